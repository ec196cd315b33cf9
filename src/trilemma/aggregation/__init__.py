"""The aggregation room."""
