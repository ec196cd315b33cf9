"""What every algorithm must do, whoever wrote it: adding an algorithm adds its tests.

Purity, the client axis, clients stepped one by one equal to the stacked run, messages as declared and read as
they were sent, no noise and no clipping equal to the plain run bit for bit. Four clients share phishing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trilemma import aggregation, data, learning, models, privacy
from trilemma.base.errors import PrivacyError
from trilemma.base.keys import Key
from trilemma.learning import ClientStep, Messages
from trilemma.learning.protocol import Algorithm, ServerStep, State
from trilemma.simulate import SimulatedClients
from trilemma.testing import chosen

CLIENTS = 4
NAMES = chosen.names("algorithm")
LOCAL_STEPS = ("local_rounds", "local_steps", "inner_steps")
"""Options that are set to 2: two local steps show what twenty show."""


def make_clients(ids: tuple[int, ...] = tuple(range(CLIENTS))) -> SimulatedClients:
    """Return clients with equal shares of phishing."""
    key = Key(7)
    dataset = data.load("phishing", key=key)
    federated = data.FederatedData(dataset, data.divide("homogeneous", dataset, CLIENTS, key=key))
    model = models.build("logistic", (68,), 2)
    return SimulatedClients(ids, federated, model, privacy.SimulatedNoise(key.fold("noise"), CLIENTS))


def settings_of(name: str, **options: Any) -> learning.AlgorithmSettings:
    """Return the settings of an algorithm with few local steps."""
    kind = learning.algorithms[name]
    few: dict[str, Any] = {steps: 2 for steps in LOCAL_STEPS if steps in kind.model_fields}
    return kind(**few, **options)


def build(name: str, private: bool = False, smooth: bool = False) -> Algorithm:
    """Return the algorithm for the mean; `smooth`: in the version that is continuous in its input."""
    settings = settings_of(name, **learning.algorithms[name].smooth if smooth else {})
    release = None
    if private:
        shape = settings.exposure(clip=1.0, examples=2100)
        law = privacy.NoiseLaw(sigma_ind=0.1, sigma_cor=0.2)
        release = privacy.Release(shape.clip, law, shape.unit, shape.batch, shape.sampling)
    rule = aggregation.parse("mean", f=0)
    return settings.build(learning.Setup(CLIENTS, 0, rounds=5, rule=rule, release=release))


def is_private(name: str) -> bool:
    """Whether the algorithm says what a round releases."""
    try:
        learning.algorithms[name]().exposure(clip=1.0, examples=100)
    except PrivacyError:
        return False
    return True


VARIANTS = [
    pytest.param(name, private, id=f"{name}-{'private' if private else 'plain'}")
    for name in NAMES
    for private in (False, True)
    if not private or is_private(name)
]


def heard(algorithm: Algorithm, step: ClientStep, server: State, number: int, key: Key) -> Messages:
    """Return what the server hears last in a round: messages, or the answers to what it asks after them."""
    if algorithm.inquiry is None:
        return step.messages
    question = algorithm.inquiry.question(step.messages, server, number, key)
    return algorithm.inquiry.answer(question, step.state)


def run_rounds(
    algorithm: Algorithm, clients: SimulatedClients, rounds: int = 3
) -> Iterator[tuple[ClientStep, ServerStep]]:
    """Yield (sent, broadcast) per round."""
    begin = algorithm.init(clients.model, clients.ids, Key(1).fold("init"))
    broadcast, state, server = begin.broadcast, begin.clients, begin.server
    for t in range(rounds):
        key = Key(1).fold("round", t)
        sent = algorithm.client(broadcast, state, clients, t, key)
        last = key.fold("server")
        done = algorithm.server(heard(algorithm, sent, server, t, last), server, t, last)
        yield sent, done
        broadcast, state, server = done.broadcast, sent.state, done.state


@pytest.mark.parametrize(("name", "private"), VARIANTS)
def test_state_and_messages_have_the_client_axis(name: str, private: bool) -> None:
    for sent, done in run_rounds(build(name, private), make_clients()):
        assert sent.messages.vectors.shape[0] == CLIENTS
        assert all(tensor.shape[0] == CLIENTS for tensor in sent.state.values())
        assert sent.report["loss"].shape == (CLIENTS,)
        assert done.report["weights"].shape == (CLIENTS,)
        assert torch.isfinite(sent.messages.vectors).all()


@pytest.mark.parametrize(("name", "private"), VARIANTS)
def test_functions_are_pure(name: str, private: bool) -> None:
    algorithm, clients = build(name, private), make_clients()
    begin = algorithm.init(clients.model, clients.ids, Key(1).fold("init"))
    before = {n: t.clone() for n, t in begin.clients.items()}
    torch_state = torch.random.get_rng_state()
    first = algorithm.client(begin.broadcast, begin.clients, clients, 0, Key(1).fold("round", 0))
    again = algorithm.client(begin.broadcast, begin.clients, clients, 0, Key(1).fold("round", 0))
    assert torch.equal(first.messages.vectors, again.messages.vectors)
    assert all(torch.equal(before[n], begin.clients[n]) for n in before)
    assert torch.equal(torch_state, torch.random.get_rng_state())


@pytest.mark.parametrize(("name", "private"), VARIANTS)
def test_one_by_one_equals_stacked(name: str, private: bool) -> None:
    algorithm, clients = build(name, private, smooth=True), make_clients()
    begin = algorithm.init(clients.model, clients.ids, Key(1).fold("init"))
    singles = [algorithm.init(clients.model, (i,), Key(1).fold("init")).clients for i in clients.ids]
    broadcast, state, server = begin.broadcast, begin.clients, begin.server
    for t in range(3):
        key = Key(1).fold("round", t)
        sent = algorithm.client(broadcast, state, clients, t, key)
        steps = [algorithm.client(broadcast, singles[i], clients.only(i), t, key) for i in range(CLIENTS)]
        alone = torch.cat([step.messages.vectors for step in steps])
        torch.testing.assert_close(alone, sent.messages.vectors, rtol=1e-6, atol=1e-6)
        last = key.fold("server")
        done = algorithm.server(heard(algorithm, sent, server, t, last), server, t, last)
        broadcast, state, server = done.broadcast, sent.state, done.state
        singles = [step.state for step in steps]


@pytest.mark.parametrize("name", [n for n in NAMES if is_private(n)])
def test_no_noise_and_no_clip_is_the_plain_run_bit_for_bit(name: str) -> None:
    settings = settings_of(name)
    shape = settings.exposure(clip=float("inf"), examples=2100)
    rule = aggregation.parse("mean", f=0)
    loose = settings.build(learning.Setup(CLIENTS, 0, rounds=5, rule=rule, release=shape))
    for (a, _), (b, _) in zip(
        run_rounds(loose, make_clients()), run_rounds(build(name), make_clients()), strict=True
    ):
        assert torch.equal(a.messages.vectors, b.messages.vectors)


@pytest.mark.parametrize(("name", "private"), VARIANTS)
def test_messages_are_as_declared_and_travel_whole(name: str, private: bool) -> None:
    """Every client's message fits the declaration, is as long as counted, and is read as it was sent."""
    algorithm, clients = build(name, private), make_clients()
    remembered: dict[int, Any] = {}
    for t, (sent, _) in enumerate(run_rounds(algorithm, clients)):
        exchanges = [(algorithm.message(clients.model), sent.messages)]
        if algorithm.inquiry is not None:
            question = {"candidates": torch.arange(t, t + algorithm.inquiry.message(clients.model).dim)}
            layout = algorithm.inquiry.message(clients.model)
            exchanges.append((layout, algorithm.inquiry.answer(question, sent.state)))
        for layout, messages in exchanges:
            assert messages.vectors.shape == (CLIENTS, layout.dim)
            lengths = layout.lengths(messages)
            for i in range(CLIENTS):
                travels = layout.encode(messages.rows([i]))
                read = layout.decode(travels, remembered.get(i))
                assert sum(tensor.nbytes for tensor in travels.values()) == int(lengths.bytes[i])
                assert int(lengths.bytes[i]) <= layout.longest.bytes
                assert torch.equal(read.vectors[0], messages.vectors[i])
                assert all(torch.equal(read.beside[n][0], part[i]) for n, part in messages.beside.items())
                remembered[i] = layout.to_remember(read)


@pytest.mark.parametrize("name", [n for n in NAMES if not is_private(n)])
def test_an_algorithm_without_a_release_says_what_is_allowed(name: str) -> None:
    with pytest.raises(PrivacyError, match=r"leave \[privacy\] out, or choose .*cafcor, .*fedavg"):
        learning.algorithms[name]().exposure(clip=1.0, examples=100)
