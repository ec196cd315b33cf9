"""Noise as it is drawn: its joint law in a simulation, the public grid, and what drawing costs."""
