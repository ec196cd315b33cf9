"""A client's side of a run: it pays, computes, remembers, and then answers."""
