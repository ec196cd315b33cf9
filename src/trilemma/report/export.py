"""The trained model as a file other programs read."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trilemma import files
from trilemma.errors import UserError

KINDS = (".safetensors", ".pt")
"""How a model's file may end: safetensors (no code inside, read by every framework), or torch's own."""


def export(state: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors by name; what is there already is not touched."""
    if path.suffix not in KINDS:
        raise UserError(f"{path.name!r}: a model is written to a file that ends in {' or '.join(KINDS)}")
    if path.exists():
        raise UserError(f"{path} is there already; name another file")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    if path.suffix == ".safetensors":
        from safetensors.torch import save

        content = save(tensors, metadata={"format": "pt"})
    else:
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        content = buffer.getvalue()
    try:
        files.write_atomically(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
