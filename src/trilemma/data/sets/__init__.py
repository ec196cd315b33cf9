"""Data sets that are downloaded, shipped or made."""

from trilemma.base.registry import discover

discover(__name__)
