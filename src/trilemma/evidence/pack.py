"""The folder: what lies in it, and the signature that holds it together.

    pack/
      statement.html, .pdf  the promise in words; page one is for who decides
      attacks.json, .html   what attacks on the model found (`trilemma attack`), where that was done
      model-card.md, mapping.md, sbom.cdx.json, utility.png
      facts.json            the one value that every page is made from
      config.toml           the configuration
      roster.json, ca.crt   who took part, signed by the federation's authority
      ledgers/client-i.json what each party has spent, signed by its owner
      pack.json             names and digests of all of the above, and a signature
      approvals/            owners' approvals of this pack; they sign the digest of pack.json's content

A federation's pack is signed with its server's key, whose certificate the authority issued; a simulation's
with a key file that is asked for. What is signed is the canonical text of the content (`signed_files`).
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from trilemma.audit.final.found import ATTACKS, Attacks
from trilemma.base.errors import PrivacyError, UserError
from trilemma.evidence.blocks import Block, Heading, Rows, Words, as_html, as_markdown, as_pdf
from trilemma.evidence.card import card
from trilemma.evidence.facts import Digest, PackFacts
from trilemma.evidence.gather import Gathered
from trilemma.evidence.mapping import MAPPING, mapping
from trilemma.evidence.sbom import SBOM, sbom
from trilemma.evidence.statement import CURVE, statement
from trilemma.evidence.vouched import LedgerAccount, Vouched
from trilemma.federation.identity import certificates, signed_files
from trilemma.federation.identity.rosters import Key, Signature
from trilemma.federation.identity.signed_files import Content, Ecdsa, Strict
from trilemma.federation.party.layout import Party
from trilemma.privacy.secrets import Identity, check_signature

MANIFEST, FACTS, CONFIG, ROSTER, AUTHORITY = "pack.json", "facts.json", "config.toml", "roster.json", "ca.crt"
APPROVALS, LEDGERS = "approvals", "ledgers"
LARGEST = 64 << 20
"""Bytes of a file of a pack at most."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}(/[A-Za-z0-9][A-Za-z0-9._-]{0,80})?")
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]


class Contents(Content):
    """What is signed: the federation, the run, and every file's digest."""

    heading = b"trilemma evidence pack v1"
    name: str
    run: str
    files: dict[Name, Digest]


class ByServer(Strict):
    """The server's signature; its certificate is one of the authority's."""

    certificate: Annotated[str, Field(max_length=8192)]
    signature: Ecdsa

    def check(self, message: bytes, authority: bytes) -> str:
        """Return who signed."""
        pem = self.certificate.encode()
        certificates.check_server(pem, authority)
        refusal = PrivacyError("the server has not signed this")
        certificates.check_signed(pem, message, bytes.fromhex(self.signature), refusal)
        return f"the server of the federation, key {certificates.key_digest(pem)[:16]}…"


class ByKey(Strict):
    """The signature of a key that nobody vouches for: whoever knows the key knows who it is."""

    key: Key
    signature: Signature

    def check(self, message: bytes, authority: bytes) -> str:
        """Return who signed."""
        check_signature(bytes.fromhex(self.key), message, bytes.fromhex(self.signature))
        return f"key {self.key[:16]}…, which nobody here vouches for: compare it with the one you know"


class PackFile(Strict):
    """`pack.json`."""

    pack: Contents
    by: ByServer | ByKey | None = None

    @classmethod
    def load(cls, pack: Path) -> PackFile:
        """Read a pack's list of contents; its signature is checked by `verify`."""
        try:
            return signed_files.read(signed_files.text_in(pack / MANIFEST, 1 << 20), cls)
        except UserError as error:
            raise UserError(f"{pack} is no evidence pack: {error}") from None


def write(
    gathered: Gathered,
    out: Path,
    ledgers: Mapping[int, Vouched],
    attacks: Attacks | None = None,
    key: Path | None = None,
) -> list[str]:
    """Write a pack into a new folder, and return what was left out of it."""
    if out.exists():
        raise UserError(f"{out} is there already: name a new folder")
    facts = gathered.facts
    if attacks is not None and attacks.model_digest != facts.model_digest:
        raise UserError("these attacks were on another model than the one of this run")
    out.mkdir(parents=True)
    try:
        facts = _fill(gathered, out, ledgers, attacks)
        message = Contents(name=facts.name, run=facts.run, files=digests(out))
        by = _signed(message, gathered.server, key)
        (out / MANIFEST).write_text(signed_files.text_of(PackFile(pack=message, by=by)), "utf-8")
    except BaseException:
        shutil.rmtree(out)
        raise
    return list(facts.left_out)


