"""From a run's folder, simulated or a federation's, to the facts of its pack."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.records import OWN_SCORE, Record
from trilemma.evidence.facts import (
    Counted,
    ExpelledParty,
    LogDigest,
    Noise,
    PackFacts,
    PartyFact,
    Robust,
    ScoreCurve,
)
from trilemma.experiment.resolve import Resolved
from trilemma.federation.party.facts import installed
from trilemma.federation.party.layout import Party, parties
from trilemma.federation.party.task import load_task
from trilemma.federation.processes.logs import events_file
from trilemma.federation.server.transcript import Transcript
from trilemma.learning.defences.evidence import hidden_shift
from trilemma.models.types import Model
from trilemma.privacy import Guarantee, read_verdict
from trilemma.privacy.types import Release
from trilemma.report.loading import load
from trilemma.report.result import Result
from trilemma.report.trust import expulsions
from trilemma.simulate import RunDirectory, assemble

WRITERS = ("fpdf2", "fonttools", "matplotlib")
"""Packages whose versions decide about the bytes of a PDF."""

SEEDED = (
    "this is a simulation: its noise follows from the seed in config.toml, so whoever has both can take it "
    "away again. The figures say what a federation of this configuration promises; these records are not "
    "protected"
)
CENTRAL = (
    "under cdp the server sees messages that are not protected against it, so nothing made of them is here"
)


@dataclass(frozen=True)
class Gathered:
    """The facts, and where the files come from that go into the pack as they are."""

    facts: PackFacts
    config: Path
    server: Party | None = None


def gather(folder: Path, run: str | None = None, seed: int | None = None, scores: bool = True) -> Gathered:
    """Return what is known of a run. `scores`: whether those that no ε pays for are in, labelled."""
    result = load(folder, run)
    server = server_of(folder)
    if server is None:
        return _simulated(folder, result, seed, scores)
    if seed is not None:
        raise UserError(f"{folder} is a federation's: its runs have names (--run) and no seeds")
    return _deployed(server, result, scores)


def server_of(folder: Path) -> Party | None:
    """Return the server of a federation's folder; None: it is no federation's."""
    there = any((path / "federation.toml").is_file() for path in (folder, folder / "server"))
    return parties(folder)[0] if there else None


def _simulated(folder: Path, result: Result, seed: int | None, scores: bool) -> Gathered:
    directory = RunDirectory.open(folder)
    chosen = next(iter(result.seeds)) if seed is None else seed
    if chosen not in result.seeds:
        raise UserError(f"there is no seed {chosen}; allowed: {', '.join(map(str, result.seeds))}")
    task = directory.task() if directory.has_task else None
    ready = assemble(result.config.with_("run.device='cpu'"), chosen, task)
    records = result.seeds[chosen]
    facts = _facts(
        *(result, ready.resolved, ready.clients.model, records, "simulation", scores),
        of="the test examples of the simulation",
        examples=ready.clients.data.poorest(ready.honest),
        name=f"{result.config.data.name}, simulated",
        run=f"seed {chosen}",
        model_digest=digest_of(result.params(chosen)),
        transcript_why="a simulation keeps no messages",
        caveats=tuple(one for one in (SEEDED, result.caveat) if one),
    )
    return Gathered(facts, directory.path / "config.toml")


def _deployed(server: Party, result: Result, scores: bool) -> Gathered:
    task, records, roster = load_task(server), result.records, server.signed_roster
    central = task.resolved.threat is not None and task.resolved.threat.name == "cdp"
    transcript, why = _transcript(result.directory, central or not task.resolved.certified)
    log = events_file(server.running)
    facts = _facts(
        *(result, task.resolved, task.model, records, "federation", scores),
        of="the server's test examples",
        examples=server.federation.examples,
        name=roster.federation,
        run=result.directory.name,
        parties=tuple(PartyFact(name=one.name, removed=one.removed) for one in roster.clients),
        model_digest=digest_of(result.params()),
        transcript=transcript,
        transcript_why=why,
        logs=(_log("server/run/events.jsonl", log),) if log.is_file() else (),
        caveats=tuple(one for one in (CENTRAL if central else "", result.caveat) if one),
    )
    return Gathered(facts, server.config, server)


def _facts(
    result: Result,
    resolved: Resolved,
    model: Model,
    records: Sequence[Record],
    kind: Any,
    scores: bool,
    of: str,
    **more: Any,
) -> PackFacts:
    """Return the facts that both kinds of runs have; `more` are the others'."""
    config = result.config
    noise = _noise(resolved, records, config.run.rounds, config.privacy.delta)
    held = kind == "federation" and "guarantee" in noise.verdict
    return PackFacts(
        kind=kind,
        made=dt.datetime.now(dt.UTC).date().isoformat(),
        made_with={
            "python": platform.python_version(),
            **{name: installed(name) for name in ("trilemma", "torch", "numpy", "dp-accounting", *WRITERS)},
        },
        clients=config.federation.clients,
        rounds=config.run.rounds,
        done=len(records),
        algorithm=config.algorithm.name,
        rule=config.aggregation.rule,
        data=config.data.name,
        model=model.name,
        dim=model.dim,
        tensors=tuple((name, tuple(shape)) for name, shape in model.shapes),
        noise=noise,
        robust=_robust(result, resolved, model.dim, records, held),
        curves=_curves(records, of, held, scores),
        **more,
    )


