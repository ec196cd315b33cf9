"""A run at a glance: what its folder says, without running anything that lies there.

`load` returns a full `Result`, and runs the plugins that a configuration names. Looking at a folder, which
may be a stranger's, should run no code from it: here a configuration is plain values, and a summary is the
one that was written, or is made from the newest records.
"""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trilemma.base.files import readable
from trilemma.base.records import OWN_SCORE, Record, Spread, Summary
from trilemma.base.typed import Count, typed
from trilemma.federation.protocol.records import written_records

BESIDE = ("loss", "variance", "worst_tenth", f"{OWN_SCORE}_low", f"{OWN_SCORE}_high")
"""Scores in a record that are no metric of their own: the loss, how the first metric is spread over clients,
and between which bounds liars could have moved the clients' own score."""

SUMMARY = "summary.json"
"""Where a finished run is summed up."""

BASELINE = "baseline"
"""Where, below a run's directory, the same run with nobody lying is kept."""

State = Literal["finished", "diverged", "under way", "quiet", "failed"]
"""Where a run stands. Quiet: not finished, and nothing was written for longer than a round takes. Failed: it
ended with an error, which a federation's server wrote down."""

PATIENCE = 60.0
"""Seconds without a record after which a run counts as quiet, unless its rounds take longer."""


@dataclass(frozen=True)
class RunMetadata:
    """A run as its folder tells it: configuration as plain values, summary, where it stands.

    `done` has the rounds each seed has finished, `newest` the newest record of them all, `changed` when
    something was written last, in seconds since 1970. `deployed` tells a federation's run from a simulated.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Summary
    state: State
    done: Mapping[int, int]
    newest: Record | None
    changed: float
    deployed: bool = False


def run_metadata(folder: Path) -> RunMetadata:
    """Look at a simulated run's directory."""
    with readable(folder):
        from trilemma.simulate.directory import SeedDirectory  # only here: it takes torch

        config = plain_config(folder / "config.toml")
        parts = {seed: SeedDirectory(folder / f"seed-{seed}") for seed in config["run"]["seeds"]}
        newest = {seed: part.newest() for seed, part in parts.items()}
        summary = written_summary(folder)
        finished = summary is not None
        if summary is None:
            scored = {seed: part.newest(lambda record: bool(record.metrics)) for seed, part in parts.items()}
            both = {seed: [one for one in (scored[seed], newest[seed]) if one] for seed in parts}
            summary = so_far(config, both, folder)
        paths = [folder / "config.toml", folder / SUMMARY, *(part.metrics_path for part in parts.values())]
        return _stand(folder, config, summary, finished, newest, paths)


def deployed_metadata(server: Path, run: Path) -> RunMetadata:
    """Look at a run in the folder of a federation's server."""
    # Only here: a party's folder takes keys and certificates.
    from trilemma.federation.party.layout import RUNNING
    from trilemma.federation.processes.logs import events_file, read_events
    from trilemma.federation.protocol.events import RUN_FAILED

    with readable(run):
        # Only here: who looks at simulated runs needs no keys.
        from trilemma.federation.party.layout import RUNNING
        from trilemma.federation.processes.logs import events_file, read_events
        from trilemma.federation.protocol.events import RUN_FAILED

        config = plain_config(server / "config.toml")
        seeds = deployed_records(config, run)
        summary = so_far(config, seeds, run, deployed=True)
        newest = {seed: records[-1] if records else None for seed, records in seeds.items()}
        paths = [run / "rounds.jsonl", run / "result", server / "config.toml"]
        found = _stand(run, config, summary, (run / "result").is_file(), newest, paths, deployed=True)
        told = [
            one["event"] for one in read_events(events_file(server / RUNNING)) if one.get("run") == run.name
        ]
        failed = found.state in ("under way", "quiet") and told[-1:] == [RUN_FAILED.code]
        return replace(found, state="failed") if failed else found


def _stand(
    folder: Path,
    config: Mapping[str, Any],
    summary: Summary,
    finished: bool,
    newest: Mapping[int, Record | None],
    paths: Sequence[Path],
    deployed: bool = False,
) -> RunMetadata:
    """Return the metadata of a run; where it stands is told by when something was written in `paths` last."""
    changed = max(path.stat().st_mtime for path in paths if path.exists())
    latest = max((one for one in newest.values() if one), key=lambda one: one.round, default=None)
    patience = PATIENCE if latest is None else max(PATIENCE, 5 * math.fsum(latest.seconds.values()))
    state: State = "under way" if time.time() - changed < patience else "quiet"
    if finished:
        state = "diverged" if summary.failed else "finished"
    done = {seed: one.round if one else 0 for seed, one in newest.items()}
    return RunMetadata(folder, config, summary, state, done, latest, changed, deployed)


def written_summary(folder: Path) -> Summary | None:
    """Return the summary that a finished run wrote; None where there is none."""
    path = folder / SUMMARY
    if not path.exists():
        return None
    with readable(path, "the summary of a run"):
        from trilemma.report.privacy import verdict_of

        summary = Summary.read(json.loads(path.read_text("utf-8")))
        verdict_of(summary)  # whoever shows it counts on a verdict that can be read
        return summary


def simulated_records(config: Mapping[str, Any], folder: Path) -> dict[int, list[Record]]:
    """Return every record of a simulated run by seed."""
    with readable(folder):
        from trilemma.simulate.directory import SeedDirectory

        run = config["run"]
        seeds = {seed: SeedDirectory(folder / f"seed-{seed}").records() for seed in run["seeds"]}
        return {seed: _of_rounds(records, run["rounds"]) for seed, records in seeds.items()}


