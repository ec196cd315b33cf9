"""The authority of a federation: it certifies parties and signs the roster, and does nothing else.

    authority/
      ca.key, ca.crt        its private key, and the certificate that is everybody's only root
      roster.json           the newest roster it signed
      issued/               the certificates it gave out, to be renewed without asking for anything; and
                            how many bundles it wrote
      facts.toml, …         what a client that comes later is handed

Its folder is needed when somebody comes, goes, changes keys or needs a new certificate, and nowhere else: it
may lie in a safe meanwhile. A roster is written down here before anybody gets it, so that there are never two
with one number.
"""

from __future__ import annotations

import os
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.identity import certificates
from trilemma.federation.identity.certificates import Issued
from trilemma.federation.identity.rosters import Member, SignedRoster, check_follows

FOLDER = "authority"


@dataclass(frozen=True)
class Authority:
    """The authority whose folder is `folder`."""

    folder: Path

    @classmethod
    def found(cls, folder: Path, name: str, facts: str, config: str) -> Authority:
        """Make the authority of a new federation."""
        one, issued = cls(folder), certificates.new_authority(name)
        folder.mkdir(mode=0o700)
        files.write_atomically(one._key, issued.key, secret=True)
        one._certificate.write_bytes(issued.certificate)
        one._facts.write_text(facts)
        one._config.write_text(config)
        return one

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Open the authority in a federation's folder, or whose folder it is itself."""
        one = cls(folder if (folder / "ca.key").is_file() else folder / FOLDER)
        if not one._key.is_file():
            raise UserError(f"{folder} has no authority: this is done where {FOLDER}/ca.key is")
        mode = stat.S_IMODE(one._key.stat().st_mode)
        if os.name == "posix" and mode & 0o077:
            raise UserError(f"{one._key} can be read by others (mode {mode:o}): chmod 600 {one._key}")
        return one

    @property
    def _key(self) -> Path:
        return self.folder / "ca.key"

    @property
    def _certificate(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def _roster(self) -> Path:
        return self.folder / "roster.json"

    @property
    def _facts(self) -> Path:
        return self.folder / "facts.toml"

    @property
    def _config(self) -> Path:
        return self.folder / "configuration.toml"

    @property
    def issued(self) -> Issued:
        """Its certificate and key."""
        return Issued(self._certificate.read_bytes(), self._key.read_bytes())

    @property
    def certificate(self) -> bytes:
        """Its certificate, everybody's only root."""
        return self._certificate.read_bytes()

    @property
    def roster(self) -> SignedRoster:
        """The newest roster it signed."""
        return SignedRoster.load(self._roster, self._certificate)

    @property
    def facts(self) -> str:
        """The public facts of the federation, as TOML."""
        return self._facts.read_text()

    @property
    def config(self) -> str:
        """The configuration that was agreed on, as TOML."""
        return self._config.read_text()

    def hand_out(self, config: str) -> None:
        """Hand out another configuration from now on."""
        files.write_atomically(self._config, config.encode())

    def sign(self, federation: str, clients: tuple[Member, ...]) -> SignedRoster:
        """Sign the next roster, with the configuration's weights; nobody may have it before it is enacted."""
        weights = tomllib.loads(self.config).get("federation", {}).get("weights")
        if weights and len(weights) != len(clients):
            raise UserError(
                f"the configuration has {len(weights)} weights, and the roster would have {len(clients)} "
                "places; noise and cap are for those it began with: found a new federation"
            )
        if weights:
            pairs = zip(clients, weights, strict=True)
            clients = tuple(one.model_copy(update={"weight": float(weight)}) for one, weight in pairs)
        before = self.roster if self._roster.is_file() else None
        serial = 1 if before is None else before.serial + 1
        roster = SignedRoster.sign(self.issued, federation, serial, clients)
        if before is not None:
            check_follows(roster, before)
        return roster

    def enact(self, roster: SignedRoster) -> SignedRoster:
        """Make a roster the newest one; on disk when this returns. There are never two with one number."""
        with files.locked(self.folder / "lock"):
            if self._roster.is_file() and self.roster.serial >= roster.serial:
                raise UserError(f"roster {roster.serial} was signed meanwhile: try again")
            roster.save(self._roster)
            return roster

    def next_number(self) -> int:
        """Return the number of the next bundle; on disk when this returns, so that no other has it."""
        with files.locked(self.folder / "lock"):
            path = self.folder / "issued" / "bundles"
            number = int(path.read_text()) + 1 if path.is_file() else 1
            files.write_atomically(path, str(number).encode())
            return number

    def renew(self) -> None:
        """Give itself a new certificate, for the key it has."""
        files.write_atomically(self._certificate, certificates.renewed_authority(self.issued))

    def keep(self, party: str, certificate: bytes) -> None:
        """Remember a certificate that was given out."""
        files.write_atomically(self._given(party), certificate)

    def given(self, party: str) -> bytes | None:
        """Return the certificate that a party was given last."""
        path = self._given(party)
        return path.read_bytes() if path.is_file() else None

    def _given(self, party: str) -> Path:
        return self.folder / "issued" / f"{party}.crt"
