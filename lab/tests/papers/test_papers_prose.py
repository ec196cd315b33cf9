"""Pages of results say how it came out in tables and verdicts that are computed, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trilemma_lab import pages
from trilemma_lab.papers import studies
from trilemma_lab.papers.published import paper
from trilemma_lab.studies.claims import sentences
from trilemma_lab.studies.measured import read_results

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "lab" / "results"

COMPUTED = re.compile(
    r"<!-- results: .+? -->\n.*?<!-- end of results -->|^```.*?^```", re.DOTALL | re.MULTILINE
)
CODE = re.compile(r"`[^`\n]+`")
NUMBER = re.compile(r"±|\d\s?%(?! of)|\b0?\.\d{2,}\b|\b\d+(\.\d+)? points?\b")
ORDER = re.compile(
    r"\b(ahead|behind|beats?|better|worse|best|worst|higher|lower|highest|lowest|outperforms?|surpass\w*|"
    r"level with|agrees?|differs? by|falls? to|drops?|loses?|survives?|withstands?|as printed|(?:at|to) "
    r"chance)\b"
)
DEFINED = (
    "mean ± standard deviation",  # what ± stands for
    "best round's",  # what the paper does not say of its numbers
    "best there",  # how a point of a grid is chosen
    "may do better",  # of a search that was not made
    "The lower bound",  # a theorem
    "common at 80 %",  # a share of liars
)


def claimed(prose: str) -> list[str]:
    """Return the lines of hand-written prose that say how something came out."""
    return [
        line.strip()
        for line in CODE.sub("", COMPUTED.sub("", prose)).splitlines()
        if not any(words in line for words in DEFINED) and (NUMBER.search(line) or ORDER.search(line))
    ]


WRITTEN = ("results.md", "personal.md", "personal-tables.md", "short-clip.md")
"""Pages of results."""


@pytest.mark.parametrize("name", WRITTEN)
def test_hand_written_prose_states_no_result(name: str) -> None:
    """Whoever wants to say that one is ahead writes a finding, which the data carry or a test fails."""
    assert claimed((ROOT / "docs" / name).read_text("utf-8")) == []


@pytest.mark.parametrize(
    "said",
    [
        "CAF is ahead of the mean under SF.",
        "On Fashion-MNIST it ends at 61.7 % there.",
        "Filter falls to chance under FOE.",
        "SMEA has 81.4 ± 5.8 with three seeds.",
        "GM loses four points.",
        "The order is the paper's: lp-proj-1 beats them all.",
    ],
)
def test_prose_that_states_a_result_is_found(said: str) -> None:
    assert claimed(f"What was run.\n\n{said}\n") == [said]
    assert claimed(f"<!-- results: s -->\n{said}\n<!-- end of results -->\n") == []


@pytest.mark.parametrize("name", sorted({study.paper for study in studies.values()}))
def test_no_cause_states_a_number_that_no_data_carries(name: str) -> None:
    """Shares that name a column and values of settings are none."""
    columns = {place.column for study in studies.values() if study.paper == name for place in study.grid}
    found = []
    for cause in paper(name).causes:
        said = re.sub(r"\b[\w₀-₉ηγβλ]+ = [\d.e-]+", "", cause.text)
        for column in sorted(columns, key=len, reverse=True):
            said = said.replace(column, "")
        if re.search(r"\d\s?%|±|\b\d+\.\d+", said):
            found.append(cause.text)
    assert found == []


@pytest.mark.parametrize("name", [name for name in studies if (KEPT / f"{name}.json").is_file()])
def test_every_finding_holds(name: str) -> None:
    printed = paper(studies[name].paper).of(name)
    found = sentences(printed.findings, read_results(KEPT / f"{name}.json"), printed)
    assert [(one.text, one.verdict) for one in found if not one.holds] == []


def test_every_study_with_sentences_shows_them() -> None:
    """Also those of which nothing was run: they say so."""
    text = "".join((ROOT / "docs" / name).read_text("utf-8") for name in WRITTEN)
    shown = {found[1] for found in pages.BLOCK.findall(text)}
    for name, study in studies.items():
        printed = paper(study.paper).of(name)
        for kind, said in (("sentences", printed.claims), ("findings", printed.findings)):
            assert not said or f"{name} / {kind}" in shown
