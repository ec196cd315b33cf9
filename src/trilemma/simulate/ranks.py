"""One run over several processes (`torchrun -m trilemma run …`): each is a rank that holds some clients.

    clients        a rank steps its own: data, gradients, noise, momenta (k, d)
    messages       rows become columns: an all-to-all leaves every rank with (n, its share of d)
    attack, rule   on columns; inner products of shards add up (`trilemma.aggregation.distributed`)
    server         the aggregate is put together again, so that every rank has the whole model

All ranks know the same record of a round; the first one alone writes. A checkpoint is that of a single
process: the first rank gathers what the others hold, and any number of ranks continues it. What cannot be
cut into columns is refused before anything runs (`trilemma.simulate.shards`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trilemma.errors import ConfigError
from trilemma.learning import ClientStep, Messages


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a run; `rank` counts from 0, the first one leads."""

    rank: int
    count: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def share(self, things: Sequence[int]) -> tuple[int, ...]:
        """Return this rank's part of a sequence that all ranks know: neighbours, as many as the others have.

        >>> Ranks(1, 3, torch.device("cpu")).share(range(7))
        (2, 3)
        """
        first, last = self._cut(len(things))[self.rank]
        return tuple(things[first:last])

    def columns(self, rows: Tensor) -> Tensor:
        """Turn this rank's rows (k, d) into its columns of everybody's rows (n, d / ranks)."""
        d, mine = rows.shape[1], rows.shape[0]
        held = [int(count) for count in self.gathered(torch.tensor([mine], device=rows.device))]
        cut = self._cut(d)
        widths = [last - first for first, last in cut]
        sent = torch.cat([rows[:, first:last].reshape(-1) for first, last in cut])
        found = rows.new_empty(sum(held) * widths[self.rank])
        out_sizes, in_sizes = (
            [count * widths[self.rank] for count in held],
            [mine * width for width in widths],
        )
        dist.all_to_all_single(found, sent, out_sizes, in_sizes)
        return found.view(sum(held), widths[self.rank])

    def whole(self, part: Tensor, d: int) -> Tensor:
        """Put a vector (d,) together from every rank's columns of it."""
        cut = self._cut(d)
        width = max(last - first for first, last in cut)
        padded = part.new_zeros(width)
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in cut]
        dist.all_gather(parts, padded)
        return torch.cat([one[: last - first] for one, (first, last) in zip(parts, cut, strict=True)])

    def gathered(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks in order, in every one; a rank may have more of them than another."""
        counts = [torch.empty(1, dtype=torch.int64, device=rows.device) for _ in range(self.count)]
        dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
        longest = max(int(count) for count in counts)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([one[: int(count)] for one, count in zip(parts, counts, strict=True)])

    def at_leader(self, rows: Tensor) -> Tensor | None:
        """Return the rows of all ranks in order, on the first one alone: nobody else has room for them."""
        counts = self.gathered(torch.tensor([len(rows)], device=rows.device)).tolist()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts] if self.leads else None
        dist.gather(padded, parts, dst=0)
        return None if parts is None else torch.cat([one[:n] for one, n in zip(parts, counts, strict=True)])

    def together(self, mine: Sequence[int], sent: ClientStep) -> tuple[tuple[int, ...], ClientStep]:
        """Join what all ranks' clients sent: who they are, their messages as columns, and their reports."""
        ids = tuple(self.gathered(torch.tensor(list(mine), device=self.device)).tolist())
        report = {
            name: self.gathered(value) if isinstance(value, Tensor) else value
            for name, value in sent.report.items()
        }
        return ids, ClientStep(Messages(self.columns(sent.messages.vectors)), sent.state, report)

    def everywhere(self, thing: Any) -> Any:
        """Return what the first rank has."""
        box = [thing]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def all_agree(self, here: bool) -> bool:
        """Return whether it is so on all ranks."""
        found = torch.tensor([int(here)], device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return bool(found.item())

    def _cut(self, length: int) -> list[tuple[int, int]]:
        """Where each rank's part begins and ends; lengths differ by at most one."""
        ends = [length * rank // self.count for rank in range(self.count + 1)]
        return [*itertools.pairwise(ends)]


def joined(device: str = "auto") -> Ranks | None:
    """Join the processes that `torchrun` started; None where it did not start this one.

    Ranks on one machine each take a GPU where there is one for each; else all compute on the CPU.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return None
    here, together = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus < together:
        raise ConfigError(
            f"[run] device = 'cuda': {together} processes on a machine with {gpus} GPUs; allowed: one each"
        )
    place = torch.device("cuda", here) if gpus >= together else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), place)


def left() -> None:
    """Leave the processes that were joined."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
