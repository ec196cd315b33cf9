"""`trilemma federation`: make, start, run, look at and stop a real federation."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.cli import federation_members, federation_owner, federation_status, statistics
from trilemma.cli.federation_status import Folder
from trilemma.cli.options import PluginOption
from trilemma.cli.output import say

if TYPE_CHECKING:
    from trilemma.experiment import Config
    from trilemma.federation.party.layout import Party
    from trilemma.federation.party.public_facts import Federation
    from trilemma.task import Task

RUNNING = "Set up and run"
"""The group in `--help` of the commands of this module."""

federation_app = typer.Typer(
    help="Run a real federation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@federation_app.command("init", rich_help_panel=RUNNING)
def init_command(
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    requests: Annotated[list[Path] | None, typer.Argument(help="with --join: the clients' requests")] = None,
    clients: Annotated[
        int | None, typer.Option(help="number of clients; default: the task's, the configuration's, or 5")
    ] = None,
    config: Annotated[str | None, typer.Option(help="TOML file, or a name; default: all defaults")] = None,
    task: Annotated[Path | None, typer.Option(help="a task.py with your model and data")] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            help="with --task: examples of the client that holds fewest; default: counted, for a rehearsal"
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="address the server listens on and clients connect to")
    ] = "127.0.0.1",
    listen: Annotated[str | None, typer.Option(help="address the server binds to, if it is another")] = None,
    port: Annotated[
        int | None, typer.Option(help="the server's port; default: 9190, or the next that is free here")
    ] = None,
    name: Annotated[str, typer.Option(help="the federation's name")] = "federation",
    budget: Annotated[float | None, typer.Option(help="every client's own limit on ε, over all runs")] = None,
    round_limit: Annotated[float, typer.Option(help="seconds a client has to answer in a round")] = 120.0,
    join_limit: Annotated[float, typer.Option(help="seconds clients have to join")] = 60.0,
    transcript: Annotated[bool, typer.Option(help="the server keeps every vector it admitted")] = False,
    plugin: PluginOption = None,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="also write Kubernetes manifests into every party's folder")
    ] = False,
    join: Annotated[
        bool, typer.Option("--join", help="clients made their own keys; REQUESTS are what they sent")
    ] = False,
) -> None:
    """Make keys, certificates, roster and configuration: one folder per party."""
    from trilemma.federation.operations import bootstrap, pilot, supervision
    from trilemma.federation.party import addresses, provisioning, public_facts
    from trilemma.federation.party.requests import Request

    if join != bool(requests):
        raise UserError("--join goes with the requests of the clients, and requests with --join")
    if examples is not None and task is None:
        raise UserError("--examples goes with --task: it is what clients with data of their own hold")
    provisioning.check_free(folder)
    asked = [Request.load(path) for path in requests or []]
    if join:
        clients = len(asked) if clients is None else clients
    own = None if task is None else _task(task, clients)
    settings = settings_of(config, clients, own, plugin or [])
    looked_up = own is not None and examples is None
    if own is not None and examples is None:
        examples = pilot.poorest(own, settings.federation.clients)
    settings = settled(settings, own, examples)
    facts = public_facts.Federation(
        name=name,
        clients=settings.federation.clients,
        host=host,
        port=port or addresses.free_port(listen or host),
        listen=listen,
        examples=examples,
        transcript=transcript,
        timing=public_facts.Timing(round_limit=round_limit, join_limit=join_limit),
    )
    if kubernetes:
        supervision.check_kubernetes(facts)
    if join:
        server, written = bootstrap.found(folder, facts, settings.toml(), asked, task, settings.plugins)
        if kubernetes:
            supervision.write_kubernetes([server])
        _say_founded(folder, server, written)
        return
    made, linked, limit = _with_all_keys(folder, facts, settings, task, budget, looked_up)
    if kubernetes:
        supervision.write_kubernetes(made)
    for party in made:
        say(f"{party.folder}")
    if own is not None:
        _say_public(own, facts, linked)
        for problem in [] if looked_up or not facts.on_one_machine else pilot.without_data(made):
            say(f"\n{problem}")
    _say_next(folder, facts, limit)


def _with_all_keys(
    folder: Path,
    facts: Federation,
    settings: Config,
    task: Path | None,
    budget: float | None,
    rehearsal: bool,
) -> tuple[list[Party], list[str], float | None]:
    """Make every party's folder; return them, what was linked into each, and what each may spend.

    For a `rehearsal` clients get what lies beside the task, which each would otherwise have at home.
    """
    from trilemma.federation.client.spending import write_budgets
    from trilemma.federation.operations import pilot, supervision
    from trilemma.federation.party import provisioning
    from trilemma.federation.party.task import load_task

    with provisioning.new_folder(folder):
        made = provisioning.init(folder, facts, settings.toml(), task=task, plugins=settings.plugins)
        linked = pilot.rehearsed(made, task) if task is not None and rehearsal else []
        limit = write_budgets(made[1:], load_task(made[0]), budget)
        supervision.write(folder, made)
    return made, linked, limit


def _say_next(folder: Path, facts: Federation, limit: float | None) -> None:
    """Say what every client may spend, who holds which keys, and what to do next."""
    if limit is not None:
        say(f"\nEvery client will spend at most ε = {limit:.3g} (budget.toml)")
    if not facts.transcript:
        say("\nNo transcript is kept: `replay` needs one to check the server afterwards (init --transcript)")
    if not facts.on_one_machine:
        say("\nClients take part in nothing yet; each owner decides: trilemma federation allow client-i RUN")
    say(
        "\nThe person who ran this has seen all keys. That is fine for a pilot. For a real federation: "
        "trilemma federation request on every client's machine, then init --join."
    )
    say(
        f"\nClients connect to {facts.address}. Keep {folder / 'authority'} off-line. Each other folder goes "
        "to its party and to nobody else.\n"
        f"On this machine: trilemma federation up {folder}; trilemma federation run {folder}"
    )


def _task(path: Path, clients: int | None) -> Task:
    """Read a task for so many clients; refuse another number of them than it says it has data for."""
    from trilemma.task import Task

    known = Task.from_file(path).clients_known
    if known is not None and clients not in (None, known):
        raise UserError(
            f"{clients} clients: {path.name} says clients = {known}; leave --clients out, or change the file"
        )
    return Task.from_file(path, clients)


def _say_founded(folder: Path, server: Party, written: list[Path]) -> None:
    """Say what goes to whom, where clients made their own keys."""
    from trilemma.federation.identity.certificates import fingerprint

    compared = fingerprint(server.authority.read_bytes())
    lines = [
        f"{server.folder}: the server's folder",
        *(f"{path}: to client {place}" for place, path in enumerate(written)),
        "",
        f"The authority's fingerprint, for everybody to compare: {compared}",
        f"Keep {folder / 'authority'} off-line. No client's secret was here. Each client, on its machine: "
        "trilemma federation install FOLDER BUNDLE",
    ]
    for line in lines:
        say(line)


def settings_of(config: str | None, clients: int | None, task: Task | None, plugins: list[str]) -> Config:
    """Read the configuration for a federation, and say what is left out of a simulation's."""
    from trilemma import experiment as configurations
    from trilemma.federation.operations import pilot

    assignments = [] if clients is None else [f"federation.clients={clients}"]
    if task is not None:
        own = configurations.Own(task.clients_known)
        settings = configurations.load(config, assignments, own, plugins)
    else:
        settings = configurations.load(config, assignments, plugins=plugins)
        if "clients" not in settings.source.get("federation", {}):
            settings = settings.with_("federation.clients=5")
    real = pilot.deployed(settings)
    if real is not settings:
        left_out = "" if settings.attack.name == "none" else "[attack] is for simulations and is left out; "
        say(f"{left_out}f = {real.federation.f} liars are tolerated")
    return real


