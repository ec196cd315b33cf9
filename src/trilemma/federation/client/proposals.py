"""What a server proposes to a client, in numbers its owner can judge, worked out by the client itself.

A server proposes a run by its name. All the rest of the manifest is computed from the client's own folder:
nothing in it is the server's word. A run that is not allowed is refused, and its name kept for the owner to
look at (`trilemma federation proposals`) and to accept (`trilemma federation allow`). What it means is worked
out when somebody looks: who takes part, whom the client counts on and so what a run costs change meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trilemma.base import files
from trilemma.federation.client.spending import Reach, least_members, planned_epsilon, reach
from trilemma.federation.party.layout import Party
from trilemma.federation.party.permission import Permission, amend
from trilemma.federation.party.task import PartyTask, load_task
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.task.inspection import left_out

KEPT = 32
"""How many proposals a client keeps, and runs it joined and was asked nothing in: a server may think of names
without end."""

JOINED = frozenset({"session", "session.tmp", "session.broken"})
"""What is in the folder of a run in which nothing was answered yet."""


@dataclass(frozen=True)
class Manifest:
    """What taking part in a run means.

    `plan` is the digest of all that is agreed on, with the code of the task; `configuration` and `task` are
    digests of those alone ("" without a task.py); `keys` is the digest of everybody's identities. An epoch
    has at least `threshold` of the `members`. `epsilon` is what its rounds cost this client, a tenth of them
    repeated; None where nothing is guaranteed. `left_out` says of which of its records nothing is learned,
    `reach` how far its budget allows it to be run.
    """

    run: str
    plan: str
    configuration: str
    task: str
    members: int
    threshold: int
    epsilon: float | None
    rounds: int
    keys: str
    left_out: tuple[str, ...] = ()
    reach: Reach | None = None

    @classmethod
    def of(cls, party: Party, task: PartyTask, run: str) -> Manifest:
        """Work it out, from this client's folder."""
        agreed = party.agreed
        return cls(
            run=run,
            plan=agreed.plan,
            configuration=hashlib.sha256(agreed.config).hexdigest(),
            task=agreed.code,
            members=len(agreed.roster.keys.members),
            threshold=least_members(party, task),
            epsilon=planned_epsilon(task, party),
            rounds=task.config.run.rounds,
            keys=agreed.roster.keys.digest.hex(),
            left_out=() if task.data is None else tuple(left_out(task.data.dataset)),
            reach=reach(party, task, run),
        )


def check_allowed(party: Party, task: PartyTask, run: str) -> None:
    """Refuse a run that this client's owner has not allowed, and keep its manifest for the owner."""
    party.run_folder(run)  # a name from outside: refused where it is none
    if Permission.load(party.allowed).allows(run, party.agreed.plan, lambda: planned_epsilon(task, party)):
        _forget_idle(party, run)
        return
    if not _kept(party, run).is_file():  # once: a server may propose it every second
        _keep(party, run)
    raise Refused(Reason.ALLOWED, f"run {run!r}: `trilemma federation allow {party.folder} {run}`")


def check_reach(party: Party, task: PartyTask, run: str) -> None:
    """Refuse to begin a run that the budget does not reach the end of, unless its owner asked for a part."""
    if run in Permission.load(party.allowed).partly:
        return
    far = reach(party, task, run)
    if far is not None and not far.ends:
        owner = f"`trilemma federation allow {party.folder} {run} --partly`, or `budget`"
        raise Refused(Reason.REACH, f"run {run!r}: {far.said}; its owner: {owner}")


def proposed(party: Party) -> Iterator[Manifest]:
    """Return what was proposed to a client and refused, the newest first, as it is now."""
    manifest = None
    for path in sorted(party.proposals.glob("*.json"), key=lambda path: -path.stat().st_mtime_ns):
        if manifest is None:
            manifest = Manifest.of(party, load_task(party), path.stem)
        yield replace(manifest, run=path.stem)


def still_refused(party: Party) -> list[Manifest]:
    """Return what was proposed and is not allowed even now."""
    allowed = Permission.load(party.allowed)

    def refused(one: Manifest) -> bool:
        return not allowed.allows(one.run, one.plan, lambda: one.epsilon)

    return [one for one in proposed(party) if refused(one)]


def allow(party: Party, run: str, partly: bool = False) -> Manifest:
    """Allow a run of the plan that this client's folder holds now; return what that means.

    `partly`: also where the budget does not reach to its end.
    """
    party.run_folder(run)
    manifest = Manifest.of(party, load_task(party), run)

    def allowed(before: Permission) -> Permission:
        after = before.with_run(run, manifest.plan)
        return after.with_part(run) if partly else after

    amend(party.allowed, allowed)
    _kept(party, run).unlink(missing_ok=True)
    return manifest


def _forget_idle(party: Party, run: str) -> None:
    """Make room for a new run: of those that were joined and came to nothing, the newest are kept.

    What is lost are keys of epochs without a release; that they were joined is remembered elsewhere.
    """
    if party.run_folder(run).exists():
        return
    runs = [path for path in (party.state / "runs").glob("*") if path.is_dir()]
    idle = [folder for folder in runs if {path.name for path in folder.iterdir()} <= JOINED]
    for folder in sorted(idle, key=lambda folder: folder.stat().st_mtime_ns)[: 1 - KEPT]:
        shutil.rmtree(folder)


def _kept(party: Party, run: str) -> Path:
    return party.proposals / f"{run}.json"


def _keep(party: Party, run: str) -> None:
    files.write_atomically(_kept(party, run), json.dumps({"run": run}).encode())
    oldest = sorted(party.proposals.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in oldest[:-KEPT]:
        path.unlink(missing_ok=True)
