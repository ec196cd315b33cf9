"""Evidence: the law of sums, who is expelled and who never is, corrections, and whole runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from trilemma import aggregation, config, privacy, simulate
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.learning import Messages, Setup, algorithms
from trilemma.learning.defences.evidence import (
    Expulsion,
    convict,
    correct,
    detector,
    edge,
    hidden_shift,
    lengths,
)
from trilemma.learning.defences.evidence.directions import Directions
from trilemma.learning.defences.evidence.hidden import smallest_spike
from trilemma.learning.defences.evidence.history import ClientHistory
from trilemma.learning.defences.stage import stage_of, staged
from trilemma.learning.steps.trace import Law
from trilemma.models import build
from trilemma.privacy.threats.covariance import SecretGraph, covariance
from trilemma.privacy.types import NoiseLaw, Release
from trilemma.simulate import engine
from trilemma.simulate.experiment import assemble

LAW = NoiseLaw(sigma_ind=0.7, sigma_cor=0.5)
RUN = {
    "federation": {"clients": 9, "byzantine": 2},
    "algorithm": {"name": "cafcor", "lr": 0.1, "batch_size": 5},
    "aggregation": {"rule": "evidence+mean"},
    "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 20.0, "delta": 1e-4},
    "run": {"rounds": 6},
}


def noise(members: int, dim: int, seed: int, rounds: int = 1) -> tuple[np.ndarray, Law]:
    """Sums of `rounds` rounds of honest noise without contributions, and their law."""
    source, everyone = privacy.SimulatedNoise(Key(seed), members), tuple(range(members))
    cpu = torch.device("cpu")
    drawn = [source.draw(LAW, everyone, dim, round_, cpu).double().numpy() for round_ in range(rounds)]
    spread = np.full(rounds, LAW.sigma_ind**2 + members * LAW.sigma_cor**2)
    shared = np.full(rounds, LAW.sigma_cor**2)
    return np.sum(drawn, axis=0), Law.of(shared, np.ones((members, rounds)), spread, np.zeros(rounds), dim)


def experiment(*changes: str) -> simulate.Experiment:
    return simulate.assemble(config.parse(RUN, changes), 1)


def run(*changes: str) -> tuple[list[tuple[int, str]], simulate.engine.Progress]:
    ready = experiment(*changes)
    progress, expelled = simulate.engine.start(ready), []
    for _ in range(ready.config.run.rounds):
        progress, record = simulate.engine.step(ready, progress)
        expelled += [(one["client"], one["test"]) for one in record.expelled]
    return expelled, progress


def test_the_law_of_sums_is_the_covariance_that_certifies_privacy_added_up() -> None:
    """Round 0 hears all four clients, round 1 the first three; coefficients are the clients' own."""
    c = np.array([[1.0, 0.5], [2.0, 0.5], [1.0, 1.0], [3.0, 0.0]])
    heard = [(0, 1, 2, 3), (0, 1, 2)]
    expected = np.zeros((4, 4))
    for round_, who in enumerate(heard):
        sigma = covariance(SecretGraph.complete(4), LAW, who)
        expected[np.ix_(who, who)] += np.outer(c[who, round_], c[who, round_]) * sigma
    spreads = np.full(2, LAW.sigma_ind**2 + 4 * LAW.sigma_cor**2)
    assert np.allclose(Law.of(np.full(2, LAW.sigma_cor**2), c, spreads, np.ones(2), 3).covariance, expected)


def test_sums_in_a_run_have_the_law_they_are_said_to_have() -> None:
    """Whitened by its law, what a real run's clients add up to has the size of d standard Gaussians."""
    _, progress = run("federation.byzantine=0", "federation.tolerate=2", "run.rounds=5", "privacy.epsilon=1")
    history = ClientHistory.read(progress.server)
    ready = experiment("federation.byzantine=0", "federation.tolerate=2", "run.rounds=5", "privacy.epsilon=1")
    law = ready.resolved.algorithm.detector.law(history)
    white = law.whitening @ history.sums.double().cpu().numpy()
    assert np.sum(white**2) == pytest.approx(white.size, rel=0.35)


@pytest.mark.parametrize("dim", [20, 400])
def test_the_false_alarm_rate_of_lengths_is_the_stated_one(dim: int) -> None:
    """Tail probabilities of 1e-2, measured on 20,000 Gaussian vectors: within four standard errors."""
    low, high = lengths(dim, 1e-2)
    drawn = np.linalg.norm(np.random.default_rng(1).normal(size=(20000, dim)), axis=1)
    for rate in ((drawn < low).mean(), (drawn > high).mean()):
        assert abs(rate - 1e-2) < 4 * np.sqrt(1e-2 / 20000)


