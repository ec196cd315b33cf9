"""The command line as a user meets it, exit codes and streams included; once in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trilemma import __version__, demo
from trilemma.cli import app, main
from trilemma.cli.app import COMMANDS
from trilemma_lab.arena import arena

HIDDEN = ("bounds", "-n", "7", "-f", "1", "-d", "5", "--rounds", "9", "--hidden", "--sigma-ind", "1")
TINY = ["--set", "run.rounds=4", "--set", "run.seeds=[1,2]"]


def trilemma(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trilemma", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.slow
def test_json_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    done = trilemma("run", *TINY, "--json", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert set(result["accuracy"]) == {"mean", "std", "per_seed"}
    assert list(result["accuracy"]["per_seed"]) == ["1", "2"]
    assert {"loss", "epsilon", "seconds"} <= set(result)
    assert (tmp_path / "out" / "curves.png").stat().st_size > 5000


def test_a_wrong_config_exits_2_with_a_message_and_no_traceback(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trilemma", "run", "--set", "aggregation.rule=cwmde", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.out == ""
    assert "did you mean 'cwmed'?" in told.err.replace("\n", " ")
    assert "Traceback" not in told.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "nothing.toml"),
        ("run", "--set", "federation.byzantine=5"),
        ("run", "--resume", "nowhere"),
        ("run", "--seeds", "x"),
        ("run", "--device", "tpu"),
        ("run", "--set", "algorithm.batch_size=9000", "--out", "out"),
        ("run", "--set", "privacy.threat=ldp", "--set", "privacy.clip=1.0"),
        ("run", "--seeds", "1-99999999999"),
        ("list", "rulse"),
        ("arena", "--show", "nowhere"),
        ("arena", "--show", "."),
        ("arena", "--quick", "--rule", "nope"),
        ("arena", "--quick", "--liars", "99"),
        ("arena", "--quick", "--seeds", "x"),
        ("arena", "--quick", "--set", "run.rounds=x"),
        ("arena", "--quick", "--rule", "mean", "--results", "."),
        ("arena", "--quick", "--rule", "mean", "--results", "/dev/null/below"),
        ("sweep", "safe-dshb-phishing", "--only", "agregation.rule=mean"),
        ("sweep", "safe-dshb-phishing", "--set", "run.device=cuda"),
        ("arena", "--quick", "--rule", "mean", "--set", "run.device=cuda"),
        ("papers", "run", "safe-dshb", "--set", "run.device=cuda"),
        ("papers", "list", "--results", "nowhere"),
        (*HIDDEN, "--alarm", "0"),
        (*HIDDEN, "--alarm", "nan"),
        (*HIDDEN, "--rounds", "0"),
        ("bounds", "-n", "7", "--sigma-ind", "1e308"),
        (*HIDDEN, "--clip", "1e308"),
        (*HIDDEN, "-k", "7"),
        ("bounds", "-n", "7", "-k", "2"),
        ("privacy", "-n", "7", "--rounds", "9", "--delta", "1e-5", "--sigma-cor", "1e308"),
        ("privacy", "-n", "7", "--rounds", "9", "--delta", "1e-5", "--epsilon", "1", "-k", "7"),
        ("privacy", "-n", "7", "--rounds", "9", "--delta", "1e-5", "--sigma-ind", "1", "--plot", "x.xyz"),
    ],
)
def test_bad_input_is_a_user_error(arguments: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    from trilemma.base.errors import UserError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"{}", b"[1]", b'[{"rule": 3}]', b'{"cells": [{}]}']
)
def test_a_file_of_results_that_is_none_is_named(content: bytes, tmp_path: Path) -> None:
    from trilemma.base.errors import UserError

    file = tmp_path / "byz-clip21.json"
    file.write_bytes(content)
    for arguments in (
        ["arena", "--show", str(file)],
        ["papers", "compare", "byz-clip21", "--results", str(tmp_path)],
        ["papers", "list", "--results", str(tmp_path)],
    ):
        found = CliRunner().invoke(app, arguments).exception
        assert isinstance(found, UserError)
        assert file.name in str(found)


def test_why_an_arena_has_nothing_to_run_is_said() -> None:
    refused = CliRunner().invoke(app, ["arena", "--quick", "--set", "run.rounds=x"]).exception
    assert "[run] rounds = 'x'" in str(refused)
    refused = CliRunner().invoke(app, ["arena", "--quick", "--adversary", "burst"]).exception
    assert "phishing-7 meets loss, rotated loss" in str(refused)
    refused = CliRunner().invoke(app, ["arena", "--quick", "--liars", "4"]).exception
    assert "on phishing-7 3 lie" in str(refused)


@pytest.mark.parametrize(
    "option", [["--set", "run.rounds=2"], ["--ground", "phishing-7"], ["--quick"], ["--minutes", "3"]]
)
def test_an_arena_that_is_only_shown_takes_no_option_of_a_run(option: list[str], tmp_path: Path) -> None:
    """They were passed over, as if the whole table were what was asked for."""
    rows = tmp_path / "rows.json"
    arena.record(rows, [arena.Row("phishing-7", "LDP", 3, "caf", "loss", 1, 0.8, 0, 1, 69, 1.5)])
    assert CliRunner().invoke(app, ["arena", "--show", str(rows)]).exit_code == 0
    refused = CliRunner().invoke(app, ["arena", "--show", str(rows), *option]).exception
    assert f"leave {option[0]} out" in str(refused)


@pytest.mark.slow
def test_a_runs_folder_is_no_federation_to_be_audited(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", "--set", "run.rounds=1", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    refused = CliRunner().invoke(app, ["audit", str(tmp_path / "run")]).exception
    assert f"trilemma audit {tmp_path / 'run' / 'config.toml'}" in str(refused)


def test_what_liars_can_hide_is_told_for_whatever_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only for those who shift alike, who hide least: the larger number stands in the table too."""
    monkeypatch.setenv("COLUMNS", "200")
    told, plain = (CliRunner().invoke(app, [*HIDDEN, *more]).output for more in ((), ("--json",)))
    hidden = json.loads(plain)["hidden"]
    assert hidden["most"] > hidden["mean"]
    (line,) = [line for line in told.splitlines() if "whatever liars send" in line]
    assert f"{hidden['most']:.4g}" in line


