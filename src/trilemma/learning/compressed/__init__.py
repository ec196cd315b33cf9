"""Communication-efficient learning: gradients that travel compressed.

One global model, and clients that send a sketch (`count_sketch`), a multiple of an earlier gradient (`lbgm`),
rounded numbers (`qsgd`) or a few coordinates (`dgc`) instead of a full gradient. `wire` turns vectors into
the bytes that travel and back; each method declares its messages with it, beside its formulas.
"""

from trilemma.registry import discover

discover(__name__)
