"""The statement: page one for who decides, then the questions of NIST SP 800-226, and every figure.

Reference: Near, Darais, Lefkovitz, Howarth, "Guidelines for Evaluating Differential Privacy Guarantees", NIST
SP 800-226, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trilemma.audit.final.found import Attacks
from trilemma.evidence.blocks import Block, Cell, Heading, Image, Link, Rows, Words
from trilemma.evidence.facts import PackFacts, ScoreCurve
from trilemma.evidence.gather import held_by
from trilemma.evidence.vouched import LedgerAccount
from trilemma.privacy import Guarantee, NoGuarantee, read_verdict

CURVE = "utility.png"

AGAINST = {
    "cdp": "people outside the federation who see the model. The server is trusted: it sees every party's "
    "message",
    "secldp": "the server and everybody who sees all messages, as long as no more than {q} parties hand it "
    "their "
    "secrets",
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
NEIGHBOURS = {
    "replace": "two data sets that differ in {what}, replaced by any other",
    "add-remove": "two data sets of which one has one more record",
}
NOT_PROMISED = (
    "That nothing can be learnt about groups of records, or about everybody: a model shows what is common "
    "to many.",
    "That the model is right, fair, or fit for a patient. The score is what was measured, on the records "
    "named.",
    "Anything about time: how long a party took to answer is in no ε. Nor does ε cover a party's own "
    "machine, "
    "its backups, or people who can log in there.",
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


def statement(
    facts: PackFacts, accounts: Mapping[int, LedgerAccount], attacks: Attacks | None
) -> list[Block]:
    """Return the pages."""
    return [
        *_page_one(facts, accounts, attacks),
        *_ledgers(facts, accounts),
        *_questions(facts, accounts),
        *_utility(facts),
        *_robustness(facts),
        *_files(facts),
    ]


def _page_one(
    facts: PackFacts, accounts: Mapping[int, LedgerAccount], attacks: Attacks | None
) -> Iterator[Block]:
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
            "so "
            "the model and this pack are NOT protected. The figures say what a federation with this "
            "configuration would promise.",
            strong=True,
        )
    elif held is None:
        yield Words(f"Nothing is guaranteed: {_reason(facts)}.", strong=True)
    yield Rows(tuple(_short(facts, accounts, attacks)))
    yield Heading("What is not promised")
    for one in NOT_PROMISED:
        yield Words(f"• {one}")


def _reason(facts: PackFacts) -> str:
    found = read_verdict(facts.noise.verdict)
    return found.reason if isinstance(found, NoGuarantee) else ""


def _short(
    facts: PackFacts, accounts: Mapping[int, LedgerAccount], attacks: Attacks | None
) -> Iterator[tuple[str, str]]:
    """Yield the questions a person who decides has, and the answers."""
    trained = f"{facts.dim:,} numbers of a model ({facts.model}) by {facts.algorithm}, on {_data(facts)}"
    yield "What was trained?", trained
    if facts.parties:
        yield "By whom?", ", ".join(_party(facts, place) for place in range(len(facts.parties)))
    spent = worst(facts, accounts)
    held = held_by(facts)
    if held is None or spent is None:
        yield "What is promised?", f"Nothing: {_reason(facts)}."
    else:
        real = facts.kind == "federation"
        yield "Who is protected?" if real else "Who would be protected?", f"{UNITS[held.unit].capitalize()}."
        yield "Against whom?", f"{_against(facts, held).capitalize()}."
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
        "with "
        "how bad a disclosure would be."
    )


def _data(facts: PackFacts) -> str:
    return "the parties' own records" if facts.data == "own" else f"the data set {facts.data}"


def _party(facts: PackFacts, place: int) -> str:
    one = facts.parties[place]
    return f"{one.name} (removed since)" if one.removed else one.name


def _against(facts: PackFacts, held: Guarantee) -> str:
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
        f"what "
        f"that does to the model. Expelled: {gone}. ε does not depend on how many lie, up to that "
        f"number."
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


def _ledgers(facts: PackFacts, accounts: Mapping[int, LedgerAccount]) -> Iterator[Block]:
    if facts.kind != "federation":
        return
    yield Heading("What each party has spent, by its own ledger", page=True)
    yield Words(
        "A ledger counts everything that a party ever released, this run among it, before anything leaves. "
        "Its owner signed each line below. The server does not know these figures."
    )
    rows: list[tuple[Cell, ...]] = []
    for place in range(len(facts.parties)):
        one = accounts.get(place)
        if one is None:
            rows.append((_party(facts, place), "not vouched for", "", "", ""))
            continue
        rows.append(
            (
                Link(_party(facts, place), f"ledgers/client-{place}.json"),
                f"{one.epsilon:.4g} of {one.budget:.4g} at δ = {one.delta:g} ({one.accountant})",
                str(sum(entry.count for entry in one.releases)),
                f"{one.lines} lines, {one.head[:12]}…",
                "; ".join(_ledger_caveats(facts, one)) or "none",
            )
        )
    yield Rows(
        tuple(rows),
        ("party", "ε spent of budget", "releases", "head of the ledger", "caveat"),
        (18, 34, 12, 24, 12),
    )


def _ledger_caveats(facts: PackFacts, account: LedgerAccount) -> Iterator[str]:
    if account.flower:
        yield "not against its server"
    if account.rounds < facts.done:
        yield f"signed with {account.rounds} of {facts.done} rounds in it"


def _questions(facts: PackFacts, accounts: Mapping[int, LedgerAccount]) -> Iterator[Block]:
    yield Heading("The questions of NIST SP 800-226", page=facts.kind != "federation")
    yield Rows(tuple(_answers(facts, accounts)))


def _answers(facts: PackFacts, accounts: Mapping[int, LedgerAccount]) -> Iterator[tuple[str, str]]:
    noise, held, spent = facts.noise, held_by(facts), worst(facts, accounts)
    release: Mapping[str, Any] = noise.release or {}
    if held is None or not release or spent is None:
        yield "Guarantee", f"None: {_reason(facts)}."
        return
    law, sampling = release["law"], release["sampling"]
    what = "one record" if held.unit == "example" else "all records of one party"
    yield "Unit of privacy", f"{held.unit}: {UNITS[held.unit]}"
    yield "Neighbouring data", f"{held.adjacency}: {NEIGHBOURS[held.adjacency].format(what=what)}"
    yield (
        "Privacy loss ε",
        f"{spent[0]:.6g} (page 1), {held.epsilon:.6g} planned for {noise.rounds} rounds",
    )
    yield "Failure probability δ", f"{held.delta:g}"
    yield (
        "Mechanism",
        f"Gaussian noise on contributions of norm at most C = {release['clip']:g}: σ_ind = "
        f"{law['sigma_ind']:.6g} "
        f"of a party's own, σ_cor = {law['sigma_cor']:.6g} shared by pairs so that it cancels in the sum",
    )
    yield "Accountant", f"{held.accountant}; of all that apply, the smallest upper bound counts"
    yield (
        "Sampling",
        f"{sampling['scheme']}, rate {sampling['rate']:.4g}, batch {release['batch']}"
        if sampling["scheme"] != "none"
        else "none: every round counts in full",
    )
    beside = sum(one.count for one in noise.beside)
    yield (
        "Composition",
        f"{noise.rounds} rounds{f' and {beside} evaluations' if beside else ''} together; a ledger adds "
        f"every "
        "other run of its party",
    )
    yield "Threat model", f"{held.threat}: {_against(facts, held)}"
    for one in held.assumptions:
        yield "It rests on", one
    drawn = release["drawing"]
    yield (
        "Floating point",
        "contribution and noise are whole numbers on a public grid; that drawn noise is not quite Gaussian "
        "is "
        f"paid for in ε (spread {drawn['spread']:.2g})"
        if facts.kind == "federation"
        else "a simulation adds noise to floating-point numbers; a federation adds whole numbers on a grid",
    )
    made = ", ".join(f"{name} {version}" for name, version in sorted(facts.made_with.items()))
    yield (
        "Implementation",
        f"{made}; randomness: "
        f"{'operating system and ChaCha20' if facts.kind == 'federation' else 'from the seed'}",
    )
    yield (
        "Data collection",
        "outside: how records came to a party, and who there can read them, is the party's",
    )


def _utility(facts: PackFacts) -> Iterator[Block]:
    yield Heading("What privacy cost in usefulness")
    if facts.curves:
        yield Image(CURVE, "Score over rounds. " + _labels(facts))
        rows = tuple(
            (one.name, f"{one.points[-1][1]:.4f}", str(one.points[-1][0]), one.of, one.cover)
            for one in facts.curves
        )
        yield Rows(rows, ("score", "last", "round", "on", "paid for by ε"), (18, 12, 10, 40, 20))
        yield Words("Scores are the server's word. Nobody else can compute them again from this folder.")
    law = (facts.noise.release or {}).get("law")
    if law and not facts.robust.weights:
        per = math.sqrt(law["sigma_ind"] ** 2 / facts.clients)
        yield Words(
            f"Planned: the noise that stays in the mean of all {facts.clients} parties has standard "
            f"deviation "
            f"{per:.4g} in each of {facts.dim:,} numbers, {per * math.sqrt(facts.dim):.4g} in all, against "
            f"contributions of at most {facts.noise.release['clip']:g}."  # type: ignore[index]
        )


def _labels(facts: PackFacts) -> str:
    loose = sorted({one.of for one in facts.curves if one.cover == "not covered"})
    return f"No ε covers scores on {', '.join(loose)}: they tell something about those." if loose else ""


def _robustness(facts: PackFacts) -> Iterator[Block]:
    robust = facts.robust
    yield Heading("What lying parties can do")
    rows = [
        ("Rule", robust.rule),
        ("Liars reckoned with", f"f = {robust.tolerated} of n = {facts.clients}"),
        (
            "κ of the rule",
            "none is proven"
            if robust.kappa is None
            else f"{robust.kappa:.4g}: its result is off the "
            "honest mean by at most κ times the honest messages' spread, squared",
        ),
    ]
    if robust.weights:
        heavy = sum(sorted(robust.weights)[-robust.tolerated :]) if robust.tolerated else 0.0
        rows.append(
            (
                "Public weights",
                f"{min(robust.weights):.3g} to {max(robust.weights):.3g}; the f heaviest weigh "
                f"{heavy:.3g}. All parties agreed on them, and no party reports its own",
            )
        )
    if robust.hidden is not None:
        found = robust.hidden
        rows += [
            (
                "What they can hide",
                f"if they shift alike, {found['mean']:.3g} in the mean of all messages; {found['most']:.3g} "
                f"whatever they send. An honest contribution is at most {found['clip']:g} long. The rule "
                "lets less than that through",
            )
        ]
    rows += [("Expelled", f"party {one.client}: {one.why}") for one in robust.expelled]
    if not robust.expelled:
        central = (facts.noise.threat or {}).get("name") == "cdp"
        rows.append(("Expelled", "not told: under cdp no ε covers it" if central else "nobody"))
    yield Rows(tuple(rows))


def _files(facts: PackFacts) -> Iterator[Block]:
    yield Heading("What lies in this folder, and how to check it")
    rows: list[tuple[str, str]] = [
        ("Model", facts.model_digest or "not finished"),
        ("Transcript", facts.transcript or facts.transcript_why),
        *((f"Log {one.name}", f"{one.sha256} (first {one.bytes:,} bytes)") for one in facts.logs),
        *(("Caveat", one) for one in facts.caveats),
        *(("Not in this pack", one) for one in facts.left_out),
        ("Check", "trilemma evidence verify FOLDER, with --authority ca.crt of the federation you know"),
    ]
    yield Rows(tuple(rows))
