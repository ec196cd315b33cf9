"""Pieces of a few thousand bytes, in files, in every process that finds this on its path."""

from trilemma.federation.carriers.grpc import frames

frames.PIECE_BYTES = 4096
from trilemma.federation.carriers.grpc import transfers  # noqa: E402

transfers.IN_MEMORY = 0
