"""Whether this machine has room for a run: said before anything is computed, or else when memory runs out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trilemma.config import Config
from trilemma.errors import ConfigError, UserError
from trilemma.simulate.experiment import Experiment

NUMBER = 4
"""Bytes of a number in a message."""


def check_room(experiment: Experiment, out: Path) -> None:
    """Refuse a run of which one round's messages alone are more than there is memory, or room on the disk.

    A round needs several times as much. What is merely close is tried.
    """
    if experiment.device.type != "cpu" or experiment.ranks is not None:
        return  # a GPU says itself what it has not, and ranks have parts of it each
    config, model = experiment.config, experiment.clients.model
    heard, length = config.federation.heard, experiment.resolved.algorithm.message(model).dim
    needed, on_disk = NUMBER * heard * length, config.run.state == "disk"
    available = _free(out) if on_disk else _memory()
    if needed <= available:
        return
    where, instead = (
        ("the disk has room for", "fewer clients, or [federation] sampled")
        if on_disk
        else ("this machine has", "fewer clients, [federation] sampled, or [run] state = 'disk' with at_once")
    )
    raise ConfigError(
        f"a message each of {heard:,} clients, {length:,} numbers long, takes {_gib(needed)}; {where} "
        f"{_gib(available)}; allowed: {instead}"
    )


@contextmanager
def said_where_memory_ends(config: Config) -> Iterator[None]:
    """Turn a lack of memory inside into words about the run."""
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
    """Whether an error says so: numpy's, torch's of a GPU, or torch's of the host, which has no type."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _memory() -> int:
    """Return the bytes of memory that this machine has."""
    import psutil

    return int(psutil.virtual_memory().total)


def _free(out: Path) -> int:
    """Return the bytes that are free where `out` is or will be."""
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def _gib(count: int) -> str:
    """Write a number of bytes.

    >>> _gib(3 * 2**40)
    '3,072 GiB'
    """
    return f"{count / 2**30:,.0f} GiB"
