"""Parties as real processes, and what they tell of themselves."""