def _noise(resolved: Resolved, records: Sequence[Record], rounds: int, delta: float) -> Noise:
    """Return what is released, for as few members as shared secrets at any time."""
    members = [int(one.facts["members"]) for one in records if "members" in one.facts]
    resolved = resolved.among(min(members)) if members else resolved
    beside = tuple(Counted(mechanism=asdict(one), count=count) for one, count in resolved.beside(rounds))
    return Noise(
        release=None if resolved.release is None else asdict(resolved.release),
        threat=None if resolved.threat is None else asdict(resolved.threat),
        beside=beside,
        caveats=resolved.caveats,
        printed=resolved.printed,
        delta=delta,
        rounds=rounds,
        verdict=resolved.verdict(rounds, delta).plain(),
    )


def _robust(result: Result, resolved: Resolved, dim: int, records: Sequence[Record], held: bool) -> Robust:
    table, release = result.config.federation, resolved.release
    hidden = hidden_by(
        *(release, table.participants, table.f, dim, result.config.run.rounds),
        *(result.config.privacy.neighbours, table.shares),
    )
    central = resolved.threat is not None and resolved.threat.name == "cdp"
    gone = [] if central else [one for record in records for one in expulsions(record)]
    return Robust(
        rule=result.config.aggregation.rule,
        tolerated=table.f,
        heard=table.participants,
        weights=table.shares,
        kappa=resolved.rule.kappa(table.participants),
        hidden=hidden,
        expelled=tuple(ExpelledParty(client=client, why=why) for client, why in gone),
        cover="paid" if held else "not covered",
    )


def hidden_by(
    release: Release | None,
    n: int,
    f: int,
    dim: int,
    rounds: int,
    neighbours: int | None,
    shares: Sequence[float] = (),
) -> dict[str, float] | None:
    """Return how far f liars of n can move the mean unseen; None: without noise or liars, or with weights."""
    if (
        shares
        or release is None
        or release.law.silent
        or not 0 < 2 * f < n
        or not math.isfinite(release.clip)
    ):
        return None
    found = hidden_shift(release.law, release.clip, n, f, dim, rounds, neighbours=neighbours)
    return {"mean": found.mean, "most": found.most, "clip": release.clip}


def _curves(records: Sequence[Record], of: str, held: bool, scores: bool) -> tuple[ScoreCurve, ...]:
    """Return the scores over rounds: clients' own, which are paid for, and others, which are not."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, score in record.metrics.items():
            if score is not None:
                found.setdefault(name, []).append((record.round, float(score)))
    made = []
    for name, points in found.items():
        own = name.startswith(OWN_SCORE)
        if own or scores:
            whose = "what parties counted on records of their own, with noise" if own else of
            cover = "paid" if own and held else "not covered"
            made.append(ScoreCurve(name=name, points=tuple(points), cover=cover, of=whose))  # type: ignore[arg-type]
    return tuple(made)


def digest_of(params: Tensor) -> str:
    """Return the digest of a model: of the numbers that were trained, in their order."""
    array = params.detach().cpu().contiguous().numpy()
    return hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()


def _transcript(run: Path, unprotected: bool) -> tuple[str | None, str]:
    """Return the digest of all messages; none where messages are not noised: it would confirm a guess."""
    files = sorted(path for path in Transcript(run).folder.glob("*") if path.is_file())
    if not files:
        return None, "the server kept no transcript (init --transcript)"
    if unprotected:
        return (
            None,
            "messages are not protected against the server: their digest would confirm a guess about them",
        )
    return digest_of_files({path.name: path for path in files}), ""


def digest_of_files(files: Mapping[str, Path]) -> str:
    """Return one digest of files by name."""
    found = hashlib.sha256()
    for name in sorted(files):
        found.update(f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def _log(name: str, path: Path) -> LogDigest:
    content = path.read_bytes()
    return LogDigest(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def held_by(facts: PackFacts) -> Guarantee | None:
    """Return the guarantee that a pack states, which `verify` computes again; None: there is none."""
    found = read_verdict(facts.noise.verdict)
    return found if isinstance(found, Guarantee) else None
