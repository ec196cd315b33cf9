"""A federation without a trusted dealer: every client made its own keys, and nobody ever has them all.

`init` (in `provisioning`) makes everybody's keys in one place, for pilots. Here the authority gets requests
and gives back bundles: it sees public halves only. What two clients share, they agree on directly, with
signed X25519 keys that the server carries (`trilemma.privacy.secrets`).
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.plugins import Plugin
from trilemma.federation.client.spending import write_budgets
from trilemma.federation.identity import authority as authorities
from trilemma.federation.identity import certificates
from trilemma.federation.identity.authority import Authority
from trilemma.federation.identity.rosters import Member, check_name
from trilemma.federation.operations import membership
from trilemma.federation.party import bundles, layout, provisioning, public_facts
from trilemma.federation.party.bundles import Bundle
from trilemma.federation.party.layout import Party
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.party.requests import Request
from trilemma.federation.party.task import load_task
from trilemma.task.file import copy_task


def found(
    folder: Path,
    federation: Federation,
    config: str,
    requests: Sequence[Request],
    task: Path | None = None,
    plugins: Iterable[Plugin] = (),
) -> tuple[Party, list[Path]]:
    """Make authority and server, and a bundle for everybody who sent a request; client i sent the i-th.

    Nothing is left behind where something is wrong.
    """
    if len(requests) != federation.clients:
        raise UserError(f"{len(requests)} requests for a federation of {federation.clients} clients")
    federation = provisioning.declared(federation, task)
    members = tuple(_member(request) for request in requests)
    with provisioning.new_folder(folder):
        authority = Authority.found(folder / authorities.FOLDER, federation.name, federation.toml(), config)
        roster = authority.sign(federation.name, members)
        provisioning.begin_folder(folder / "server", federation, config, task, plugins)
        server = Party.open(folder / "server")
        provisioning.write_certificate(server, authority.issued, (federation.host, "localhost"))
        authority.enact(roster)
        authority.keep(server.name, server.certificate.read_bytes())
        provisioning.complete_folder(server, authority.certificate, roster)
        load_task(server)
        written = []
        for place, request in enumerate(requests):
            name = f"client-{place}"
            authority.keep(name, certificates.certify_client(authority.issued, name, request.certificate))
            written.append(bundles.write_bundle(authority, place, authority.folder / membership.BUNDLES))
    return server, written


def _member(request: Request) -> Member:
    check_name(request.name)
    return request.member()


def is_new(folder: Path) -> bool:
    """Tell whether a folder is no party's yet: a request's, or one that a crash left unfinished."""
    return not (folder / public_facts.PUBLIC).is_file() or (folder / layout.UNFINISHED).is_file()


def installed(
    folder: Path,
    bundle: Bundle,
    task: Path | None = None,
    budget: float | None = None,
    plugins: Sequence[Path] = (),
) -> tuple[Party, float | None]:
    """Install a bundle; a new client also gets its task, its plugins and its budget.

    Return the party, and its limit on ε. A folder in which something is wrong is left as it was: with its
    keys and its request alone. One in which a crash came in between is a new one still.
    """
    if not is_new(folder):
        return bundles.install(folder, bundle), None
    before = set(folder.iterdir()) if folder.is_dir() else set()
    try:
        for given in ([] if task is None else [task]) + list(plugins):
            if not given.is_file():
                raise UserError(f"there is no {given}")
        party = bundles.begin(folder, bundle)
        if task is not None:
            copy_task(task.resolve(), party.folder, layout.TASK)
        _copy_plugins(party, plugins)
        limit = write_budgets([party], load_task(party), budget)
        (folder / layout.UNFINISHED).unlink()
        return party, limit
    except UserError:
        for path in set(folder.iterdir()) - before if folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _copy_plugins(party: Party, given: Sequence[Path]) -> None:
    """Put the plugins where the configuration looks for them; it has their digests, and refuses others."""
    named = [name.partition("#")[0] for name in tomllib.loads(party.config.read_text()).get("plugins", [])]
    wanted = {name for name in named if name.endswith(".py")}
    for path in given:
        if path.name not in wanted:
            allowed = ", ".join(sorted(wanted)) or "none"
            raise UserError(f"the configuration has no plugin {path.name!r}; allowed: {allowed}")
        files.write_atomically(party.folder / path.name, path.read_bytes())
    if missing := sorted(name for name in wanted if not (party.folder / name).is_file()):
        raise UserError(
            f"the configuration wants {', '.join(missing)}, which no bundle carries: get the file from who "
            "founded the federation, look at it, and give it with --plugin"
        )