def test_honest_noise_is_expelled_no_more_often_than_stated() -> None:
    """At alarm 1e-1, 400 federations of five: at most 40 expected; the union bound leaves it below."""
    alarms = 0
    for seed in range(400):
        sums, law = noise(5, 30, seed)
        alarms += bool(convict(sums @ sums.T, law, liars=1, alarm=1e-1))
    assert 0 < alarms <= 55


def test_a_longer_and_a_shorter_sum_are_expelled_with_statistic_and_threshold() -> None:
    sums, law = noise(8, 500, 1)
    sums[2] *= 3.0
    sums[5] *= 0.1
    found = convict(sums @ sums.T, law, liars=2, alarm=1e-6)
    assert [(one.client, one.test, one.low) for one in found] == [(2, "length", False), (5, "length", True)]
    assert all((one.statistic < one.threshold) == one.low for one in found)
    assert "length" in str(found[0])


def test_whoever_fails_with_more_clients_than_may_lie_is_named_and_nobody_else() -> None:
    """Client 0 adds a piece of everybody's noise: all its pairs fail, theirs with each other do not."""
    sums, law = noise(6, 60000, 2)
    sums[0] = 0.75 * sums[0] + 0.25 * (sums[1] + sums[2] + sums[3] + sums[4] + sums[5])
    found = convict(sums @ sums.T, law, liars=1, alarm=1e-6)
    assert [one.client for one in found] == [0]


def test_a_copy_sets_both_aside_because_nobody_knows_who_copied() -> None:
    sums, law = noise(8, 500, 3)
    sums[6] = sums[1]
    found = convict(sums @ sums.T, law, liars=2, alarm=1e-6)
    assert [(one.client, one.test, one.others) for one in found] == [
        (1, "one of a pair", (6,)),
        (6, "one of a pair", (1,)),
    ]


def test_a_framed_client_stays_and_the_liars_who_frame_it_lose_one_for_one_at_most() -> None:
    """Two of nine add client 0's noise: an honest client goes only together with a liar."""
    sums, law = noise(9, 2000, 4)
    sums[7] = (sums[7] + sums[0]) / np.sqrt(2)
    sums[8] = (sums[8] + sums[0]) / np.sqrt(2)
    found = {one.client for one in convict(sums @ sums.T, law, liars=2, alarm=1e-6)}
    assert len(found - {7, 8}) <= len(found & {7, 8})


def test_common_shifts_are_named_along_the_direction_they_make_visible() -> None:
    sums, law = noise(40, 300, 5)
    shift = np.zeros(300)
    shift[0] = 8.5 * np.sqrt(law.covariance[0, 0])
    sums[:4] += shift
    found = convict(sums @ sums.T, law, liars=4, alarm=1e-6)
    assert {one.client for one in found} <= set(range(4))
    assert found
    assert found[0].test == "direction"


def test_without_a_direction_above_the_edge_nothing_is_corrected() -> None:
    sums, law = noise(20, 300, 6)
    found = correct(sums @ sums.T, sums @ sums.mean(0), law, liars=3, parts=np.full(20, 1 / 20))
    assert not found.mix.any()
    assert found.scale == 1.0


def test_the_edge_is_passed_by_noise_once_in_a_thousand() -> None:
    rng = np.random.default_rng(2)
    tops = [np.linalg.norm(rng.normal(size=(20, 200)), 2) ** 2 for _ in range(1000)]
    assert np.mean(np.array(tops) > edge(20, 200)) < 6e-3
    assert edge(20, 200) < 1.15 * (np.sqrt(20) + np.sqrt(200)) ** 2


def test_a_visible_lie_is_taken_out_of_the_mean() -> None:
    """A quarter of the clients push far along one axis: most of it is gone after the correction."""
    sums, law = noise(40, 200, 7)
    quiet = sums.mean(0)[0]
    sums[:10, 0] += 60 * np.sqrt(law.covariance[0, 0])
    moved = sums.mean(0)
    after = moved + correct(sums @ sums.T, sums @ moved, law, liars=10).mix @ sums
    assert abs(after[0] - quiet) < 0.1 * abs(moved[0] - quiet)


