"""A party's own model and data, and the configurations a federation refuses."""

from __future__ import annotations

import os
import py_compile
import re
import shutil
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trilemma
from federation_harness import INSTANT, Direct, command, coordinator, small_config
from trilemma import config as configurations
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.keys import Key
from trilemma.cli import app
from trilemma.federation.client import spending
from trilemma.federation.operations import pilot
from trilemma.federation.party import provisioning
from trilemma.federation.party.layout import parties
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.party.task import load_task
from trilemma.federation.protocol import kinds, wire
from trilemma.task import Task
from trilemma.task.file import TaskFile, copy_task, sources, task_digest

EXAMPLE = Path(__file__).parents[3] / "examples" / "federation"
TASK = """
import numpy as np
from trilemma import models

def model():
    return models.build("mlp", (4,), 2, hidden=(3,))

def data(client):
    rng = np.random.default_rng(client)
    x = rng.normal(size=({rows}, 4))
    return x, (x.sum(1) > 0).astype(int)
"""


def federation(tmp_path, task: str, config: str, *, examples: int | None = 30, clients: int = 3):
    (tmp_path / "task.py").write_text(task)
    facts = Federation("own", clients, examples=examples, timing=INSTANT)
    return provisioning.init(tmp_path / "federation", facts, config, task=tmp_path / "task.py")


def test_a_federation_learns_a_task_of_its_own(tmp_path):
    config = small_config(3, "algorithm.lr=1.0", "algorithm.batch_size=30", tolerate=0, rounds=40)
    made = federation(tmp_path, TASK.format(rows=40), config)
    runner, _ = coordinator(made, Direct(made))
    commit = runner.go()
    assert commit.broadcast["params"].shape == (load_task(made[0]).model.dim,)
    losses = [
        [float(line.split('"loss": ')[1].split(",")[0]) for line in path.read_text().splitlines()]
        for path in sorted((tmp_path / "federation").glob("client-*/state/runs/run/notes.jsonl"))
    ]
    assert len(losses) == 3
    assert all(sum(loss[-5:]) < 0.8 * sum(loss[:5]) for loss in losses)
    assert runner.log.records()[-1]["metrics"] == {}, "the server has no data to score anything on"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of a task of its own that has ended, with a transcript."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "task.py").write_text(TASK.format(rows=40))
    facts = Federation("own", 3, examples=30, timing=INSTANT, transcript=True)
    config = small_config(3, tolerate=0, rounds=2)
    made = provisioning.init(folder / "federation", facts, config, task=folder / "task.py")
    coordinator(made, Direct(made))[0].go()
    return folder / "federation"


@pytest.mark.parametrize("lost", [(), ("commits",), ("commits", "terms")])
def test_a_server_whose_task_changed_neither_goes_on_nor_hands_out_nor_replays(finished, tmp_path, lost):
    """Its model has the same shape and the same names, and is another model all the same."""
    shutil.copytree(finished, tmp_path / "federation")
    made = parties(tmp_path / "federation")
    task = made[0].folder / "task.py"
    was = task.read_text()
    for one in lost:
        path = made[0].run_folder("run") / one
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    exported = ["export", str(made[0].folder), str(tmp_path / "model.pt")]

    def said(*arguments: str) -> str:
        return str(CliRunner().invoke(app, arguments).exception or "")

    task.write_text(was.replace("hidden=(3,)", "hidden=[3]"))
    if "terms" in lost:  # nothing says any more with which it began
        assert said(*exported) == ""
        return
    told = "task.py in .* is not the one with which run 'run' began: put it back as it was"
    assert re.search(told, said(*exported))
    assert not (tmp_path / "model.pt").exists()
    with pytest.raises(UserError, match=told):
        trilemma.load(made[0].folder).state_dict()
    if not lost:
        assert re.search(told, said("federation", "replay", str(made[0].folder), "--run", "run"))
        with pytest.raises(UserError, match=told):
            coordinator(made, Direct(made))[0].go()
    task.write_text(was)
    assert said(*exported) == ""


def test_a_replay_under_another_configuration_accuses_nobody(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "federation")
    config = tmp_path / "federation" / "server" / "config.toml"
    config.write_text(config.read_text().replace('"cwmed"', '"mean"'))
    with pytest.raises(UserError, match="are not those with which run 'run' began"):
        command("replay", tmp_path / "federation", "--run", "run")


