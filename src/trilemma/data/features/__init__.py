"""Fixed features in place of raw examples."""

from trilemma.base.registry import discover

discover(__name__)
