"""The notebooks run from top to bottom and show what they keep; how notebooks show things."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import trilemma as tl
from trilemma.base.errors import Stopped, UserError
from trilemma.base.records import Record
from trilemma.report.trust import Suspects, shares, trusted

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def runner():
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "tools" / "run_notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(notebook: dict) -> list[list[str]]:
    """What each cell shows as text, without the digits: they move with the release of torch."""
    found = []
    for cell in notebook["cells"]:
        shown = [
            "".join(one.get("text", one.get("data", {}).get("text/plain", "")))
            for one in cell.get("outputs", [])
        ]
        found.append([re.sub(r"[-\d.e]+", "#", one) for one in shown])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_keeps(path: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = json.loads(path.read_text("utf-8"))
    assert texts(runner().run(path)) == texts(kept)
    assert path.stat().st_size < 120_000
    for link in re.findall(
        r"\]\((?!http)([^)]+)\)", "".join("".join(cell["source"]) for cell in kept["cells"])
    ):
        assert (path.parent / link).is_file(), link


def small_task() -> tl.Task:
    x = torch.full((40, 3), 0.123456)
    y = (torch.arange(40) % 2).long()
    return tl.Task(model=lambda: nn.Linear(3, 2), clients=[(x, y)] * 3, test=(x, y), name="secret-free")


def test_a_task_is_shown_without_a_record() -> None:
    told = repr(small_task())
    assert told == (
        "Task('secret-free', model <lambda>(), 3 clients, 120 training and 40 test examples, 2 classes)"
    )


def test_a_result_shows_its_table_its_promise_and_its_picture(tmp_path: Path) -> None:
    result = tl.run(small_task(), rounds=2, progress=False, out=tmp_path / "run")
    shown = result._repr_html_()
    assert "<td" in shown
    assert "No guarantee of privacy: " in shown
    assert "No guarantee of privacy: " in result._repr_markdown_()
    assert set(result.plot()._repr_mimebundle_()) == {"text/plain", "image/png"}
    assert "<svg" in result.plot(tmp_path / "a.svg")._repr_mimebundle_()["image/svg+xml"]


def test_shares_are_shown_as_a_map() -> None:
    records = [Record(t, weights={0: 1.0, 1: 0.0} if t % 2 else {0: 1.0}) for t in range(1, 200)]
    suspects = Suspects(trusted(2, records), shares(2, {1: records}))
    assert suspects == trusted(2, records)
    drawn = suspects._repr_svg_()
    assert 0 < drawn.count("<rect") <= 120
    assert drawn.index("1: 0.000") < drawn.index("0: 1.000")
    assert np.isnan(suspects.table).any()


def test_a_mistake_is_a_sentence_and_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    assert UserError("one thing\nand another")._render_traceback_() == ["UserError: one thing\nand another"]

    class Interrupting:
        def __getattr__(self, name: str):
            def stop(*_: object) -> None:
                if name == "round_finished":
                    raise KeyboardInterrupt

            return stop

    out = tmp_path / "run"
    with pytest.raises(Stopped, match="resume=True") as told:
        tl.run(small_task(), rounds=3, progress=False, out=out, observer=Interrupting())
    assert told.value._render_traceback_() == [str(told.value)]
    assert len(tl.run(small_task(), rounds=3, progress=False, out=out, resume=True).records) == 3


def test_ipython_shows_a_mistake_in_three_lines(capsys) -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed")
    shell = interactive.InteractiveShell.instance()
    shell.run_cell("import trilemma as tl\ntl.run(rule='cwmde', rounds=1, progress=False)")
    told = capsys.readouterr()
    said = [line for line in (told.out + told.err).splitlines() if line.strip()]
    assert len(said) <= 3
    assert "did you mean 'cwmed'" in " ".join(said)
    assert sys.modules["IPython"] is not None
