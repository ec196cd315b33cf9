"""Slow clients, on a clock of their own: an honest one is not lost, and a liar holds nobody up."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation_harness import PRIVATE, Direct, coordinator, make, small_config
from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.federation.client.account import own_statement
from trilemma.federation.party.public_facts import Federation, Timing
from trilemma.federation.protocol import wire
from trilemma.federation.protocol.reasons import Reason
from trilemma.federation.protocol.transport import FIRST_NODE
from trilemma.federation.protocol.waiting import Took, Waiting, slow_ones, usual

LIMIT = 60.0
TIMING = Timing(round_limit=LIMIT, join_limit=10.0, poll=0.1)


class Slow(Direct):
    """Nodes that take `seconds(client, round)` for questions of the kinds `to`, on the server's clock."""

    def __init__(
        self, parties, seconds, gone=(), to=("ask",), refuses=lambda _client, _step: False, away=None
    ):
        super().__init__(parties, gone=gone)
        self.to, self.refuses, self.away = to, refuses, away
        self.seconds, self.steps = seconds, [0] * len(parties)
        self.due: list[tuple[float, object]] = []
        self.free = dict.fromkeys(self.clients, 0.0)

    def nodes(self):
        client, since, until = self.away or (None, 0.0, 0.0)
        self.gone = {client} if since < self.time.at < until else self.gone - {client}
        return super().nodes()

    def send(self, blocks, lifetime):
        questions = super().send(blocks, lifetime)
        for question, node in questions.items():
            client = node - FIRST_NODE
            if wire.kind_of(blocks[node]) in self.to:
                begun = max(self.time.at, self.free[client])
                takes = self.seconds(client, self.steps[client])
                self.free[client] = begun + (takes if takes < math.inf else 0.0)
                reply = self._replies.pop(question, None)
                reply = reply if takes < math.inf else None  # lost on the way
                if reply is not None and self.refuses(client, self.steps[client]):
                    reply = replace(reply, block=None, error=Reason.FAILED.told, refused=True)
                self.steps[client] += 1
                if reply is not None and self.free[client] < self.time.at + lifetime:
                    self.due.append((self.free[client], reply))
        return questions

    def fetch(self, questions):
        there = [reply for at, reply in self.due if at <= self.time.at]
        self.due = [(at, reply) for at, reply in self.due if at > self.time.at]
        return [one for one in [*super().fetch(questions), *there] if one.question in questions]


@pytest.fixture
def run(tmp_path):
    """A run of so many clients and rounds; returns its records, the seconds it took, and what was said."""

    def start(seconds, clients=5, rounds=12, tolerate=1, gone=(), assignments=PRIVATE, timing=TIMING, **how):
        config = small_config(clients, *assignments, tolerate=tolerate, rounds=rounds)
        budget = 1e6 if "privacy.clip=0.1" in assignments else None
        parties = make(tmp_path / "federation", clients, config, budget=budget, timing=timing)
        slow = Slow(parties, seconds, gone, **how)
        runner, said = coordinator(parties, slow)
        assert runner.go().rounds == rounds
        return [Record.read(one) for one in runner.log.records()], slow.time.at, said, parties

    return start


def heard(records, client):
    return [one.round for one in records if client in one.weights and client not in one.unheard]


def test_one_slow_site_does_not_slow_down_everybody_and_is_not_lost(run):
    """Twenty seconds where others take two: 3 rounds of 20 s, then about one of ten, whose turn it is."""
    records, took, said, _ = run(lambda client, _: 20.0 if client == 4 else 2.0, rounds=120, assignments=())
    assert took < 120 * 2.0 * 1.4 + 3 * 20.0, "at most a fifth more, and the first three rounds"
    mine = heard(records, 4)
    assert mine[:3] == [1, 2, 3]
    assert 2 <= len([one for one in mine if one > 3]) <= 6, mine
    assert sum(4 in one.late for one in records) > 100
    assert not any(one.unheard for one in records)
    assert any("client 4 takes 20" in line and "not waited for" in line for line in said)
    assert records[50].times[0] == pytest.approx(2.0, abs=0.2)


