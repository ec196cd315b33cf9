"""The steps that algorithms are made of: batches, clipping and noise, local steps, momentum, the server."""