def deployed_records(config: Mapping[str, Any], run: Path) -> dict[int, list[Record]]:
    """Return every record of a federation's run, under the seed of its configuration."""
    with readable(run):
        table = config["run"]
        records = [Record.read(record) for record in written_records(run)]
        return {table["seeds"][0]: _of_rounds(records, table["rounds"])}


def _of_rounds(records: list[Record], rounds: int) -> list[Record]:
    """Return the records; refuse a round beyond the run's last, as tables and pictures would grow with it."""
    last = max((record.round for record in records), default=0)
    if last > rounds:
        raise ValueError(f"a record is of round {last}, and there are {rounds}")
    return records


@dataclass(frozen=True)
class _Sizes:
    """What a resolved configuration must say for a reader; more than anybody configures is a mistake."""

    clients: Annotated[Count, Field(ge=1, le=10_000_000)]
    rounds: Annotated[Count, Field(ge=1, le=100_000_000)]
    seeds: Annotated[tuple[int, ...], Field(min_length=1, max_length=10_000)]


def plain_config(path: Path) -> dict[str, Any]:
    """Read a resolved configuration as plain values, and see that the tables a reader needs are there."""
    config = tomllib.loads(path.read_text("utf-8"))
    typed(_Sizes, {**config["run"], "clients": config["federation"]["clients"]})
    for table, key in (("algorithm", "name"), ("aggregation", "rule"), ("attack", "name"), ("data", "name")):
        if not isinstance(config[table][key], str):
            raise ValueError(f"[{table}] {key} is no name")
    if not isinstance(config["privacy"]["threat"], str):
        raise ValueError("[privacy] threat is no name")
    return config


def so_far(
    config: Mapping[str, Any], seeds: Mapping[int, Sequence[Record]], folder: Path, deployed: bool = False
) -> Summary:
    """Summarise the records so far, without a certificate: finished runs, or the clients, have one."""
    rounds, threat = config["run"]["rounds"], config["privacy"]["threat"]
    liars = None if deployed else config["federation"]["byzantine"]
    done = min((records[-1].round if records else 0 for records in seeds.values()), default=0)
    notes = [f"not finished: {done} of {rounds} rounds"] if done < rounds else []
    elsewhere = ledgers_have(config) if deployed else ""
    if elsewhere:
        notes.append(f"ε is {elsewhere}")
    reason = _uncertified(seeds, done, rounds)
    verdict: dict[str, Any] = {}
    if threat != "none" and not elsewhere:
        from trilemma.privacy import NoGuarantee

        verdict = NoGuarantee(reason).plain()
    every = [record for records in seeds.values() for record in records]
    return Summary(
        metrics={
            name: Spread.of({seed: _latest(records, name) for seed, records in seeds.items()})
            for name in _scored(seeds)
        },
        loss=Spread.of({seed: _latest(records, "loss") for seed, records in seeds.items()}),
        epsilon={},
        delta=None,
        seconds=round(math.fsum(spent for record in every for spent in record.seconds.values()), 3),
        algorithm=config["algorithm"]["name"],
        rule=config["aggregation"]["rule"],
        clients=config["federation"]["clients"],
        byzantine=liars,
        attack=_attack(config, liars),
        threat=threat,
        rounds=rounds,
        notes=tuple(notes),
        directory=str(folder),
        verdict=verdict,
    )


def _attack(config: Mapping[str, Any], liars: int | None) -> str:
    """Name the attack; nobody knows what, or whether, clients of a real federation play."""
    if liars is None:
        return "unknown"
    return str(config["attack"]["name"]) if liars else "none"


def ledgers_have(config: Mapping[str, Any]) -> str:
    """Say where ε of a federation's run stands, which no server sees; "" where nothing is guaranteed.

    >>> noised = {"threat": "secldp", "epsilon": 8.0}
    >>> ledgers_have({"privacy": noised}), ledgers_have({"privacy": {**noised, "uncertified": True}})
    ("in each client's ledger; at most 8 by agreement", '')
    """
    table = config["privacy"]
    doubted = table.get("uncertified") or "published" in (table.get("assume"), table.get("adjacency"))
    if table["threat"] == "none" or doubted or table.get("noise") == "paper":
        return ""
    agreed = "" if table.get("epsilon") is None else f"; at most {table['epsilon']:g} by agreement"
    return f"in each client's ledger{agreed}"


def _uncertified(seeds: Mapping[int, Sequence[Record]], done: int, rounds: int) -> str:
    """Say why a run without a summary has no certificate of its own, and what held for the rounds it did."""
    last = [record for records in seeds.values() for record in records if record.round == done]
    spent = max((record.epsilon for record in last), default=math.inf)
    held = f"; for those ε = {spent:.3g} was certified ({last[0].accountant})" if math.isfinite(spent) else ""
    return f"unfinished: {done} of {rounds} rounds{held}"


def _scored(seeds: Mapping[int, Sequence[Record]]) -> list[str]:
    """Return the metrics that the records have, without what stands beside them; clients' own is the last."""
    names = dict.fromkeys(name for one in seeds.values() for record in one for name in record.metrics)
    found = sorted((name for name in names if name not in BESIDE), key=lambda name: name == OWN_SCORE)
    return found or ["accuracy"]


def _latest(records: Sequence[Record], name: str) -> float | None:
    """Return the newest score by a metric; None where there is none."""
    scores = [score for record in records if (score := record.metrics.get(name)) is not None]
    return scores[-1] if scores else None
