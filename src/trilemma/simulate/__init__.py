"""The simulate room."""
