"""Page one of the statement: the questions of a person who decides, answered in plain sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from trilemma.audit.final.found import Attacks
from trilemma.evidence.blocks import Block, Heading, Rows, Words
from trilemma.evidence.facts import PackFacts, ScoreCurve
from trilemma.evidence.gather import held_by
from trilemma.evidence.vouched import LedgerAccount
from trilemma.privacy import Guarantee, NoGuarantee, read_verdict

AGAINST = {
    "cdp": "people outside the federation who see the model. The server is trusted: it sees every party's "
    "message",
    "secldp": "the server and everybody who sees all messages, as long as no more than {q} parties hand it "
    "their secrets",
    "byzldp": "the server and everybody who sees all messages, even if {q} parties hand it their secrets",
    "ldp": "everybody: the server, all other parties together, and the public",
}


UNITS = {
    "example": "each single record of a party (for instance one patient's row)",
    "user": "everything that one party holds, all its records at once",
}


GUESS = {
    "example": "whether one particular record was used",
    "user": "which of two sets of records a party holds",
}


NOT_PROMISED = (
    "That nothing can be learnt about groups of records, or about everybody: a model shows what is common "
    "to many.",
    "That the model is right, fair, or fit for a patient. The score is what was measured, on the records "
    "named.",
    "Anything about time: how long a party took to answer is in no ε. Nor does ε cover a party's own "
    "machine, its backups, or people who can log in there.",
    "Anything about models that a party trained on at home, on its own records without noise.",
    "That an owner told the truth about its ledger. It signed it; only its own machine knows it.",
)


def guess(epsilon: float, delta: float) -> float:
    """Return in what share of cases the best adversary can guess between two equally likely data sets.

    >>> round(guess(0.0, 0.0), 2), round(guess(1.0, 1e-5), 3), guess(1e9, 1e-5)
    (0.5, 0.731, 1.0)
    """
    if epsilon > 500:
        return 1.0
    return min(1.0, (math.exp(epsilon) + delta) / (math.exp(epsilon) + 1))


def share(value: float) -> str:
    """Return a share as a percentage that never rounds to certainty.

    >>> share(0.99966), share(0.73), share(1.0)
    ('99.966 %', '73 %', '100 %')
    """
    digits = 0 if value < 0.99 or value == 1 else min(6, math.ceil(-math.log10(1 - value)) - 1)
    return f"{100 * value:.{digits}f} %"


def worst(facts: PackFacts, accounts: Mapping[int, LedgerAccount]) -> tuple[float, float, str] | None:
    """Return ε, δ and accountant of the party that spent most; the plan counts for whom no ledger speaks."""
    held = held_by(facts)
    if held is None:
        return None
    spent = [(one.epsilon, one.delta, one.accountant) for one in accounts.values()]
    if not spent or unspoken(facts, accounts):
        spent.append((held.epsilon, held.delta, held.accountant))
    return max(spent)


def unspoken(facts: PackFacts, accounts: Mapping[int, LedgerAccount]) -> list[int]:
    """Return the parties whose ledger is not here, or lacks rounds of this run.

    A statement that was signed in the middle of a run says less than was spent. So does one of a party that
    was absent: nobody but the party knows which it is.
    """
    return [
        place
        for place, party in enumerate(facts.parties)
        if not party.removed and (place not in accounts or accounts[place].rounds < facts.done)
    ]


def page_one(
    facts: PackFacts, accounts: Mapping[int, LedgerAccount], attacks: Attacks | None
) -> Iterator[Block]:
    """Yield page one."""
    held = held_by(facts)
    yield Heading(f"What is promised about the records behind this model: {facts.name}", 1)
    who = "parties trained" if facts.kind == "federation" else "simulated parties trained"
    yield Words(
        f"{facts.clients} {who} one model together in {facts.done} rounds. Each kept its records and sent "
        "messages to a server. This page says what those records are promised, and what they are not. "
        "“trilemma evidence verify” checks the signatures, computes ε again, and compares every page with "
        "the facts."
    )
    if facts.kind == "simulation":
        yield Words(
            "This is a rehearsal, not a deployment. Its noise can be computed again from the configuration, "
            "so the model and this pack are NOT protected. The figures say what a federation with this "
            "configuration would promise.",
            strong=True,
        )
    elif held is None:
        yield Words(f"Nothing is guaranteed: {reason(facts)}.", strong=True)
    yield Rows(tuple(_short(facts, accounts, attacks)))
    yield Heading("What is not promised")
    for one in NOT_PROMISED:
        yield Words(f"• {one}")


def reason(facts: PackFacts) -> str:
    """Say why nothing is guaranteed."""
    found = read_verdict(facts.noise.verdict)
    return found.reason if isinstance(found, NoGuarantee) else ""


def _short(
    facts: PackFacts, accounts: Mapping[int, LedgerAccount], attacks: Attacks | None
) -> Iterator[tuple[str, str]]:
    """Yield the questions a person who decides has, and the answers."""
    trained = f"{facts.dim:,} numbers of a model ({facts.model}) by {facts.algorithm}, on {_data(facts)}"
    yield "What was trained?", trained
    if facts.parties:
        yield "By whom?", ", ".join(party_words(facts, place) for place in range(len(facts.parties)))
    spent = worst(facts, accounts)
    held = held_by(facts)
    if held is None or spent is None:
        yield "What is promised?", f"Nothing: {reason(facts)}."
    else:
        real = facts.kind == "federation"
        yield "Who is protected?" if real else "Who would be protected?", f"{UNITS[held.unit].capitalize()}."
        yield "Against whom?", f"{against(facts, held).capitalize()}."
        epsilon, delta, by = spent
        known = f"the largest of {len(accounts)} ledgers" if accounts else "by plan; no owner vouched"
        if accounts and (open_ := len(unspoken(facts, accounts))):
            known += f", and of the plan for {open_} without a ledger of all rounds"
        yield (
            "How strongly?" if real else "How strongly would it hold?",
            f"ε = {epsilon:.3g} at δ = {delta:g} ({known}; counted by “{by}”). In words: somebody who has to "
            f"guess {GUESS[held.unit]}, and begins at 50 %, is right in at most "
            f"{share(guess(epsilon, delta))} of cases, whatever else is known.{_weak(epsilon)}",
        )
    yield "What did attacks find?", _attacked(attacks, facts)
    yield "What if parties lie?", _lies(facts)
    yield "How good is it?", _score(facts)
    yield (
        "Where do records lie?",
        "At each party, before and after. This pack has no record and no party's size.",
    )
    yield (
        "What is left to you?",
        "Whether this limit is enough for these records, and whether the model is needed. No figure says so.",
    )


def _weak(epsilon: float) -> str:
    if epsilon <= 5:
        return ""
    return (
        " At this ε the worst case alone rules out little. Weigh it together with what attacks found, and "
        "with how bad a disclosure would be."
    )


def _data(facts: PackFacts) -> str:
    return "the parties' own records" if facts.data == "own" else f"the data set {facts.data}"


def party_words(facts: PackFacts, place: int) -> str:
    """Name a party."""
    one = facts.parties[place]
    return f"{one.name} (removed since)" if one.removed else one.name


def against(facts: PackFacts, held: Guarantee) -> str:
    """Say against whom a guarantee holds."""
    q = 0 if facts.noise.threat is None else facts.noise.threat.get("collusion", 0)
    return AGAINST.get(held.threat, held.threat).format(q=q)


def _attacked(attacks: Attacks | None, facts: PackFacts) -> str:
    if attacks is not None and attacks.tried:
        refuted = [one for one in attacks.tried if one.exceeds]
        said = " ".join(
            f"{one.attack[0].upper()}{one.attack[1:]}: {one.measure} {one.found:.3g}; the promise allows "
            f"{one.allowed:.3g}."
            for one in attacks.tried
            if one.allowed is not None
        )
        return f"{'AN ATTACK EXCEEDED THE PROMISE. ' if refuted else ''}{said} More in attacks.html."
    if facts.kind == "federation":
        return (
            "Nothing was measured on the parties' records: no count of such an attack is paid for here. An "
            "owner can attack the model with its own records (“trilemma attack”) and keeps what that finds."
        )
    return "Nothing was tried (“trilemma attack”)."


def _lies(facts: PackFacts) -> str:
    robust = facts.robust
    if robust.tolerated == 0:
        return "No lying party is reckoned with: a single one can spoil the model. ε holds all the same."
    gone = ", ".join(f"party {one.client}" for one in robust.expelled) or "nobody"
    return (
        f"Up to {robust.tolerated} of {facts.clients} may send anything. The rule “{robust.rule}” limits "
        f"what that does to the model. Expelled: {gone}. ε does not depend on how many lie, up to that "
        "number."
    )


def _score(facts: PackFacts) -> str:
    if not facts.curves:
        return "No score is in this pack."
    one = _first(facts)
    label = "" if one.cover == "paid" else "; no ε covers this figure"
    return f"{one.name} {one.points[-1][1]:.3f} after round {one.points[-1][0]} (on {one.of}{label})."


def _first(facts: PackFacts) -> ScoreCurve:
    """Return the score that counts: not the loss, where there is another."""
    return next((one for one in facts.curves if one.name != "loss"), facts.curves[0])
