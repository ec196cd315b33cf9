"""What a client of a federation takes home: the model of all, or where it goes on to on its own examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from federation_harness import (
    INSTANT,
    PRIVATE,
    Direct,
    coordinator,
    make,
    result_of,
    share_seeds,
    simulation,
    small_config,
)
from trilemma import config as configurations
from trilemma.base.errors import ConfigError, UserError
from trilemma.cli import app
from trilemma.federation.client.at_home import received
from trilemma.federation.party import provisioning
from trilemma.federation.party.layout import Party
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.party.task import load_task
from trilemma.simulate import engine
from trilemma.task import Task

FEW = ("data.examples=45", "algorithm.batch_size=5", *PRIVATE)
TASK = """
import numpy as np
import torch
from torch import nn

def model():
    torch.manual_seed(3)
    return nn.Linear(6, 2)

def data(client):
    rng = np.random.default_rng(client)
    x = rng.normal(size=(30 + client, 6))
    return x, (x.sum(1) + 0.5 * rng.normal(size=len(x)) > 0).astype(int)
"""


def export(*words: object):
    return CliRunner().invoke(app, ["export", *map(str, words)])


def ended(folder: Path, *changes: str) -> tuple[list[Party], str]:
    """A federation of three that has done a run, with few examples."""
    config = small_config(3, *FEW, *changes)
    made = make(folder / "here", 3, config, budget=1e6)
    share_seeds(made, config)
    coordinator(made, Direct(made))[0].go()
    return made, config


def test_a_client_at_home_ends_where_the_simulation_ends(tmp_path: Path) -> None:
    """From the same model of all the same numbers, bit for bit; with `tune` agreed on `export` does it."""
    made, config = ended(tmp_path, "aggregation.tune=clients")
    experiment = simulation(made, config, "run")
    progress = engine.start(experiment)
    for _ in range(experiment.config.run.rounds):
        progress, _ = engine.step(experiment, progress)
    ledgers = [party.ledger.read_bytes() for party in made[1:]]
    homes = [received(party).at_home() for party in made[1:]]
    alike = experiment.tuned(experiment.clients.only(2), result_of(made, "run")["params"])
    assert torch.equal(homes[2].found.params, alike.params)
    assert (homes[2].found.scale, homes[2].found.pull) == (alike.scale, alike.pull)
    for row, home in enumerate(homes):
        torch.testing.assert_close(home.found.params, progress.chosen[row], rtol=1e-2, atol=1e-3)
        assert home.examples == experiment.clients.data.sizes[row]
    assert export(made[1].folder, tmp_path / "own.pt").exit_code == 0
    written = torch.cat([part.flatten() for part in torch.load(tmp_path / "own.pt").values()])
    assert torch.equal(written.sort().values, homes[0].found.params.sort().values), "as was agreed on"
    assert ledgers == [party.ledger.read_bytes() for party in made[1:]], "nothing is sent, nothing is spent"


def own_task(folder: Path, config: str, code: str = TASK) -> list[Party]:
    (folder / "task.py").write_text(code)
    facts = Federation("own", 3, examples=30, timing=INSTANT)
    return provisioning.init(folder / "here", facts, config, task=folder / "task.py")


def own_config(*changes: str) -> str:
    said = ["federation.tolerate=0", "run.rounds=30", "algorithm.batch_size=10", "algorithm.lr=0.5", *changes]
    return configurations.parse({}, said, configurations.Own(3)).toml()


def test_an_engineer_of_a_federation_goes_on_at_home_and_is_told_how_far(tmp_path: Path) -> None:
    made = own_task(tmp_path, own_config())
    coordinator(made, Direct(made))[0].go()
    handed, own = tmp_path / "handed.pt", tmp_path / "own.pt"
    plain = export(made[2].folder, handed)
    assert plain.exit_code == 0, plain.exception
    assert "at home" not in plain.output, "not unless it is asked for, or agreed on"
    outcome = export(made[2].folder, own, "--at-home")
    assert outcome.exit_code == 0, outcome.exception
    home = received(made[2]).at_home()
    assert (
        f"on 31 own examples: it goes on from {home.found.scale:g} times what run 'run' taught"
        in outcome.output
    )
    assert (
        f"accuracy {home.before['accuracy']:.3f} before, {home.after['accuracy']:.3f} after" in outcome.output
    )
    assert "this model is for you alone" in outcome.output
    assert "test examples" not in outcome.output, "it has none"
    before, after = torch.load(handed), torch.load(own)
    assert set(before) == set(after) == {"weight", "bias"}
    assert not torch.equal(before["weight"], after["weight"])
    x, y = Task.from_file(tmp_path / "task.py").clients(1)
    said = torch.from_numpy(x).float() @ before["weight"].T + before["bias"]
    assert float((said.argmax(1).numpy() == y).mean()) == pytest.approx(home.before["accuracy"])


def test_held_out_scores_are_of_models_that_did_not_see_the_example(tmp_path: Path) -> None:
    """Labels that are coins: whoever is scored on what it learnt would look good."""
    coins = TASK.replace("(x.sum(1) + 0.5 * rng.normal(size=len(x)) > 0)", "(rng.normal(size=len(x)) > 0)")
    coins = coins.replace("size=(30 + client, 6)", "size=(200, 6)")
    made = own_task(tmp_path, own_config("run.rounds=1"), coins)
    coordinator(made, Direct(made))[0].go()
    scores = np.array([received(party).at_home().after["accuracy"] for party in made[1:]])
    assert abs(scores.mean() - 0.5) < 0.08


def test_what_cannot_be_taken_home_is_said(tmp_path: Path) -> None:
    made = own_task(tmp_path, own_config())
    with pytest.raises(UserError, match="no run has ended"):
        received(made[1])
    for name in ("one", "two"):
        coordinator(made, Direct(made), run=name)[0].go()
    with pytest.raises(UserError, match="name one with --run: one, two"):
        received(made[1])
    with pytest.raises(UserError, match="did you mean 'one'"):
        received(made[1], "onw")
    target = tmp_path / "model.pt"
    assert export(made[1].folder, target, "--run", "two", "--as-received").exit_code == 0
    for words, reason in {
        (made[1].folder, target, "--run", "two"): "is there already",
        (made[1].folder, tmp_path / "m.pt", "--seed", 1): "leave out --seed",
        (made[0].folder, tmp_path / "m.pt", "--run", "two", "--at-home"): "for one client's folder",
    }.items():
        refused = export(*words)
        assert isinstance(refused.exception, UserError)
        assert reason in str(refused.exception)
    (made[1].folder / "task.py").write_text(TASK.replace("nn.Linear(6, 2)", "nn.Linear(6, 2, bias=False)"))
    with pytest.raises(UserError, match="are not those with which client-0 joined run 'two'"):
        _ = received(made[1], "two").params


def test_what_changed_since_the_run_is_noticed(tmp_path: Path) -> None:
    """A model of another seed, on other features, has the same shape, and is another model all the same."""
    made = own_task(tmp_path, own_config("run.rounds=2"))
    coordinator(made, Direct(made))[0].go()
    folder, target = made[1].folder, tmp_path / "own.pt"

    def refused(how: str, reason: str) -> bool:
        outcome = export(folder, target, how)
        assert isinstance(outcome.exception, UserError), outcome.output
        return reason in str(outcome.exception) and not target.exists()

    for name, old, new in (
        ("config.toml", "seeds = [\n    1,\n]", "seeds = [\n    2,\n]"),
        ("federation.toml", "examples = 30", "examples = 29"),
        ("task.py", "size=(30 + client, 6)", "size=(31 + client, 6)"),
    ):
        before = (folder / name).read_text()
        assert old in before
        (folder / name).write_text(before.replace(old, new))
        assert refused("--at-home", "put them back")
        assert refused("--as-received", "put them back")
        (folder / name).write_text(before)
    session = made[1].run_folder("run") / "session"
    before = session.read_bytes()
    session.write_bytes(before[:-1])
    assert refused("--at-home", "does not say with which any more")
    session.write_bytes(before)
    assert export(folder, target, "--as-received").exit_code == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["algorithm={name='ditto'}"], "clients of ditto have their own already"),
        (["algorithm={name='per-fedavg', batch_size=2}"], "clients of per-fedavg have their own already"),
        (["aggregation.root=20"], "root sets are for simulations"),
    ],
)
def test_who_cannot_go_on_at_home_is_told_before_the_first_round(
    tmp_path: Path, changes: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(tmp_path / "here", 3, small_config(3, "aggregation.tune=clients", *changes))


def test_the_server_of_a_task_has_nobodys_examples_to_look_at(tmp_path: Path) -> None:
    made = own_task(tmp_path, own_config("aggregation.tune=clients"))
    assert load_task(made[0]).data is None
    assert load_task(made[1]).config.aggregation.tune == "clients"
