"""Communication-efficient learning: clients send compressed gradients.

There is one global model. Instead of a full gradient, clients send a sketch (`count_sketch`), a multiple of
an earlier gradient (`lbgm`), rounded numbers (`qsgd`) or a few coordinates (`dgc`). `wire` converts vectors
to bytes and back; the codec of each method uses it.
"""

from trilemma_lab.compressed import count_sketch, dgc, lbgm, qsgd

__all__ = ["count_sketch", "dgc", "lbgm", "qsgd"]
