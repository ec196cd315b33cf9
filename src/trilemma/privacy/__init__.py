"""The privacy room."""
