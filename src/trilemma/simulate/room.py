"""Check that a run fits this machine before it starts, and explain it when memory runs out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trilemma.base.errors import ConfigError, UserError
from trilemma.experiment import Config
from trilemma.simulate.experiment import Experiment

NUMBER = 4
"""Bytes of a number in a message."""


def check_room(experiment: Experiment, out: Path) -> None:
    """Refuse a run if the messages of one round alone exceed the memory, or the free space on the disk.

    A round needs several times as much, but only what cannot possibly fit is refused.
    """
    if experiment.device.type != "cpu" or experiment.ranks is not None:
        return  # a GPU reports its own limit, and each rank holds only a part
    config, model = experiment.config, experiment.clients.model
    participants, length = config.federation.participants, experiment.resolved.algorithm.message(model).dim
    needed, on_disk = NUMBER * participants * length, config.run.state == "disk"
    available = _free(out) if on_disk else _memory()
    if needed <= available:
        return
    where, instead = (
        ("the disk has room for", "fewer clients, or [federation] sampled")
        if on_disk
        else ("this machine has", "fewer clients, [federation] sampled, or [run] state = 'disk' with at_once")
    )
    raise ConfigError(
        f"a message each of {participants:,} clients, {length:,} numbers long, takes {_gib(needed)}; {where} "
        f"{_gib(available)}; allowed: {instead}"
    )


@contextmanager
def said_where_memory_ends(config: Config) -> Iterator[None]:
    """Turn an out-of-memory error inside the block into a `UserError` that says what to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        said = str(error).partition("\n")[0] or "none left"
        raise UserError(
            f"the run does not fit into memory ({said}): "
            f"{config.federation.clients:,} clients, {config.run.rounds:,} rounds, algorithm = "
            f"{config.algorithm.dump()}; allowed: less of what is largest among these, a smaller model, "
            "[run] at_once = 1"
        ) from error


def _lacks_memory(error: Exception) -> bool:
    """Tell whether an error means out of memory; on a CPU torch raises a plain `RuntimeError` for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _memory() -> int:
    """Return this machine's memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().total)


def _free(out: Path) -> int:
    """Return the free bytes on the disk of `out`, which need not exist yet."""
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def _gib(count: int) -> str:
    """Return a number of bytes in GiB, as text.

    >>> _gib(3 * 2**40)
    '3,072 GiB'
    """
    return f"{count / 2**30:,.0f} GiB"
