"""The commands `trilemma privacy` and `trilemma bounds`."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from trilemma.aggregation import rules
from trilemma.base import plugins
from trilemma.base.errors import UserError
from trilemma.cli.privacy import bounds_command, privacy_command

app = typer.Typer()
app.command("privacy")(privacy_command)
app.command("bounds")(bounds_command)

SECLDP = "privacy --threat secldp -n 100 -f 10 -q 0 --clip 2.25 --rounds 30 --delta 1e-4"
CAFCOR = f"{SECLDP} --assume published"
EXAMPLE = (
    "privacy --threat ldp -n 7 -f 3 --unit example --batch 25 --examples 2764 --sampling poisson "
    "--rounds 400 --delta 1e-4"
)


def run(text: str):
    return CliRunner().invoke(app, text.split(), env={"COLUMNS": "200"})


def answer(text: str) -> dict:
    result = run(text + " --json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(text: str) -> str:
    error = run(text).exception
    assert isinstance(error, UserError)
    return str(error)


def test_epsilon_of_given_noise():
    found = answer(f"{CAFCOR} --sigma-cor 0.6")
    assert f"{found['printed']['rdp']:.1f}" == "26.4"
    assert found["printed"]["exact"] == pytest.approx(24.587, abs=1e-3)
    assert found["epsilon"] == {}, "a figure that counts on liars is not in a column of guarantees"
    assert "only if 10 liars exist" in found["no_guarantee"]
    assert found["multiplier"] == pytest.approx(1.2713, abs=1e-4)
    assert found["notes"]


def test_the_printed_figure_by_its_noise_multiplier():
    found = answer(f"{EXAMPLE} --adjacency published --noise-multiplier 1")
    assert f"{found['printed']['rdp']:.2f}" == "1.14"
    strict = answer(f"{EXAMPLE} --noise-multiplier 1")
    assert strict["epsilon"]["pld"] < strict["epsilon"]["rdp"] < 1.14


def test_noise_for_a_given_epsilon():
    found = answer(f"{CAFCOR} --epsilon 26.4 --accountant rdp -d 10")
    assert found["calibrated"]["sigma_cor"] == pytest.approx(0.6, abs=2e-3)
    assert found["calibrated"]["predicted_error"] == pytest.approx(0.4, abs=2e-3)
    assert found["printed"]["rdp"] <= 26.4
    errors = [row["predicted_error"] for row in found["collusion"]]
    assert [row["collusion"] for row in found["collusion"]] == [0, 2, 5, 8, 10]
    assert errors == sorted(errors)
    assert [row["threat"] for row in found["models"]] == ["cdp", "secldp", "byzldp", "ldp"]


def test_delta_of_given_noise_and_epsilon():
    text = CAFCOR.replace(" --delta 1e-4", "")
    found = answer(f"{text} --sigma-cor 0.6 --epsilon 25")
    assert found["printed"]["exact"] < found["printed"]["rdp"] < 1e-3


def test_no_noise_is_null_in_json_and_said():
    found = answer(f"{CAFCOR} --sigma-ind 0")
    assert set(found["printed"].values()) == {None}
    assert found["epsilon"] == {}
    assert "no noise: no guarantee" in found["notes"]


def test_a_guarantee_needs_no_liars():
    found = answer(f"{SECLDP} --epsilon 26.4 --accountant rdp")
    pair = [round(found["calibrated"][name], 2) for name in ("sigma_ind", "sigma_cor")]
    assert pair == [1.19, 0.64]
    assert found["epsilon"]["rdp"] <= 26.4
    assert "no_guarantee" not in found
    assert "when nobody lies" in refusal(f"{SECLDP} --sigma-cor 0.6")


def test_tables_name_accountant_and_threat():
    text = run(f"{CAFCOR} --sigma-cor 0.6").stdout
    assert "26.37" in text
    assert "printed, no guarantee" in text
    assert "secldp" in text
    assert "exact" in text
    text = run(f"{CAFCOR} --epsilon 26.4").stdout
    assert "calibrated by exact" in text
    assert "byzldp" in text


@pytest.mark.parametrize("noise", ["--sigma-cor 0.6", "--epsilon 5"])
def test_plot(tmp_path, noise):
    path = tmp_path / "folder" / "privacy.png"
    found = answer(f"{CAFCOR} {noise} --plot {path}")
    assert found["plot"] == str(path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CAFCOR, "give either the noise"),
        (f"{CAFCOR} --sigma-cor 1 --epsilon 3", "give either the noise"),
        (f"{CAFCOR} --sigma-cor 1 --noise-multiplier 3", "not both"),
        (CAFCOR.replace("--delta 1e-4", "--sigma-cor 1"), "give --delta"),
        (f"{CAFCOR.replace('-q 0', '-q 11')} --sigma-cor 1", "q ≤ f"),
        (f"{CAFCOR.replace('-q 0', '-q 10')} --sigma-cor 1", "cancels"),
        (f"{CAFCOR.replace('1e-4', '1.5')} --sigma-cor 1", "strictly between"),
        (f"{CAFCOR} --sigma-cor -1", "not negative"),
        (f"{CAFCOR} --sigma-cor 1 --sampling poisson", "--examples"),
        (f"{CAFCOR} --epsilon 3 --accountant exakt", "did you mean 'exact'"),
        (f"{CAFCOR} --sigma-cor 1 --adjacency add_remove", "did you mean 'add-remove'"),
        (EXAMPLE.replace("poisson", "without_replacement") + " --epsilon 1", "mean 'without-replacement'"),
        (f"{CAFCOR.replace('secldp', 'sec')} --sigma-cor 1", "unknown threat model"),
        ("bounds -n 7 -f 2 -d 3 --rounds 5 --rule medan", "unknown aggregation rule"),
        ("bounds -n 7 -f 4 -d 3 --rounds 5 --rule caf", "2f < n"),
        ("bounds -n 10 -f 10 -d 3 --rounds 5 --hidden", "2f < n"),
    ],
)
def test_bad_input_says_why(text, reason):
    assert reason in refusal(text)


def test_bounds_of_every_rule():
    rows = {row["rule"]: row for row in answer("bounds -n 7 -f 2")["rules"]}
    assert rows["caf"]["kappa"] == pytest.approx(6 * 2 / 5 * (1 + 2 / 3) ** 2)
    assert rows["caf"]["criterion"] == "spectral"
    assert rows["cwtm"]["criterion"] == "trace"
    assert rows["mean"]["kappa"] is None
    assert "none proven" in run("bounds -n 7 -f 2").stdout


def test_bounds_of_a_rule_of_ones_own(tmp_path):
    path = tmp_path / "rules.py"
    path.write_text(
        "from trilemma.aggregation import cwmed, rules\n"
        "rules.register('my-median')(type('Mine', (cwmed,), {'__doc__': 'The median, again.'}))\n"
    )
    try:
        said = run(f"bounds -n 7 -f 2 --rule nnm+my-median --plugin {path} --json")
        assert json.loads(said.stdout)["rules"][0]["rule"] == "nnm+my-median"
    finally:
        rules.withdraw("my-median")
        plugins._loaded.clear()
