"""The documentation: pages run, the site is built strictly, every public name is explained."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DOCS, ROOT, blocks, run_page

import trilemma

RUN = (
    "start",
    "coming-from",
    "tutorials/own-model-and-data",
    "tutorials/choosing-epsilon",
    "tutorials/red-teaming",
    "tutorials/own-rule-and-attack",
    "tutorials/reproducing-a-paper",
    "concepts/evidence",
    "concepts/gram-to-weights",
    "concepts/weights",
    "aggregation",
    "attacks",
    "federation",
    "few-coordinates",
    "gradients",
    "own-task",
    "plugins",
    "privacy",
    "statistics",
    "studies",
)
"""Pages that are run whole."""

ELSEWHERE = {
    "tutorials/five-hospitals": "it starts processes",
    "tutorials/hospitals-with-evidence": "it starts processes",
    "data": "it reads images",
}
"""Pages with a test of their own, and why."""


@pytest.mark.slow
@pytest.mark.usefixtures("plugins_forgotten", "here")
@pytest.mark.parametrize("name", RUN)
def test_a_page_runs_from_top_to_bottom(name: str, tmp_path: Path):
    assert run_page(DOCS / f"{name}.md", tmp_path)


def test_every_page_that_can_run_is_run():
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        if any(block.language in ("python", "sh") and not block.skipped for block in blocks(page)):
            assert name in (*RUN, *ELSEWHERE), f"docs/{name}.md has code that no test runs"


@pytest.mark.slow
def test_the_page_on_data_runs_where_there_are_images(tmp_path: Path):
    if not os.environ.get("TRILEMMA_DATA"):
        pytest.skip("needs TRILEMMA_DATA: the page loads MNIST")
    assert run_page(DOCS / "data.md", tmp_path)


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.usefixtures("plugins_forgotten", "here")
@pytest.mark.parametrize("page", ["five-hospitals", "hospitals-with-evidence"])
def test_hospitals_train_together(page: str, tmp_path: Path):
    try:
        run_page(DOCS / f"tutorials/{page}.md", tmp_path)
    finally:
        subprocess.run(
            [sys.executable, "-m", "trilemma", "federation", "down", str(tmp_path / "pilot")], timeout=240
        )


def test_a_page_that_prints_something_else_is_found_out(tmp_path: Path):
    page = tmp_path / "page-of-a-test.md"
    text = "```python\nprint(1 + 1)\n```\n\n```text\n{}\n```\n"
    page.write_text(text.format("2"))
    assert run_page(page, tmp_path) == 1
    page.write_text(text.format("3"))
    with pytest.raises(AssertionError, match=r"page-of-a-test.md, line 5"):
        run_page(page, tmp_path)


def test_python_on_every_page_is_python():
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]:
        for block in blocks(page):
            if block.language == "python":
                text = block.text.replace("…", "...")  # stands for what a reader has
                compile(text, f"{page.name}, line {block.line}", "exec")


def test_the_site_has_at_most_eight_entries_and_small_pictures():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert sum(line.startswith("  - ") for line in nav.splitlines()) in range(1, 9)
    pictures = {path.name: path.stat().st_size for path in (DOCS / "images/gallery").iterdir()}
    assert pictures
    assert max(pictures.values()) < 100_000


def rooms() -> list[str]:
    return [name for name in trilemma.__all__ if inspect.ismodule(getattr(trilemma, name))]


@pytest.mark.parametrize("room", rooms())
def test_every_public_name_is_explained(room: str):
    module = getattr(trilemma, room)
    explained = (inspect.isclass, inspect.isroutine, inspect.ismodule)
    bare = [
        name
        for name in module.__all__
        if any(kind(getattr(module, name)) for kind in explained)
        and not inspect.getdoc(getattr(module, name))
    ]
    assert not bare


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link(tmp_path: Path):
    pytest.importorskip("mkdocs", reason="the site needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="the site needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Gram matrix" in (tmp_path / "site/reference/python/aggregation/index.html").read_text()
