"""What a user's code has switched for the whole process, and what fails half-way does not switch back itself.

One record could so change what later steps contribute, or whether they fail. What has no way back, or would
take others' randomness with it, is named in SECURITY.md.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch


def _device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _warnings(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _function_modes(modes: list[Any]) -> None:
    for _ in overrides._get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        overrides._pop_mode()  # type: ignore[no-untyped-call]
    for mode in modes:
        overrides._push_mode(mode)  # type: ignore[no-untyped-call]


def _dispatch_modes(modes: list[Any]) -> None:
    for _ in dispatch._get_current_dispatch_mode_stack():
        dispatch._pop_mode()
    for mode in modes:
        dispatch._push_mode(mode)


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
    ]


def _cast(before: list[tuple[str, bool, torch.dtype]]) -> None:
    for kind, on, dtype in before:
        torch.set_autocast_enabled(kind, on)
        torch.set_autocast_dtype(kind, dtype)


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    # The modes first: what follows would be seen by those that were left on.
    "dispatch modes": (dispatch._get_current_dispatch_mode_stack, _dispatch_modes),
    "the default device": (_device, torch.set_default_device),
    "function modes": (overrides._get_current_function_mode_stack, _function_modes),
    "the default type": (torch.get_default_dtype, torch.set_default_dtype),
    "how finely products are computed": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "autocast": (_autocast, _cast),
    "algorithms that are deterministic": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "anomalies": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda before: torch.autograd.set_detect_anomaly(*before),
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "numpy's errors": (np.geterr, lambda before: np.seterr(**before)),
    "warnings": (lambda: list(warnings.filters), _warnings),
    "the folder": (os.getcwd, os.chdir),
    "how deep calls go": (sys.getrecursionlimit, sys.setrecursionlimit),
}
"""How each is read, and put back."""


@contextmanager
def put_back() -> Iterator[None]:
    """Put back afterwards what code has switched: gradients, inference and all of `SWITCHES`."""
    grad, before = torch.is_grad_enabled(), {name: read() for name, (read, _) in SWITCHES.items()}
    with torch.inference_mode(False), torch.set_grad_enabled(grad):  # when left: whatever is on then
        try:
            yield
        finally:
            for name, (read, put) in SWITCHES.items():
                if read() != before[name]:
                    put(before[name])
