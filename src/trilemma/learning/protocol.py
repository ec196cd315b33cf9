"""An algorithm is three pure functions on stacked state.

    init(model, ids, key)                          -> Start(broadcast, clients, server)
    client(broadcast, state, clients, round, key)  -> ClientStep(messages, state, report)
    server(messages, state, round, key)            -> ServerStep(broadcast, state, report)

and a statement of what clients send, `message(model) -> MessageLayout` (see `trilemma.learning.messages`).

Client state and messages carry a leading client axis. The simulator steps k = n clients at once, a real node
steps k = 1, and both run the same code: the deployed run can be compared with the simulated one number for
number. Nothing here has hidden state; what a function does not get as an argument it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from trilemma.data.types import Batch
from trilemma.keys import Key
from trilemma.learning.messages import Declaration, Messages
from trilemma.learning.trace import Trace
from trilemma.models.types import Model
from trilemma.privacy.types import NoiseSource, Release

State = Mapping[str, Tensor]
"""Named tensors. A client's state has the client axis first; the server's has none of its own."""

Report = Mapping[str, Any]
"""What a step did, for the record: fraction clipped, each client's weight, the rule's info."""


class Clients(Protocol):
    """The k clients a process plays: their identities, their data, and the source of their noise."""

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
        """Draw each example independently with probability `rate`; each weighs 1/`size`, which is public."""

    def epochs(self, size: int, steps: int, key: Key) -> Iterator[Batch]:
        """Yield `steps` stacked batches of a shuffled loader: reshuffled when exhausted, last one partial."""

    def everything(self) -> Batch:
        """Return all training examples of each client, padded with weight 0."""


@dataclass(frozen=True)
class Start:
    """Everything before the first round."""

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
    """A second exchange within a round: what the server asks once it has heard the first messages.

    `server` then gets the messages of this exchange, with the question in them.

    Attributes:
        question: (messages, state, round, key) -> the tensors that are sent to every client heard.
        answer: (question, state) -> messages of k clients; `state` is as their step left it.
        message: What these messages look like.
    """

    question: Callable[[Messages, State, int, Key], State]
    answer: Callable[[State, State], Messages]
    message: Declaration


def global_model(broadcast: State, state: State, clients: Clients, key: Key) -> Tensor:
    """Return the broadcast model: what is scored when there is one model for everybody."""
    return broadcast["params"]


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm. `broadcast["params"]` (d,) is the global model wherever there is one.

    Attributes:
        name: As in configurations.
        init: (model, ids, key) -> Start.
        client: (broadcast, state, clients, round, key) -> ClientStep; `report["loss"]` (k,) is the training
            loss, and a client whose loss is not finite has diverged.
        server: (messages, state, round, key) -> ServerStep.
        message: model -> what clients' messages look like.
        release: What one client lets out in one round, for the accountant; None: no privacy mechanism.
        evaluated: (broadcast, state, clients, key) -> the parameters that are scored: (d,) for one global
            model, (k, d) for personal ones. The key is for methods that fine-tune before they are scored.
        own_models: Whether clients end with models of their own, whatever the model is.
        everyone_trains: Whether clients that were not sampled this round train too; their messages are not
            aggregated, their state is kept. Otherwise only sampled clients are stepped.
        tolerates_nonfinite: Whether honest messages that are not finite are part of the method's life, and
            not the end of the run.
        everyone_listens: Whether clients that do not train this round are sent the broadcast all the same.
        downlink: broadcast -> scalars and bytes that travel to one client; None: the broadcast's numbers.
        inquiry: The second exchange of every round; None: there is none.
        trace: How releases reach the model, where that is linear; None: it is not.
        members: server state -> who still takes part; None: everybody.
        court: What a defended server judges by (`trilemma.learning.evidence.court.Court`); None: undefended.
        screen: Which of `trilemma.learning.screens` looks at messages before the rule; empty: none.
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
    court: Any = None
    screen: str = ""

    def personal(self, alone: Clients, key: Key, device: torch.device | str = "cpu") -> bool:
        """Whether scores are of clients' own models, found out with one client `alone`."""
        begin = self.init(alone.model, alone.ids, key.fold("init"))
        broadcast, kept = (
            {name: tensor.to(device) for name, tensor in part.items()}
            for part in (begin.broadcast, begin.clients)
        )
        return self.evaluated(broadcast, kept, alone, key).dim() != 1
