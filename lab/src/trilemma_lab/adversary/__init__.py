"""Liars who know everything but honest secrets, and rehearse what the server will make of their lies."""
