"""Fixed features of the papers' experiments: wavelet scattering, whitened along invented strokes."""

from trilemma_lab.features import scattering, strokes

__all__ = ["scattering", "strokes"]