def settled(settings: Config, task: Task | None, examples: int | None) -> Config:
    """Choose what the configuration leaves open, and say it: all parties agree on it from here on."""
    from trilemma.federation.operations import pilot

    found = pilot.settled(settings, task, examples)
    if found is not settings:
        say(found.notes[-1])
    return found


def _say_public(task: Task, facts: Federation, linked: list[str]) -> None:
    """Say what everybody gets to know, and what was done for a rehearsal only."""
    lines = [
        "",
        f"Public: {facts.clients} clients, of whom the poorest holds {facts.examples} examples "
        "(federation.toml); the model and the number of its classes (task.py)",
    ]
    if linked:
        lines.append(
            f"For a rehearsal here, {', '.join(linked)} from beside {task.path} is linked into every folder; "
            "in earnest each party puts its own there"
        )
    for line in lines:
        say(line)


@federation_app.command("up", rich_help_panel=RUNNING)
def up_command(
    folder: Folder,
    attach: Annotated[bool, typer.Option(help="stay, and restart processes that end")] = False,
    metrics: Annotated[
        int | None,
        typer.Option(
            help="serve metrics on loopback: the server's port; client i's is i + 1 after it",
            min=1,
            max=65535,
        ),
    ] = None,
) -> None:
    """Start every party that is not running, and list what was started."""
    from trilemma.federation.operations import deployment
    from trilemma.federation.party.layout import METRICS

    if metrics is not None:
        os.environ[METRICS] = str(metrics)  # processes inherit it, those that are started anew too

    started = deployment.up(folder, say)
    say(f"{_processes(len(started))} started" if started else "everything was running")
    if attach:
        deployment.supervise(folder, say=say)