def test_the_rule_is_told_about_those_who_are_there(run):
    """Four rows of which one may lie, and not five of which one is missing already: κ is that of four."""
    records, *_ = run(lambda client, _: 20.0 if client == 4 else 2.0)
    assert set(records[0].weights) == {0, 1, 2, 3, 4}
    late = [one for one in records if 4 in one.late]
    assert late
    assert all(set(one.weights) == {0, 1, 2, 3} for one in late)
    assert all(one.facts["members"] == 5 for one in late), "its secrets' epoch it stays in"
    assert {one.epoch for one in records} == {0}


def test_ledgers_know_who_was_not_heard_and_pay_as_before(run):
    """Noise shared with it stays in: that costs accuracy. Members, and so ε, are the same in every round."""
    records, _, _, parties = run(lambda client, _: 20.0 if client == 4 else 2.0)
    statement = own_statement(parties[1])
    late = [one.round for one in records if 4 in one.late]
    remarked = [one.round + 1 for one in statement.remarks if "clients 4;" in one.text]
    assert remarked == [one for one in late if one < len(records)]
    assert len({(entry.mechanism, entry.threat) for entry in statement.entries}) == 1
    assert len(statement.entries) == len(records)
    slow = own_statement(parties[5])
    assert len(heard(records, 4)) <= len(slow.entries) < len(records), "what it answered too late it paid for"


def test_under_central_privacy_everybody_is_waited_for(run):
    """There a client hides in the noise of those who are heard: with fewer of them ε would be too small."""
    central = (
        "aggregation.rule=mean",
        "algorithm.momentum=0.0",
        "privacy.threat=cdp",
        "privacy.clip=0.1",
        "privacy.sigma_ind=0.5",
    )
    records, *_ = run(lambda client, _: 20.0 if client == 4 else 2.0, rounds=6, assignments=central)
    assert all(heard(records, client) == [1, 2, 3, 4, 5, 6] for client in range(5))


def test_a_site_that_recovers_is_waited_for_again(run):
    """It is as quick as the others from its fourth step on: after 2m prompt answers it counts as before."""
    records, _, said, _ = run(
        lambda client, step: 20.0 if client == 4 and step < 4 else 2.0 + 0.3 * (client == 4), rounds=30
    )
    assert heard(records, 4)[-10:] == list(range(21, 31))
    assert any("client 4 has been prompt for long enough" in line for line in said)


def test_where_there_are_too_few_others_a_slow_client_is_waited_for(run):
    """Of three one may lie: without the slow one two would be left, and nobody knows who is right."""
    records, took, _, _ = run(lambda client, _: 20.0 if client == 2 else 2.0, clients=3, rounds=6)
    assert heard(records, 2) == [1, 2, 3, 4, 5, 6]
    assert took > 6 * 20.0


@pytest.mark.parametrize("repeats", [0, 1])
def test_with_one_gone_and_one_slow_the_slow_one_is_waited_for(run, repeats):
    """Otherwise two of five were missing where one may be; and no attempt, nor an epoch, is lost by it."""
    timing = replace(TIMING, repeats=repeats)
    records, _, said, _ = run(
        lambda client, _: 20.0 if client == 4 else 2.0, rounds=8, gone=(0,), timing=timing
    )
    assert all(set(heard(records, client)) == set(range(1, 9)) for client in (1, 2, 3, 4))
    assert {one.epoch for one in records} == {0}
    assert not any("asked again" in line for line in said)


@pytest.mark.parametrize("repeats", [0, 1])
def test_with_one_silent_and_one_slow_no_round_fails(run, repeats):
    """Client 0 is there and never answers, which nobody knows before: then the slow one is waited for."""
    timing = replace(TIMING, repeats=repeats)
    records, _, said, _ = run(
        lambda client, step: 20.0 if client == 4 else 1e9 if client == 0 and step > 4 else 2.0,
        rounds=8,
        timing=timing,
    )
    assert {one.epoch for one in records} == {0}
    assert not any("failed" in line for line in said)


SECOND = ("algorithm.name=sketch", "algorithm.columns=12", "algorithm.rows=5", "algorithm.kept=6")
SCORED = ("evaluation.clients=true", "evaluation.every=1", "data.holders=all")


def test_who_was_away_and_is_back_is_waited_for_again(run):
    records, *_ = run(
        lambda client, step: math.inf if client == 4 and step == 5 else 2.0,
        rounds=150,
        assignments=(),
        away=(4, 11.0, 140.0),
    )
    assert any(4 in one.slow for one in records)
    assert heard(records, 4)[-10:] == list(range(141, 151))


