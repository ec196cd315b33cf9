"""Clients' own scores of the model that a round led to: asked for once, before the round is committed.

Nobody is waited for twice and no round fails for want of a score: who does not answer, or refuses (its budget
may not allow it), is left out, and where too few are left there is none. What comes is believed as far as
`learning.own_scores` says. A server that dies before it commits asks the same again, and gets the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trilemma.federation.protocol import events, kinds, wire
from trilemma.federation.protocol.admission import Rejection
from trilemma.federation.protocol.events import without_quotes
from trilemma.federation.protocol.transport import Reply
from trilemma.federation.server.commits import Commit
from trilemma.federation.server.exchange import Correspondence, Patience
from trilemma.learning.steps.own_scores import OwnScores

SMALL = 1 << 12
"""Bytes that a reply may have."""

SHARE = "share"


@dataclass(frozen=True)
class Scoring:
    """Asks the members of an epoch of the run `run`."""

    run: str
    own_scores: OwnScores
    exchange: Correspondence
    say: events.Say

    def ask(self, commit: Commit, clients: Mapping[int, int], patience: Patience) -> dict[str, float]:
        """Return the score of what a round led to, by name; {} where it is not its turn, or too few tell.

        `clients` says who sits at which node.
        """
        if commit.epoch is None or commit.rounds not in self.own_scores.turns:
            return {}
        round_, epoch = commit.rounds - 1, commit.epoch
        header = kinds.Evaluate(run=self.run, epoch=epoch.number, round=round_)
        block = wire.dumps(header, {"params": commit.broadcast["params"]})
        asked = {node: client for node, client in clients.items() if client in epoch.members}
        told: dict[int, float] = {}
        for reply in self.exchange.ask(dict.fromkeys(asked, block), patience, timed=True):
            client = asked.get(reply.node)
            try:
                if client is None:
                    raise wire.WireError("the node was not asked")
                told[client] = _share(reply, kinds.Scored(client=client, **header.model_dump()))
            except wire.WireError as error:
                reason = without_quotes(Rejection.of(reply.node, client, f"no score: {error}").reason)
                self.say(events.REPLY_REJECTED(round=commit.rounds, client=client, reason=reason))
        return self.own_scores.combined(told.values())


def _share(reply: Reply, expected: kinds.Scored) -> float:
    """Return the share that a reply tells; refuse anything else."""
    if reply.block is None:
        raise wire.WireError(reply.why)
    header, tensors = wire.loads(reply.block, kinds.Scored, limit=SMALL)
    if header != expected:
        raise wire.WireError("it is about another client, run, epoch or round")
    share = tensors.get(SHARE)
    if share is None or len(tensors) != 1 or share.shape != (1,) or share.dtype != torch.float64:
        raise wire.WireError("it is not one number")
    if not bool(torch.isfinite(share).all()):
        raise wire.WireError("it is not finite")
    return float(share)
