"""The clip that follows a quantile: what it declares holds, what it follows, and how far a liar gets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from trilemma import aggregation, data, learning, privacy
from trilemma.audit import Subject
from trilemma.audit.sensitivity import sensitivity, wild_pairs
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.data.types import Batch
from trilemma.experiment import parse
from trilemma.experiment.resolve import resolve
from trilemma.learning import Messages
from trilemma.learning.messages import STEPS, Asked
from trilemma.learning.steps import adaptive_clip, total
from trilemma.learning.steps.adaptive_clip import RATE, REACH, AdaptiveClip, below
from trilemma.testing.test_algorithms import CLIENTS, make_clients, run_rounds

SETTINGS = {
    "safe-dshb": {"batch_size": 20},
    "safe-dshb, poisson": {"batch_size": 20, "sampling": "poisson"},
    "cafcor": {"batch_size": 20, "start": "first", "weight_decay": 0.01},
}


def algorithm_of(name, arithmetic="float", noise=0.0, quantile=0.5, clip=1.0, rule="mean", **more):
    settings = learning.algorithms[name.partition(",")[0]](**SETTINGS[name], quantile=quantile, **more)
    shape = settings.exposure(clip=clip, examples=2100)
    release = replace(shape, law=privacy.NoiseLaw(sigma_ind=noise))
    return settings.build(
        learning.Setup(
            CLIENTS, 0, 9, aggregation.parse(rule, f=0 if rule == "mean" else 1), release, arithmetic
        )
    )


def subject_of(arithmetic, *assignments):
    config = parse({}, ["federation.clients=7", "federation.tolerate=2", "run.rounds=4", *assignments])
    subject = Subject.of(config, 200, arithmetic)
    assert subject is not None
    return subject


WAYS = {
    "safe-dshb": ("algorithm={name='safe-dshb', quantile=0.3}", "privacy={threat='ldp', epsilon=4.0}"),
    "poisson": (
        "algorithm={name='safe-dshb', quantile=0.3, sampling='poisson'}",
        "privacy={threat='ldp', epsilon=4.0, adjacency='add-remove'}",
    ),
    "cafcor": ("algorithm={name='cafcor', quantile=0.3}", "privacy={threat='secldp', epsilon=4.0}"),
}


@pytest.mark.parametrize("arithmetic", ["grid", "float"])
@pytest.mark.parametrize("way", WAYS)
def test_no_record_moves_count_and_gradient_together_farther_than_declared(way, arithmetic, monkeypatch):
    """The audit finds what the clip allows, and finds a count that is not paid for."""
    subject = subject_of(arithmetic, *WAYS[way])
    pairs = wild_pairs(subject, 8, Key(1))
    found = sensitivity(subject, pairs, Key(1), "canaries")
    assert not found.exceeds
    assert found.found > 0.9 * subject.declared
    monkeypatch.setattr(adaptive_clip, "COUNT", 2.0)  # more than short gradients leave unused
    wrong = sensitivity(subject_of(arithmetic, *WAYS[way]), pairs, Key(1), "canaries")
    shrunk = arithmetic == "grid" and subject.release.unit == "user"  # a client's integers are checked
    assert wrong.exceeds != shrunk


@pytest.mark.parametrize("clip", [1e-9, 0.02, 3.0, 1e9, -1.0, math.nan])
def test_whatever_clip_a_server_names_a_client_stays_within_its_own(clip):
    algorithm, clients = algorithm_of("cafcor", "grid", noise=1.0), make_clients()
    begin = algorithm.init(clients.model, clients.ids, Key(1))
    asked = {**begin.broadcast, "clip": torch.tensor([clip])}
    quiet = replace(clients, noise=privacy.Noiseless())
    steps = algorithm.client(asked, begin.clients, quiet, 0, Key(2)).messages.beside[STEPS]
    grid = algorithm.message(clients.model).codec.grid
    assert 0 < (steps.double().norm(dim=1) * grid.step).max() <= 1.0


@pytest.mark.parametrize("name", SETTINGS)
def test_the_clip_goes_to_the_quantile_of_the_lengths(name, monkeypatch):
    """Without noise and steps, from far away: as many lengths are below as were asked for."""
    monkeypatch.setattr(adaptive_clip, "RATE", 1.0)
    algorithm = algorithm_of(name, quantile=0.3, clip=20.0, lr=1e-6)
    *_, (sent, done) = run_rounds(algorithm, make_clients(), rounds=40)
    clip = float(done.broadcast["clip"])
    assert 0.001 < clip < 2.0
    assert float(done.broadcast["clip"]) == pytest.approx(float(sent.report["clip"][0]), rel=0.2)


def test_noise_and_liars_move_a_clip_by_a_public_factor_at_most():
    clients = make_clients()
    for rule, lies in (("mean", (1e30, -1e30)), ("cwmed", (1e30, -1e30, math.inf, -math.inf, math.nan))):
        algorithm = algorithm_of("cafcor", rule=rule)
        begin = algorithm.init(clients.model, clients.ids, Key(1))
        for lie in lies:
            vectors = torch.zeros(CLIENTS, clients.model.dim + 1)
            vectors[-1, -1] = lie
            after = algorithm.server(Messages(vectors), begin.server, 0, Key(2)).broadcast
            assert abs(math.log(float(after["clip"]))) <= RATE + 1e-6


def test_a_clip_stays_within_reach():
    clip = AdaptiveClip(first=2.0, quantile=0.5)
    up = down = 2.0
    for _ in range(200):
        up, down = clip.following(up, -5.0), clip.following(down, 5.0)
    assert (up, down) == (2.0 * REACH, 2.0 / REACH)


def test_the_guarantee_is_the_same_as_that_of_a_clip_that_stays():
    """One Gaussian release of the same length: what the count costs is in the length, not beside it."""
    ways = []
    for more in ("", ", quantile=0.3"):
        config = parse(
            {},
            [
                f"algorithm={{name='cafcor', lr=1.0, momentum=0.5{more}}}",
                "privacy={threat='secldp', clip=2.0, epsilon=8.0}",
                "run.rounds=30",
                "federation.clients=20",
                "federation.tolerate=3",
            ],
        )
        ways.append(resolve(config, 100).verdict(30, 1e-5))
    assert ways[0] == ways[1]
    assert ways[0].epsilon == pytest.approx(8.0, rel=1e-3)


def test_the_receiver_works_the_message_out_from_integers_alone():
    algorithm, clients = algorithm_of("cafcor", "grid", noise=0.1), make_clients()
    layout = algorithm.message(clients.model)
    broadcast = algorithm.init(clients.model, clients.ids, Key(1).fold("init")).broadcast
    before = dict.fromkeys(range(CLIENTS))
    for t, (sent, done) in enumerate(run_rounds(algorithm, clients)):
        for i in range(CLIENTS):
            read = layout.decode(layout.encode(sent.messages.rows([i])), before[i], Asked(t, broadcast))
            assert torch.equal(read.vectors[0], sent.messages.vectors[i])
            before[i] = layout.to_remember(read)
        broadcast = done.broadcast
    assert float(broadcast["clip"]) != 1.0


def test_a_record_that_fails_counts_as_long_and_no_other_changes():
    """What a step goes through again keeps every other example's length."""
    clients = make_clients((0,))
    x = clients.data.dataset.x_train.clone()
    rows = clients.data.holdings.train[0]
    x[rows[3]] = torch.nan
    broken = data.FederatedData(replace(clients.data.dataset, x_train=x), clients.data.holdings)
    whole, other = clients.everything(), replace(clients, data=broken).everything()
    first = [Batch(one.x[:, :8], one.y[:, :8]) for one in (whole, other)]
    clip, theta = learning.steps.adaptive_clip.Clip.example(0.5, careful=True), torch.zeros(69)
    paid = total._Paid(total.Failures(torch.zeros(1, dtype=torch.int64)), deployed=True)
    with total._paid(paid):
        sound = total.gradients(clients.model, theta, first[0], clip=clip).norms
        failing = total._Row(paid, 0, clients.model, theta, first[1], clip, None, None).gradients("failed")
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(sound[:, others], failing.norms[:, others])
    assert below(failing.norms, 0.5)[0, 3] == 0


def test_short_lengths_leave_room_for_their_count():
    """Every length, on both sides of the clip: contribution and count together are no longer than C."""
    clip, lengths = AdaptiveClip(3.0, 0.5), torch.linspace(0, 10, 4001)[:, None]
    contribution = lengths.clamp(max=4.0)
    joined = clip.joined(contribution, below(lengths[:, 0], 4.0), 4.0)
    assert float(joined.norm(dim=1).max()) <= 3.0 * (1 + 1e-6)
    assert float(joined[0, 1]) > 0.8 * 3.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((), r"begins at \[privacy\] clip; give a finite one"),
        (("privacy={threat='none', clip=inf}",), r"begins at \[privacy\] clip"),
        (("aggregation.rule=evidence+mean", "privacy={threat='ldp', clip=1.0, sigma_ind=1.0}"), "keeps clip"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes, said):
    config = parse({}, ["algorithm={name='safe-dshb', unit='user', quantile=0.5}", *changes])
    clients = make_clients()
    with pytest.raises(ConfigError, match=said):
        resolve(config, 2100, clients.model).algorithm.init(clients.model, (0,), Key(1))