@pytest.mark.parametrize("honest", [True, False])
def test_who_refuses_just_below_the_limit_is_slow(run, honest):
    """It answers at once every other time, so that it is not among those who are doubted."""
    records, took, _, _ = run(
        lambda client, step: LIMIT - 1 if client == 4 and step % 2 == 0 else 2.0,
        rounds=60,
        assignments=(),
        refuses=lambda client, step: not honest and client == 4 and step % 2 == 0,
    )
    assert took < 60 * 2.0 * 1.4 + 8 * LIMIT, took
    assert records[0].slow == (4,)


@pytest.mark.parametrize("how", [(SECOND, "inquire"), (SCORED, "evaluate")])
@pytest.mark.parametrize("seconds", [LIMIT - 1, 1e9])
def test_whatever_it_is_asked_a_liar_holds_nobody_up_for_long(run, how, seconds):
    """Prompt with its step, and slow, or silent, with what it is asked besides."""
    assignments, kind = how
    records, took, _, _ = run(
        lambda client, _: seconds if client == 4 else 2.0, rounds=40, assignments=assignments, to=(kind,)
    )
    assert took < 40 * 2.0 * 5 + 6 * LIMIT, took
    assert all(len(heard(records, client)) == 40 for client in range(4))


@pytest.mark.parametrize("quick", [0.0, 1.9])
def test_quick_liars_get_nobody_declared_slow(run, quick):
    """Honest clients take between 2 and 9 s, two of seven answer at once: against all, 9 s are not slow."""
    honest = {0: 2.0, 1: 3.0, 2: 4.0, 3: 6.0, 4: 9.0}
    records, _, _, _ = run(lambda client, _: honest.get(client, quick), clients=7, tolerate=2, rounds=8)
    assert not any(one.slow or one.late for one in records)


def test_liars_just_below_the_limit_hold_nobody_up_for_long(run):
    """They are slow when they are waited for, and prompt for as long as it takes to be waited for again."""

    def seconds(client, step):
        if client < 5:
            return 2.0
        return LIMIT - 1 if step % 10 < 4 else 2.0

    records, took, _, _ = run(seconds, clients=7, tolerate=2, rounds=100, assignments=())
    waited = sum(max(one.times.values()) > 50 and not one.late for one in records)
    assert took < 2 * 100 * 2.0 + 2 * 12 * LIMIT, (took, waited)
    assert all(len(heard(records, client)) == 100 for client in range(5))


def test_a_silent_client_costs_the_limit_a_few_times_and_then_nothing(run):
    records, took, _, _ = run(lambda client, _: 1e9 if client == 4 else 2.0, rounds=60, assignments=())
    assert took < 60 * 2.0 * 1.4 + 4 * LIMIT
    assert sum(4 in one.absent for one in records) <= 6


# --- the rule as a pure function ------------------------------------------------------------------------


