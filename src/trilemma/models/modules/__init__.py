"""Any `torch.nn.Module` as a model."""

from trilemma.models.modules.adapter import from_module, state_dict, token_cross_entropy
from trilemma.models.modules.checks import Paths, compared, couples, paths, verify

__all__ = [
    "Paths",
    "compared",
    "couples",
    "from_module",
    "paths",
    "state_dict",
    "token_cross_entropy",
    "verify",
]
