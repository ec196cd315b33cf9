"""Studies and the files in which what they gave is kept, beside what others write there meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilemma import files
from trilemma.papers.measured import Measured, Results, read_results, write_results
from trilemma.papers.study import Study


@dataclass(frozen=True)
class Kept:
    """Results of studies, by name, in a folder; those of quick looks have files of their own."""

    studies: Mapping[str, Study]
    folder: Path
    quick: bool = False

    def path(self, name: str) -> Path:
        """Where the results of a study are."""
        return self.folder / f"{name}{'-quick' if self.quick else ''}.json"

    def read(self, name: str) -> Results:
        """Return what is there of a study: nothing, where nothing is."""
        return read_results(self.path(name)) if self.path(name).is_file() else Results(name, ())

    def add(self, name: str, found: Sequence[Measured]) -> None:
        """Put what was found into a study's file."""
        # read anew: another process may have written other places of it meanwhile
        together = self.read(name).merged(found, self.studies[name].module)
        write_results(self.studies[name].ordered(together), self.path(name))

    def check_room(self) -> None:
        """Refuse files that could not be written, before anything is run for them."""
        for name in self.studies:
            files.room_for(self.path(name))
