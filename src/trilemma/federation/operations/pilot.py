"""From a task that was simulated to a federation of it: what has to be agreed on, and a rehearsal.

In earnest nobody has everybody's data: the number of clients and of the poorest one's examples are agreed on.
In a rehearsal on one machine `data(client)` can be called for all of them, and tells. What each client has
spent is in its own ledger and in no record of the server's; where all folders are on one machine, whoever
watches may read them.
"""

from __future__ import annotations

from pathlib import Path

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.experiment import Config, auto
from trilemma.experiment.assembly import everybody, one_party
from trilemma.federation.client.account import run_of
from trilemma.federation.client.spending import RESERVE
from trilemma.federation.party.layout import TASK, Party
from trilemma.federation.party.task import load_task
from trilemma.privacy.ledger.lines import read_entries
from trilemma.task import Task

TEXTS = (".py", ".toml", ".md")
"""Endings of files beside a task that are not its data."""


def deployed(config: Config) -> Config:
    """Return a simulation's configuration as a federation runs it: nobody plays the attacker.

    As many liars as there were are tolerated.

    >>> from trilemma.experiment import parse
    >>> real = deployed(parse({}, ["federation.byzantine=2", "attack.name=sf"]))
    >>> real.attack.name, real.federation.byzantine, real.federation.f
    ('none', 0, 2)

    An ε that is asked for has room for rounds that happen twice, unless the configuration says otherwise.

    >>> deployed(parse({}, ["privacy.threat=ldp", "privacy.clip=1", "privacy.epsilon=8"])).privacy.repeated
    0.1
    """
    if config.privacy.aims and "repeated" not in config.source.get("privacy", {}):
        config = config.with_(f"privacy.repeated={RESERVE}")
    if config.attack.name == "none" and not config.federation.byzantine:
        return config
    return config.with_(
        "attack={name='none'}", "federation.byzantine=0", f"federation.tolerate={config.federation.f}"
    )


def settled(config: Config, task: Task | None, examples: int | None) -> Config:
    """Return the configuration all parties agree on: numbers for what it leaves open, of public facts alone.

    The poorest client of a `task` counts as holding so many `examples`.
    """
    if not config.auto:
        return config
    key = Key(config.run.seeds[0])
    if task is None:
        found = everybody(config, key, None, config.federation.clients)
        return auto.settled(config, int(found.held.sizes.min()), found.model.dim)
    assert examples is not None
    kept = config.evaluation.held_out(examples) if config.evaluation.clients else 0
    return auto.settled(config, examples - kept, one_party(config, key, task, None, examples).model.dim)


def poorest(task: Task, clients: int) -> int:
    """Return how many examples every client counts as holding: what the task says, else the fewest held."""
    if task.examples is not None:
        return task.examples
    held = task.of(clients).dataset.natural
    assert held is not None
    return min(len(rows) for rows in held.train)


def rehearsed(parties: list[Party], task: Path) -> list[str]:
    """Let every party load its own data; where its copy of the task finds none, link what lies beside it.

    What was linked is returned. Links, not copies: no party's folder carries another one's data away.
    """
    try:
        for party in parties:
            load_task(party)
        return []
    except UserError:
        linked = _link_beside(parties, task.resolve())
        if not linked:
            raise
    for party in parties:
        load_task(party)
    return linked


def without_data(parties: list[Party]) -> list[str]:
    """Say which clients find no data here, and what that means; for folders that are all on one machine."""
    problems = []
    for party in parties:
        try:
            if party.client is not None:
                load_task(party)
        except UserError as error:
            problems.append(
                f"{party.name} has no data, and takes no part before it has: {error} (then: trilemma "
                f"federation doctor {party.folder})"
            )
    return problems


def spent(parties: list[Party], run: str, rounds: int) -> tuple[float, str] | None:
    """Return the largest ε that a client's ledger has when `rounds` of a run are over, and its accountant.

    It is each client's cost of all its releases, those of other runs included. None: no ledger of a client is
    here, or nothing was paid for.
    """
    found = []
    for party in parties:
        if party.client is None:
            continue
        found_here = read_entries(party.ledger)
        entries = [entry for entry in found_here if run_of(entry) == run and entry.round < rounds]
        if entries:
            costs = entries[-1].epsilon
            found.append(min((figure, name) for name, figure in costs.items()))
    return max(found, default=None)


def _link_beside(parties: list[Party], task: Path) -> list[str]:
    federation = parties[0].folder.parent
    code = {TASK, task.name, "__pycache__"}
    beside = [
        path
        for path in sorted(task.parent.iterdir())
        if path.name not in code and path.suffix not in TEXTS and path.resolve() != federation
    ]
    linked: dict[str, None] = {}
    for party in parties:
        for path in beside:
            place = party.folder / path.name
            if not place.exists() and not place.is_symlink():
                place.symlink_to(path)
                linked[path.name] = None
    return list(linked)
