"""What a party has seen of others' ledgers is changed by one process at a time."""

from __future__ import annotations

import pytest

from trilemma.base import files
from trilemma.federation.protocol.confirmation import Position, Sighting, Witness
from trilemma.privacy.secrets import Identity


class Busy(Exception):
    """Somebody else is at it."""


@pytest.mark.usefixtures("refused_at_once")
@pytest.mark.parametrize(
    "change",
    [
        lambda witness: witness.see({0: Position(5, "e")}),
        lambda witness: witness.forget_ends([0]),
        lambda witness: witness.recall(
            1, Position(7, "f"), Sighting.sign("list", 1, Position(7, "f"), Identity.generate())
        ),
    ],
    ids=["see", "forget_ends", "recall"],
)
def test_nobody_else_writes_between_reading_and_writing(tmp_path, monkeypatch, change):
    """A rotated client whose old end came back would look like one that was set back."""
    witness = Witness(tmp_path / "memory" / "seen")
    witness.see({0: Position(4, "d")})
    tried, honest = [], Witness._read

    def read(self):
        try:
            with files.locked(tmp_path / "memory" / "seen.lock", Busy()):
                tried.append("went through")
        except Busy:
            tried.append("waits")
        return honest(self)

    monkeypatch.setattr(Witness, "_read", read)
    change(witness)
    assert set(tried) == {"waits"}
