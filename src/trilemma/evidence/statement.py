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
from trilemma.evidence.facts import PackFacts
from trilemma.evidence.gather import held_by
from trilemma.evidence.page_one import UNITS, against, page_one, party_words, reason, worst
from trilemma.evidence.vouched import LedgerAccount

CURVE = "utility.png"

NEIGHBOURS = {
    "replace": "two data sets that differ in {what}, replaced by any other",
    "add-remove": "two data sets of which one has one more record",
}


def statement(
    facts: PackFacts, accounts: Mapping[int, LedgerAccount], attacks: Attacks | None
) -> list[Block]:
    """Return the pages."""
    return [
        *page_one(facts, accounts, attacks),
        *_ledgers(facts, accounts),
        *_questions(facts, accounts),
        *_utility(facts),
        *_robustness(facts),
        *_files(facts),
    ]


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
            rows.append((party_words(facts, place), "not vouched for", "", "", ""))
            continue
        rows.append(
            (
                Link(party_words(facts, place), f"ledgers/client-{place}.json"),
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
        yield "Guarantee", f"None: {reason(facts)}."
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
        "every other run of its party",
    )
    yield "Threat model", f"{held.threat}: {against(facts, held)}"
    for one in held.assumptions:
        yield "It rests on", one
    drawn = release["drawing"]
    yield (
        "Floating point",
        "contribution and noise are whole numbers on a public grid; that drawn noise is not quite Gaussian "
        f"is paid for in ε (spread {drawn['spread']:.2g})"
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
            f"deviation {per:.4g} in each of {facts.dim:,} numbers, {per * math.sqrt(facts.dim):.4g} in all, "
            "against "
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
