"""One folder per party: what each holds, and what nobody else may.

    federation/
      authority/      the CA's private key and what it signed: off-line but when somebody comes or goes
      server/         TLS certificate and key, roster, the run configuration
      client-0/ …     TLS certificate and key, identity key, roster, budget, the run configuration

A party's folder holds its own secrets only, so handing `client-3/` to party 3 hands over exactly what that
party needs. `federation.toml` is the same everywhere and public. Every party reads its own copy of
`config.toml`: a server that changes its copy is refused by the clients, it cannot lower their noise.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from trilemma.base.errors import UserError
from trilemma.base.files import ends
from trilemma.federation.identity.rosters import SignedRoster
from trilemma.federation.party.agreed import Agreed
from trilemma.federation.party.public_facts import PUBLIC, Federation
from trilemma.privacy.secrets import Identity, Roster
from trilemma.task.file import task_digest

CONFIG = "config.toml"
TASK = "task.py"
RUNNING = "run"
PROCESS = "process"
"""What a party's process is called: its state is in run/process.json, its log in run/process.log."""
UNFINISHED = "unfinished"
"""There while a new client's folder is being made: its task, its plugins and its budget may be missing."""
REPRODUCIBLE = "TRILEMMA_REPRODUCIBLE"
"""Environment variable without which a client whose noise is no secret refuses to work."""
METRICS = "TRILEMMA_METRICS"
"""Environment variable of a party's process: the port of the server's metrics on loopback.

Client i's is the one i + 1 after it, so that all parties of a pilot have one of their own. Off without it.
"""
PARTY_NAME = re.compile(r"server|client-[0-9]+")
"""What a party's folder is called, where its owner calls it nothing else."""
NO_FACTS = f"there is no {PUBLIC} in the folder (if that is a link: is its disk there?)"
FACTS_BACK = (
    "copy it from another party's folder: it is the same everywhere (a new client gets it by `trilemma "
    "federation install`)"
)
WITHOUT_FACTS = f"{NO_FACTS}; {FACTS_BACK}"
"""What is wrong with a party without its public facts, what to do about it, and both."""
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Reproducible:
    """Seeds of a client whose noise and batches can be drawn again: for tests."""

    noise: bytes = field(repr=False)
    batches: int = field(repr=False)


class _Place:
    """Where one of a party's files is; `checked`, so that it is no pipe or device, which may never end."""

    def __init__(self, *parts: str, checked: bool = True) -> None:
        self._parts, self._checked = parts, checked

    def __get__(self, party: Party, owner: type[Party]) -> Path:
        if party is None:
            raise AttributeError("a party has places, not their kind")
        path = party.folder.joinpath(*self._parts)
        if self._checked and not ends(path):
            raise UserError(f"{path} is no file: delete it, and bring back what was there")
        return path


