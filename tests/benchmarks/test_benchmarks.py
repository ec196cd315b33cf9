"""Benchmarks run, measure what they say, and refuse what they cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import aggregation
import kernel_cases
import kernels
from turns import take_turns


def run(monkeypatch: pytest.MonkeyPatch, script, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", [script.__name__, *arguments])
    script.main()


def test_aggregation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "numbers.json"
    sizes = ["-n", "6", "-f", "1", "-d", "3e4", "--error-dim", "500", "--streams", "6x1e5"]
    run(monkeypatch, aggregation, "--rules", "caf,cwmed", *sizes, "--repeats", "1", "--out", str(out))
    printed = capsys.readouterr().out
    assert "| rule |" in printed
    assert "holds" in printed or "of it" in printed
    assert out.read_text().count('"rule": "cwmed"') == 1 + 5 + 1


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--device", "tpu"], "device"),
        (["--peer-path", "nowhere"], "byzfl"),
        (["-d", "many"], "coordinates"),
        (["-d", "10", "--error-dim", "0", "--streams", "3"], "size"),
    ],
)
def test_aggregation_refuses(arguments: list[str], hint: str, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, aggregation, *arguments)
    assert stopped.value.code == 2
    assert hint in capsys.readouterr().err


def test_kernels_are_right_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "rows.json"
    threads = str(torch.get_num_threads())
    sizes = ["--clients", "6", "--dims", "3000", "--together", "2", "--batch", "4"]
    limits = ["--repeats", "1", "--patience", "0", "--threads", threads]
    for only in ("messages", "layers"):
        # Whole models are compared by the tests of models; here they would take seconds.
        chosen = ["--only", only] + (["--kernel", "nvolution"] if only == "layers" else [])
        run(monkeypatch, kernels, *chosen, *sizes, *limits, "--json", str(out))
        rows = json.loads(out.read_text())
        assert len(rows) > 5
        assert all(row["right"] and row["ratio"] > 0 for row in rows)


def test_a_kernel_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch, capsys):
    wrong = kernel_cases.KernelCase("k", "w", lambda: np.ones(3), {"plain": lambda: np.zeros(3)})
    broken = kernel_cases.KernelCase("b", "w", lambda: 1 / 0, {"plain": lambda: np.zeros(3)})
    monkeypatch.setattr(kernels, "cases", lambda options: iter([wrong, broken]))
    threads = str(torch.get_num_threads())
    with pytest.raises(SystemExit, match="wrong"):
        run(monkeypatch, kernels, "--threads", threads)
    told = capsys.readouterr()
    assert "WRONG" in told.out
    assert "ZeroDivisionError" in told.err


def test_turns_are_taken():
    seen: list[str] = []
    actions = {name: (lambda name=name: seen.append(name)) for name in "ab"}
    times = take_turns(actions, repeats=2)
    assert seen == ["a", "b"] * 3
    assert all(0 <= best.seconds < 1 for best in times.values())
    seen.clear()
    take_turns(actions, repeats=5, patience=0, warm=True)
    assert seen == ["a", "b"]
