"""Any `torch.nn.Module` as a model."""

from trilemma.models.modules.adapter import from_module, state_dict, token_cross_entropy

__all__ = ["from_module", "state_dict", "token_cross_entropy"]
