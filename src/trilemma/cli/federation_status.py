"""`trilemma federation status`, `doctor`, `replay`: where parties stand, what is wrong, what follows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trilemma.base.errors import printable
from trilemma.cli.output import say
from trilemma.federation.protocol.events import listed

if TYPE_CHECKING:
    from trilemma.report.client_events import Doings
    from trilemma.report.federations import Account, MemberRow, PartyStanding, RunStanding

console = Console()

Folder = Annotated[Path, typer.Argument(help="a federation's folder, or one party's folder in it")]

SCORES = 5
"""Scores of a run that are shown: the newest; `--json` has more."""


def status_command(
    folder: Folder,
    watch: Annotated[bool, typer.Option("--watch", help="repeat until stopped")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON per look")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="with --watch: seconds between two looks")] = 2.0,
) -> None:
    """Show the state of every party in the folder: processes, runs, clients, ε spent."""
    from trilemma.report.federations import standing

    found = standing(folder)
    if as_json:
        print(_json(found), flush=True)
    elif not watch:
        console.print(_shown(found))
    if not watch:
        return
    try:
        if as_json:
            while True:
                time.sleep(every)
                print(_json(standing(folder)), flush=True)
        with Live(_shown(found), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                time.sleep(every)
                live.update(_shown(standing(folder)), refresh=True)
    except KeyboardInterrupt:
        return


def doctor_command(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON")] = False,
) -> None:
    """Check the parties in the folder, and name the cure of each problem; exit code 1 if there is one.

    Certificates, keys, ports, the server's door, disk, versions, configuration, ledgers, and
    whether parties have the same roster and configuration. Nothing is changed.
    """
    from trilemma.federation.operations.doctor import examine

    found = examine(folder)
    if as_json:
        print(json.dumps({"parties": [one.plain() for one in found]}), flush=True)
    else:
        for one in found:
            said = [finding.text for finding in one.findings] or ["all is well"]
            for line in said:
                say(f"{one.party}: {line}")
    if any(one.findings for one in found):
        raise typer.Exit(1)


def replay_command(
    folder: Folder,
    run: Annotated[str, typer.Option(help="name of the run")] = "default",
) -> None:
    """Repeat every step of the server from its transcript, and compare; exit code 1 if anything differs.

    The model must be the one that was committed and handed out, to the bit, and the same clients expelled.
    Needs a federation that keeps a transcript (`init --transcript`). Changes nothing.
    """
    from trilemma.federation.party.layout import server_in
    from trilemma.federation.server.replay import differences

    replayed, found = differences(server_in(folder), run)
    for line in found:
        say(f"run {run}: {line}")
    if found:
        raise typer.Exit(1)
    gone = [f"client {one.client} in round {one.round}" for one in replayed.expelled]
    say(
        f"run {run}: {replayed.rounds} rounds again, the same model to the bit; "
        f"expelled: {', '.join(gone) or 'nobody'}"
    )


def _json(found: Iterable[PartyStanding]) -> str:
    return json.dumps({"time": round(time.time(), 3), "parties": [one.plain() for one in found]})


def _shown(found: list[PartyStanding]) -> RenderableType:
    """Lay out what was found: processes of all, the server's runs, the clients' accounts."""
    started = any(one.processes for one in found)
    parts: list[RenderableType] = [_processes(found) if started else Text("no processes were started")]
    for party in found:
        if party.problem:
            parts.append(Text(f"{party.party}: {printable(party.problem)}", style="red"))
        if party.door is not None:
            parts.append(_door(party.door))
        for run in party.runs:
            parts += [Text(_head(run)), _members(run.members)]
            parts += [Text(line) for line in _remarks(run)]
        if party.account is not None and party.account.problem:
            parts.append(Text(f"{party.party}: {printable(party.account.problem)}", style="red"))
        parts += [
            Text(f"{party.party} was told of an expulsion, {printable(one)}") for one in party.doings.expelled
        ]
    accounts = [(one.party, one.account, one.doings) for one in found if one.account is not None]
    if accounts:
        parts.append(_accounts(accounts))
        caveats = {(name, text) for name, account, _ in accounts for text in account.caveats}
        parts += [Text(f"{name}: {printable(text)}") for name, text in sorted(caveats)]
    return Group(*parts)


def _table(*headings: str) -> Table:
    """Return a table for a terminal of 80 columns: no lines between columns, one space."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _processes(found: list[PartyStanding]) -> Table:
    table = _table("party", "pid", "state")
    for party in found:
        for one in party.processes:
            state = Text("running") if one.alive else Text("dead", style="red")
            table.add_row(party.party, str(one.pid), state)
    return table


