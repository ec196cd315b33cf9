"""Messages sharded by columns over processes: each holds (n, its columns) and gets its part of the value.

Inner products of shards add up, so two sums of n×n matrices over the network suffice, whatever d is. Every
process then has the same geometry, takes the same decision, and carries it out on its own columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trilemma.aggregation.passes import inputs
from trilemma.aggregation.passes.gram import Geometry, finite_rows, halfway, measure
from trilemma.aggregation.steps.decision import Decision, Weighted
from trilemma.aggregation.steps.rule import Rule, aggregate
from trilemma.aggregation.steps.types import Aggregate, Array, Vectors
from trilemma.base.errors import UserError
from trilemma.base.keys import Key


class Sharded:
    """The columns of this process, and the group that holds the others."""

    def __init__(self, X: Vectors, group: dist.ProcessGroup | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UserError("no process group: call torch.distributed.init_process_group first")
        self.given = inputs.messages(X)
        self.group = group
        counts = self._sum(np.array([1.0, self.n, float(self.n) ** 2]))
        if counts[0] * counts[2] != counts[1] ** 2:
            raise UserError(
                "all shards must have one row per client; the processes hold different numbers of rows"
            )

    @property
    def n(self) -> int:
        """Number of messages."""
        return len(self.given.X)

    def _sum(self, array: Array) -> Array:
        """Return the sum over all processes, the same bits in each."""
        device = self.given.X.device if dist.get_backend(self.group) == "nccl" else "cpu"
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64)).to(device)
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, tensor, group=self.group)
        return torch.stack(parts).sum(0).cpu().numpy()

    def geometry(self) -> Geometry:
        """Return the geometry of all columns, around the row that is central over all shards."""
        own = measure(self.given.X)
        base = int(np.argmin(halfway(self._sum(own.distances))))
        return Geometry(self._sum(own.rebased(base).inner), base)

    def finite(self) -> Any:
        """Return which messages are finite in all shards (n,), bool."""
        return self._sum(~finite_rows(self.given.X)) == 0

    def carry_out(self, decision: Decision) -> Aggregate[Any]:
        """Return the outcome: the value on the columns of this process, weights and scores over all."""
        if isinstance(decision, Weighted):
            value = decision.apply(self.given.X)
            return self.given.deliver(value, decision.weights, decision.scores, decision.info)
        out = decision.apply(self.given.X)
        sums = self._sum(np.concatenate([out.shares, out.squares, [self.given.X.shape[1]]]))
        shares, squares = sums[: len(out.shares)], sums[len(out.shares) : -1]
        weights, scores = decision.totals(shares, squares, int(sums[-1]))
        return self.given.deliver(out.value, weights, scores, decision.info)


def sharded(
    rule: Rule, X: Vectors, key: Key | None = None, group: dist.ProcessGroup | None = None
) -> Aggregate[Any]:
    """Apply a rule to messages whose columns are spread over the processes of a group.

    Every process calls it with its own columns (n, d_local), and with the same rule and key. `value` is this
    process's part, weights and scores are the same everywhere. Works with gloo and nccl.

    >>> import tempfile
    >>> from trilemma.aggregation import caf
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     dist.init_process_group("gloo", init_method=f"file://{file.name}.store", rank=0, world_size=1)
    ...     out = sharded(caf(f=1), torch.tensor([[1.0], [1.0], [9.0]]))
    ...     dist.destroy_process_group()
    >>> out.value
    tensor([1.])
    """
    return aggregate(rule, Sharded(X, group), key)
