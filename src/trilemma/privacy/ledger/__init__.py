"""What a client has released and what it has cost, written before anything leaves."""