def test_what_a_robust_rule_says_is_left_alone_where_a_quarter_may_lie() -> None:
    """The honest gradient stands out of little noise; the mean is set right by it, however many may lie."""

    def alike(rule: str, liars: int) -> bool:
        little = "privacy={threat='ldp', clip=1.0, sigma_ind=0.1, delta=1e-4}"
        few = [little, "algorithm.batch_size=50", f"federation={{clients=9, byzantine={liars}}}"]
        models = [
            run(*few, f"aggregation.rule=evidence({correct})+{rule}")[1].broadcast["params"]
            for correct in ("correct=0", "correct=1")
        ]
        return torch.equal(*models)

    assert alike("caf", 3)
    assert not alike("caf", 2)
    assert not alike("mean", 3)


def test_whoever_stands_apart_is_left_out_of_the_move_whole() -> None:
    """What is left is the mean of the others, in every direction, set right along those still visible."""
    sums, law = noise(40, 200, 7)
    sums[:5, 0] += 60 * np.sqrt(law.covariance[0, 0])
    found = correct(sums @ sums.T, sums @ sums.mean(0), law, liars=5, parts=np.full(40, 1 / 40))
    after = found.scale * sums.mean(0) + found.mix @ sums
    assert np.allclose(after, sums[5:].mean(0))


def test_a_single_round_is_looked_at_beside_all_of_them() -> None:
    """A message twice too long hides in the sums of many rounds, not in its own round."""
    release, rounds = Release(clip=0.1, law=NoiseLaw(1.0, 0.5)), 40
    setup = Setup(9, 2, rounds, aggregation.parse("evidence+mean", f=2), release)
    algorithm = staged(algorithms["byz-clip-sgd"](momentum=0.0).build, setup)
    model = build("logistic", (400,), 2)
    state, source = algorithm.init(model, tuple(range(9)), Key(1)).server, privacy.SimulatedNoise(Key(2), 9)
    for round_ in range(rounds):
        drawn = source.draw(release.law, tuple(range(9)), model.dim, round_, torch.device("cpu"))
        if round_ == rounds - 1:
            drawn[8] *= 1.7
        step = algorithm.server(Messages(drawn), state, round_, Key(3))
        state = step.state
    assert [one.client for one in step.report["expelled"]] == [8]
    history = ClientHistory.read(state)
    gram, law = (history.sums @ history.sums.T).double().cpu().numpy(), algorithm.detector.law(history)
    assert not convict(gram, law, liars=2, alarm=1e-6 / rounds)


def one_round(sharing: tuple[int, ...], senders: tuple[int, ...], said: tuple[int, ...]) -> list[int]:
    """Who of nine is expelled when `senders`, of those who share secrets, send noise; the server is told."""
    release = Release(clip=0.1, law=NoiseLaw(0.1, 1.0))
    setup = Setup(9, 2, 1, aggregation.parse("evidence+mean", f=2), release)
    algorithm = staged(algorithms["byz-clip-sgd"](momentum=0.0).build, setup)
    model = build("logistic", (4000,), 2)
    source = privacy.SimulatedNoise(Key(2), 12).among(sharing)
    drawn = source.draw(release.law, senders, model.dim, 0, torch.device("cpu"))
    state = algorithm.init(model, tuple(range(9)), Key(1)).server
    step = algorithm.server(Messages(drawn, senders=senders, sharing=said), state, 0, Key(3))
    assert len(step.report["weights"]) == len(senders)
    return [one.client for one in step.report["expelled"]]


def test_noise_is_judged_by_how_many_share_secrets_and_not_by_how_many_are_heard() -> None:
    """Six of nine are in the epoch and five of them are heard; a server that counted nine would expel."""
    assert one_round(tuple(range(6)), (0, 1, 2, 3, 5), said=tuple(range(6))) == []
    assert one_round(tuple(range(6)), (0, 1, 2, 3, 5), said=tuple(range(9)))


def test_a_client_that_comes_later_has_a_row_of_its_own() -> None:
    """Place 11 of a federation that began with nine."""
    assert one_round((*range(9), 11), (*range(9), 11), said=(*range(9), 11)) == []


