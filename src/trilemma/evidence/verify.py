"""Check a pack: signatures, digests, every page, every ε. It runs no code that lies in the pack.

Every page is made again from `facts.json` and compared. ε is computed again from each ledger's releases, the
guarantee from release and threat model, and both are compared with what the configuration says. Where the
server's folder is given, and it kept a transcript, the run is replayed.
"""

from __future__ import annotations

import hashlib
import math
import platform
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trilemma import aggregation
from trilemma.aggregation.steps.weights import normalised
from trilemma.audit.final.found import ATTACKS, Attacks
from trilemma.base.errors import PrivacyError, UserError
from trilemma.base.typed import typed
from trilemma.evidence.facts import PackFacts
from trilemma.evidence.gather import WRITERS, digest_of, digest_of_files, hidden_by
from trilemma.evidence.mapping import MAPPING, rows
from trilemma.evidence.pack import (
    AUTHORITY,
    CONFIG,
    FACTS,
    LEDGERS,
    ROSTER,
    ByServer,
    PackFile,
    digests,
    pages,
    statement_pdf,
)
from trilemma.evidence.vouched import LedgerAccount, Vouched
from trilemma.federation.identity import certificates, signed_files
from trilemma.federation.identity.rosters import SignedRoster
from trilemma.federation.party.facts import installed
from trilemma.privacy.types import Release


@dataclass(frozen=True)
class Verified:
    """One thing that was checked. `holds` None: it could not be, or need not be, and `words` say why."""

    what: str
    holds: bool | None
    words: str

    @property
    def line(self) -> str:
        """The finding in a line."""
        mark = {True: "holds", False: "REFUSED", None: "not checked"}[self.holds]
        return f"{mark}: {self.what}: {self.words}"


def refused(found: list[Verified]) -> list[str]:
    """Return what is wrong."""
    return [f"{one.what}: {one.words}" for one in found if one.holds is False]


def verify(pack: Path, authority: bytes | None = None, server: Path | None = None) -> list[Verified]:
    """Check a pack.

    `authority` is the certificate of the federation's authority as the reader knows it, `server` the
    server's folder, for a replay.
    """
    manifest = PackFile.load(pack)
    found = [*_contents(pack, manifest)]
    if refused(found):
        return found  # nothing in a changed folder is worth reading
    found += [_checked("signature", lambda: _signature(pack, manifest, authority))]
    try:
        facts = signed_files.read((pack / FACTS).read_text("utf-8"), PackFacts)
    except (UserError, OSError, ValueError) as error:
        return [*found, Verified(FACTS, False, str(error))]
    roster, accounts = None, dict[int, LedgerAccount]()
    if facts.kind == "federation":
        found.append(_checked("roster", lambda: _roster(pack, facts)))
        if found[-1].holds:
            roster = SignedRoster.load(pack / ROSTER, pack / AUTHORITY)
    for path in sorted((pack / LEDGERS).glob("*")) if roster else ():
        check = partial(_ledger, path, roster, facts, accounts)
        found.append(_checked(f"{LEDGERS}/{path.name}", check))
    found.append(_checked("guarantee", lambda: _guarantee(facts)))
    found.append(_checked("configuration", lambda: _configuration(pack, facts)))
    found.append(_checked("robustness", lambda: _robustness(pack, facts)))
    found += _pages(pack, facts, accounts)
    found.append(_checked(MAPPING, lambda: _mapping(pack)))
    if roster is not None:
        found += _approvals(pack, roster)
    found.append(_replay(facts, server))
    return found