def test_tuning_takes_at_least_a_round(monkeypatch) -> None:
    monkeypatch.setattr("trilemma_lab.papers.lp_proj.tried", lambda *_: [])
    assert CliRunner().invoke(app, ["papers", "tune", "mnist", "DGC", "--rounds", "0"]).exit_code == 2


def test_a_misspelt_command_is_asked_about() -> None:
    told = CliRunner().invoke(app, ["exprot"], env={"COLUMNS": "200"})
    assert told.exit_code == 2
    assert "no command is called 'exprot': did you mean 'export'? Allowed: arena, attack" in told.output


@pytest.mark.slow
def test_seeds_may_be_negative(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", "--set", "run.rounds=1", "--set", "run.seeds=-1", "--out", "out"])
    assert done.exit_code == 0, done.output


def test_what_a_new_name_leaves_behind_is_noted_on_standard_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text('[federation]\nbyzantine = 1\n[attack]\nname = "alie"\nstrength = 1.5\n')
    arguments = ["run", "a.toml", "--set", "attack.name=sf", *TINY, "--json", "--out", "out"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == "note: [attack] strength = 1.5 is left out: alie has it, sf does not\n"
    assert json.loads(result.stdout)["attack"] == "sf"


def test_an_attack_that_nobody_plays_is_noted(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()  # so that nothing is run
    nobody = ["run", "--set", "attack.name=sf", "--json", "--out", str(tmp_path)]
    assert "nobody plays it" in str(CliRunner().invoke(app, nobody).exception)
    result = CliRunner().invoke(app, [*nobody, "--set", "federation.byzantine=0"])
    assert "already holds something" in str(result.exception)
    assert result.stderr == "note: nobody plays the attack sf: [federation] byzantine = 0\n"


def test_resume_of_a_finished_run_prints_the_same_result(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = CliRunner().invoke(app, ["run", *TINY, "--json", "--out", "out"])
    again = CliRunner().invoke(app, ["run", "--resume", "out", "--json"])
    assert json.loads(first.stdout) == json.loads(again.stdout)


def test_table_shows_accuracy_beside_the_rest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = ["--set", "federation.byzantine=2", "--set", "attack.name=sf", "--baseline"]
    result = CliRunner().invoke(app, ["run", *TINY, *changes, "--out", "out"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for word in ("2 of 7", "sf", "∞", "no liars %"):
        assert word in result.output
    assert "--baseline" not in result.output


DIVERGING = ["--set", "algorithm.lr=1e38", "--set", "algorithm.weight_decay=1.0", "--set", "run.rounds=12"]


def test_a_corrected_run_finds_the_place_free(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["run", "--set", "algorithm.batch_size=9000", "--out", "out"])
    assert refused.exit_code != 0
    corrected = CliRunner().invoke(app, ["run", *TINY, "--out", "out"])
    assert corrected.exit_code == 0, corrected.output


def test_no_result_is_a_failure(tmp_path: Path, monkeypatch) -> None:
    """Every seed diverged: exit code 1 and a message; the JSON object is printed all the same."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", *DIVERGING, "--json", "--out", "out"])
    assert result.exit_code == 1
    assert "every seed diverged" in result.stderr
    assert json.loads(result.stdout)["accuracy"]["mean"] is None


def test_a_result_of_some_seeds_says_which_diverged(tmp_path: Path, monkeypatch) -> None:
    from trilemma.simulate import engine

    kept = engine.step

    def step(experiment, progress):
        if experiment.seed == 2 and progress.round == 2:
            raise engine.Diverged(3)
        return kept(experiment, progress)

    monkeypatch.setattr(engine, "step", step)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", *TINY, "--out", "out"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "* seed 2 diverged in round 3" in result.output


def test_help_says_what_an_argument_means() -> None:
    for command, help_ in (("run", "a TOML file"), ("check", "task.py"), ("list", "a kind (rules")):
        assert help_ in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    below = CliRunner().invoke(app, ["federation", "up", "--help"], env={"COLUMNS": "200"})
    assert "one party's folder in it" in below.output


def test_the_list_of_commands_says_what_each_says_itself() -> None:
    for name, lazy in COMMANDS.items():
        assert (lazy.load(name).help or "").splitlines()[0] == lazy.line


def test_no_command_offers_to_complete_itself_without_the_others() -> None:
    for name, lazy in COMMANDS.items():
        assert "install_completion" not in {parameter.name for parameter in lazy.load(name).params}


def test_the_version_is_that_of_the_package() -> None:
    """Results say the one, whoever installs sees the other."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == __version__


def test_version_and_help_do_without_torch(tmp_path: Path) -> None:
    """What takes seconds to import is imported by the commands that need it."""
    program = (
        "import sys; from trilemma.cli import app\n"
        "for line in sys.argv[1:]: app(line.split(), standalone_mode=False)\n"
        "print([name for name in ('torch', 'numpy', 'scipy', 'matplotlib') if name in sys.modules])"
    )
    lines = ("--help", "--version", "run --help", "demo --help", "papers --help")
    command = [sys.executable, "-c", program, *lines]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines()[-1] == "[]", (done.stdout, done.stderr)
    assert done.stdout.count("Usage:") == 4
    shown = trilemma("--version", cwd=tmp_path)
    assert shown.stdout == f"trilemma {__version__}\n"


def test_the_demo_finds_a_place_of_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(demo.SETTING, "run", {"rounds": 2, "seeds": "1"})
    monkeypatch.setattr(demo, "ROWS", demo.ROWS[:2])
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0, "an earlier demo is replaced"
    assert [path.name for path in Path("runs").iterdir()] == ["demo"]
    (tmp_path / "runs" / "demo" / "0" / "config.toml").unlink()
    result = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "200"})
    assert "runs/demo-2/demo.png" in result.output
    refused = CliRunner().invoke(app, ["demo", "--out", "runs/demo"])
    assert "not a demo" in str(refused.exception)


def test_list_shows_every_registered_name() -> None:
    result = CliRunner().invoke(app, ["list", "--json"])
    listing = json.loads(result.stdout)
    assert {"mean", "cwmed"} <= set(listing["rules"])
    assert {"sf", "lf"} <= set(listing["attacks"])
    assert all(line for kind in listing.values() for line in kind.values()), "one line each"


@pytest.mark.slow
def test_demo_shows_that_robust_rules_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its runs, with one of the three seeds and half of the rounds."""
    monkeypatch.setitem(demo.SETTING, "run", {"rounds": 200, "seeds": "1"})
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo")])
    assert done.exit_code == 0, done.output
    summaries = [json.loads(p.read_text()) for p in sorted((tmp_path / "demo").glob("*/summary.json"))]
    by_setting = {(s["rule"], s["attack"]): s["accuracy"]["mean"] for s in summaries}
    assert by_setting["mean", "ipm"] < by_setting["caf", "ipm"] - 0.3
    assert by_setting["caf", "sf"] > by_setting["mean", "none"] - 0.03
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000


def test_a_folder_with_brackets_in_its_name_is_told_as_it_is(tmp_path: Path, monkeypatch) -> None:
    """Brackets are how rich marks up text; what a user named is no markup."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["federation", "init", "[bold]hospitals", "--clients", "2"])
    assert result.exit_code == 0, result.output
    assert "[bold]hospitals/server" in result.output


def test_brackets_in_help_are_brackets() -> None:
    """Typer reads them as a style: of `[aggregation] tune` only the second word was left."""
    told = CliRunner().invoke(app, ["export", "--help"], env={"COLUMNS": "200"}).output
    assert "default: as [aggregation] tune says" in told
    assert "\\[" not in told