@given(st.integers(0, 4), st.data())
def test_no_liar_moves_what_is_usual_out_of_what_honest_clients_take(f, data):
    n = data.draw(st.integers(2 * f + 1, 3 * f + 6))
    seconds = st.floats(0.0, 100.0)
    honest = sorted(data.draw(st.lists(seconds, min_size=n - f, max_size=n - f)))
    lies = data.draw(st.lists(st.one_of(seconds, st.just(math.inf)), min_size=f, max_size=f))
    took = {place: Took(one, answered=math.isfinite(one)) for place, one in enumerate([*honest, *lies])}
    found = usual(took, f)
    assert found <= honest[-1]
    if n >= 3 * f:
        assert found >= honest[(n - f - 1) // 2], "the honest median, the lower of two"
        slow = slow_ones(took, f, times=5.0)
        assert not [one for one in slow if one < n - f and honest[one] <= 5 * honest[(n - f - 1) // 2]]


def test_in_many_rounds_a_liar_is_waited_for_in_vain_only_a_few_times():
    """Whatever it does, as long as it can: slow when it is waited for, prompt as long as it has to be."""
    waiting, vain, rounds = Waiting(times=5.0, rounds=3, tolerated=1), 0, 3000
    for number in range(1, rounds + 1):
        awaited = 3 not in waiting.not_awaited(range(4))
        vain += awaited
        times = {0: 1.0, 1: 1.0, 2: 1.0, 3: 60.0 if awaited else 1.0}
        slow, rows = ((3,), range(4)) if awaited else ((), range(3))
        weights = dict.fromkeys(rows, 0.0)
        record = Record(number, times=times, slow=slow, weights=weights, facts={"usual_seconds": 1.0})
        waiting = waiting.after(record)
    assert vain <= 3 + math.log2(rounds / 3) + rounds / (5 * 60)


QUICK, NEARLY, OFTEN = 2.0, 9.9, 24
"""Seconds of an honest step, those that are just not slow, and how many steps a liar's plan has."""


def played(plans, clients, tolerated, rounds):
    """Let liars do as they plan, one plan for when they are waited for and one for when they are not.

    Return the seconds of all rounds, those by which liars made rounds longer than they may, and how many
    honest answers were lost.
    """
    waiting, total, stolen, lost, step = Waiting(5.0, 3, tolerated), 0.0, 0.0, 0, [0] * tolerated
    for number in range(1, rounds + 1):
        out = waiting.not_awaited(range(clients))
        times = dict.fromkeys(range(clients - tolerated), QUICK)
        for place, plan in enumerate(plans):
            liar = clients - tolerated + place
            times[liar] = plan[liar not in out][step[place] % OFTEN]
            step[place] += 1
        took = {one: Took(seconds, answered=seconds < LIMIT) for one, seconds in times.items()}
        lasted = min(LIMIT, max(seconds for one, seconds in times.items() if one not in out))
        late = tuple(one for one in out if times[one] > lasted)
        lost += sum(one < clients - tolerated for one in late)
        total, stolen = total + lasted, stolen + (lasted if lasted > 5 * QUICK else 0.0)
        weights = {one: 0.0 for one in times if one not in late}
        facts = {"usual_seconds": usual(took, tolerated)}
        slow = slow_ones(took, tolerated, 5.0)
        record = Record(number, times=times, slow=slow, late=late, weights=weights, facts=facts)
        waiting = waiting.after(record)
    return total, stolen, lost


@pytest.mark.parametrize(("clients", "tolerated"), [(4, 1), (7, 2), (10, 3)])
def test_liars_who_search_for_it_do_not_find_how_to_hold_others_up_for_long(clients, tolerated):
    """Hill climbing from the best that is known: slow when it is waited for, prompt when it is not."""
    chance, rounds = random.Random(5), 150
    choices = [1.0, QUICK, NEARLY, 10.5, LIMIT / 3, LIMIT - 1, LIMIT + 1]
    best = [{True: [LIMIT - 1] * OFTEN, False: [QUICK] * OFTEN} for _ in range(tolerated)]
    most = played(best, clients, tolerated, rounds)
    for _ in range(60):
        plans = [{awaited: list(plan) for awaited, plan in one.items()} for one in best]
        for _ in range(chance.choice((1, 2, 5))):
            plans[chance.randrange(tolerated)][chance.random() < 0.5][chance.randrange(OFTEN)] = (
                chance.choice(choices)
            )
        found = played(plans, clients, tolerated, rounds)
        if found[1] >= most[1]:
            best, most = plans, found
    total, stolen, lost = most
    assert stolen <= tolerated * ((3 + math.log2(rounds / 3)) * LIMIT + total / 5), most
    assert not lost


def test_where_clients_stand_follows_from_the_records_alone():
    chance = random.Random(4)
    records = []
    for number in range(1, 200):
        slow = tuple(client for client in range(4) if chance.random() < 0.2)
        records.append(Record(number, times=dict.fromkeys(range(4), 2.0), slow=slow))
    whole = Waiting.of(5.0, 3, records)
    half = Waiting.of(5.0, 3, records[:100])
    for record in records[100:]:
        half = half.after(Record.read(record.plain()))
    assert half == whole
    assert whole.out


def test_the_rule_is_agreed_on():
    """A server that waits otherwise than its clients were told proposes other terms."""
    assert Timing(slow_times=5).agreed == Timing().agreed != Timing(slow_times=9).agreed
    assert Timing(slow_times=math.inf).agreed != Timing().agreed
    facts = Federation.parse(Federation("pilot", 3, timing=Timing(slow_times=math.inf)).toml())
    assert facts.timing.slow_times == math.inf
    for wrong in ({"slow_times": 1.0}, {"slow_times": math.nan}, {"slow_rounds": 0}):
        with pytest.raises(UserError, match="allowed"):
            Timing(**wrong)
