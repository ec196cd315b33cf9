"""`trilemma evidence`: one signed folder about a run, its check, and what owners sign."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from typer.core import TyperGroup

from trilemma.base.errors import UserError
from trilemma.cli.output import note, say

if TYPE_CHECKING:
    from trilemma.evidence.vouched import Vouched
    from trilemma.federation.party.layout import Party

WRITE = "write"


class _WriteByDefault(TyperGroup):
    """`trilemma evidence RUN` is `trilemma evidence write RUN`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is called."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = [WRITE, *args]
        return super().resolve_command(ctx, args)


evidence_app = typer.Typer(
    cls=_WriteByDefault,
    help="Write one signed folder about a run for who decides and who audits, or check one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Pack = Annotated[Path, typer.Argument(help="the folder of a pack")]


@evidence_app.command(WRITE)
def write_command(
    source: Annotated[Path, typer.Argument(help="the folder of a run, or of a federation")],
    out: Annotated[Path, typer.Option(help="a new folder")],
    run: Annotated[str | None, typer.Option(help="which of a federation's runs, if it has several")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of a simulated run; default: the first")] = None,
    vouched: Annotated[
        list[Path] | None, typer.Option(help="a ledger that its owner vouched for; repeatable")
    ] = None,
    attacks: Annotated[Path | None, typer.Option(help="attacks.json of `trilemma attack`")] = None,
    key: Annotated[
        Path | None, typer.Option(help="sign a simulation's pack with this key file; made if it is not there")
    ] = None,
    scores: Annotated[
        bool, typer.Option("--scores/--no-scores", help="also scores that no ε pays for, labelled")
    ] = True,
) -> None:
    """Write a pack: what was promised and what is known, for who decides and who audits.

    In a pilot's folder the owners' ledgers are vouched for at once; elsewhere give --vouched.
    """
    from trilemma.audit.final.found import Attacks
    from trilemma.evidence.gather import gather
    from trilemma.evidence.pack import write

    if out.exists():
        raise UserError(f"{out} is there already: name a new folder")
    tried = None if attacks is None else Attacks.load(attacks)
    gathered = gather(source, run, seed, scores)
    if gathered.server is not None and key is not None:
        raise UserError("a federation's pack is signed by its server: leave --key out")
    ledgers = _ledgers(source, gathered.facts.run, vouched or []) if gathered.server else {}
    for left in write(gathered, out, ledgers, tried, key):
        note(f"not in the pack: {left}")
    if gathered.server is None and key is None:
        note("nobody signed it: give --key")
    say(f"{out}: begin with {out / 'statement.html'}; check it with `trilemma evidence verify {out}`")


def _ledgers(source: Path, run: str, given: list[Path]) -> dict[int, Vouched]:
    """Return the ledgers by client: those given, and of a pilot those in its folders."""
    from trilemma.evidence.vouched import Vouched, vouch
    from trilemma.federation.party.layout import parties

    found = {one.account.client: one for one in map(Vouched.load, given)}
    here = [party for party in parties(source) if party.client is not None and not party.removed]
    for party in here:
        if party.client not in found and party.ledger.is_file():
            found[party.client] = vouch(party, run)  # type: ignore[index]  # a client has a number
    return found


@evidence_app.command("verify")
def verify_command(
    pack: Pack,
    authority: Annotated[
        Path | None, typer.Option(help="the authority's certificate (ca.crt) as you know it")
    ] = None,
    server: Annotated[Path | None, typer.Option(help="the server's folder, to replay the run")] = None,
) -> None:
    """Check a pack: signatures, digests, every page, every ε; exit code 1 if something is refused."""
    from trilemma.evidence.verify import refused, verify

    found = verify(pack, None if authority is None else authority.read_bytes(), server)
    for one in found:
        say(one.line)
    if refused(found):
        raise typer.Exit(1)


@evidence_app.command("vouch")
def vouch_command(
    client: Annotated[Path, typer.Argument(help="a client's folder")],
    out: Annotated[Path, typer.Option(help="a new file, for who writes the pack")],
    run: Annotated[str, typer.Option(help="the run that the pack is about")] = "default",
) -> None:
    """Sign what a client's ledger says; for its owner, on its machine."""
    from trilemma.base import files
    from trilemma.evidence.vouched import vouch

    found = vouch(_client(client), run)
    files.write_atomically(out, found.text.encode())
    said = found.account
    say(
        f"{out}: ε = {said.epsilon:.4g} of {said.budget:g} at δ = {said.delta:g}, signed by client "
        f"{said.client}"
    )


@evidence_app.command("approve")
def approve_command(
    client: Annotated[Path, typer.Argument(help="a client's folder")],
    pack: Pack,
) -> None:
    """Approve the export of the model that a pack is about; for a client's owner, who has read it."""
    from trilemma.evidence.approvals import approve

    say(f"{approve(_client(client), pack)}: approved")


def _client(folder: Path) -> Party:
    from trilemma.federation.party.layout import Party

    return Party.open(folder)