def test_those_who_share_secrets_with_a_client_that_sends_nonsense_are_not_suspected() -> None:
    """Their noise has its share, whatever became of its message."""
    release = Release(clip=0.1, law=NoiseLaw(0.1, 1.0))
    setup = Setup(9, 2, 1, aggregation.parse("evidence+mean", f=2), release)
    algorithm = staged(algorithms["byz-clip-sgd"](momentum=0.0).build, setup)
    model = build("logistic", (4000,), 2)
    drawn = privacy.SimulatedNoise(Key(2), 9).draw(
        release.law, tuple(range(9)), model.dim, 0, torch.device("cpu")
    )
    drawn[7:] = torch.nan
    step = algorithm.server(Messages(drawn), algorithm.init(model, (0,), Key(1)).server, 0, Key(3))
    assert [(one.client, one.test) for one in step.report["expelled"]] == [
        (7, "not finite"),
        (8, "not finite"),
    ]


def test_what_hides_grows_with_dimension_and_shrinks_with_rounds() -> None:
    found = [hidden_shift(LAW, 1.0, 50, 5, dim, 30) for dim in (100, 10000)]
    assert found[0].shift < found[1].shift
    assert found[1].left < hidden_shift(LAW, 1.0, 50, 5, 10000, 10).left
    assert found[0].left >= found[0].mean * 0.98


@pytest.mark.parametrize("turned", [False, True])
def test_no_lie_that_passes_lengths_and_pairs_moves_the_mean_further_than_the_bound(turned: bool) -> None:
    """Liars who add a shift to their noise, and liars who send their noise in one direction alone."""
    n, f, dim, clip, alarm = 20, 4, 150, 1.0, 1e-6
    honest, law = noise(n, dim, 9)
    law, way = replace(law, bounds=np.full(n, clip)), np.eye(1, dim)[0]
    bound = hidden_shift(LAW, clip, n, f, dim, 1, alarm).most
    passed = []
    for strength in np.linspace(0, 60, 200):
        sent = honest.copy()
        if turned:
            sent[-f:] -= sent[-f:].mean(0)
        sent[-f:] += strength * way
        if not convict(sent @ sent.T, law, f, alarm / 2, lambda: Directions.none(1, f)):
            passed.append(np.linalg.norm(sent[-f:].sum(0)) / n)
    assert bound / 3 < max(passed) < bound


def test_a_spike_below_the_smallest_hides_and_one_above_is_seen() -> None:
    """Measured: the top eigenvalue of noise plus a rank-one matrix against the edge."""
    rng, m, d = np.random.default_rng(3), 60, 600
    left, right = np.ones(m) / np.sqrt(m), np.zeros(d)
    right[0] = 1.0
    for factor, seen in ((0.6, False), (1.5, True)):
        spike = np.sqrt(smallest_spike(m, d)) * factor
        tops = [
            np.linalg.norm(spike * np.outer(left, right) + rng.normal(size=(m, d)), 2) ** 2 > edge(m, d)
            for _ in range(20)
        ]
        assert np.mean(tops) > 0.9 if seen else np.mean(tops) < 0.1


def test_an_expulsion_is_written_and_read() -> None:
    for one in (Expulsion(1, "not finite"), Expulsion(2, "pairs", 3.0, 2.0, others=(4, 5))):
        assert str(Expulsion.read(one.plain())) == str(one)


def test_without_noise_evidence_does_nothing() -> None:
    quiet = ["privacy.threat=none", "attack.name=sf"]
    base = {name: table for name, table in RUN.items() if name != "privacy"}
    models = []
    for rule in ("evidence+mean", "mean"):
        ready = simulate.assemble(config.parse(base, [*quiet, f"aggregation.rule={rule}"]), 1)
        progress = simulate.engine.start(ready)
        for _ in range(3):
            progress, _ = simulate.engine.step(ready, progress)
        models.append(progress.chosen)
    assert torch.equal(*models)


@pytest.mark.parametrize("attack", ["sf", "alie", "inf"])
def test_liars_who_leave_their_noise_out_are_expelled_and_nobody_else(attack: str) -> None:
    expelled, progress = run(f"attack.name={attack}", "privacy.epsilon=2", "run.rounds=12")
    assert {client for client, _ in expelled} == {7, 8}
    assert ClientHistory.read(progress.server).members.tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize(
    "algorithm",
    [
        "algorithm={name='safe-dshb', unit='user'}",
        "algorithm={name='byz-clip-sgd'}",
        "algorithm={name='byz-clip21-sgd2m'}",
        "algorithm={name='fedavg'}",
        "algorithm={name='lp-proj', dim=8, local_rounds=1, inner_steps=1}",
    ],
)
def test_algorithms_of_clipped_contributions_and_noise_are_guarded(algorithm: str) -> None:
    everyone, _ = run(algorithm, "federation.byzantine=0", "federation.tolerate=2", "federation.sampled=7")
    assert everyone == []
    expelled, _ = run(algorithm, "attack.name=inf")
    assert {client for client, _ in expelled} == {7, 8}


