"""What pages say there is: commands with their options, files, headings, targets of make.

Nothing is run here: a command is read as the command line would read it, and no further.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from pages import DOCS, ROOT, blocks

from trilemma.cli.app import command_named, command_names

PAGES = sorted(
    {*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/*/*.md")} - {ROOT / "CHANGELOG.md"}
)
"""All but the history, which tells of what was there then."""
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

in_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@in_every_page
def test_commands_are_spelt_as_they_are_typed(page: Path):
    for line in [*_typed(page), *_in_prose(page)]:
        for said in re.findall(r"(?:^|[ /])trilemma ([^&;|>]+)", line):
            problem = _problem([word for word in shlex.split(said, comments=True) if word not in ("…", "&")])
            assert not problem, f"trilemma {said}: {problem}"


@cache
def _tests() -> dict[str, str]:
    """Return what every file of tests holds, by its path."""
    found = [path for part in ("tests", "lab/tests") for path in (ROOT / part).rglob("test_*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in found}


def test_tests_that_a_promise_names_are_there():
    """A name that ends in … begins those of several; a file in brackets holds the test before it."""
    said = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for name, more in re.findall(r"`(test_\w+)(…?)`", said):
        begins = re.compile(rf"def {name}{'' if more else chr(92) + '('}")
        assert any(begins.search(held) for held in _tests().values()), name
    for name, file in re.findall(r"`(test_\w+)` \(`([\w/]*test_\w+\.py)`\)", said):
        held = [text for path, text in _tests().items() if f"/{path}".endswith(f"/{file}")]
        assert any(f"def {name}(" in text for text in held), f"{name} is not in {file}"
    for file in re.findall(r"`([\w/]*test_\w+\.py)`", said):
        assert any(f"/{path}".endswith(f"/{file}") for path in _tests()), file


@in_every_page
def test_links_lead_to_files_and_headings(page: Path):
    for file, heading in re.findall(r"\]\(([^)\s#]*)#?([^)\s]*)\)", _prose(page)):
        if not file.startswith("https:"):
            target = (page.parent / file) if file else page
            if file.startswith("notebooks/"):  # the site makes a page of each notebook
                target = ROOT / "examples" / file.replace(".md", ".ipynb")
            assert target.exists(), f"{file} is not there"
            assert not heading or heading in _headings(target), f"{file} has no heading #{heading}"


@in_every_page
def test_files_of_ours_and_targets_of_make_are_there(page: Path):
    ours = r"`((?:src|tests|docs|results|examples|benchmarks|tools|deploy)/[\w./-]+)`"
    for name in re.findall(ours, page.read_text(encoding="utf-8")):
        assert "NAME" in name or (ROOT / name).exists(), f"{name} is not there"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in [*_typed(page), *_in_prose(page)]:
        for target in re.findall(r"^make ([a-z-]+)", line):
            assert target in targets, f"there is no target {target}"


def test_what_is_not_there_is_found_out():
    assert not _problem(["run", "cafcor-mnist", "--set", "run.rounds=2"])
    assert "No such option" in _problem(["run", "--sett", "run.rounds=2"])
    assert "requires an argument" in _problem(["run", "--out"])
    assert "unexpected" in _problem(["federation", "up", "pilot", "twice"])
    assert _problem(["federation", "start", "pilot"])
    assert _problem(["train"])
    assert "where-to-go" in _headings(ROOT / "README.md")
    assert "make-demo" not in _headings(ROOT / "README.md")


def _prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def _typed(page: Path) -> Iterator[str]:
    """Yield the lines of blocks that hold commands; lines that go on are joined."""
    for block in blocks(page):
        if block.language in ("", "sh") and not block.title:
            yield from block.text.replace("\\\n", " ").splitlines()


def _in_prose(page: Path) -> Iterator[str]:
    return (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", _prose(page)))


def _headings(page: Path) -> set[str]:
    """Return the addresses of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def _command(name: str) -> click.Command:
    found = command_named(name)
    assert found is not None
    return found


def _problem(words: list[str]) -> str:
    """Say what the command line would not understand; arguments that are left out of prose are not missed."""
    if not words or words[0] in ("--help", "--version", "--install-completion"):
        return ""
    if words[0] not in command_names():
        return "there is no such command"
    command, rest = _command(words[0]), words[1:]
    while isinstance(command, click.Group) and rest:
        try:
            _, found, rest = command.resolve_command(click.Context(command), rest)
        except click.UsageError as error:
            return error.format_message()
        assert found is not None
        command = found
    try:
        _, left, _ = command.make_parser(click.Context(command)).parse_args(rest)
    except click.UsageError as error:
        return error.format_message()
    return "" if not left else f"unexpected {left}"
