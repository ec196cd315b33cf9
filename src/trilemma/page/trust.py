"""Whom the rule trusted: every client's share in the aggregate, round by round, and what was turned away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.page.answers import Incident, Trusted, TrustMap, finite
from trilemma.page.index import shown
from trilemma.report.run_metadata import RunMetadata
from trilemma.report.trust import expulsions, places, shares, trusted, verdict

COLUMNS = 240
"""Columns of the map at most; more rounds share one."""

LARGEST = 50_000_000
"""Clients times rounds that are looked at."""

INCIDENTS = 1500
"""Absences, rejections and expulsions that are told one by one, the newest."""


def trust_map(found: RunMetadata, seeds: Mapping[int, Sequence[Record]], seed: int | None) -> TrustMap:
    """Return the map of one seed, or the mean over seeds; the first one's where other clients lie in each."""
    summary, federation = found.summary, found.config["federation"]
    last_lie = federation.get("placement", "last") == "last"
    remark = ""
    if seed is None and not last_lie and len(seeds) > 1:
        seed = next(iter(seeds))
        remark = f"other clients lie in every seed: this is seed {seed}"
    chosen = dict(seeds) if seed is None else {seed: seeds[seed]}
    count = summary.clients
    liars = range(count - (summary.byzantine or 0), count) if last_lie else range(0)
    records = [record for one in chosen.values() for record in one]
    if places(count, records) * max((record.round for record in records), default=0) > LARGEST:
        raise UserError(f"{count} clients in so many rounds are too many for a map")
    table = shares(count, chosen)
    edges = _edges(table.shape[1])
    people = trusted(count, records)
    return TrustMap(
        columns=[(int(first) + 1, int(after)) for first, after in edges],
        shares=[[_mean(row[first:after]) for first, after in edges] for row in table],
        incidents=_incidents(records),
        clients=[
            Trusted(
                client=one.client,
                weight=one.weight,
                heard=one.heard,
                absent=one.absent,
                unreached=one.unreached,
                rejected=one.rejected,
                late=one.late,
                expelled=shown(one.expelled),
                lies=one.client in liars,
            )
            for one in people
        ],
        equal=1 / count,
        verdict=shown(
            verdict(
                *(summary.rule, count, records, federation.get("tolerate", federation["byzantine"])),
                federation.get("weights", ()),
            )
        ),
        seed=seed,
        remark=remark,
    )


def _edges(rounds: int) -> list[tuple[int, int]]:
    """Return the rounds of every column, (first, after the last): as many for each, `COLUMNS` at most."""
    width = max(1, -(-rounds // COLUMNS))
    return [(first, min(first + width, rounds)) for first in range(0, rounds, width)]


def _mean(part: np.ndarray) -> float | None:
    """Return the mean share over the rounds in which a client was heard; None where it never was."""
    heard = part[np.isfinite(part)]
    return finite(round(float(heard.mean()), 5)) if heard.size else None


def _incidents(records: Sequence[Record]) -> list[Incident]:
    """Return who was absent, not reached, turned away or expelled, with the reason, the newest of them."""
    found = [
        Incident(client=client, round=record.round, kind="absent")
        for record in records
        for client in record.absent
    ] + [
        Incident(client=client, round=record.round, kind="rejected", reason=shown(str(reason)))
        for record in records
        for client, reason in record.rejected
    ]
    found += [
        Incident(client=client, round=record.round, kind="unreached", reason=shown(str(reason)))
        for record in records
        for client, reason in record.unreached
    ]
    found += [
        Incident(client=client, round=record.round, kind="expelled", reason=shown(reason))
        for record in records
        for client, reason in expulsions(record)
    ]
    return sorted(found, key=lambda one: one.round)[-INCIDENTS:]