@dataclass(frozen=True)
class Party:
    """One party's folder. `client` is None for the server."""

    folder: Path
    client: int | None

    config = _Place(CONFIG)
    """This party's copy of the run configuration."""
    allowed = _Place("allowed.toml")
    """What this client's owner allows."""
    authority = _Place("tls", "ca.crt")
    """The CA certificate: a client's only trusted root."""
    roster = _Place("roster.json")
    """Who is in the federation, signed by its authority."""
    known = _Place("known.json")
    """The identities this client counts on, whoever else is on the roster: its owner's list."""
    installing = _Place("installing.json")
    """The bundle that is being installed: there while not all of it is in its place."""
    installed = _Place("memory", "bundle")
    """Which bundle was installed last."""
    identity = _Place("secrets", "identity.key")
    """A client's Ed25519 identity key."""
    budget = _Place("budget.toml")
    """A client's own limit on what it spends, over all runs."""
    ledger = _Place("state", "ledger")
    """What a client has released and what it has cost."""
    ledger_head = _Place("memory", "ledger-head")
    """How far the ledger had come, a second time: `state/` may be deleted, or an old copy put back."""
    ledgers_seen = _Place("memory", "ledgers-seen")
    """How far everybody else's ledger had come when this party last saw it."""
    _server_crt, _server_key = _Place("tls", "server.crt"), _Place("secrets", "server.key")
    _client_crt, _client_key = _Place("tls", "client.crt"), _Place("secrets", "client.key")
    proposals = _Place("proposals", checked=False)
    """What was proposed to this client and not allowed."""
    state = _Place("state", checked=False)
    """What must survive a crash."""
    lock = _Place("lock", checked=False)
    """Held by whoever answers for this party: one at a time, whatever processes there are."""
    running = _Place(RUNNING, checked=False)
    """Records and logs of this party's processes."""
    log = _Place(RUNNING, "node.log", checked=False)
    """What a client does not tell the server: why it refused, in full."""
    ready = _Place(RUNNING, "ready", checked=False)
    """There while this party's process is, from when it has all it needs."""
    process_log = _Place(RUNNING, f"{PROCESS}.log", checked=False)
    """What this party's process says."""

    @classmethod
    def open(cls, folder: Path) -> Party:
        """Open a party's folder, or say what is missing."""
        called = folder.absolute().name  # a link is called what it is called here, wherever it leads
        folder = folder.resolve()
        _ = cls(folder, None).config  # others than we read it, too
        if not (folder / PUBLIC).is_file():
            if is_partys(folder):
                raise UserError(f"{folder.name}: {WITHOUT_FACTS}")
            raise UserError(f"{folder} is not a party's folder: it has no {PUBLIC}")
        called = called if PARTY_NAME.fullmatch(called) else folder.name
        if called == "server":
            return cls(folder, None)
        prefix, _, number = called.rpartition("-")
        if prefix == "client" and number.isdigit():
            return cls(folder, int(number))
        unnamed = cls(folder, None)
        if not unnamed.identity.is_file():
            raise UserError(f"{folder.name!r} is no party; allowed: server, client-0, client-1, …")
        return cls(folder, unnamed.signed_roster.place_of(Identity.load(unnamed.identity).public))

    @property
    def name(self) -> str:
        """`server` or `client-i`."""
        return "server" if self.client is None else f"client-{self.client}"

    @property
    def federation(self) -> Federation:
        """The public facts, as this party has them."""
        return Federation.parse((self.folder / PUBLIC).read_text(errors="replace"))

    @property
    def agreed(self) -> Agreed:
        """What it has agreed on with the others, as its folder has it now."""
        code = "" if self.task is None else task_digest(self.task)
        return Agreed(self.config.read_bytes(), self.federation, self.signed_roster, code)

    @property
    def certificate(self) -> Path:
        """The certificate this party shows to others."""
        return self._server_crt if self.client is None else self._client_crt

    @property
    def certificate_key(self) -> Path:
        """The private key of this party's certificate."""
        return self._server_key if self.client is None else self._client_key

    @property
    def signed_roster(self) -> SignedRoster:
        """The roster in force here."""
        return SignedRoster.load(self.roster, self.authority)

    @property
    def keys(self) -> Roster:
        """Everybody's identity public keys, as the roster in force has them."""
        return self.signed_roster.keys

    @property
    def removed(self) -> bool:
        """Whether this client was removed, as far as its own roster says."""
        return self.client is not None and self.roster.is_file() and self.client in self.keys.removed

    @property
    def reproducible(self) -> Reproducible | None:
        """Seeds in place of the system's generator: to compare a run with a simulation, and only there."""
        path = self.folder / "secrets" / "reproducible-noise"
        if not path.is_file():
            return None
        if os.environ.get(REPRODUCIBLE) != "1":
            raise UserError(
                f"{path}: noise and batches from a file are no secret, and no real run may have them; delete "
                f"it. (A test that must reproduce a run sets {REPRODUCIBLE}=1 too.)"
            )
        noise, batches = bytes.fromhex(path.read_text()), self.folder / "secrets" / "reproducible-batches"
        return Reproducible(noise, int(batches.read_text() if batches.is_file() else noise.hex(), 16))

    def check(self) -> None:
        """Refuse to work in a folder that is not complete, or whose secrets others here can read."""
        if (self.folder / UNFINISHED).is_file():
            raise UserError(f"{self.folder} is not complete: install the bundle once more, as it was begun")
        own = () if self.client is None else (self.identity,)
        tls = (self.authority, self.certificate, self.certificate_key)
        for path in (self.config, self.roster, *tls, *own):
            if not path.is_file():
                raise UserError(f"{path} is missing: {self.name}'s folder is not complete; copy it once more")
        for path in sorted((self.folder / "secrets").iterdir()):
            mode = stat.S_IMODE(path.stat().st_mode)
            if os.name == "posix" and mode & 0o077:
                raise UserError(
                    f"{path} can be read by others (mode {mode:o}); only its owner may: chmod 600 {path}"
                )
        _ = self.reproducible  # refused in a real run

    @property
    def task(self) -> Path | None:
        """The party's own model and data, where it brings them."""
        path = self.folder / TASK
        return path if path.is_file() else None

    def run_folder(self, run: str) -> Path:
        """Return where the memory of a run is kept. The name may come from a stranger: it stays a name.

        >>> Party(Path("/fed/client-0"), 0).run_folder("../../secrets")
        Traceback (most recent call last):
        trilemma.base.errors.UserError: '../../secrets' is no name for a run; allowed: letters, ...
        """
        if not RUN_NAME.fullmatch(run):
            raise UserError(f"{run!r} is no name for a run; allowed: letters, digits, . _ -, at most 64")
        return self.state / "runs" / run