def alike(one: Any, other: Any) -> bool:
    """Tell whether two values are the same but for last digits, which other machines may round otherwise.

    >>> alike({"a": [1.0, "x"]}, {"a": (1.0 + 1e-12, "x")}), alike({"a": 1.0}, {"a": 1.1}), alike(None, 0.0)
    (True, False, False)
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _checked(what: str, check: Callable[[], str]) -> Verified:
    try:
        return Verified(what, True, check())
    except (UserError, PrivacyError, ValueError, OSError) as error:
        return Verified(what, False, str(error))


def _contents(pack: Path, manifest: PackFile) -> Iterator[Verified]:
    try:
        there = digests(pack)
    except UserError as error:
        yield Verified("contents", False, str(error))
        return
    said = manifest.pack.files
    for name in sorted({*there, *said}):
        if name not in there:
            yield Verified(name, False, "it is missing")
        elif name not in said:
            yield Verified(name, False, "it was added: the list of contents does not have it")
        elif there[name] != said[name]:
            yield Verified(
                name, False, "it was changed: its digest is another one than when the pack was made"
            )
    if there == said:
        yield Verified("contents", True, f"{len(said)} files are as they were when the pack was made")


def _signature(pack: Path, manifest: PackFile, authority: bytes | None) -> str:
    if manifest.by is None:
        raise UserError("nobody signed this pack: whoever can write a folder can have made it")
    own = (pack / AUTHORITY).read_bytes() if (pack / AUTHORITY).is_file() else b""
    if own and not isinstance(manifest.by, ByServer):
        raise UserError("a federation's pack is signed by its server")
    if authority is not None and not (own and certificates.same_authority(own, authority)):
        raise UserError("it is of another authority than the one you know")
    by = manifest.by.check(manifest.pack.message, authority or own)
    if authority is None and own:
        by += f"; compare its authority's fingerprint with the one you know: {certificates.fingerprint(own)}"
    return by


def _roster(pack: Path, facts: PackFacts) -> str:
    roster = SignedRoster.load(pack / ROSTER, pack / AUTHORITY)
    if roster.federation != facts.name:
        raise UserError(f"it is of the federation {roster.federation!r}, the facts of {facts.name!r}")
    if [(one.name, one.removed) for one in roster.clients] != [
        (one.name, one.removed) for one in facts.parties
    ]:
        raise UserError("it names other parties than the facts do")
    return f"number {roster.serial}, {len(roster.keys.members)} members, signed by the authority"


def _ledger(
    path: Path, roster: SignedRoster | None, facts: PackFacts, accounts: dict[int, LedgerAccount]
) -> str:
    assert roster is not None
    one = Vouched.load(path).check(roster)
    if path.name != f"client-{one.client}.json" or one.run != facts.run:
        raise UserError(f"it is about client {one.client} in run {one.run!r}")
    accounts[one.client] = one
    many = sum(entry.count for entry in one.releases)
    return f"signed by its owner; ε = {one.epsilon:.6g} follows from its {many} releases"


def _guarantee(facts: PackFacts) -> str:
    found = facts.noise.judged().plain()
    if not alike(found, facts.noise.verdict):
        raise UserError(f"release and threat model give {found}, the facts say {facts.noise.verdict}")
    return "it follows from release, threat model and rounds"


def _configuration(pack: Path, facts: PackFacts) -> str:
    """Compare facts with the configuration, read as plain values: its plugins are code."""
    said: dict[str, Any] = tomllib.loads((pack / CONFIG).read_text("utf-8"))
    release, threat = facts.noise.release, facts.noise.threat
    pairs = {
        "[algorithm] name": (said["algorithm"]["name"], facts.algorithm),
        "[aggregation] rule": (said["aggregation"]["rule"], facts.rule),
        "[run] rounds": (said["run"]["rounds"], facts.rounds),
        "[privacy] delta": (said["privacy"]["delta"], facts.noise.delta),
    }
    if threat is not None:
        pairs["[privacy] threat"] = (said["privacy"]["threat"], threat["name"])
    if release is not None and "clip" in said["privacy"]:
        pairs["[privacy] clip"] = (said["privacy"]["clip"], release["clip"])
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise UserError(f"{name} is {ours!r}, the facts say {theirs!r}")
    return f"{', '.join(pairs)} are what the facts say"


def _robustness(pack: Path, facts: PackFacts) -> str:
    """Compute κ and what liars can hide again; rules of plugins are not known here."""
    said, robust = tomllib.loads((pack / CONFIG).read_text("utf-8")), facts.robust
    release = None if facts.noise.release is None else typed(Release, facts.noise.release)
    neighbours = said["privacy"].get("neighbours")
    shares = normalised(said["federation"].get("weights", ()))
    if shares != robust.weights:
        raise UserError("the configuration has other weights than the facts")
    n, f = robust.heard, robust.tolerated
    hidden = hidden_by(release, n, f, facts.dim, facts.rounds, neighbours, shares)
    if not alike(hidden, robust.hidden):
        raise UserError(f"liars can hide {hidden}, the facts say {robust.hidden}")
    if said.get("plugins"):
        return "what liars can hide follows; κ was not computed: a plugin's rule is not known here"
    kappa = aggregation.parse(robust.rule, f, shares).kappa(n)
    if not alike(kappa, robust.kappa):
        raise UserError(f"κ of {robust.rule} is {kappa}, the facts say {robust.kappa}")
    return "κ and what liars can hide follow from rule, f, n and noise"


def _pages(pack: Path, facts: PackFacts, accounts: dict[int, LedgerAccount]) -> Iterator[Verified]:
    """Make every page again, where this is the version that made them."""
    made = facts.made_with.get("trilemma")
    if made != installed("trilemma"):
        yield Verified("pages", None, f"version {made} wrote them, this is {installed('trilemma')}")
        return
    there = digests(pack)
    attacks = Attacks.load(pack / ATTACKS) if ATTACKS in there else None
    if attacks is not None and attacks.model_digest != facts.model_digest:
        yield Verified(ATTACKS, False, "these attacks were on another model")
    again = pages(facts, accounts, attacks, [*there])
    for name, text in again.items():
        same = (pack / name).is_file() and (pack / name).read_text("utf-8") == text
        yield Verified(
            name, same, "it says what the facts say" if same else "it says something else than the facts"
        )
    if "statement.pdf" in there:
        here = {name: installed(name) for name in WRITERS} | {"python": platform.python_version()}
        other = [f"{name} {one}" for name, one in here.items() if facts.made_with.get(name) != one]
        if other:
            words = f"here are {', '.join(other)}, which write other bytes; read statement.html"
            yield Verified("statement.pdf", None, words)
            return
        digest = hashlib.sha256(statement_pdf(facts, accounts, attacks, pack)).hexdigest()
        same = digest == there["statement.pdf"]
        yield Verified(
            "statement.pdf", same, "it says what the facts say" if same else "it is not what follows"
        )


def _mapping(pack: Path) -> str:
    there = digests(pack)
    text = (pack / MAPPING).read_text("utf-8")
    for line in text.splitlines():
        file = line.partition("](")[2].partition(")")[0].partition("#")[0]
        if file and file not in there:
            raise UserError(f"a row rests on {file}, which is not in the pack")
    return f"{len(rows(there))} rows, each with its file"


def _approvals(pack: Path, roster: SignedRoster) -> Iterator[Verified]:
    from trilemma.evidence.approvals import approvals

    who, wrong = approvals(pack, roster)
    yield from (Verified(*_split(one)) for one in wrong)
    names = ", ".join(f"client {one}" for one in sorted(who)) or "nobody yet"
    yield Verified("approvals", True if who else None, f"by {names}, under the roster in the pack")


def _split(text: str) -> tuple[str, bool, str]:
    what, _, words = text.partition(": ")
    return what, False, words


def _replay(facts: PackFacts, server: Path | None) -> Verified:
    """Take every step of the server again, where its folder is here."""
    if facts.transcript is None:
        return Verified("transcript", None, facts.transcript_why)
    if server is None:
        return Verified("transcript", None, "give --server FOLDER to replay the run")
    return _checked("transcript", lambda: _replayed(facts, server))


def _replayed(facts: PackFacts, server: Path) -> str:
    from trilemma.federation.party.layout import server_in
    from trilemma.federation.server.replay import differences
    from trilemma.federation.server.transcript import Transcript
    from trilemma.report.loading import load

    party = server_in(server)
    folder = Transcript(party.run_folder(facts.run)).folder
    if digest_of_files({path.name: path for path in folder.glob("*")}) != facts.transcript:
        raise UserError("the server's folder has another transcript than the one of the pack")
    replayed, wrong = differences(party, facts.run)
    if wrong:
        raise UserError("; ".join(wrong))
    gone = sorted({one.client for one in replayed.expelled})
    if gone != sorted({one.client for one in facts.robust.expelled}):
        raise UserError(f"from the messages follows that {gone} are expelled; the facts say otherwise")
    if digest_of(load(server, facts.run).params()) != facts.model_digest:
        raise UserError("the model in the server's folder is another one than that of the pack")
    return f"{replayed.rounds} rounds were taken again: the same model to the bit, the same expulsions"
