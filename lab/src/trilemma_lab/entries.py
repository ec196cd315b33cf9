"""What the core imports when it looks for things with a name: each module registers what it brings."""

from trilemma_lab import compressed, features, ready
from trilemma_lab.adversary import adaptive, bounded, ring

__all__ = ["adaptive", "bounded", "compressed", "features", "ready", "ring"]
