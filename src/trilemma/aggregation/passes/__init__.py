"""The two passes over the messages: to their Gram matrix, and to the weighted sum of their rows."""
