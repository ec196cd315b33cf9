"""LBGM: a gradient with nearly the direction of an earlier one is sent as one number.

Client and server remember the client's last full gradient L. With G the sum of the gradients of R local
steps:

    error = 1 − cos²(G, L)                      (infinite where G or L is 0)
    error ≤ δ:   send ρ = ⟨G, L⟩/‖L‖², both use ρ L
    else:        send G, and L ← G

    w ← w − η R(m_1, …, m_S)

A message is a byte that says which, then one float32 or D of them. The authors of lp-proj divide by ‖L‖
instead of ‖L‖² (`preset = "reference"`), which makes the step ‖L‖ times as long.

Reference: Azam, Hosseinalipour, Qiu, Brinton, "Recycling model updates in federated learning: are gradient
subspaces low-rank?", ICLR 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.learning.messages import (
    NOTHING_ASKED,
    Asked,
    Length,
    MessageLayout,
    MessageLengths,
    Messages,
    Part,
    Parts,
)
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, Start, State
from trilemma.learning.settings import Setup, algorithms
from trilemma.learning.steps.local_steps import LocalStep, statistics_of, walk
from trilemma.learning.steps.privatise import client_keys
from trilemma.models.types import Model
from trilemma_lab.compressed.gradient import CompressedSettings, start
from trilemma_lab.compressed.wire import decode_dense, encode_dense


def look_back(g: Tensor, last: Tensor, threshold: float, power: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients that k messages represent (k, D), which are sent in full (k,), and ρ (k,).

    ρ is 0 for those sent in full. `power` 2 projects onto `last`; 1 divides by its norm only once.

    >>> g, last = torch.tensor([[3.0, 0.1], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    >>> message, full, multiplier = look_back(g, last, 0.2)
    >>> message.tolist(), full.tolist(), multiplier.tolist()
    ([[3.0, 0.0], [0.0, 1.0]], [False, True], [1.5, 0.0])
    >>> look_back(g, last, 0.2, power=1)[0][0].tolist()
    [6.0, 0.0]
    """
    inner = (g * last).sum(1)
    norms, lengths = torch.linalg.vector_norm(g, dim=1), torch.linalg.vector_norm(last, dim=1)
    cosine = inner / (norms * lengths)
    # Not `>`: 0/0 is NaN and must count as an infinite error.
    full = ~(1.0 - cosine.square() <= threshold)
    multiplier = torch.where(full, 0.0, inner / lengths**power)
    return torch.where(full[:, None], g, multiplier[:, None] * last), full, multiplier


@dataclass(frozen=True)
class LookBackCodec:
    """Sends a byte that says which, then ρ or a full gradient; the receiver remembers the last full one.

    >>> codec, full, rho = LookBackCodec(2), torch.tensor(True), torch.tensor(0.5)
    >>> first = codec.encode({"full": full, "multiplier": rho, "last": torch.tensor([2.0, 4.0])})
    >>> heard = codec.decode(first, {"last": torch.zeros(2)})
    >>> again = codec.encode({"full": ~full, "multiplier": rho, "last": heard["last"]})
    >>> len(first), len(again), codec.decode(again, heard)["gradient"].tolist()
    (9, 5, [1.0, 2.0])
    """

    dim: int

    @property
    def longest(self) -> Length:
        """See `Codec.longest`: a full gradient."""
        return Length(self.dim, 1 + 4 * self.dim)

    def lengths(self, parts: Parts) -> MessageLengths:
        """See `Codec.lengths`."""
        scalars = torch.where(parts["full"], self.dim, 1)
        return MessageLengths(scalars, 1 + 4 * scalars)

    def encode(self, parts: Parts) -> bytes:
        """See `Codec.encode`."""
        if bool(parts["full"]):
            return b"\1" + encode_dense(parts["last"])
        return b"\0" + encode_dense(parts["multiplier"].reshape(1))

    def decode(self, data: bytes, before: Parts, asked: Asked = NOTHING_ASKED) -> Parts:
        """See `Codec.decode`. Before a client's first full gradient, its last one is taken as zero."""
        full = data[:1] == b"\1"
        expected = 1 + 4 * (self.dim if full else 1)
        if data[:1] not in (b"\0", b"\1") or len(data) != expected:
            raise UserError(f"neither a full gradient of {self.dim} numbers nor a multiple of an earlier one")
        numbers = decode_dense(data[1:])
        last = numbers if full else before["last"]
        return {
            "full": torch.tensor(full),
            "multiplier": torch.tensor(0.0) if full else numbers[0],
            "last": last,
            "gradient": last if full else numbers[0] * last,
        }


def look_back_message(model: Model) -> MessageLayout:
    """Declare LBGM's messages: a full gradient, or a multiple of the last one that was sent in full."""
    whole = (model.dim,)
    parts = Part("gradient", whole), Part("last", whole), Part("full", ()), Part("multiplier", ())
    return MessageLayout(parts, ("gradient",), LookBackCodec(model.dim), remembered=("last",))


@algorithms.register("lbgm")
class LBGM(CompressedSettings):
    """LBGM: while a client's gradients keep their direction, it sends one number instead of each."""

    local_steps: int = Field(default=5, ge=1, description="local steps per round (R)")
    threshold: float = Field(
        default=0.2, ge=0, le=1, description="largest error 1 − cos² that is tolerated (δ)"
    )

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        power = 1 if self.preset == "reference" else 2

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            return start(model, ids, key, "last")

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            model = clients.model
            batches = clients.epochs(self.batch_size, self.local_steps, key.fold("batch"))
            trained = walk(
                model,
                broadcast["params"],
                batches,
                LocalStep(self.lr),
                statistics_of(model, state),
                keys=client_keys(clients, key),
            )
            vectors, full, multiplier = look_back(trained.travelled, state["last"], self.threshold, power)
            last = torch.where(full[:, None], trained.travelled, state["last"])
            messages = Messages(vectors, {"full": full, "multiplier": multiplier, "last": last})
            kept = {**state, "last": last, **trained.statistics}
            return ClientStep(messages, kept, {"loss": trained.loss, "full": full})

        return Algorithm("lbgm", init, client, self.server(setup), look_back_message)