def _head(run: RunStanding) -> str:
    epoch = "" if run.epoch is None else f", epoch {run.epoch}"
    since = f", last written {ago(time.time() - run.changed)}"
    return f"run {run.name}: {run.state}, {run.round} rounds committed of {run.rounds}{epoch}{since}"


def _door(door: Mapping[str, Any]) -> Table:
    """Lay out who is connected to the server, and who was not let in."""
    table = _table("client", "came", "last heard", "from")
    now = time.time()
    for client, one in door["there"].items():
        address = printable(one["address"].partition(":")[2])
        table.add_row(client, ago(now - one["since"]), ago(now - one["heard"]), address)
    for client, why in door["turned_away"].items():
        table.add_row(client, Text("not let in", style="red"), "", printable(why))
    return table


def _heard(one: MemberRow) -> str:
    if one.heard is None:
        return "never"
    return f"round {one.heard}" + ("" if one.heard_at is None else f", {ago(time.time() - one.heard_at)}")


def _now(one: MemberRow) -> Text:
    if one.joined is False:
        return Text("not in", style="red")
    return Text(one.now, style="" if one.now in ("heard", "not asked", "nothing yet") else "red")


def _members(members: Iterable[MemberRow]) -> Table:
    """Lay out the clients: the seconds of their last answer and the median, how often they were not heard."""
    table = _table("client", "now", "heard in", "took (median)", "not heard", "weight (now)")
    for one in members:
        counts = {"absent": one.absent, "unreached": one.unreached, "rejected": one.rejected}
        counts["late"] = one.late
        took = "" if one.took is None else f"{one.took:.2g} s ({one.usual or 0.0:.2g})"
        share = "" if one.share is None else f" ({one.share:.2f})"
        table.add_row(
            str(one.client),
            _now(one),
            _heard(one),
            Text(took, style="red" if one.out else ""),
            ", ".join(f"{count} {what}" for what, count in counts.items() if count),
            f"{one.weight:.2f}{share}",
        )
    return table


def _remarks(run: RunStanding) -> list[str]:
    """Say why clients were rejected or expelled, and how the model scored of late."""
    lines = []
    outside: dict[str, list[int]] = {}
    for one in run.members:
        if one.why:
            outside.setdefault(one.why, []).append(one.client)
    for why, them in outside.items():
        who = f"client {them[0]} is" if len(them) == 1 else f"clients {listed(them)} are"
        lines.append(f"{who} not in the epoch: {printable(why)}")
    for one in run.members:
        if one.reason:
            lines.append(f"client {one.client} was last turned away or not reached: {printable(one.reason)}")
        if one.out:
            lines.append(f"client {one.client} is slow and is not waited for")
        if one.expelled:
            lines.append(f"client {one.client} was expelled: {printable(one.expelled)}")
    for round_, scores in list(run.scores.items())[-SCORES:]:
        finite = {printable(name): value for name, value in scores.items() if value is not None}
        said = ", ".join(f"{name} {value:.3f}" for name, value in finite.items())
        lines.append(f"round {round_}: {said or 'no finite score'}")
    return lines


def _accounts(accounts: list[tuple[str, Account, Doings]]) -> Table:
    table = _table("client", "ε spent", "ε left", "releases", "last answer", "refused")
    for name, one, doings in accounts:
        if one.problem:
            continue
        left = "no budget" if one.left is None else f"{one.left:.3g}"
        spent = f"{one.spent:.3g}" + (f" ({one.accountant})" if one.accountant else "")
        releases = ", ".join(f"{printable(run)}: {count}" for run, count in one.releases.items())
        refused = ", ".join(f"{count} × {printable(why)}" for why, count in doings.refused.items())
        since = "" if doings.answered is None else ago(time.time() - doings.answered)
        answer = f"round {doings.round}, {since}" if since else ""
        called = name if one.weight is None else f"{name}, weight {one.weight:g}"
        table.add_row(called, spent, left, releases or "none", answer, refused)
    return table


def ago(seconds: float) -> str:
    """Say how long ago something was.

    >>> ago(3.2), ago(200), ago(7300), ago(-4)
    ('3 s ago', '3 min ago', '2 h ago', 'just now')
    """
    if seconds < 1:
        return "just now"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


COMMANDS: dict[str, Callable[..., None]] = {
    "status": status_command,
    "doctor": doctor_command,
    "replay": replay_command,
}
"""The commands of this module by name, for `trilemma federation`."""
