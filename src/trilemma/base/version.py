"""Which version this is, for rooms that cannot ask the whole package; it needs no installed distribution."""

VERSION = "0.1.0"
"""As in pyproject.toml: a test keeps the two alike."""
