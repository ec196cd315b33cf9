"""What happens in a federation, as one catalogue: every event has a code, a level and the fields it may have.

The parties' processes say what happens with these events and no others. Each is a sentence in the party's log
and a line of JSON in its own `run/events.jsonl`. An event that is not in the catalogue, a field that its
entry does not name, and a value of another sort are refused where they are made: what may be written down is
decided here, once, and by nobody who is in a hurry.

Rounds are counted from 1, as in records, and not from 0 as in the blocks between parties.

So nothing private can slip in. There is no field for a loss, an example, or the text of an exception; of what
another party wrote only the sentences of `reasons` are kept; ε is in a client's own log and nobody else's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from trilemma.federation.protocol.reasons import LONGEST, shortened

Level = Literal["info", "warning", "error"]


_WORD = re.compile(r"[][A-Za-z0-9_./~:+%-]{1,262}")  # the longest name of a host, and a port
_QUOTED = re.compile(r"\b(unknown|unreached): .*", re.DOTALL)


class Sort(Enum):
    """What a field may hold."""

    NUMBER = "a finite number"
    CLIENT = "a client's number, or None where nobody knows whose it was"
    CLIENTS = "numbers of clients"
    WORD = "one word of letters, digits and . _ / ~ : + % - [ ]"
    SENTENCE = f"at most {LONGEST} printable characters, nothing of them quoted from somebody else"
    FIGURES = "finite numbers by name"

    def holds(self, value: Any) -> bool:
        """Tell whether a value is of this sort.

        >>> Sort.NUMBER.holds(math.nan), Sort.WORD.holds("two words"), Sort.FIGURES.holds({"commit": 0.1})
        (False, False, True)
        """
        match self:
            case Sort.NUMBER:
                return isinstance(value, int | float) and math.isfinite(value)
            case Sort.CLIENT:
                return value is None or type(value) is int
            case Sort.CLIENTS:
                return isinstance(value, list) and all(type(one) is int for one in value)
            case Sort.WORD:
                return isinstance(value, str) and _WORD.fullmatch(value) is not None
            case Sort.SENTENCE:
                return isinstance(value, str) and value == without_quotes(value)
            case Sort.FIGURES:
                return isinstance(value, Mapping) and all(
                    Sort.WORD.holds(name) and Sort.NUMBER.holds(one) for name, one in value.items()
                )


def without_quotes(reason: str) -> str:
    """Return a reason without what another party's program wrote into it.

    >>> without_quotes("no message but an error: unknown: patient 4711 has no label")
    'no message but an error: unknown'
    """
    return shortened(_QUOTED.sub(r"\1", reason))


def figures(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """Return numbers by name as an event takes them: the finite ones, under names of one word.

    >>> figures({"commit": 0.5, "my score": 1.0, "loss": math.nan, "auc": None})
    {'commit': 0.5, 'my_score': 1.0}
    """
    finite = {name: one for name, one in numbers.items() if one is not None and math.isfinite(one)}
    return {re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:80] or "_": one for name, one in finite.items()}


class UnknownEvent(ValueError):
    """An event, a field or a value that the catalogue does not have: a defect of whoever made it."""


@dataclass(frozen=True)
class Kind:
    """An entry of the catalogue: how it is said on a console, what it means, which fields it has."""

    code: str
    level: Level
    said: str
    meaning: str
    fields: Mapping[str, Sort]

    def __call__(self, **facts: Any) -> Event:
        """Return an event of this kind."""
        return Event(self.code, facts)


CATALOGUE: dict[str, Kind] = {}
"""Every kind of event by its code; docs/federation.md shows it."""


_SORTS = {
    name: sort
    for sort, names in {
        Sort.NUMBER: "serial round epoch of usual bytes rounds",
        Sort.CLIENT: "client",
        Sort.CLIENTS: "clients heard absent unreached rejected late expelled",
        Sort.WORD: "file run asked party version address error",
        Sort.SENTENCE: "reason test what",
        Sort.FIGURES: "seconds scores figures epsilon",
    }.items()
    for name in names.split()
}
"""What a field holds by its name, where its event does not say otherwise (`clients=number`)."""


def _kind(code: str, level: Level, fields: str, said: str, meaning: str) -> Kind:
    """Enter a kind; its fields are names, with `=sort` where that is not the usual one."""
    named = (one.partition("=") for one in fields.split())
    sorts = {name: Sort[sort.upper()] if sort else _SORTS[name] for name, _, sort in named}
    CATALOGUE[code] = Kind(code, level, said, meaning, sorts)
    return CATALOGUE[code]


@dataclass(frozen=True)
class Event:
    """Something that happened. Only what the catalogue has can be made.

    >>> ROUND_REPEATED(round=3).text
    'round 3: asked again'
    >>> ROUND_REPEATED(round=3, loss=0.7)
    Traceback (most recent call last):
    trilemma.federation.protocol.events.UnknownEvent: 'round-repeated' has round, and not loss, round
    >>> Event("patient-found", {})
    Traceback (most recent call last):
    trilemma.federation.protocol.events.UnknownEvent: there is no event 'patient-found'
    """

    code: str
    facts: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.code not in CATALOGUE:
            raise UnknownEvent(f"there is no event {self.code!r}")
        fields = self.kind.fields
        if set(self.facts) != set(fields):
            has, given = ", ".join(sorted(fields)) or "no fields", ", ".join(sorted(self.facts)) or "none"
            raise UnknownEvent(f"{self.code!r} has {has}, and not {given}")
        for name, value in self.facts.items():
            if not fields[name].holds(value):
                raise UnknownEvent(f"{name} of {self.code!r} is {fields[name].value}")

    @property
    def kind(self) -> Kind:
        """Its entry in the catalogue."""
        return CATALOGUE[self.code]

    @property
    def text(self) -> str:
        """One readable line about it."""
        return self.kind.said.format_map({name: _read(name, value) for name, value in self.facts.items()})


Say = Callable[[Event], None]
"""Whoever wants to know what happens."""


def silent(event: Event) -> None:
    """Tell nobody."""


def to_all(*listeners: Say) -> Say:
    """Return one who passes everything on to all of these."""

    def say(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return say


def _read(name: str, value: Any) -> str:
    if name == "client":
        return "an unknown node" if value is None else f"client {value}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_short(one)}" for key, one in value.items())
    return _short(value)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return listed(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def listed(numbers: Sequence[int]) -> str:
    """Return numbers as people write them.

    >>> listed([0, 1, 2, 3, 5]), listed([4]), listed([])
    ('0 to 3, 5', '4', 'none')
    """
    runs: list[list[int]] = []
    for one in sorted(numbers):
        if runs and one == runs[-1][-1] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    said = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(said) or "none"


# A table: name, level, fields, how it is said, what it means.
# fmt: off
# the server
ROSTER_ADOPTED = _kind("roster-adopted", "info", "serial clients", "roster {serial}: clients {clients}",
    "a new roster of the authority's is in force; the next epoch is among those on it")
COMMIT_BROKEN = _kind("commit-broken", "warning", "file round",
    "{file} is broken and was put aside; the run goes back to round {round}",
    "a disk broke the newest commit; the one before it counts")
EPOCH_CALLED = _kind("epoch-called", "info", "epoch", "epoch {epoch}: calling",
    "the server calls everybody to an epoch")
CLIENT_REFUSED = _kind("client-refused", "warning", "epoch client reason", "rejected {client}: {reason}",
    "a client did not join an epoch, or did not sign or confirm its members, and why")
EPOCH_UNSIGNED = _kind("epoch-unsigned", "warning", "epoch clients",
    "epoch {epoch}: without clients {clients}, who did not sign",
    "another epoch begins, without those who joined the last and did not sign it")
EPOCH_OPENED = _kind("epoch-opened", "info", "epoch clients of", "epoch {epoch}: clients {clients} of {of}",
    "the members of an epoch have agreed on its keys")
REPLY_REJECTED = _kind("reply-rejected", "warning", "round client reason", "rejected {client}: {reason}",
    "a client's answer in a round was turned away, and why")
CLIENT_UNREACHED = _kind("client-unreached", "warning", "round client reason",
    "{client} not reached: {reason}",
    "a question to a client, or its answer, did not get through; nobody said anything")
SLOW = _kind("slow", "warning", "round client seconds=number usual",
    "round {round}: {client} takes {seconds} s where {usual} s are usual, and is not waited for any more",
    "a client was slow in as many rounds as is agreed on; it is asked, and its answer counts if it is there")
SLOW_NO_MORE = _kind("slow-no-more", "info", "round client",
    "round {round}: {client} has been prompt for long enough, and is waited for again",
    "a client that was slow is waited for as the others are")
ROUND_REPEATED = _kind("round-repeated", "warning", "round", "round {round}: asked again",
    "too few clients answered; those who did not are asked again")
ROUND_FAILED = _kind("round-failed", "warning", "round", "round {round}: too few answers, new epoch",
    "too few clients answered, however often they were asked")
ROUND_COMMITTED = _kind("round-committed", "info",
    "round epoch heard absent unreached rejected late expelled bytes seconds scores",
    "round {round} committed",
    "a round is over and on disk: who was heard; who was silent, not reached, turned away, not waited for")
CLIENT_EXPELLED = _kind("client-expelled", "warning", "round client test figures",
    "round {round}: {client} expelled for good, {test}: {figures}",
    "a client's messages cannot be honest: the test, what it gave and what an honest client does not exceed")
RUN_FINISHED = _kind("run-finished", "info", "run rounds", "run {run!r} finished after {rounds} rounds",
    "all rounds of a run are committed, and its result was handed out")

# a client
EPOCH_JOINED = _kind("epoch-joined", "info", "run epoch", "run {run}: epoch {epoch} joined",
    "this client offered a key for an epoch")
EPOCH_CONFIRMED = _kind("epoch-confirmed", "info", "run epoch", "run {run}: epoch {epoch} confirmed",
    "every member of the epoch signed the list of members that this client has")
ROUND_ANSWERED = _kind("round-answered", "info", "run epoch round seconds bytes epsilon",
    "run {run}: round {round} answered",
    "this client paid for a round, computed and answered: seconds by stage, bytes, ε so far by accountant")
SCORE_TOLD = _kind("score-told", "info", "run epoch round epsilon",
    "run {run}: the model of round {round} evaluated on this client's own examples",
    "this client paid for an evaluation and told its share of right answers, with its noise: ε so far")
ANSWER_REPEATED = _kind("answer-repeated", "info", "run epoch round",
    "run {run}: round {round} answered once more, with the same bytes",
    "the server asked a second time and got what it had got before, at no cost")
REFUSED = _kind("refused", "warning", "asked reason=word", "{asked} refused: {reason}; node.log says more",
    "this client refused a block of the server's, for a reason of the catalogue of reasons")
EXPULSION_ANNOUNCED = _kind("expulsion-announced", "warning", "run epoch client round test figures",
    "run {run}: {client} is expelled since round {round}, says the server, {test}: {figures}",
    "the server called this client to an epoch without somebody it expelled, and said why")
EXPELLED = _kind("expelled", "warning", "run reason=word round test figures",
    "run {run}: this client was expelled in round {round}, says the server, {test}: {figures}",
    "this client takes no further part in a run: its messages could not be honest, says the server")
RESULT_RECEIVED = _kind("result-received", "info", "run", "run {run}: the result is here",
    "the run is over, and its model is in this client's folder")

# any process
PARTY_STARTED = _kind("party-started", "info", "party version", "{party} begins, trilemma {version}",
    "a party's process is there")
LISTENS = _kind("listens", "info", "address clients=number", "listening at {address} for {clients} clients",
    "the server's door is open to clients")
LINE = _kind("line", "info", "what", "{what}",
    "a client's line to the server is there, or broke, and why")
RUN_FAILED = _kind("run-failed", "error", "error", "the run failed: {error}; process.log says more",
    "a run ended with an exception, of which only the kind is told")
# fmt: on