@pytest.mark.parametrize("party", ["server", "client-1"])
def test_a_result_of_another_run_is_not_taken_for_this_ones(finished, tmp_path, party):
    """It has the shape and the checksum it should have."""
    shutil.copytree(finished, tmp_path / "federation")
    folder = tmp_path / "federation" / party
    result = folder / "state" / "runs" / "run" / "result"
    _, model = wire.read_file(result, kinds.Finished)
    result.write_bytes(wire.sealed(wire.dumps(kinds.Finished(run="other"), model)))
    refused = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "model.pt")]).exception
    assert "is the result of run 'other', and not of 'run'" in str(refused)
    assert not (tmp_path / "model.pt").exists()


def test_the_server_never_asks_for_data(tmp_path):
    made = federation(
        tmp_path, TASK.format(rows=40) + "\n1/0 if False else None\n", small_config(3, tolerate=0)
    )
    (made[0].folder / "task.py").write_text(TASK.format(rows=40).replace("def data", "def no_data"))
    assert load_task(made[0]).data is None


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        (TASK.format(rows=40).replace("def data", "def dta"), "must define a function `data`"),
        ("import nothing_of_that_name", "cannot be imported"),
    ],
)
def test_a_task_that_does_not_fit_is_named(tmp_path, task, complaint):
    with pytest.raises(UserError, match=complaint):
        load_task(federation(tmp_path, task, small_config(3, tolerate=0))[1])


def test_a_client_that_holds_fewer_than_agreed_takes_part_with_empty_places(tmp_path):
    """How many it holds may depend on one record, so it must not decide whether the client joins."""
    made = federation(tmp_path, TASK.format(rows=20), small_config(3, "algorithm.batch_size=30", tolerate=0))
    held = load_task(made[1]).data
    batch = held.sample((0,), 30, Key(1))
    assert batch.weight.count_nonzero() == 20
    assert batch.weight.max() == pytest.approx(1 / 30)
    assert coordinator(made, Direct(made))[0].go().rounds > 0


def test_a_batch_larger_than_what_everybody_promised_to_hold_is_refused(tmp_path):
    config = small_config(3, "algorithm.batch_size=31", tolerate=0)
    made = federation(tmp_path, TASK.format(rows=40), config)
    for party in made[:2]:
        with pytest.raises(ConfigError, match="allowed: 1 to 30"):
            load_task(party)


HELPED = """
from helpers import SIZE, labels

def model():
    from tools.shapes import shape
    from trilemma import models
    return models.build("mlp", shape(), 2, hidden=(SIZE,))

def data(client):
    import late
    return late.features(client), labels(client)
"""


def beside(folder: Path, size: int) -> Path:
    """A task of several files, which differ from party to party in `size`."""
    folder.mkdir(parents=True)
    (folder / "task.py").write_text(HELPED)
    (folder / "helpers.py").write_text(
        f"import torch\nSIZE = {size}\ndef labels(client):\n    return torch.zeros(30, dtype=torch.int64)\n"
    )
    (folder / "late.py").write_text("import torch\ndef features(client):\n    return torch.ones(30, 4)\n")
    (folder / "tools").mkdir()
    (folder / "tools" / "__init__.py").write_text("")
    (folder / "tools" / "shapes.py").write_text("def shape():\n    return (4,)\n")
    (folder / "unrelated.py").write_text("raise SystemExit\n")
    return folder / "task.py"


def test_a_task_imports_files_beside_it(tmp_path):
    """`init` copies what the task imports, also inside its functions, and nothing else."""
    task = beside(tmp_path / "code", size=3)
    facts = Federation("own", 3, examples=30, timing=INSTANT)
    made = provisioning.init(tmp_path / "federation", facts, small_config(3, tolerate=0, rounds=2), task=task)
    copied = {path.relative_to(made[1].folder).as_posix() for path in made[1].folder.rglob("*.py")}
    assert copied == {"task.py", "helpers.py", "late.py", "tools/__init__.py", "tools/shapes.py"}
    before, path = dict(sys.modules), list(sys.path)
    runner, _ = coordinator(made, Direct(made))
    assert runner.go().rounds == 2
    assert sys.path == path
    assert not {"task", "helpers", "late", "tools", "tools.shapes"} & (sys.modules.keys() - before.keys())