def metrics_port(party: Party, base: str | None) -> int | None:
    """Return where a party's metrics are, given the first port; None where they are off.

    >>> metrics_port(Party(Path("client-2"), 2), "9400"), metrics_port(Party(Path("server"), None), None)
    (9403, None)
    >>> metrics_port(Party(Path("server"), None), "many")
    Traceback (most recent call last):
    trilemma.base.errors.UserError: TRILEMMA_METRICS = 'many': allowed is a port, 1 to 65535
    """
    if not base or base == "0":
        return None
    port = int(base) + (0 if party.client is None else 1 + party.client) if base.isdigit() else 0
    if not 1 <= port <= 65535:
        raise UserError(f"{METRICS} = {base!r}: allowed is a port, 1 to 65535")
    return port


def parties(folder: Path) -> list[Party]:
    """Return the parties in `folder`: itself where it is one, else all it contains, the server first.

    Those without their public facts are left out: `without_facts` names them.
    """
    found = [Party.open(path) for path in party_folders(folder) if (path / PUBLIC).is_file()]
    if not found:
        raise UserError(f"{', '.join(without_facts(folder))}: {WITHOUT_FACTS}")
    return sorted(found, key=lambda party: -1 if party.client is None else party.client)


def party_folders(folder: Path) -> list[Path]:
    """Return the parties' folders in `folder`, or itself, also of parties without their public facts.

    Such a folder is known by the secrets in it, or, beside another party's, by its name. One folder is one
    party, whatever links lead to it.
    """
    if (folder / PUBLIC).is_file():
        return [folder]
    inside = [path for path in sorted(folder.glob("*")) if path.is_dir() and _may_be_looked_into(path)]
    inside += [path for path in folder.glob("*") if path.is_symlink() and not path.exists()]
    own = {path.resolve(): path for path in sorted(inside, key=lambda path: not path.is_symlink())}
    inside = [path for path in inside if own[path.resolve()] == path]
    if any(map(is_partys, inside)):
        return [path for path in inside if is_partys(path) or PARTY_NAME.fullmatch(path.name)]
    if is_partys(folder):
        return [folder]
    raise UserError(f"there is no federation in {folder}; make one with `trilemma federation init {folder}`")


def _may_be_looked_into(folder: Path) -> bool:
    """Tell whether it is ours to read: not another user's party, and not the lost+found of a disk."""
    try:
        os.stat(folder / PUBLIC)
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def is_partys(folder: Path) -> bool:
    """Tell whether a folder is a party's, with its public facts or without."""
    return (folder / PUBLIC).is_file() or (folder / "secrets").is_dir()


def without_facts(folder: Path) -> dict[str, Path]:
    """Return the folders in `folder` that lack the public facts, by name, links that lead nowhere too."""
    return {path.absolute().name: path for path in party_folders(folder) if not (path / PUBLIC).is_file()}


def server_in(folder: Path) -> Party:
    """Return the server of the federation in `folder`, or say that this is done where the server is."""
    first = parties(folder)[0]
    if "server" in without_facts(folder):
        raise UserError(f"server: {WITHOUT_FACTS}")
    if first.client is not None:
        raise UserError(f"there is no server's folder in {folder}: this is done where the server is")
    return first
