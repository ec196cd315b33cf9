"""One run over several processes (`torchrun -m trilemma run …`), called ranks; each holds some clients.

    clients        each rank steps its own clients: data, gradients, noise, momenta (k, d)
    messages       rows become columns: after an all-to-all every rank has (n, its share of d)
    attack, rule   work on columns; inner products of shards add up
    (`trilemma.aggregation.passes.distributed`) server         the aggregate is gathered, so that every rank
    has the whole model

All ranks have the same record of a round, and the first one writes it. A checkpoint is the same as that of a
single process: the first rank gathers the others' state, and any number of ranks can continue it. Runs that
cannot be split by columns are refused before they start (`trilemma.simulate.shards`).
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

from trilemma.base.errors import ConfigError
from trilemma.learning import ClientStep, Messages


@dataclass(frozen=True)
class Ranks:
    """This process among the `count` that share a run; `rank` counts from 0, and rank 0 leads."""

    rank: int
    count: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    def share(self, things: Sequence[int]) -> tuple[int, ...]:
        """Return this rank's part of a sequence: consecutive items, about as many as every other rank has.

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
        """Return a vector (d,) gathered from every rank's columns of it."""
        cut = self._cut(d)
        width = max(last - first for first, last in cut)
        padded = part.new_zeros(width)
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in cut]
        dist.all_gather(parts, padded)
        return torch.cat([one[: last - first] for one, (first, last) in zip(parts, cut, strict=True)])

    def gathered(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks in order, on every rank; ranks may have different numbers of rows."""
        counts = [torch.empty(1, dtype=torch.int64, device=rows.device) for _ in range(self.count)]
        dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
        longest = max(int(count) for count in counts)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([one[: int(count)] for one, count in zip(parts, counts, strict=True)])

    def at_leader(self, rows: Tensor) -> Tensor | None:
        """Return the rows of all ranks in order on the first rank; None on the others, which saves memory."""
        counts = self.gathered(torch.tensor([len(rows)], device=rows.device)).tolist()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts] if self.leads else None
        dist.gather(padded, parts, dst=0)
        return None if parts is None else torch.cat([one[:n] for one, n in zip(parts, counts, strict=True)])

    def together(self, mine: Sequence[int], sent: ClientStep) -> tuple[tuple[int, ...], ClientStep]:
        """Join the steps of all ranks: the clients' ids, their messages as columns, and their reports.

        The state stays that of this rank's clients.
        """
        ids = tuple(self.gathered(torch.tensor(list(mine), device=self.device)).tolist())
        report = {
            name: self.gathered(value) if isinstance(value, Tensor) else value
            for name, value in sent.report.items()
        }
        return ids, ClientStep(Messages(self.columns(sent.messages.vectors)), sent.state, report)

    def everywhere(self, thing: Any) -> Any:
        """Return the first rank's `thing` on every rank."""
        box = [thing]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def all_agree(self, here: bool) -> bool:
        """Return whether `here` is true on all ranks."""
        found = torch.tensor([int(here)], device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return bool(found.item())

    def _cut(self, length: int) -> list[tuple[int, int]]:
        """Return where each rank's part begins and ends; lengths differ by at most one."""
        ends = [length * rank // self.count for rank in range(self.count + 1)]
        return [*itertools.pairwise(ends)]


def joined(device: str = "auto") -> Ranks | None:
    """Join the processes that `torchrun` started; None if it did not start this one.

    Every rank takes a GPU if its machine has one for each of its ranks; otherwise all use the CPU.
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
    """Leave the process group, if one was joined."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
