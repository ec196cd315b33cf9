"""Whatever became of a file that a command reads: the command says what is wrong, and shows no traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from damage import called, damage
from trilemma import config, report, simulate
from trilemma.base.errors import UserError
from trilemma.learning.defences.evidence import Expulsion
from trilemma.simulate import engine
from trilemma_lab.arena import arena

RUN = {
    "federation": {"clients": 3, "byzantine": 1},
    "attack": {"name": "sf"},
    "privacy": {"threat": "ldp", "clip": 1.0, "epsilon": 20.0, "delta": 1e-4},
    "run": {"rounds": 2, "evaluate_every": 1},
}
STUDY = "byz-clip21"
ROW = arena.Row("phishing-7", "LDP", 3, "mean", "alie", 1, 0.5, 0, 0, 69, None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of everything: a sweep of two cells and a failed one, a stopped run, results."""
    folder = tmp_path_factory.mktemp("whole")
    names = {}
    for rule in ("mean", "cwmed"):
        settled = config.parse(RUN, [f"aggregation.rule={rule}"])
        simulate.run(settled, folder / "sweep" / rule)
        names[rule] = {"aggregation.rule": rule}
    (folder / "sweep" / "sweep.json").write_text(json.dumps({"cells": {**names, "lost": {"run.rounds": 3}}}))
    (folder / "sweep" / "failed").mkdir()
    (folder / "sweep" / "failed" / "lost.json").write_text(json.dumps({"reason": "lost", "trace": ""}))
    stopped = simulate.RunDirectory.create(folder / "stopped", config.parse(RUN))
    ready = simulate.assemble(stopped.config, 1)
    progress, record = engine.step(ready, engine.start(ready))
    expelled = Expulsion(2, "length", 9.0, 7.5, others=(1,)).plain()
    for path in folder.glob("sweep/*/seed-1/metrics.jsonl"):
        first, last = map(json.loads, path.read_text().splitlines())
        path.write_text(json.dumps({**first, "expelled": [expelled]}) + "\n" + json.dumps(last) + "\n")
    seed = stopped.seed(1)
    seed.path.mkdir()
    seed.append(record)
    seed.save(progress)
    results = Path(__file__).parents[2] / "lab" / "results"
    (folder / "results").mkdir()
    shutil.copy(results / f"{STUDY}.json", folder / "results")
    arena.record(folder / "arena.json", [ROW])
    return folder


READERS = {
    "sweep/mean/summary.json": ("table sweep --rows aggregation.rule", "plot sweep/mean --kind privacy"),
    "sweep/mean/config.toml": ("table sweep --rows aggregation.rule", "plot sweep/mean"),
    "sweep/mean/seed-1/metrics.jsonl": tuple(
        f"plot sweep/mean --kind {kind}" for kind in ("curves", "suspects", "privacy", "cost")
    ),
    "sweep/mean/model.json": ("export sweep/mean model.pt",),
    "sweep/mean/seed-1/model.npy": ("export sweep/mean model.pt", "run --resume sweep/mean"),
    "sweep/sweep.json": ("table sweep --rows aggregation.rule --format csv",),
    "sweep/failed/lost.json": ("table sweep --rows aggregation.rule --value worst",),
    "stopped/config.toml": ("run --resume stopped",),
    "stopped/seed-1/checkpoint.pt": ("run --resume stopped",),
    "stopped/seed-1/metrics.jsonl": ("run --resume stopped",),
    f"results/{STUDY}.json": (
        f"papers compare {STUDY} --results results",
        f"papers figure {STUDY} --results results --to drawn.png",
        "papers list --results results",
    ),
    "arena.json": ("arena --show arena.json", "arena --show arena.json --details --results arena.json"),
}
"""What can be damaged, and commands that read it."""


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damaged_file_shows_a_traceback(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Nor does a command that refuses leave anything behind, but the lock of a run it looked at."""
    name, command = data.draw(
        st.sampled_from([(name, one) for name, some in READERS.items() for one in some])
    )
    top, folder = name.split("/")[0], tmp_path_factory.mktemp("damaged")
    copied = shutil.copytree if (whole / top).is_dir() else shutil.copy
    copied(whole / top, folder / top)
    damage(folder / name, data.draw)
    before = set(folder.rglob("*"))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch())
        code = called(command, patched)
    assert code in (0, 1, 2)
    if code == 2:
        assert {path.name for path in {*folder.rglob("*")} - before} <= {".lock"}
    shutil.rmtree(folder)


@pytest.mark.parametrize("side", ["Infinity", "NaN", "-1", "1.5", "null", "1e400"])
def test_a_tensor_with_a_side_that_is_no_number_is_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    shutil.copytree(whole / "sweep" / "mean", tmp_path / "mean")
    (tmp_path / "mean" / "model.json").write_text(f'{{"tensors": [["weight", [{side}, 68]]]}}')
    monkeypatch.chdir(tmp_path)
    assert called("export mean model.pt", monkeypatch) == 2
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("target", [".", "arena.json/below.{}", "/dev/null/below.{}", "/proc/below.{}"])
@pytest.mark.parametrize(
    ("command", "ending"),
    [
        ("table sweep --rows aggregation.rule --format csv --to", "csv"),
        ("table sweep --rows aggregation.rule --format png --to", "png"),
        (f"papers figure {STUDY} --results results --to", "png"),
        ("plot sweep/mean --out", "png"),
        ("plot sweep/mean --kind suspects --out", "png"),
        ("export sweep/mean", "pt"),
        ("arena --show arena.json --results", "json"),
    ],
)
@pytest.mark.slow
def test_where_nothing_can_be_written_a_command_says_so(
    whole: Path, monkeypatch: pytest.MonkeyPatch, command: str, ending: str, target: str
) -> None:
    """A folder, something below a file, a place where the system lets nobody write."""
    monkeypatch.chdir(whole)
    before = set(whole.rglob("*"))
    assert called(f"{command} {target.format(ending)}", monkeypatch) == 2
    assert set(whole.rglob("*")) == before


def test_one_model_of_all_is_no_clients_own(whole: Path) -> None:
    with pytest.raises(UserError, match="all clients have one model"):
        report.load(whole / "sweep" / "mean").state_dict(client=1)
