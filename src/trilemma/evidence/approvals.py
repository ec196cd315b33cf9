"""Approvals: owners sign a pack's digest, and an export waits for as many as were agreed on.

    {"approval": {"pack": digest, "federation": …, "client": …, "identity": …}, "signature": …}

`[federation] export = {needs = 2}` is part of what all parties agreed on. The roster in force where the model
is exported decides whose signature counts, not the one in the pack. This keeps an honest operator from
exporting too early. Somebody who has a party's folder has the model, whatever this file says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from trilemma.base import files
from trilemma.base.errors import PrivacyError, UserError
from trilemma.evidence.facts import Digest, PackFacts
from trilemma.evidence.pack import APPROVALS, Contents, PackFile, digests
from trilemma.evidence.vouched import check_owner
from trilemma.federation.identity import signed_files
from trilemma.federation.identity.rosters import Key, Signature, SignedRoster
from trilemma.federation.identity.signed_files import Content, Strict
from trilemma.federation.party.layout import Party
from trilemma.privacy.secrets import Identity, check_signature


class Approval(Content):
    """What an owner signs."""

    heading = b"trilemma export approval v1"
    pack: Digest
    federation: Annotated[str, Field(max_length=200)]
    client: int
    identity: Key


class Approved(Strict):
    """The file."""

    approval: Approval
    signature: Signature

    def check(self, pack: Contents, roster: SignedRoster) -> int:
        """Return whose approval it is; refuse one of another pack, or whose signer does not count."""
        said = self.approval
        if said.pack != pack.digest:
            raise UserError("it approves another pack, or this one as it was before it changed")
        if said.federation != roster.federation:
            raise UserError(f"it is of the federation {said.federation!r}")
        check_owner(roster, said.client, said.identity)
        check_signature(bytes.fromhex(said.identity), said.message, bytes.fromhex(self.signature))
        return said.client


def approve(party: Party, pack: Path) -> Path:
    """Sign a pack's digest; for a client's owner, who has read it. Return the file."""
    from trilemma.evidence.verify import refused, verify

    if party.client is None:
        raise UserError(f"{party.folder} is the server's: owners of clients approve")
    found = verify(pack, authority=party.authority.read_bytes())
    wrong = refused([one for one in found if not one.what.startswith(f"{APPROVALS}/")])
    if wrong:
        raise UserError(f"{pack} is not approved: {wrong[0]}")
    content, identity = PackFile.load(pack).pack, Identity.load(party.identity)
    check_owner(party.signed_roster, party.client, identity.public.hex())
    approval = Approval(
        pack=content.digest,
        federation=party.signed_roster.federation,
        client=party.client,
        identity=identity.public.hex(),
    )
    signed = Approved(approval=approval, signature=identity.sign(approval.message).hex())
    path = pack / APPROVALS / f"client-{party.client}.json"
    path.parent.mkdir(exist_ok=True)
    files.write_atomically(path, signed_files.text_of(signed).encode())
    return path


def approvals(pack: Path, roster: SignedRoster) -> tuple[set[int], list[str]]:
    """Return who approved a pack, and of the files that do not count why."""
    content, counted, refused = PackFile.load(pack).pack, set(), []
    for path in sorted((pack / APPROVALS).glob("*")):
        try:
            found = signed_files.read(signed_files.text_in(path, 4096), Approved)
            counted.add(found.check(content, roster))
        except (UserError, PrivacyError) as error:
            refused.append(f"{APPROVALS}/{path.name}: {error}")
    return counted, refused


def check_export(party: Party, needs: int, pack: Path | None, model_digest: str) -> None:
    """Refuse an export before enough owners have approved a pack about this very model."""
    agreed = f"[federation] export = {{needs = {needs}}}"
    if pack is None:
        raise UserError(f"{agreed}: name the approved evidence pack, --pack FOLDER")
    content = PackFile.load(pack).pack
    if digests(pack) != content.files:
        raise UserError(f"{pack} was changed since it was made; `trilemma evidence verify` says where")
    facts = signed_files.read((pack / "facts.json").read_text("utf-8"), PackFacts)
    if facts.model_digest != model_digest:
        raise UserError(f"{pack} is about another model than this one")
    who, refused = approvals(pack, party.signed_roster)
    if len(who) < needs:
        said = "".join(f"; {one}" for one in refused)
        raise UserError(
            f"{agreed}: {len(who)} of {needs} approvals are there{said}. An owner approves by "
            f"`trilemma evidence approve CLIENT {pack}`"
        )