def test_two_parties_in_one_process_do_not_mix_their_modules(tmp_path, monkeypatch):
    """Nor those that the process itself has under the same names."""
    outside = types.ModuleType("helpers")
    monkeypatch.setitem(sys.modules, "helpers", outside)
    three, five = (TaskFile(beside(tmp_path / str(size), size)) for size in (3, 5))
    dims = [task.call("model").dim for task in (three, five, three)]
    assert dims == [4 * 3 + 3 + 2 * 3 + 2, 4 * 5 + 5 + 2 * 5 + 2, 4 * 3 + 3 + 2 * 3 + 2]
    assert sys.modules["helpers"] is outside


def test_modules_in_a_folder_that_is_no_package_are_not_mixed_either(tmp_path):
    tasks = []
    for number in (1, 2):
        (tmp_path / str(number) / "loosely").mkdir(parents=True)
        (tmp_path / str(number) / "loosely" / "words.py").write_text(f"one = {number}\n")
        (tmp_path / str(number) / "task.py").write_text("from loosely.words import one\n")
        tasks.append(TaskFile(tmp_path / str(number) / "task.py"))
    assert [task.value("one") for task in tasks] == [1, 2]
    assert "loosely" not in sys.modules


@pytest.mark.parametrize(
    ("imports", "path"),
    [
        ("from tools import statistics", "tools/statistics.py"),
        ("import tools.types as kinds", "tools/types.py"),
        ("from tools import *", "tools/random.py"),
        ("from tools.steps import one", "tools/queue.py"),
        ("from loosely.words import one", "loosely/words.py"),
    ],
)
def test_no_file_that_a_task_runs_is_left_out_of_what_is_copied_and_allowed(tmp_path, imports, path):
    """Not for having, in its package, a name of the standard library's, nor for lying in no package."""
    task, source = beside(tmp_path / "code", size=3), tmp_path / "code" / path
    task.write_text(f"{imports}\n")
    (tmp_path / "code" / "tools" / "steps.py").write_text("from .queue import one\n")
    source.parent.mkdir(exist_ok=True)
    source.write_text("one = 1\n")
    copy_task(task, tmp_path / "copy", "task.py")
    assert (tmp_path / "copy" / path).read_text() == "one = 1\n"
    TaskFile(tmp_path / "copy" / "task.py")
    before = task_digest(task)
    source.write_text("one = 2\n")
    assert task_digest(task) != before


def test_names_of_the_standard_library_are_not_a_tasks(tmp_path, monkeypatch):
    """Not even of a module that nobody has imported yet: nothing runs that is not in the digest."""
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    task = beside(tmp_path / "code", size=3)
    task.write_text("import tabnanny\n")
    (tmp_path / "code" / "tabnanny.py").write_text("raise SystemExit\n")
    finders = list(sys.meta_path)
    TaskFile(task)
    assert sources(task) == [task]
    assert sys.meta_path == finders


@pytest.mark.parametrize("module", ["task", "helper", "tools/inner", "loosely/words"])
def test_what_runs_is_the_source_and_nothing_that_was_compiled_before(tmp_path, module):
    """Whoever leaves a `.pyc` there that looks as old and as long has no code run that nobody allowed."""
    lines = {
        "task": "import helper\nfrom tools import inner\nfrom loosely import words\nNUMBER = 1\n",
        "tools/__init__": "",
        **dict.fromkeys(("helper", "tools/inner", "loosely/words"), "NUMBER = 1\n"),
    }
    for name, text in lines.items():
        source = tmp_path / f"{name}.py"
        source.parent.mkdir(exist_ok=True)
        source.write_text(text)
    source, allowed = tmp_path / f"{module}.py", lines[module]
    source.write_text(allowed.replace("1", "2"))
    py_compile.compile(str(source))
    then = source.stat()
    source.write_text(allowed)
    os.utime(source, ns=(then.st_atime_ns, then.st_mtime_ns))
    task = TaskFile(tmp_path / "task.py")
    numbers = [task.value("NUMBER"), *(task.value(name).NUMBER for name in ("helper", "inner", "words"))]
    assert numbers == [1, 1, 1, 1]


def test_the_number_of_examples_is_public(tmp_path):
    made = federation(tmp_path, TASK.format(rows=40), small_config(3, tolerate=0), examples=None)
    with pytest.raises(ConfigError, match="examples"):
        load_task(made[1])


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("attack.name=sf", "is for simulations"),
        ("federation.clients=4", "this federation has 3"),
        ("federation.sampled=2 algorithm.name=ditto", "clients that are not sampled train too"),
        (
            "federation.sampled=2 privacy.threat=cdp privacy.clip=1 privacy.sigma_ind=1 algorithm.momentum=0",
            "noise of all the others",
        ),
        ("privacy.threat=cdp privacy.clip=1 privacy.sigma_ind=1", "carry noise of earlier rounds"),
        ("run.returned=average algorithm.name=ditto", "the clients' own"),
    ],
)
def test_what_a_federation_cannot_do_is_refused(tmp_path, option, complaint):
    options = ["federation.clients=3", "aggregation.rule=mean", *option.split()]
    config = configurations.parse({}, options).toml()
    made = provisioning.init(tmp_path / "federation", Federation("x", 3), config)
    with pytest.raises(ConfigError, match=complaint):
        load_task(made[0])


