"""Makes every Python that has this folder on its path carry blocks in pieces of a few thousand bytes."""

from trilemma.federation.protocol import sizes

sizes.PIECE = 4096
