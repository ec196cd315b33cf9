"""Things of one's own, from a file, a module, an installed package: recorded, refused, harmless in print."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trilemma import aggregation, config, report, simulate
from trilemma.base import plugins, registry
from trilemma.base.errors import ConfigError
from trilemma.cli import app, main
from trilemma.experiment import rooms
from trilemma.federation.party.provisioning import init
from trilemma.federation.party.public_facts import Federation

RULE = '''
"""A rule of one's own."""
import numpy as np
from trilemma.aggregation import Geometric, Weighing, rules

@rules.register("{name}")
class Mine(Geometric):
    """{summary}"""

    def weigh(self, geometry, f):
        return Weighing(np.full(geometry.n, 1 / geometry.n))

    def kappa(self, n):
        return None
'''
TINY = {"run": {"rounds": 2}, "aggregation": {"rule": "mine"}}


pytestmark = pytest.mark.usefixtures("plugins_forgotten")


def write(
    folder: Path, name: str = "mine", summary: str = "The mean, again.", file: str = "my_rules.py"
) -> Path:
    path = folder / file
    path.write_text(RULE.format(name=name, summary=summary))
    return path


def test_a_configuration_names_a_plugin_beside_it(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "run.toml").write_text(
        'plugins = ["my_rules.py"]\n[aggregation]\nrule = "nnm+mine"\n[run]\nrounds = 2\n'
    )
    settings = config.load(tmp_path / "run.toml")
    assert "mine" in aggregation.rules
    assert settings.with_("run.rounds=3").plugins == settings.plugins
    assert config.load(tmp_path / "run.toml").dump() == settings.dump()  # loaded once
    assert tomllib.loads(settings.toml())["plugins"] == [settings.plugins[0].reference]


def test_a_run_keeps_a_copy_and_continues_from_it_alone(tmp_path: Path) -> None:
    source = write(tmp_path)
    settings = config.parse({**TINY, "plugins": [str(source)]})
    out = tmp_path / "run"
    first = simulate.run(settings, out)
    source.unlink()
    (out / "summary.json").unlink()
    assert simulate.resume(out).accuracy == first.accuracy
    assert report.load(out).config.plugins[0].edition == settings.plugins[0].edition
    assert simulate.without_liars(simulate.RunDirectory.open(out).config).plugins


def test_a_changed_copy_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    simulate.run(config.parse({**TINY, "plugins": [str(write(tmp_path))]}), out)
    with (out / "my_rules.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(ConfigError, match=r"my_rules.py has changed since it was recorded"):
        simulate.resume(out)


def test_a_name_that_is_taken_names_both_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "clash.py"
    path.write_text(RULE.format(name="fine", summary="A.") + RULE.format(name="caf", summary="B."))
    shipped = aggregation.rules["caf"]
    with pytest.raises(
        ConfigError, match=r"line \d+: aggregation rule 'caf' is registered twice: by trilemma"
    ) as told:
        plugins.load([str(path)])
    assert "clash.py" in str(told.value).split("and by")[1]
    assert aggregation.rules["caf"] is shipped
    assert "fine" not in aggregation.rules


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("\nimport nothing_of_this_name\n", 2, "ModuleNotFoundError"),
        ("\n\ndef broken(:\n", 3, "SyntaxError"),
        (
            RULE.format(name="mine", summary="A.").replace("def kappa", "def other"),
            6,
            "aggregation rule 'mine' does",
        ),
        ("def f():\n    raise SystemExit('bye')\nf()\n", 2, "SystemExit: bye"),
    ],
)
def test_a_plugin_that_fails_is_told_with_file_and_line(
    tmp_path: Path, text: str, line: int, reason: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"bad.py, line {line}: {reason}"):
        plugins.load(["bad.py"], tmp_path)


@pytest.mark.parametrize("named", ["nothing.py", "no such/file", "9lives", "a b", "package.no_such_module"])
def test_what_is_no_plugin_is_refused(named: str) -> None:
    with pytest.raises(ConfigError, match="plugin"):
        plugins.load([named])
    with pytest.raises(ConfigError, match="list of files and modules"):
        config.parse({"plugins": named})


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = [write(tmp_path), write(tmp_path / "other", name="other")]
    with pytest.raises(ConfigError, match=r"two plugins are called 'my_rules.py'"):
        plugins.load(map(str, files))


def test_modules_and_installed_packages_are_recorded_where_they_are_used(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "site"
    info = package / "robust_things-1.2.dist-info"
    info.mkdir(parents=True)
    write(package, name="packaged", file="robust_things.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: robust-things\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[trilemma.rules]\npackaged = robust_things\n")
    (info / "RECORD").write_text("robust_things.py,,\n")
    (info / "top_level.txt").write_text("robust_things\n")
    monkeypatch.syspath_prepend(str(package))
    plugins.installed.cache_clear()
    assert "packaged" in rooms.rooms()["rules"]
    assert config.parse({}).plugins == ()
    used = config.parse({"aggregation": {"rule": "packaged"}})
    assert used.dump()["plugins"] == ["robust_things==1.2"]
    assert config.parse(used.dump()).plugins == used.plugins
    with pytest.raises(ConfigError, match=r"recorded in version 1.1; installed is 1.2"):
        config.parse({"plugins": ["robust_things==1.1"]})
    sys.modules.pop("robust_things")


def test_texts_of_plugins_cannot_steer_a_terminal(tmp_path: Path, capsys, monkeypatch) -> None:
    hostile = write(tmp_path, name="evil", summary="[bold red]boo[/] \\x1b]0;title\\x07 \\x1b[2J.")
    shown = CliRunner().invoke(app, ["list", "rules", "--plugin", str(hostile)])
    assert shown.exit_code == 0, shown.output
    assert "[bold red]boo[/]" in shown.output.replace("\n", " ")
    assert "\x1b]0" not in shown.output
    assert "\x07" not in shown.output
    (tmp_path / "bad.py").write_text("raise ValueError('[red]x[/] \\x1b[2J')")
    monkeypatch.setattr(sys, "argv", ["trilemma", "list", "--plugin", str(tmp_path / "bad.py")])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "[red]x[/]" in printed
    assert "\x1b[2J" not in printed


def test_a_name_is_a_plain_word() -> None:
    things: registry.Registry[str] = registry.Registry("thing")
    with pytest.raises(ConfigError, match="allowed in a name"):
        things.register("two words\x1b")("text")


def test_the_command_line_runs_and_lists_a_plugin(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    listed = CliRunner().invoke(app, ["list", "mine", "--plugin", "my_rules.py", "--json"])
    assert json.loads(listed.output)[0]["summary"] == "The mean, again."
    arguments = ["run", "--plugin", "my_rules.py", "--set", "aggregation.rule=mine", "--set", "run.rounds=2"]
    done = CliRunner().invoke(app, [*arguments, "--out", "out"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "my_rules.py").read_bytes() == (tmp_path / "my_rules.py").read_bytes()
    with pytest.raises(ConfigError, match="takes no other settings"):
        CliRunner().invoke(app, ["run", "--resume", "out", "--plugin", "my_rules.py"], catch_exceptions=False)


def test_every_party_of_a_federation_holds_the_plugin_they_agreed_on(tmp_path: Path) -> None:
    settings = config.parse({**TINY, "plugins": [str(write(tmp_path))], "federation": {"clients": 2}})
    parties = init(tmp_path / "federation", Federation("test", 2), settings.toml(), plugins=settings.plugins)
    assert len({party.agreed.terms for party in parties}) == 1
    for party in parties:
        assert config.load(party.config).plugins == settings.plugins
    theirs = parties[1]
    with (theirs.folder / "my_rules.py").open("a") as file:
        file.write("print('other')\n")
    with pytest.raises(ConfigError, match="has changed"):
        config.load(theirs.config)


def blocks(language: str) -> list[str]:
    """The pieces of code in docs/plugins.md."""
    text = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_documented_rule_runs_and_the_documented_observer_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rule, tracker = blocks("python")
    (tmp_path / "my_rules.py").write_text(rule)
    (tmp_path / "run.toml").write_text('plugins = ["my_rules.py"]\naggregation.rule = "nnm+closestpair"\n')
    settings = config.load("run.toml", ["federation.byzantine=2", "attack.name=sf", "run.rounds=2"])
    assert simulate.run(settings, tmp_path / "run").rule == "nnm+closestpair"
    logged: dict[int, dict[str, float]] = {}
    mine = types.SimpleNamespace(
        begin=lambda _: None, log=lambda metrics, step: logged.update({step: metrics})
    )
    exec(tracker.replace("observer=", "rounds=2, observer="), {"mine": mine})
    assert list(logged) == [1, 2]
    assert logged[2]["test/accuracy"] > 0