def test_the_command_line_makes_a_federation(tmp_path):
    config = tmp_path / "config.toml"
    private = ["algorithm.name=cafcor", "privacy.threat=secldp", "privacy.clip=1.0", "privacy.epsilon=30.0"]
    config.write_text(configurations.parse({}, [*private, "run.rounds=7"]).toml())
    folder = tmp_path / "federation"
    said = command("init", folder, "--clients", 3, "--config", config, "--port", 9333)
    assert [party.name for party in parties(folder)] == ["server", "client-0", "client-1", "client-2"]
    budget = spending.read_budget(parties(folder)[1])
    assert budget.epsilon == 30.0, "what was asked for, with room for repeated rounds"
    assert "client-2" in said
    command("status", folder)
    assert command("down", folder) == "0 processes stopped\n"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--port", "70000"], "allowed is 1 to 65535"),
        (["--budget", "3"], "this configuration adds no noise"),
        (["--round-limit", "0"], "round_limit"),
        (["--host", ""], "host = ''"),
        (["--host", "two words"], "host = 'two words'"),
        (["--host", "-x"], "host = '-x'"),
        (["--host", "müller.example.org"], "host = 'müller.example.org'"),
        (["--listen", ""], "listen = ''"),
        (["--name", ""], "name = ''"),
        (["--name", "x" * 55], "at most 54 bytes"),
        (["--examples", "3"], "--examples goes with --task"),
        (["--task", "nowhere.py", "--examples", "3"], "there is no nowhere.py"),
        (["--task", str(EXAMPLE / "task.py"), "--clients", "5", "--examples", "0"], "at least 1"),
    ],
)
def test_a_command_that_is_refused_leaves_nothing_behind(tmp_path, options, complaint):
    folder = tmp_path / "federation"
    with pytest.raises(UserError, match=re.escape(complaint)):
        command("init", folder, "--clients", 3, *options)
    assert not folder.exists()


@pytest.mark.parametrize("options", [[], ["--examples", "30"]], ids=["looked up", "agreed on"])
def test_more_clients_than_a_task_says_it_has_data_for_are_refused(tmp_path, options):
    task, folder = tmp_path / "task.py", tmp_path / "federation"
    task.write_text("clients = 2\n" + TASK.format(rows=40))
    told = "^3 clients: task.py says clients = 2; leave --clients out, or change the file$"
    with pytest.raises(UserError, match=told):
        command("init", folder, "--clients", 3, "--task", task, *options)
    assert not folder.exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "fl.example.org"])
def test_clients_of_a_pilot_that_find_no_data_are_named(tmp_path, host):
    """On one machine whoever makes a federation can know; elsewhere data are the clients' own business."""
    task, folder = tmp_path / "task.py", tmp_path / "federation"
    none = "    if client == 2: raise LookupError('no table for client 2')\n    rng"
    task.write_text(TASK.format(rows=40).replace("    rng", none, 1))
    asked = ("--clients", 3, "--task", task, "--examples", 30, "--host", host)
    said = " ".join(command("init", folder, *asked).split())
    assert ("client-2 has no data, and takes no part before it has: task.py" in said) == (host == "127.0.0.1")
    assert "client-1 has no data" not in said


@pytest.mark.slow
def test_the_example_is_a_valid_task(tmp_path):
    pytest.importorskip("sklearn", reason="the example reads a data set of scikit-learn")
    facts = Federation("example", 5, examples=80, timing=INSTANT)
    own = Task.from_file(EXAMPLE / "task.py", 5)
    chosen = pilot.settled(
        configurations.load(str(EXAMPLE / "config.toml"), [], configurations.Own(5)), own, 80
    )
    made = provisioning.init(tmp_path / "federation", facts, chosen.toml(), task=EXAMPLE / "task.py")
    spending.write_budgets(made[1:], load_task(made[0]))
    runner, _ = coordinator(made, Direct(made))
    assert runner.go().rounds == 20
