"""What a private client's message may tell: bounded moves, however large or broken the data are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from trilemma import aggregation, data, learning, privacy
from trilemma.base.keys import Key
from trilemma.learning.messages import STEPS, Asked
from trilemma.learning.steps import gridded, privatise
from trilemma.learning.steps.privatise import publish
from trilemma.privacy.noise import grid
from trilemma.privacy.noise.grid import Grid
from trilemma.testing.test_algorithms import CLIENTS, is_private, make_clients, run_rounds, settings_of

LAW = privacy.NoiseLaw(sigma_ind=0.1, sigma_cor=0.2)
PRIVATE = [name for name in learning.algorithms if is_private(name)]


def built(name: str, arithmetic: str, law: privacy.NoiseLaw = LAW, **options):
    settings = settings_of(name, **options)
    release = replace(settings.exposure(clip=1.0, examples=2100), law=law)
    rule = aggregation.parse("mean", f=0)
    return settings.build(learning.Setup(CLIENTS, 0, 5, rule, release, arithmetic))


@dataclass(frozen=True)
class Silent:
    """Noise that is all zeros: what is left of a message is the contribution."""

    def draw(self, law, ids, dim, round_, device) -> Tensor:
        return torch.zeros(len(ids), dim)

    def steps(self, law, step, ids, dim, round_, device) -> Tensor:
        return torch.zeros(len(ids), dim, dtype=torch.int64)


@pytest.mark.parametrize("name", PRIVATE)
def test_on_a_grid_the_integers_tell_the_whole_message(name: str) -> None:
    """The receiver works every message out from integers alone, exactly as its sender did."""
    algorithm, clients = built(name, "grid"), make_clients()
    broadcast = algorithm.init(clients.model, clients.ids, Key(1).fold("init")).broadcast
    layout, remembered = algorithm.message(clients.model), {}
    for t, (sent, done) in enumerate(run_rounds(algorithm, clients)):
        for i in range(CLIENTS):
            travels = layout.encode(sent.messages.rows([i]))
            assert sum(tensor.nbytes for tensor in travels.values()) == layout.longest.bytes < 4 * layout.dim
            read = layout.decode(travels, remembered.get(i), Asked(t, broadcast))
            assert torch.equal(read.vectors[0], sent.messages.vectors[i])
            remembered[i] = layout.to_remember(read)
        broadcast = done.broadcast


@pytest.mark.parametrize("name", PRIVATE)
def test_the_grid_changes_a_run_by_no_more_than_its_steps(name: str) -> None:
    """Same keys: grid and float runs differ by rounding, far less than by noise."""
    rough, fine = (run_rounds(built(name, kind), make_clients(), 2) for kind in ("grid", "float"))
    for (a, _), (b, _) in zip(rough, fine, strict=True):
        # Examples are clipped a hundredth lower on a grid.
        torch.testing.assert_close(a.messages.vectors, b.messages.vectors, rtol=0.02, atol=0.02)


def setup_of(arithmetic: str) -> learning.Setup:
    release = privacy.Release(1.0, LAW)
    return learning.Setup(CLIENTS, 0, 5, aggregation.parse("mean", f=0), release, arithmetic)


@pytest.mark.parametrize("arithmetic", ["float", "grid"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_leaves_as_noise_alone(arithmetic: str, broken: float) -> None:
    clients = replace(make_clients((0, 1)), noise=Silent())
    origin = torch.linspace(-1, 1, 69)
    vectors = origin + 0.01 * torch.ones(2, 69)
    vectors[0, 3] = broken
    sent, _ = publish(setup_of(arithmetic), clients, origin, vectors, 0)
    assert torch.equal(sent.vectors[0], origin)
    assert (sent.vectors[1] - origin).norm() > 0.05


def test_neighbours_stay_within_two_clips_around_large_models() -> None:
    """Near 3 · 2²⁰ single precision counts in quarters: w + clip(…) made 0.25 of 0.13, and 2C 3.84 C."""
    clients = replace(make_clients((0,)), noise=Silent())
    origin = torch.full((69,), 3.0 * 2**20)
    moves = torch.zeros(1, 69)
    moves[:, :59] = 1 / 59**0.5
    steps = [
        publish(setup_of("grid"), clients, origin, origin + 30 * sign * moves, 0)[0].beside[STEPS]
        for sign in (1, -1)
    ]
    grid = setup_of("grid").grid(69)
    assert grid is not None
    assert float((steps[0] - steps[1]).double().norm()) * grid.step <= 2.0


@pytest.mark.parametrize("size", [1e20, 1e30, 1e38])
@pytest.mark.parametrize("name", ["cafcor", "safe-dshb", "byz-clip21-sgd2m+", "fedavg"])
def test_no_broadcast_makes_a_record_show(name: str, size: float) -> None:
    """Huge weights overflow on one record and not on others: the message stays finite, its move bounded."""
    algorithm = built(name, "grid", batch_size=2100) if name != "fedavg" else built(name, "grid")
    whole = replace(make_clients(), noise=Silent())
    params = algorithm.init(whole.model, whole.ids, Key(1)).broadcast["params"]
    state = algorithm.init(whole.model, whole.ids, Key(1)).clients
    loud = torch.zeros_like(params)
    loud[5] = size
    x = whole.data.dataset.x_train.clone()
    x[whole.data.holdings.train[0][0]] *= 1e10
    changed = replace(
        whole, data=data.FederatedData(replace(whole.data.dataset, x_train=x), whole.data.holdings)
    )
    sent = [
        algorithm.client({"params": loud}, state, clients, 0, Key(2)).messages.beside[STEPS]
        for clients in (whole, changed)
    ]
    release = algorithm.release
    grid = Grid.of(release, whole.model.dim, CLIENTS)
    for steps in sent:
        assert steps.abs().max() < grid.limit
    moved = (sent[0] - sent[1]).double().norm(dim=1) * grid.step
    assert (moved <= release.sensitivity * (1 + 1e-9)).all()


def test_every_message_is_possible_under_other_data() -> None:
    """Whatever the data, the same integers can leave: the noise's support is every integer in reach."""
    grid = Grid.of(privacy.Release(1.0, privacy.NoiseLaw(0.5)), 50, clients=1)
    source = privacy.SecretNoise(0, {})
    rows = torch.randn(2, 50, generator=Key(4).torch())
    first, second = grid.contribution(rows)
    steps = source.steps(privacy.NoiseLaw(0.5), grid.step, (0,), 50, 0, torch.device("cpu"))
    needed = first + steps[0] - second  # the noise that makes the other data send the same message
    assert needed.abs().max() < 10 * 0.5 / grid.step
    assert torch.equal(grid.message(first[None], steps), grid.message(second[None], needed[None]))


