"""The learning room."""
