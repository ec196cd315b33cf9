"""The trained model as a file other programs read."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.experiment import Inputs

KINDS = (".safetensors", ".pt")
"""How a model's file may end: safetensors (no code inside, read by every framework), or torch's own."""

BESIDE = ".input.toml"
"""How the file beside it ends that says what the model takes."""


def export(state: Mapping[str, Tensor], path: Path, inputs: Inputs | None = None) -> Path | None:
    """Write tensors by name; for a model trained on features, also a file that says how to compute them.

    Returns that second file, if there is one. A file that exists already is refused.
    """
    check_target(path)
    contents = {path: _content(state, path.suffix)}
    beside = path.with_suffix(BESIDE) if inputs is not None and inputs.computed else None
    if inputs is not None and beside is not None:
        contents[beside] = inputs.toml(path.name).encode()
    for one in contents:
        if one.exists():
            raise UserError(f"{one} is there already; name another file")
    for one, content in contents.items():
        try:
            files.write_atomically(one, content)
        except OSError as error:
            raise UserError(f"{one} cannot be written: {error.strerror}") from None
    return beside


def check_target(path: Path) -> None:
    """Refuse a file of another kind, or one that is there."""
    if path.suffix not in KINDS:
        raise UserError(f"{path.name!r}: a model is written to a file that ends in {' or '.join(KINDS)}")
    if path.exists():
        raise UserError(f"{path} is there already; name another file")


def _content(state: Mapping[str, Tensor], kind: str) -> bytes:
    """Return the bytes of a model's file."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    if kind == ".safetensors":
        from safetensors.torch import save

        return save(tensors, metadata={"format": "pt"})
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()
