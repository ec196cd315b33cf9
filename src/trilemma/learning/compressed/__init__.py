"""Communication-efficient learning: gradients that travel compressed.

One global model, and clients that send a sketch (`count_sketch`), a multiple of an earlier gradient (`lbgm`),
rounded numbers (`qsgd`) or a few coordinates (`dgc`) instead of a full gradient. `wire` turns messages into
the bytes that would travel and back; every message knows its size in scalars and in bytes.
"""

from trilemma.registry import discover

discover(__name__)
