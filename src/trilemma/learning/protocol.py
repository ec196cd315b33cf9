"""An algorithm is three pure functions on stacked state.

    init(model, ids, key)                          -> Start(broadcast, clients, server)
    client(broadcast, state, clients, round, key)  -> ClientStep(messages, state, report)
    server(messages, state, round, key)            -> ServerStep(broadcast, state, report)

and a statement of what clients send, `message(model) -> MessageLayout` (see `trilemma.learning.messages`).

Client state and messages have the client axis first. The simulator steps k = n clients at once and a real
node steps k = 1. Both run the same code, so a deployed run can be compared with a simulated one number for
number. The functions have no hidden state: they depend on their arguments only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.data.types import Batch
from trilemma.learning.messages import Declaration, Messages
from trilemma.learning.steps.trace import Trace
from trilemma.models.types import Model
from trilemma.privacy.types import NoiseSource, Release

State = Mapping[str, Tensor]
"""Named tensors. Client state has the client axis first; server state has no client axis of its own."""

Report = Mapping[str, Any]
"""What a step did, for the record: fraction clipped, each client's weight, the rule's info."""


class Clients(Protocol):
    """The k clients that one process runs: their identities, their data and the source of their noise."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Identity of each of the k clients in the federation, 0 … n−1."""

    @property
    def model(self) -> Model:
        """The model they train."""

    @property
    def noise(self) -> NoiseSource:
        """Where privacy noise comes from: simulated, or the secrets of a real federation."""

    def sample(self, size: int, key: Key) -> Batch:
        """Draw `size` examples without replacement for each client, each from its own key."""

    def poisson(self, rate: float, size: int, key: Key) -> Batch:
        """Draw each example independently with probability `rate`, with the public weight 1/`size`."""

    def epochs(self, size: int, steps: int, key: Key) -> Iterator[Batch]:
        """Yield `steps` stacked batches of shuffled data.

        Each pass over a client's data is shuffled anew; the last batch of a pass may be smaller.
        """

    def everything(self) -> Batch:
        """Return all training examples of each client, padded with weight 0."""


@dataclass(frozen=True)
class Start:
    """The first broadcast, and the state of clients and server before the first round."""

    broadcast: State
    clients: State
    server: State


@dataclass(frozen=True)
class ClientStep:
    """Result of one client step."""

    messages: Messages
    state: State
    report: Report = field(default_factory=dict)


@dataclass(frozen=True)
class ServerStep:
    """Result of one server step. `report["weights"]` holds every client's share in the aggregate."""

    broadcast: State
    state: State
    report: Report = field(default_factory=dict)


InitFunction = Callable[[Model, tuple[int, ...], Key], Start]
ClientFunction = Callable[[State, State, Clients, int, Key], ClientStep]
ServerFunction = Callable[[Messages, State, int, Key], ServerStep]


@dataclass(frozen=True)
class Inquiry:
    """A second exchange within a round: a question by the server and the clients' answers.

    The server asks after it has received the first messages. `Algorithm.server` then gets the answers
    instead of the first messages; `Messages.question` holds the question.

    Attributes:
        question: (messages, state, round, key) -> the tensors sent to every client that was heard.
        answer: (question, state) -> messages of k clients; `state` is the clients' state after their step.
        message: model -> layout of these messages.
    """

    question: Callable[[Messages, State, int, Key], State]
    answer: Callable[[State, State], Messages]
    message: Declaration


def global_model(broadcast: State, state: State, clients: Clients, key: Key) -> Tensor:
    """Return the broadcast model, which is scored when all clients share one model."""
    return broadcast["params"]


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm. If there is a global model, it is `broadcast["params"]` (d,).

    Attributes:
        name: The algorithm's name in messages to the user.
        init: (model, ids, key) -> Start.
        client: (broadcast, state, clients, round, key) -> ClientStep. `report["loss"]` (k,) is the training
            loss; a client whose loss is not finite has diverged.
        server: (messages, state, round, key) -> ServerStep.
        message: model -> layout of the clients' messages.
        release: What one client releases in one round, for the accountant; None: no privacy mechanism.
        evaluated: (broadcast, state, clients, key) -> the parameters that are scored: (d,) for one global
            model, (k, d) for personal models. Methods that fine-tune before scoring draw from the key.
        own_models: Whether clients end with models of their own for every kind of model, not only for
            those with batch normalisation.
        everyone_trains: Whether clients that were not sampled this round train too. Their new state is kept,
            their messages are not aggregated. If False, only sampled clients are stepped.
        tolerates_nonfinite: Whether a run continues after an honest message that is not finite.
        everyone_listens: Whether the broadcast is also sent to clients that do not train this round.
        downlink: broadcast -> scalars and bytes sent to one client; None: all numbers of the broadcast.
        inquiry: The second exchange of every round; None: there is only one exchange.
        trace: How releases move the model, if that is linear; None: it is not.
        members: server state -> the clients that still take part; None: all of them.
        detector: How a defended server judges its clients (`learning.defences.evidence.detector.Detector`);
            None: the server has no evidence stage.
        filter: The name of the filter (`trilemma.learning.defences`) applied before the rule; empty:
            none.
    """

    name: str
    init: InitFunction
    client: ClientFunction
    server: ServerFunction
    message: Declaration
    release: Release | None = None
    evaluated: Callable[[State, State, Clients, Key], Tensor] = global_model
    own_models: bool = False
    everyone_trains: bool = False
    tolerates_nonfinite: bool = False
    everyone_listens: bool = False
    downlink: Callable[[State], tuple[float, int]] | None = None
    inquiry: Inquiry | None = None
    trace: Trace | None = None
    members: Callable[[State], tuple[int, ...]] | None = None
    detector: Any = None
    filter: str = ""

    def personal(self, alone: Clients, key: Key, device: torch.device | str = "cpu") -> bool:
        """Tell whether clients' own models are scored, by calling `evaluated` for the one client `alone`."""
        begin = self.init(alone.model, alone.ids, key.fold("init"))
        broadcast, kept = (
            {name: tensor.to(device) for name, tensor in part.items()}
            for part in (begin.broadcast, begin.clients)
        )
        return self.evaluated(broadcast, kept, alone, key).dim() != 1
