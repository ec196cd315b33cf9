"""The examples as a user runs them, small: simulated, between parties, exported and loaded again."""

from __future__ import annotations

import csv
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from federation_harness import Direct, coordinator
from trilemma import report
from trilemma.base.errors import UserError
from trilemma.cli import app
from trilemma.cli.export import export_command
from trilemma.cli.federation import federation_app
from trilemma.cli.run import run_command
from trilemma.federation.party.layout import parties

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("run.rounds=2", "run.seeds=[1]")


def simulate(
    example: str, out: Path, *assignments: str, name: str = "task", toml: str = "run"
) -> report.Result:
    """Run an example for two rounds."""
    folder = EXAMPLES / example
    run_command(
        str(folder / f"{toml}.toml"),
        task=folder / f"{name}.py",
        set_=[*SMALL, *assignments],
        out=out,
    )
    return report.load(out)


def deploy(example: str, folder: Path) -> report.Result:
    """Make an example's federation by the command, and let its parties train together in this process."""
    where = EXAMPLES / example
    small = folder.with_suffix(".toml")
    text = (where / "run.toml").read_text()
    small.write_text(text[: text.index("[run]")] + "[run]\nrounds = 2\n")
    made = CliRunner().invoke(
        federation_app, ["init", str(folder), "--task", str(where / "task.py"), "--config", str(small)]
    )
    assert made.exit_code == 0, made.output + repr(made.exception)
    found = parties(folder)
    coordinator(found, Direct(found))[0].go()
    return report.load(folder)


def module(path: Path) -> ModuleType:
    """Import a task file as Python does."""
    spec = importlib.util.spec_from_file_location("example_task", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.slow
def test_hospitals(tmp_path: Path) -> None:
    task = module(EXAMPLES / "hospitals" / "task.py")
    sizes = [len(task.data(client, task.records(client))[0]) for client in range(task.clients)]
    assert (sizes, len(task.test()[0])) == ([205, 203, 80, 129], 303)
    assert min(sizes) >= task.examples

    result = simulate("hospitals", tmp_path / "run")
    assert {"accuracy", "auc"} <= set(result.summary.metrics)
    export_command(tmp_path / "run", tmp_path / "model.safetensors")
    net = task.model()
    net.load_state_dict(load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(net.state_dict(), result.state_dict())

    real = deploy("hospitals", tmp_path / "pilot")
    assert len(real.records) == 2
    assert "auc" in real.records[-1].metrics
    task.model().load_state_dict(real.state_dict())


@pytest.mark.slow
def test_survival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.environ.get("TRILEMMA_DATA", "")) / "tcga_brca"
    if not folder.is_dir():
        pytest.skip("needs tcga_brca in the folder named by TRILEMMA_DATA")
    monkeypatch.setenv("BRCA", str(folder))
    result = simulate("survival", tmp_path / "run", "run.rounds=20", "federation.byzantine=0")
    assert result.summary.metrics["concordance"].mean > 0.8
    with pytest.raises(UserError, match="couples the examples"):
        simulate(
            "survival",
            tmp_path / "refused",
            "algorithm={name='safe-dshb',unit='example',batch_size=20}",
            "privacy={threat='ldp',clip=1.0,epsilon=4.0}",
        )
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    arrays = {
        "x_train": rng.integers(256, size=(660, 28, 28), dtype=np.uint8),
        "y_train": rng.integers(10, size=660, dtype=np.uint8),
        "x_test": rng.integers(256, size=(30, 28, 28), dtype=np.uint8),
        "y_test": rng.integers(10, size=30, dtype=np.uint8),
    }
    np.savez(tmp_path / "images.npz", **arrays)
    monkeypatch.setenv("IMAGES", str(tmp_path / "images.npz"))
    result = simulate("images", tmp_path / "run")
    trained = {name for name, _ in module(EXAMPLES / "images" / "task.py").model().named_parameters()}
    assert set(result.state_dict()) == trained  # frozen tensors come back too
    assert len(result.params()) == 10 * 1024 + 10  # and only the head travelled


@pytest.fixture
def tiny_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny encoder of the real one's classes with its tokenizer, and a few queries."""
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "my", "card", "is", "lost", "late", "where", "?"]
    body = tmp_path / "body"
    body.mkdir()
    (body / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab_file=str(body / "vocab.txt")).save_pretrained(body)
    sizes = {"hidden_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(words), **sizes)
    transformers.BertModel(config).save_pretrained(body)
    for name, count in (("train", 400), ("test", 80)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "category"])
            writer.writerows(
                [f"my card is {('lost', 'late')[i % 2]} ?", f"intent-{i % 77:02}"] for i in range(count)
            )
    monkeypatch.setenv("BODY", str(body))
    monkeypatch.setenv("BANKING77", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_banks_with_a_frozen_encoder(tiny_bank: Path) -> None:
    result = simulate("banks", tiny_bank / "run", "algorithm.batch_size=10")
    assert len(result.params()) == 384 * 77


@pytest.mark.slow
def test_banks_with_adapters(tiny_bank: Path) -> None:
    result = simulate("banks", tiny_bank / "run", "algorithm.batch_size=4", name="lora", toml="lora")
    assert "encoder.body.encoder.layer.0.attention.self.query.weight" in result.state_dict()


@pytest.mark.slow
def test_the_grid_of_the_readme_runs(tmp_path: Path) -> None:
    few = ["--set", "run.rounds=1", "--seeds", "1", "--only", "attack.name=sf", "--jobs", "1"]
    done = CliRunner().invoke(
        app, ["sweep", str(EXAMPLES / "grid.toml"), *few, "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    rules = [result.summary.rule for result in report.load_sweep(tmp_path / "out").results.values()]
    assert sorted(rules) == ["caf", "mean", "nnm+cwmed"]


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*/*.toml")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_an_example_without_its_task_says_what_is_missing(path: Path, tmp_path: Path) -> None:
    trains = path.stem != "statistics"
    with pytest.raises(UserError, match="give it with --task task" if trains else "use trilemma statistics"):
        run_command(str(path), set_=["run.seeds=[1]"], out=tmp_path / "out")
