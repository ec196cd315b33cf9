"""Configurations: every wrong kind gets a message that says what is allowed."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from trilemma import config
from trilemma.base.errors import ConfigError, PrivacyError, UserError
from trilemma.base.options import Options
from trilemma.experiment.resolve import resolve


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("federation.clents=9", "[federation] unknown key 'clents': did you mean 'clients'?"),
        ("federatoin.clients=9", "unknown table [federatoin]: did you mean 'federation'?"),
        ("federation.byzantine=4", "f = 4 Byzantine of n = 7 clients"),
        ("federation.clients=0", "[federation] clients = 0: allowed: at least 1"),
        ("federation.sampled=9", "sampled = 9 of 7 clients; allowed: 1 to 7"),
        ("privacy.clip=-1", "[privacy] clip = -1: allowed: more than 0"),
        ("privacy.epsilon=1", "noise without a threat model certifies nothing"),
        ("privacy.treat=ldp", "unknown key 'treat': did you mean 'threat'?"),
        ("privacy.adjacency=add_remove", "[privacy] adjacency = 'add_remove': did you mean 'add-remove'?"),
        (
            "privacy.accountant=exakt",
            "[privacy] accountant = 'exakt': did you mean 'exact'?",
        ),
        ("algorithm.sampling=without_replacement", "did you mean 'without-replacement'?"),
        ("privacy.delta=1", "[privacy] delta = 1: allowed: less than 1"),
        ("algorithm.name=dsdg", "unknown algorithm 'dsdg': did you mean 'dsgd'?"),
        ("algorithm.lrr=1", "[algorithm] unknown key 'lrr': did you mean 'lr'?"),
        ("algorithm.lr=fast", "[algorithm] lr = 'fast': must be a number"),
        ("federation.byzantine=two", "[federation] byzantine = 'two': must be a whole number"),
        ("run.device=gpu", "[run] device = 'gpu': allowed: 'auto', 'cpu' or 'cuda'"),
        ("attack.name=sff", "unknown attack 'sff': did you mean 'sf'?"),
        ("data.name=mnits", "unknown data set 'mnits': did you mean 'mnist'?"),
        ("data.partition=dirichle", "unknown partition 'dirichle': did you mean 'dirichlet'?"),
        ("data.partition.alpha=1", "[data.partition] unknown key 'alpha'"),
        ("data.partition.name=dirichlet", "[data.partition] needs alpha"),
        ("data.partition.name=3", "unknown partition '3'"),
        ("model.name=logistik", "unknown model 'logistik': did you mean 'logistic'?"),
        ("run.rounds=0", "[run] rounds = 0: allowed: at least 1"),
        ("run.seeds=5-1", "cannot read seeds '5-1'; allowed: numbers and ranges"),
        ("rounds=5", "cannot read 'rounds=5'; allowed: table.key=value"),
    ],
)
def test_wrong_config_says_what_is_wrong_and_what_is_allowed(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.parse({}, [change])


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse({}, ["run.rounds=0", "privacy.clip=-1", "attack.name=x"])
    assert len(str(caught.value).splitlines()) == 3


def test_noise_is_said_once() -> None:
    changes = ["privacy.threat=ldp", "privacy.clip=1", "privacy.epsilon=1", "privacy.sigma_ind=1"]
    with pytest.raises(ConfigError, match="noise is given twice"):
        config.parse({}, changes)


def test_a_name_stands_for_its_table() -> None:
    settings = config.parse(
        {"data": {"name": "phishing", "partition": "dirichlet"}}, ["data.partition.alpha=0.5"]
    )
    assert (settings.partition.name, settings.partition.options.alpha) == ("dirichlet", 0.5)


def test_toml_round_trip_keeps_everything() -> None:
    import tomllib

    settings = config.parse({}, ["run.seeds=1-3", "model.name=mlp", "model.hidden=[5,6]", "privacy.clip=inf"])
    again = config.parse(tomllib.loads(settings.toml()))
    assert again.dump() == settings.dump()
    assert again.run.seeds == (1, 2, 3)


def test_a_config_can_be_sent_to_another_process() -> None:
    settings = config.parse(
        {}, ["model.name=mlp", "attack.name=alie", "data.partition={name='dirichlet', alpha=1}"]
    )
    assert pickle.loads(pickle.dumps(settings)).dump() == settings.dump()


def test_a_missing_or_broken_file_is_a_user_error(tmp_path) -> None:
    with pytest.raises(UserError, match="there is no configuration file"):
        config.load(tmp_path / "nothing.toml")
    (tmp_path / "broken.toml").write_text("[run\n")
    with pytest.raises(UserError, match="is not a TOML file"):
        config.load(tmp_path / "broken.toml")


def _central(*changes: str) -> float:
    base = {
        "federation": {"clients": 20},
        "algorithm": {"name": "fedavg", "lr": 0.1},
        "aggregation": {"rule": "mean"},
        "privacy": {"threat": "cdp", "clip": 1.0, "epsilon": 2.0},
    }
    return resolve(config.parse(base, list(changes)), examples=50).release.law.sigma_ind


def test_under_cdp_only_clients_that_are_heard_count_as_noise() -> None:
    """Five of twenty heard: the mean has a quarter of the noise, so each must add twice as much."""
    assert _central("federation.sampled=5") == pytest.approx(2 * _central(), rel=1e-6)
    assert _central("federation.byzantine=4") == pytest.approx((20 / 16) ** 0.5 * _central(), rel=1e-6)
    with pytest.raises(PrivacyError, match="all 5 clients heard in a round could be among the 8 that lie"):
        _central("federation.sampled=5", "federation.byzantine=8", "federation.tolerate=2")


ALIE = {"attack": {"name": "alie", "strength": 1.5}}


@pytest.mark.parametrize(
    ("before", "change", "note"),
    [
        (ALIE, "attack.name=sf", "[attack] strength = 1.5 is left out: alie has it, sf does not"),
        (
            {"data": {"name": "synthetic", "size": 315, "holders": "all"}},
            "data.name=phishing",
            "[data] size = 315 is left out: synthetic has it, phishing does not",
        ),
        (
            {"data": {"partition": {"name": "dirichlet", "alpha": 1.0}}},
            "data.partition.name=extreme",
            "[data.partition] alpha = 1.0 is left out: dirichlet has it, extreme does not",
        ),
        (
            {"model": {"name": "mlp", "hidden": [5]}},
            "model.name=logistic",
            "[model] hidden = [5] is left out: mlp has it, logistic does not",
        ),
        (
            {"algorithm": {"lr": 0.5, "momentum": 0.9}},
            "algorithm.name=fedavg",
            "[algorithm] momentum = 0.9 is left out: dsgd has it, fedavg does not",
        ),
    ],
)
def test_a_new_name_leaves_behind_what_the_new_thing_lacks(before: dict, change: str, note: str) -> None:
    settings = config.parse(before, [change])
    assert settings.notes == (note,)
    assert config.parse(settings.dump()).notes == ()
    assert config.parse(before).with_(change).with_("run.rounds=2").notes == (note,)


def test_what_the_new_thing_has_is_kept() -> None:
    settings = config.parse(ALIE, ["attack.name=foe"])
    assert (settings.attack.options.strength, settings.notes) == (1.5, ())


@pytest.mark.parametrize(
    ("before", "changes", "message"),
    [
        (ALIE, ["attack.name=sf", "attack.strength=2"], "unknown key 'strength'"),
        (ALIE, ["attack.name=sf", "attack.search.reach=5"], "unknown key 'search'"),
        ({"attack": {"name": "alie", "strenght": 1}}, ["attack.name=sf"], "unknown key 'strenght'"),
        ({"attack": {"name": "sf", "strength": 1.5}}, ["attack.name=sf"], "unknown key 'strength'"),
    ],
)
def test_what_was_asked_for_or_never_known_is_still_a_mistake(
    before: dict, changes: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.parse(before, changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("algorithm.batch=5", "unknown key 'batch': did you mean 'batch_size'?"),
        ("algorithm.name=lp_proj", "did you mean 'lp-proj'?"),
        ("algorithm.name=lg_fedavg", "did you mean 'lg-fedavg'?"),
        ("data.name=fashion_mnist", "did you mean 'fashion-mnist'?"),
        ("data.partition.name=gamma_similarity", "did you mean 'gamma-similarity'?"),
        ("attack.name=min_max", "did you mean 'min-max'?"),
        ("model.name=cifar_cnn", "did you mean 'cifar-cnn'?"),
    ],
)
def test_names_that_are_nearly_right_say_what_is_meant(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.parse({}, [change])


def test_a_data_set_says_how_it_is_usually_divided() -> None:
    assert config.parse({}, ["data.name=synthetic"]).partition.name == "natural"
    assert config.parse({}, ["data.name=mnist"]).partition.name == "homogeneous"


def test_configurations_of_the_package_are_found_by_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cafcor-mnist").mkdir()
    assert config.load("cafcor-mnist").algorithm.name == "cafcor"
    with pytest.raises(ConfigError, match="did you mean 'cafcor-mnist'\\? All names: trilemma list configs"):
        config.load("configs/cafcor-mnits.toml")


def test_a_task_given_as_a_configuration_is_told_where_it_belongs(tmp_path) -> None:
    (tmp_path / "task.py").write_text("def data():\n    ...\n", "utf-8")
    with pytest.raises(ConfigError, match=r"is not a TOML file: .*; a task is given with --task .*task\.py"):
        config.load(tmp_path / "task.py")


@pytest.mark.parametrize(
    "assignment",
    ["attack.strength=1e308", f"algorithm.batch_size={10**30}", f"run.seeds=[1, {10**30}]"],
)
def test_numbers_that_no_tensor_holds_are_refused(assignment: str) -> None:
    with pytest.raises(ConfigError, match="numbers go up to"):
        config.parse({"federation": {"byzantine": 1}, "attack": {"name": "alie"}}, [assignment])


@pytest.mark.parametrize(
    "assignment",
    [
        *("algorithm.lr=inf", "algorithm.lr=1e400", "algorithm.lr=nan", "algorithm.weight_decay=inf"),
        *("data.norm=inf", "data.partition={name='dirichlet', alpha=inf}", "privacy.broadcast_bound=inf"),
        *("model.train={lora=2, alpha=inf}", "data={name='synthetic', beta=inf}"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(assignment: str) -> None:
    with pytest.raises(ConfigError, match="must be a finite number"):
        config.parse({}, [assignment])


@pytest.mark.parametrize(
    "assignment",
    ["privacy.clip={}", "algorithm={{name='fedavg', clip_gradients={}}}", "algorithm={{name='rsa', p={}}}"],
)
def test_where_infinity_says_something_it_may_be_said(assignment: str) -> None:
    """TOML has no word for what is left out: without a bound is inf."""
    config.parse({}, [assignment.format("inf")])
    with pytest.raises(ConfigError, match="= nan: allowed: "):
        config.parse({}, [assignment.format("nan")])


@pytest.mark.parametrize(
    ("assignment", "allowed"),
    [
        ("federation.clients=true", "whole number ≥ 1"),
        ("algorithm.lr=true", "number > 0"),
        ("privacy.clip=true", "number > 0"),
        ("run.seeds=[true]", "list of whole numbers"),
        ("run.seeds=true", "list of whole numbers"),
        ("model={name='mlp', hidden=[true]}", "list of whole numbers"),
        ("attack={name='alie', strength=true}", 'number, "zmax" or "search"'),
    ],
)
def test_true_is_no_number(assignment: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"True.*: allowed: {allowed}"):
        config.parse({}, [assignment])


def test_seeds_in_a_list_count_once_and_are_not_too_many() -> None:
    assert config.parse({}, ["run.seeds=[2, 1, 2]"]).run.seeds == (2, 1)
    with pytest.raises(ConfigError, match="allowed is a list with at least 1"):
        config.parse({}, ["run.seeds=[]"])
    with pytest.raises(ConfigError, match="must be a list"):
        config.parse({}, ["run.seeds={}"])
    with pytest.raises(ConfigError, match="10,001 are more seeds than the 10,000 a run may have"):
        config.parse({}, [("run.seeds", [*range(10_001)])])


@pytest.mark.parametrize(
    ("strength", "said"),
    [
        ("inf", "strength = inf: allowed: a finite number, 'zmax' or 'search'"),
        ("'zmx'", "strength = 'zmx': did you mean 'zmax'? Allowed: a number, 'zmax' or 'search'"),
    ],
)
def test_a_value_that_may_be_of_several_types_is_refused_once(strength: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.parse({}, [f"attack={{name='alie', strength={strength}}}"])
    assert str(refused.value) == f"[attack] {said}"


def test_a_multiple_of_an_endless_contribution_is_refused() -> None:
    endless = config.parse({}, ["privacy.threat=ldp", "privacy.clip=inf", "privacy.noise_multiplier=1.0"])
    with pytest.raises(ConfigError, match="finite clip"):
        resolve(endless, 100)


def test_options_of_a_plugin_may_be_true_where_they_may_be_anything() -> None:
    class Loose(Options):
        anything: Any = None
        several: tuple[int | bool, ...] = ()

    assert Loose.parse(anything=True, several=[True]).anything is True
    with pytest.raises(ConfigError, match="several"):
        Loose.parse(several="x")