@federation_app.command("units", rich_help_panel=RUNNING)
def units_command(
    folder: Folder,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="write Kubernetes manifests instead")
    ] = False,
) -> None:
    """Write a systemd unit for each party, and a compose file for all of them."""
    from trilemma.federation.operations import supervision
    from trilemma.federation.party.layout import parties

    found = parties(folder)
    for path in supervision.write_kubernetes(found) if kubernetes else supervision.write(folder, found):
        say(f"{path}")


@federation_app.command("run", rich_help_panel=RUNNING)
def run_command(
    folder: Folder,
    name: Annotated[str, typer.Option(help="name of the run; a run that exists is continued")] = "default",
    limit: Annotated[float | None, typer.Option(help="stop watching after so many seconds")] = None,
    replace: Annotated[bool, typer.Option(help="stop another run that is under way")] = False,
) -> None:
    """Start or continue the configured run, and show its rounds.

    A run under way is watched, not started a second time. It continues when you stop watching.
    """
    from trilemma.federation.party.layout import parties, server_in
    from trilemma.federation.processes.door import follow

    server, everyone = server_in(folder), parties(folder)
    goes_on = f"run {name!r} goes on; see how far it is with `trilemma federation status {folder}`"
    ended: dict[str, Any] = {}
    try:
        for told in follow(server, name, replace, say, math.inf if limit is None else limit):
            if "record" in told:
                done = Record.read(told["record"])
                say(_line(done, _spent(everyone, name, done.round)))
            ended = told
    except KeyboardInterrupt:
        raise UserError(goes_on) from None
    if ended.get("state", "running") == "running":
        raise UserError(f"after {limit:g} s {goes_on}")
    if ended["state"] != "completed":
        reason = ended["reason"] or "no reason given"
        if "reach:" in reason:
            federation_owner.say_reach(everyone, name)
        raise UserError(f"run {name!r} {ended['state']}: {reason} (more in {server.process_log})")
    say(f"finished; the model is in {server.run_folder(name) / 'result'}")


def _spent(everyone: list[Party], run: str, rounds: int) -> tuple[float, str] | None:
    """Return the largest ε in the clients' ledgers; where there are none here, that takes no torch."""
    if not any(party.client is not None and party.ledger.is_file() for party in everyone):
        return None
    from trilemma.federation.operations import pilot

    return pilot.spent(everyone, run, rounds)


def _line(record: Record, spent: tuple[float, str] | None = None) -> str:
    """Say how a round went; what was spent is the clients' own word, which no record of the server has."""
    from trilemma.federation.protocol.events import listed

    parts = [f"round {record.round}"]
    parts += [f"{name} {score:.3f}" for name, score in record.metrics.items() if score is not None]
    if spent is not None:
        parts.append(f"ε {spent[0]:.3g} by {spent[1]} (the largest in the clients' ledgers)")
    if record.absent:
        parts.append(f"absent {listed(record.absent)}")
    if record.unreached:
        parts.append(f"unreached {listed([client for client, _ in record.unreached])}")
    if record.late:
        parts.append(f"not waited for {listed(record.late)}")
    if record.rejected:
        who = (f"{'somebody' if client is None else client} ({why})" for client, why in record.rejected)
        parts.append(f"rejected {', '.join(who)}")
    if record.expelled:
        parts.append(f"expelled {listed([int(one['client']) for one in record.expelled])}")
    return ", ".join(parts)


@federation_app.command("down", rich_help_panel=RUNNING)
def down_command(folder: Folder) -> None:
    """Stop every process that `up` started."""
    from trilemma.federation.operations import deployment

    say(f"{_processes(deployment.down(folder))} stopped")


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


for _group, _commands in (
    (RUNNING, {"statistics": statistics.federation_statistics_command}),
    ("Watch", federation_status.COMMANDS),
    ("For a client's owner", federation_owner.COMMANDS),
    ("Members, keys and certificates", federation_members.COMMANDS),
):
    for _name, _command in _commands.items():
        federation_app.command(_name, rich_help_panel=_group)(_command)