def test_what_cannot_be_traced_is_refused_with_a_reason() -> None:
    noise = "privacy={threat='ldp', clip=1.0, sigma_ind=1.0}"
    with pytest.raises(ConfigError, match="sums of clipped contributions"):
        experiment("algorithm={name='byz-clip21-sgd2m+'}", noise)
    with pytest.raises(ConfigError, match="Poisson batch"):
        experiment("algorithm={name='safe-dshb', sampling='poisson', batch_size=5}", noise)
    with pytest.raises(ConfigError, match="once, before everything"):
        stage_of(aggregation.parse("nnm+evidence+mean", f=1))


def test_waiting_leaves_the_model_where_it_is_and_loses_nothing() -> None:
    ready = experiment(
        "aggregation.rule=evidence(wait=4)+mean", "federation.byzantine=0", "federation.tolerate=2"
    )
    progress = first = simulate.engine.start(ready)
    for _ in range(3):
        progress, _ = simulate.engine.step(ready, progress)
    assert torch.equal(progress.broadcast["params"], first.broadcast["params"])
    progress, _ = simulate.engine.step(ready, progress)
    history = ClientHistory.read(progress.server)
    assert torch.allclose(progress.broadcast["params"], history.origin + history.sums.mean(0), atol=1e-5)


def test_secrets_are_shared_without_the_expelled() -> None:
    """After the liars are out, noise that only cancels among all nine would not cancel among seven."""
    _, progress = run("attack.name=inf")
    ready = experiment("attack.name=inf")
    members = ready.members(progress.server)
    source = ready.clients.among(members).noise
    drawn = source.draw(NoiseLaw(sigma_cor=1.0), members, 50, 3, torch.device("cpu"))
    assert members == tuple(range(7))
    assert drawn.sum(0).abs().max() < 1e-4


def test_the_guarantee_counts_on_the_members_that_may_be_left() -> None:
    """Noise is calibrated for n − f members, for whom it cancels among fewer."""
    with_evidence = experiment().resolved
    assert with_evidence.threat is not None
    assert with_evidence.threat.clients == 7
    assert (
        with_evidence.release.law.sigma_cor
        >= experiment("aggregation.rule=mean").resolved.release.law.sigma_cor
    )


def test_where_all_who_were_asked_are_expelled_the_model_stays() -> None:
    release = Release(clip=1.0, law=NoiseLaw(1.0, 0.5))
    setup = Setup(6, 2, 3, aggregation.parse("evidence+mean", f=2), release)
    algorithm = staged(algorithms["cafcor"]().build, setup)
    model = build("logistic", (40,), 2)
    state = algorithm.init(model, tuple(range(6)), Key(1)).server
    noiseless = Messages(torch.full((1, model.dim), 1e3), senders=(5,))
    step = algorithm.server(noiseless, state, 0, Key(2))
    assert [one.client for one in step.report["expelled"]] == [5]
    assert torch.equal(step.broadcast["params"], state["params"])
    assert step.report["weights"].tolist() == [0.0]


@pytest.mark.parametrize("rule", ["evidence+mean", "safeguard+mean", "noise-test+mean"])
def test_a_round_in_which_nobody_sends_leaves_the_model_where_it_is(rule: str) -> None:
    """Where all who were asked are absent there are no senders: that is nobody, and not everybody."""
    release = Release(clip=1.0, law=NoiseLaw(1.0, 0.5))
    setup = Setup(6, 2, 3, aggregation.parse(rule, f=2), release)
    algorithm = staged(algorithms["cafcor"]().build, setup)
    model = build("logistic", (40,), 2)
    state = algorithm.init(model, tuple(range(6)), Key(1)).server
    step = algorithm.server(Messages(torch.empty(0, model.dim)), state, 0, Key(2))
    assert torch.equal(step.broadcast["params"], state["params"])
    assert step.report["weights"].tolist() == []
    assert step.report.get("expelled", ()) == ()


