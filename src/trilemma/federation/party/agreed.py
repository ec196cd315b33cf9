"""What parties agree on, as one of them has it: read once, since any of it may change at any moment."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from trilemma.federation.identity.rosters import SignedRoster
from trilemma.federation.party.public_facts import Federation


@dataclass(frozen=True)
class Agreed:
    """A party's configuration, public facts and roster; `code` is the digest of its own task, "" without."""

    config: bytes
    facts: Federation
    roster: SignedRoster
    code: str = ""

    @cached_property
    def agreement(self) -> str:
        """Digest of what a run is about, whoever takes part: configuration, `examples`, who is waited for."""
        return _digest(self.config, *self._public)

    @cached_property
    def terms(self) -> str:
        """Digest of what all parties of an epoch must agree on: the agreement, and what the roster says."""
        return _digest(self.config, self.roster.message, *self._public)

    @cached_property
    def plan(self) -> str:
        """Digest of what an owner allows: the agreement, and the code that will run on the client's data."""
        return hashlib.sha256(f"{self.agreement} {self.code}".encode()).hexdigest()

    @property
    def _public(self) -> tuple[bytes, ...]:
        records = json.dumps(self.facts.records, sort_keys=True)
        return str(self.facts.examples).encode(), self.facts.timing.agreed, records.encode()


def _digest(*contents: bytes) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()
