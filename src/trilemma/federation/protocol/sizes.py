"""How long what travels in one message may be: for whoever must know it without reading blocks."""

PIECE = 1 << 24
"""Bytes of a block that travel in one message; a longer one goes in pieces (`long_blocks`)."""

ROOM = 4096
"""Bytes that the header of a piece may take."""