def test_undo_takes_back_what_an_expelled_client_did_and_nothing_it_did_not() -> None:
    """Without common noise all of its past goes when a client is expelled. The message that betrayed it never
    moved the model, so however long it is, undoing must not move the model by it.
    """
    release, everyone = Release(clip=0.1, law=NoiseLaw(1.0, 0.0)), tuple(range(9))
    setup = Setup(9, 2, 4, aggregation.parse("evidence(correct=0)+mean", f=2), release)
    algorithm = staged(algorithms["byz-clip-sgd"](momentum=0.0, lr=1.0).build, setup)
    source, model = privacy.SimulatedNoise(Key(2), 9), build("logistic", (299,), 2)
    for last in (300.0, 1e6):
        state = algorithm.init(model, everyone, Key(1)).server
        origin = ClientHistory.read(state).origin
        rounds = [source.draw(release.law, everyone, 300, r, torch.device("cpu")) for r in range(4)]
        for round_, messages in enumerate(rounds):
            messages[8, 0] += last if round_ == 3 else 5.0
            step = algorithm.server(Messages(messages), state, round_, Key(3))
            state = step.state
        assert [one.client for one in step.report["expelled"]] == [8]
        others = sum(messages[:8].sum(0) / 9 for messages in rounds[:3]) + rounds[3][:8].mean(0)
        assert torch.allclose(step.broadcast["params"], origin - others, atol=1e-4)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_false_alarm_rate_of_pairs_is_the_stated_one(sign: float) -> None:
    """S_i/√K_ii ± S_j/√K_jj of correlated honest noise, tails of 1e-2 on either side, 2,000 federations."""
    dim, count = 40, 2000
    low, high = lengths(dim, 1e-2)
    found = []
    for seed in range(count):
        sums, law = noise(3, dim, seed)
        own = sums / np.sqrt(law.covariance.diagonal())[:, None]
        rho = law.covariance[0, 1] / law.covariance[0, 0]
        found.append(np.linalg.norm(own[0] + sign * own[1]) / np.sqrt(2 * (1 + sign * rho)))
    for rate in (np.mean(np.array(found) < low), np.mean(np.array(found) > high)):
        assert abs(rate - 1e-2) < 4 * np.sqrt(1e-2 / count)


def test_the_false_alarm_rate_of_directions_is_below_the_nominal_one() -> None:
    """A common contribution makes a direction visible; at alarm 1e-1 few of 200 federations lose a client."""
    alarms = 0
    for seed in range(200):
        sums, law = noise(12, 60, seed, rounds=4)
        sums[:, 0] += 5.0
        law = Law(law.covariance, np.full(12, 5.0), 60)
        alarms += any(one.test == "direction" for one in convict(sums @ sums.T, law, liars=2, alarm=1e-1))
    assert alarms <= 34


def test_where_more_are_expelled_than_was_reckoned_with_epsilon_says_so() -> None:
    """Noise was calibrated for n − f = 7 of 9 members; among four it protects less."""
    ready = experiment("privacy.threat=secldp")
    assert ready.resolved.threat is not None
    progress = simulate.engine.start(ready)
    members = progress.server["evidence.members"].clone()
    enough, few = members.clone(), members.clone()
    enough[7:], few[4:] = False, False
    states = [{**progress.server, "evidence.members": left} for left in (enough, few)]
    told = [simulate.engine.step(ready, replace(progress, server=state))[1] for state in states]
    planned = ready.spending.figure[0]
    fewer = replace(ready.resolved.threat, clients=4)
    assert told[0].epsilon == pytest.approx(planned)
    assert told[1].epsilon > 1.01 * planned
    assert ready.resolved.release is not None
    expected = privacy.certified_curve(ready.resolved.release, fewer, ready.config.run.rounds, 1e-4)
    assert told[1].epsilon == pytest.approx(expected.figure[0])


def test_in_a_single_release_nobody_can_have_been_expelled_before_it() -> None:
    once, without = (
        experiment("run.rounds=1", f"aggregation.rule={rule}").resolved for rule in ("evidence+mean", "mean")
    )
    assert once.release is not None
    assert without.release is not None
    assert once.release.law == without.release.law


def test_who_was_never_heard_is_no_company_for_liars(monkeypatch):
    """Of twelve who spoke five may lie, however many have not: too many for their middle to count."""
    asked = []
    monkeypatch.setattr(detector, "worth_correcting", lambda members, *_: asked.append(members) or False)
    sampled = config.parse(
        {},
        [
            *("federation.clients=24", "federation.sampled=12", "federation.tolerate=5"),
            *("aggregation.rule=evidence+caf", "run.rounds=1"),
            *("privacy.threat=ldp", "privacy.clip=1.0", "privacy.sigma_ind=0.5"),
        ],
    )
    experiment = assemble(sampled, seed=1)
    engine.step(experiment, engine.start(experiment))
    assert set(asked) == {12}