@dataclass(frozen=True)
class Given:
    """Noise in whole steps, as given."""

    whole: Tensor

    def draw(self, law, ids, dim, round_, device) -> Tensor:
        raise NotImplementedError

    def steps(self, law, step, ids, dim, round_, device) -> Tensor:
        return self.whole


@pytest.mark.parametrize("name", PRIVATE)
def test_every_algorithms_message_is_possible_under_a_neighbours_data(name: str) -> None:
    """Bit for bit: noise within reach makes client 0's new data send the very bytes of the old.

    That noise is another integer of the same stream, so the sets of possible messages are the same.
    """
    # Statistics sum over all that a client holds: here over 2,100 examples, as many as it then declares.
    options = {"batch_size": 2100} if name == "statistics" else {}
    algorithm, clients = built(name, "grid", **options), make_clients()
    x = clients.data.dataset.x_train.clone()
    x[clients.data.holdings.train[0]] *= -3.0
    held = data.FederatedData(replace(clients.data.dataset, x_train=x), clients.data.holdings)
    begin = algorithm.init(clients.model, clients.ids, Key(1).fold("init"))
    layout = algorithm.message(clients.model)

    def sent(noise, held=clients.data):
        mine = replace(clients, noise=noise, data=held)
        return algorithm.client(begin.broadcast, begin.clients, mine, 0, Key(2)).messages

    before, after = sent(Silent()).beside[STEPS].long(), sent(Silent(), held).beside[STEPS].long()
    grid = Grid.of(algorithm.release, layout.dim, CLIENTS)
    noise = clients.noise.steps(LAW, grid.step, clients.ids, layout.dim, 0, torch.device("cpu"))
    needed = noise + before - after
    assert bool((before != after).any()), "the neighbour's data differ"
    assert torch.equal(needed[1:], noise[1:]), "nobody else's message depends on them"
    assert (needed - noise).abs().max() * grid.step <= 2 * algorithm.release.clip
    assert needed.abs().max() * grid.step < 13 * LAW.sigma_ind + 13 * LAW.sigma_cor * (CLIENTS - 1)
    old, new = sent(Given(noise)), sent(Given(needed), held)
    for i in range(CLIENTS):
        one, other = layout.encode(old.rows([i])), layout.encode(new.rows([i]))
        assert {part: tensor.tolist() for part, tensor in one.items()} == {
            part: tensor.tolist() for part, tensor in other.items()
        }


@dataclass(frozen=True)
class InPieces:
    """A source's noise for one client, in pieces of seven numbers."""

    source: privacy.SimulatedNoise

    def draw(self, *asked) -> Tensor:
        return self.source.draw(*asked)

    def steps(self, *asked) -> Tensor:
        return self.source.steps(*asked)

    def pieces(self, law, step, ids, dim, round_):
        whole = self.steps(law, step, ids, dim, round_, torch.device("cpu"))[0].double().numpy()
        return iter([whole[start : start + 7] for start in range(0, dim, 7)])


@pytest.mark.parametrize("broken", [False, True], ids=["sound", "not finite"])
@pytest.mark.parametrize("name", PRIVATE)
def test_a_long_message_is_made_in_pieces_and_is_the_same_to_the_bit(name, broken, monkeypatch) -> None:
    """Contribution, noise and what follows from them, some columns at a time."""
    decays = "weight_decay" in learning.algorithms[name].model_fields
    algorithm = built(name, "grid", **({"weight_decay": 0.1} if decays else {}))
    everybody = make_clients()
    alone = replace(everybody, ids=(2,), noise=InPieces(everybody.noise))
    start = algorithm.init(alone.model, (2,), Key(1).fold("init"))
    broadcast = start.broadcast
    if broken:
        broadcast = {part: torch.full_like(numbers, 1e30) for part, numbers in broadcast.items()}

    def rounds():
        state, told = start.clients, []
        for t in range(3):
            step = algorithm.client(broadcast, state, alone, t, Key(1).fold("round", t))
            state = step.state
            told += [step.messages.vectors, step.messages.beside[STEPS], *state.values()]
        return told

    whole = rounds()
    for module, size in ((gridded, "TOGETHER"), (privatise, "LONG"), (grid, "LONG")):
        monkeypatch.setattr(module, size, 10)
    for one, other in zip(whole, rounds(), strict=True):
        assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))
