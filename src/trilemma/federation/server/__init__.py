"""The server's side of a run: who takes part, rounds, commits."""
