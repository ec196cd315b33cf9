"""Questions and answers over a slow transport, on a clock of its own: no processes, no waiting."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from federation_harness import PRIVATE, Direct, Time, make, small_config
from trilemma.federation.party.public_facts import Timing
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.epochs import EpochsStopped
from trilemma.federation.protocol.transport import Reply
from trilemma.federation.server.coordinator import open_run
from trilemma.federation.server.exchange import Correspondence, Patience


@dataclass
class SlowTransport:
    """A transport whose nodes work on one message at a time, each `seconds[node]` long; the rest queue up.

    It forgets a question that expired before a node took it, and refuses a late answer.
    """

    time: Time
    answer: object
    seconds: dict[int, float]
    clients: dict[int, int]
    sent: list[tuple[float, int, str]] = field(default_factory=list)
    worked: list[tuple[int, str]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    back: float = 0.0

    def __post_init__(self) -> None:
        self._queue = {node: [] for node in self.seconds}
        self._free = dict.fromkeys(self.seconds, 0.0)
        self._done: list[tuple[float, int, Reply]] = []

    def nodes(self):
        return {node: client for node, client in self.clients.items() if node not in self.gone}

    def send(self, blocks, lifetime):
        questions = {}
        for node, block in blocks.items():
            question = f"q{len(self.sent)}"
            self.sent.append((self.time.at, node, wire.kind_of(block)))
            self._queue[node].append((question, block, self.time.at, self.time.at + lifetime))
            questions[question] = node
        return questions

    def fetch(self, questions):
        self._work()
        replies = []
        while self._done and self._done[0][0] <= self.time.at:
            replies.append(heapq.heappop(self._done)[2])
        return [reply for reply in replies if reply.question in questions]

    def _work(self):
        for node, queue in self._queue.items():
            while queue and node not in self.gone:
                question, block, sent, expires = queue[0]
                begin = max(self._free[node], sent, self.back)
                if begin > self.time.at:
                    break
                queue.pop(0)
                if begin >= expires:
                    continue
                self._free[node] = begin + self.seconds[node]
                self.worked.append((node, wire.kind_of(block)))
                if self._free[node] < expires:
                    reply = replace(self.answer(node, block), question=question)
                    heapq.heappush(self._done, (self._free[node], len(self.worked), reply))


def noted(node, block):
    return Reply(node, wire.dumps(kinds.Noted(client=node, run="run")))


def post(*seconds: float) -> SlowTransport:
    return SlowTransport(
        Time(), noted, dict(enumerate(seconds)), {node: node for node in range(len(seconds))}
    )


def correspondence(carrier: SlowTransport) -> Correspondence:
    return Correspondence(carrier, poll=0.2, clock=carrier.time.clock)


def question(text: str) -> bytes:
    return wire.dumps(kinds.Finished(run=text))


def ask(exchange, text, nodes, patience):
    return [reply.node for reply in exchange.ask(dict.fromkeys(nodes, question(text)), patience)]


def test_replies_come_in_the_order_of_arrival_and_nobody_waits_longer():
    carrier = post(3.0, 1.0, 2.0)
    assert ask(correspondence(carrier), "a", [0, 1, 2], Patience(60.0)) == [1, 2, 0]
    assert carrier.time.at == pytest.approx(3.0, abs=0.3)


def test_a_late_answer_is_welcome_in_the_next_call():
    carrier = post(9.0)
    exchange = correspondence(carrier)
    assert ask(exchange, "a", [0], Patience(8.0, welcome=32.0)) == []
    assert ask(exchange, "a", [0], Patience(8.0, welcome=24.0)) == [0]
    assert len(carrier.sent) == 1, "it was still open and not sent again"


def test_an_open_question_is_sent_again_when_it_may_be_lost():
    carrier = post(100.0)
    exchange = correspondence(carrier)
    for call in range(4):
        ask(exchange, "a", [0], Patience(8.0, welcome=32.0 - 8 * call))
    assert [round(at) for at, _, _ in carrier.sent] == [0, 24]
    ask(exchange, "a", [0], Patience(8.0))
    assert [round(at) for at, _, _ in carrier.sent] == [0, 24, 32, 38], "both have expired: it is asked anew"


def test_what_nobody_waits_for_is_not_worked_on():
    carrier = post(5.0)
    exchange = correspondence(carrier)
    carrier.gone = {0}
    ask(exchange, "a", [0], Patience(3.0))
    carrier.gone, carrier.back = set(), carrier.time.at
    carrier.time.pass_(1.0)
    assert ask(exchange, "b", [0], Patience(20.0)) == [0]
    assert len(carrier.worked) == 1


def test_a_doubtful_node_catches_up_before_it_is_asked_something_else():
    carrier = post(1.0, 10.0)
    exchange = correspondence(carrier)
    rounds = []
    for number in range(12):
        patience = Patience(8.0, doubtful={1: 1.0}, welcome=16.0)
        rounds.append(ask(exchange, f"round {number}", [0, 1], patience))
        carrier.time.pass_(1.0)
    assert all(0 in heard for heard in rounds)
    asked = [round(at) for at, node, _ in carrier.sent if node == 1]
    assert all(later - earlier >= 10 for earlier, later in pairwise(asked))


def test_a_node_that_has_caught_up_is_asked_what_the_others_are_at_once():
    """It is heard in the round that is under way, and not only in the next."""
    carrier = post(4.0, 6.0)
    exchange = correspondence(carrier)
    doubt = Patience(60.0, doubtful={1: 1.0}, welcome=60.0)
    assert ask(exchange, "a", [0, 1], doubt) == [0]
    carrier.seconds[1] = 1.0
    assert ask(exchange, "b", [0, 1], doubt) == [1, 0]
    assert [round(at, 1) for at, node, _ in carrier.sent if node == 1] == [0.0, 6.0]


def test_a_doubtful_node_is_waited_for_only_a_little():
    carrier = post(1.0, 100.0)
    assert ask(correspondence(carrier), "a", [0, 1], Patience(60.0, {1: 2.0})) == [0]
    assert carrier.time.at == pytest.approx(3.0, abs=0.5)


def test_a_doubtful_node_may_be_waited_for_like_the_others_or_not_at_all():
    """Who is not waited for is asked, and heard where it is there; who is, first catches up."""
    for seconds, heard, lasts in ((0.0, [0], 1.0), (60.0, [0, 1], 5.0)):
        carrier = post(1.0, 5.0)
        assert ask(correspondence(carrier), "a", [0, 1], Patience(60.0, {1: seconds})) == heard
        assert carrier.time.at == pytest.approx(lasts, abs=0.5)
    assert ask(correspondence(post(1.0, 0.5)), "a", [0, 1], Patience(60.0, {1: 0.0})) == [1, 0]
    carrier = post(1.0, 5.0)
    exchange = correspondence(carrier)
    assert ask(exchange, "a", [0, 1], Patience(60.0, {1: 0.0})) == [0]
    assert ask(exchange, "b", [0, 1], Patience(60.0, {1: 60.0})) == [0, 1]
    assert carrier.time.at == pytest.approx(10.0, abs=0.8)


def test_how_long_nodes_take_is_noted_late_answers_too():
    carrier = post(1.0, 5.0, 0.1)
    exchange = correspondence(carrier)
    exchange.ask(dict.fromkeys([0, 1, 2], question("a")), Patience(60.0, {1: 0.0}), timed=True)
    first = exchange.times()
    assert (first[0].answered, first[1].answered) == (True, False)
    assert [first[node].seconds for node in (0, 1)] == pytest.approx([1.0, 1.0], abs=0.3)
    carrier.time.pass_(5.0)
    exchange.ask(dict.fromkeys([0, 1, 2], question("b")), Patience(60.0, {1: 0.0}), timed=True)
    second = exchange.times()
    assert second[1].answered
    assert second[1].seconds == pytest.approx(6.0, abs=0.3), "as it was found when somebody looked"
    exchange.ask({0: question("c")}, Patience(60.0))
    assert 0 not in exchange.times(), "what is not timed says nothing"


def test_an_answer_to_something_else_is_not_taken_for_this():
    carrier = post(5.0)
    exchange = correspondence(carrier)
    assert ask(exchange, "a", [0], Patience(3.0, welcome=30.0)) == []
    carrier.answer = lambda node, block: Reply(node, block)
    (reply,) = exchange.ask({0: question("b")}, Patience(30.0))
    assert reply.block == question("b")


def test_a_node_that_cannot_be_reached_is_not_waited_for():
    carrier = post(1.0, 1.0)
    carrier.answer = lambda node, block: Reply(node, error="unavailable") if node else noted(node, block)
    replies = correspondence(carrier).ask(dict.fromkeys([0, 1], question("a")), Patience(60.0))
    assert [(reply.node, reply.error) for reply in replies] == [(0, ""), (1, "unavailable")]
    assert carrier.time.at < 2.0


def test_a_reply_that_the_carrier_brings_twice_counts_once():
    carrier = post(1.0, 3.0)
    exchange, fetch = correspondence(carrier), carrier.fetch
    carrier.fetch = lambda questions: 2 * fetch(questions)
    assert ask(exchange, "a", [0, 1], Patience(60.0)) == [0, 1]


# --- a federation on a slow machine -----------------------------------------------------------------------

TIMING = Timing(round_limit=15.0, join_limit=32.0, poll=0.2)


@pytest.fixture
def slow(tmp_path):
    """Five clients of whom each needs `seconds` for every message, and a run among them."""

    def start(seconds: float):
        parties = make(
            tmp_path / "federation", 5, small_config(5, *PRIVATE), timing=TIMING, budget=1e6, transcript=True
        )
        direct, moment, said = Direct(parties), Time(), []
        clients = direct.nodes()
        carrier = SlowTransport(moment, direct.reply, dict.fromkeys(clients, seconds), clients)
        say = lambda event: said.append(event.text)  # noqa: E731
        return open_run(parties[0], "run", carrier, say, moment.clock), carrier, said

    return start


@pytest.mark.parametrize("seconds", [2.0, 9.0, 14.0, 20.0])
def test_two_dropouts_of_five_on_a_slow_machine(slow, seconds):
    """Messages take a node longer than the round's limit of 15 s, and the run goes on all the same."""
    runner, carrier, said = slow(seconds)
    honest = runner.log.append

    def append(commit):
        honest(commit)
        if commit.rounds == 1:
            carrier.gone = {101, 104}

    runner.log.append = append
    assert runner.go().rounds == 3, said
    records = runner.log.records()
    assert [record["epoch"] for record in records] == [0, 1, 1]
    assert set(records[-1]["weights"]) == {"0", "2", "3"}
    hellos = [node for _, node, kind in carrier.sent if kind == "hello"]
    assert max(map(hellos.count, set(hellos))) <= 4, "at most two in each of two epochs"


def test_a_machine_that_is_too_slow_stops_the_run_and_says_so(slow):
    runner, carrier, _ = slow(40.0)
    with pytest.raises(EpochsStopped, match="0 of 5 clients joined epoch 0"):
        runner.go()
    hellos = [node for _, node, kind in carrier.sent if kind == "hello"]
    assert max(map(hellos.count, set(hellos))) == 2
