"""Studies and the files in which what they gave is kept, beside what others write there meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma_lab.studies.measured import Measured, Results, new_results, read_results, write_results
from trilemma_lab.studies.sources import Sources
from trilemma_lab.studies.staleness import Rerun
from trilemma_lab.studies.study import Study


@dataclass(frozen=True)
class ResultFiles:
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
        with files.changing(self.path(name)):  # another process may be writing other places of it
            together = self.read(name).merged(found, self.studies[name].module)
            write_results(self.studies[name].ordered(together), self.path(name))

    def add_rerun(self, name: str, before: Results, again: Rerun, sources: Sources) -> None:
        """Put into a study's file what running some of its cells again has shown; refuse it of others."""
        with files.changing(self.path(name)):
            now = self.read(name)
            there = {cell.place: cell.metrics for cell in now.cells}
            if any(there.get(one.place) != one.metrics for one in before.cells if one.place in again.places):
                raise UserError(
                    f"cells of {name} that were run again were measured anew meanwhile: repeat it"
                )
            write_results(now.with_rerun(again, sources), self.path(name))

    def check_room(self) -> None:
        """Refuse files that could not be written, before anything is run for them.

        All that is put into one but the numbers is gathered once: what fails there fails now.
        """
        for name, study in self.studies.items():
            files.lock_of(self.path(name))
            new_results(name, (), study.module)