def _fill(
    gathered: Gathered, out: Path, ledgers: Mapping[int, Vouched], attacks: Attacks | None
) -> PackFacts:
    """Write every file but the list of them; return the facts with what is left out."""
    facts, left_out = gathered.facts, []
    (out / CONFIG).write_bytes(gathered.config.read_bytes())
    accounts: dict[int, LedgerAccount] = {}
    if gathered.server is not None:
        roster = gathered.server.signed_roster
        (out / AUTHORITY).write_bytes(gathered.server.authority.read_bytes())
        roster.save(out / ROSTER)
        (out / LEDGERS).mkdir()
        for client, one in sorted(ledgers.items()):
            accounts[client] = one.check(roster)
            (out / LEDGERS / f"client-{client}.json").write_text(one.text, "utf-8")
        missing = [place for place in roster.keys.members if place not in accounts]
        left_out += [f"the ledger of client {place}: its owner did not vouch for it" for place in missing]
    if facts.curves:
        draw(facts, out / CURVE)
    if attacks is not None:
        (out / ATTACKS).write_text(attacks.text, "utf-8")
    try:
        (out / SBOM).write_text(sbom(facts.made), "utf-8")
    except UserError as error:
        left_out.append(str(error))
    try:
        as_pdf("", [], out, facts.made)
    except UserError as error:
        left_out.append(str(error))
    facts = facts.model_copy(update={"left_out": tuple(left_out)})
    (out / FACTS).write_text(signed_files.text_of(facts), "utf-8")
    for name, text in pages(facts, accounts, attacks, [*digests(out)]).items():
        (out / name).write_text(text, "utf-8")
    if not any("fpdf2" in one for one in left_out):
        (out / "statement.pdf").write_bytes(statement_pdf(facts, accounts, attacks, out))
    return facts


def pages(
    facts: PackFacts, accounts: Mapping[int, LedgerAccount], attacks: Attacks | None, there: Sequence[str]
) -> dict[str, str]:
    """Return every page that follows from the facts, by name; `there` are the other files of the pack."""
    found = {
        "statement.html": as_html(f"Statement: {facts.name}", statement(facts, accounts, attacks)),
        "model-card.md": card(facts, accounts, attacks),
    }
    if attacks is not None:
        found["attacks.html"] = as_html("Attacks on the final model", attack_page(attacks))
    return found | {MAPPING: as_markdown(mapping({*there, *found}))}


def statement_pdf(
    facts: PackFacts, accounts: Mapping[int, LedgerAccount], attacks: Attacks | None, folder: Path
) -> bytes:
    """Return the statement as a PDF."""
    return as_pdf(f"Statement: {facts.name}", statement(facts, accounts, attacks), folder, facts.made)


def attack_page(attacks: Attacks) -> list[Block]:
    """Return the page about attacks: a bound and a measurement side by side."""
    rows = tuple(
        (
            one.attack,
            one.how,
            f"{one.measure}: {one.found:.4f}"
            + (f" (surely at least {one.low:.4f})" if one.low != one.found else "")
            + ("" if one.chance is None else f"; blind guessing {one.chance:.4f}"),
            "nothing is said" if one.allowed is None else f"{one.allowed:.4f}",
            one.why,
        )
        for one in attacks.tried
    )
    return [
        Heading("What attacks on the final model found", 1),
        Words(
            f"Promise: {attacks.promise}. An attack that stays below what is allowed proves nothing: a "
            "better one may find more, up to the bound. One that exceeds it refutes the promise."
        ),
        Words(
            "No ε pays for the measurements on this page. They were made with the records themselves, so "
            "they tell something about those: publish them only where that is allowed.",
            strong=True,
        ),
        Rows(rows, ("attack", "what it does", "measured", "allowed", "why"), (14, 27, 24, 10, 25)),
        Rows(attacks.skipped, ("not tried", "why"), (25, 75)) if attacks.skipped else Words(""),
    ]


def draw(facts: PackFacts, path: Path) -> None:
    """Draw the scores over rounds."""
    import numpy as np

    from trilemma.report import curves

    shown = [one for one in facts.curves if one.name != "loss"] or list(facts.curves)
    lines = [
        curves.Curve(
            one.name,
            np.array([x for x, _ in one.points]),
            np.array([[y for _, y in one.points]]),
            one.cover != "paid",
        )
        for one in shown
    ]
    curves.plot_curves(lines, path, f"{facts.name}: dashed is paid for by no ε", "score")


def digests(pack: Path) -> dict[str, str]:
    """Return the digest of every file of a pack but the list of them and approvals; refuse links."""
    found = {}
    for path in sorted(pack.rglob("*")):
        name = path.relative_to(pack).as_posix()
        if path.is_symlink() or (not path.is_dir() and not path.is_file()):
            raise UserError(f"{name} is no plain file")
        if path.is_dir() or name == MANIFEST or name.startswith(f"{APPROVALS}/"):
            continue
        if path.stat().st_size > LARGEST:
            raise UserError(f"{name} has more than {LARGEST} bytes")
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _signed(content: Contents, server: Party | None, key: Path | None) -> ByServer | ByKey | None:
    if key is not None:
        if not key.is_file():
            Identity.generate().save(key)
        one = Identity.load(key)
        return ByKey(key=one.public.hex(), signature=one.sign(content.message).hex())
    if server is None:
        return None
    issued = certificates.Issued(server.certificate.read_bytes(), server.certificate_key.read_bytes())
    signature = issued.sign(content.message).hex()
    return ByServer(certificate=issued.certificate.decode(), signature=signature)
