"""What the page answers, to whom, and that its figures are those of the reports and of the command line."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from page_harness import BASE, HOST, HOSTILE, TOKEN, make_run
from trilemma import config, report, simulate
from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.cli import app as command
from trilemma.federation.operations import membership
from trilemma.federation.party.layout import Party
from trilemma.federation.processes.logs import EventLog, events_file
from trilemma.federation.protocol.events import EPOCH_OPENED
from trilemma.learning.defences.evidence import Expulsion
from trilemma.privacy import Mechanism
from trilemma.privacy.ledger.lines import Entry
from trilemma_lab import papers

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from trilemma.page.app import make_app
from trilemma.page.federations import _spending
from trilemma.page.guard import POLICY, hosts_of
from trilemma.page.index import Index, find
from trilemma.page.serving import serve


def client_of(*roots: Path, token: str | None = TOKEN) -> TestClient:
    app = make_app(Index(roots), TOKEN, hosts_of("127.0.0.1", 8765))
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return TestClient(app, base_url=f"http://{HOST}", headers=headers, follow_redirects=False)


def runs_of(client: TestClient) -> dict[str, dict]:
    return {line["name"]: line for line in client.get("/api/runs").json()["runs"]}


# --- who may ask -------------------------------------------------------------------------------------------


def test_nobody_is_answered_without_the_token(watched: Path) -> None:
    client = client_of(watched, token=None)
    for address in ("/", "/api/runs", "/static/main.js", "/openapi.json", "/api/events", "/?token=guess"):
        assert client.get(address).status_code == 403, address
    assert client.get("/api/runs", headers={"Authorization": "Bearer guess"}).status_code == 403
    assert client.get("/api/runs", headers={"Cookie": "trilemma=guess"}).status_code == 403


def test_the_token_becomes_a_cookie_and_leaves_the_address(watched: Path) -> None:
    client = client_of(watched, token=None)
    admitted = client.get(f"/?token={TOKEN}")
    assert (admitted.status_code, admitted.headers["location"]) == (303, "/")
    kept = admitted.headers["set-cookie"].lower()
    assert "httponly" in kept
    assert "samesite=strict" in kept
    assert client.get("/api/runs").status_code == 200  # the client keeps cookies


def test_another_name_for_this_machine_is_turned_away(watched: Path) -> None:
    """A web site whose name was made to point here after it was loaded: the browser sends its name."""
    client = client_of(watched)
    for name in ("evil.example", "evil.example:8765", "127.0.0.1:80", "localhost"):
        assert client.get("/api/runs", headers={"Host": name}).status_code == 403, name
    assert client.get("/api/runs", headers={"Host": "localhost:8765"}).status_code == 200


def test_it_only_reads_and_says_what_a_browser_may_do(watched: Path) -> None:
    client = client_of(watched)
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/api/runs").status_code == 405
    for address in ("/", "/api/runs", "/api/runs/nobody", "/plotly.js"):
        headers = client.get(address).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
    assert POLICY.count("unsafe") == 1  # attributes that say how something looks
    assert "script-src 'self';" in POLICY
    assert "http" not in POLICY


def test_no_path_leads_out_of_what_was_found(watched: Path) -> None:
    client = client_of(watched)
    for address in (
        "/api/runs/..%2Fbroken",
        "/api/runs/%2Fetc%2Fpasswd",
        "/static/..%2Fapp.py",
        "/static/%2e%2e/app.py",
        "/api/parties/..",
        "/api/study?name=../..",
    ):
        assert client.get(address).status_code in (404, 400), address
    assert str(watched.parent) not in client.get("/api/runs").text


# --- runs --------------------------------------------------------------------------------------------------


def test_the_list_says_what_reports_say(watched: Path) -> None:
    lines = runs_of(client_of(watched))
    caf = lines["runs/study/caf"]
    result = report.load(watched / "study" / "caf")
    assert (caf["state"], caf["done"], caf["seeds"]) == ("finished", 6, 2)
    assert caf["shown"] == f"{report.percent(result.summary.accuracy)} %"
    assert caf["guarantee"] == {
        "held": False, "text": "nothing is clipped and noised", "epsilon": None, "assumptions": [],
    }  # fmt: skip
    private = lines[f"runs/{HOSTILE}"]
    verdict = report.verdict_of(report.load(watched / HOSTILE).summary)
    assert private["guarantee"]["epsilon"] == verdict.epsilon
    assert "for one record, if it is replaced by another; under ldp, by pld" in private["guarantee"]["text"]
    assert lines["runs/federation/server/pilot"]["deployed"]
    assert lines["runs/broken"]["state"] == "broken"
    assert "TOMLDecodeError" in lines["runs/broken"]["problem"]
    assert not any(name.endswith("baseline") for name in lines)


def test_the_list_is_searched_and_paged(watched: Path) -> None:
    client = client_of(watched)
    found = client.get("/api/runs", params={"search": "MEAN study"}).json()
    assert [line["name"] for line in found["runs"]] == ["runs/study/mean"]
    part = client.get("/api/runs", params={"limit": 2, "offset": 1}).json()
    assert (len(part["runs"]), part["total"]) == (2, 5)


def test_a_runs_curves_are_the_results(watched: Path) -> None:
    client = client_of(watched)
    result = report.load(watched / "study" / "caf")
    view = client.get(f"/api/runs/{runs_of(client)['runs/study/caf']['id']}").json()
    accuracy = next(one for one in view["series"] if one["name"] == "accuracy")
    assert accuracy["rounds"] == [3, 6]
    assert accuracy["mean"] == pytest.approx(result.curve().mean.tolist(), rel=1e-5)
    assert accuracy["high"][1] - accuracy["mean"][1] == pytest.approx(result.curve().deviation[1], rel=1e-3)
    assert {one["name"] for one in view["baseline"]} == {"accuracy", "loss"}
    assert view["config"]["aggregation.rule"] == "caf"
    assert {one["name"] for one in view["stages"]} >= {"clients s", "server s"}


def test_the_map_is_the_suspects(watched: Path) -> None:
    client = client_of(watched)
    lines = runs_of(client)
    found = client.get(f"/api/runs/{lines['runs/study/caf']['id']}/trust").json()
    assert [one["client"] for one in found["clients"][:2]] == [5, 6]
    assert [one["lies"] for one in found["clients"][:3]] == [True, True, False]
    assert len(found["shares"]) == 7
    assert found["columns"] == [[round_, round_] for round_ in range(1, 7)]
    deployed = client.get(f"/api/runs/{lines['runs/federation/server/pilot']['id']}/trust").json()
    incidents = [(one["client"], one["round"], one["kind"]) for one in deployed["incidents"]]
    assert incidents == [(2, 2, "absent"), (2, 3, "absent")]
    wrong = client.get(f"/api/runs/{lines['runs/study/caf']['id']}/trust", params={"seed": 9})
    assert (wrong.status_code, wrong.json()["detail"]) == (400, "there is no seed 9; allowed: 1, 2")


def test_configurations_differ_where_they_do(watched: Path) -> None:
    client = client_of(watched)
    lines = runs_of(client)
    chosen = [lines["runs/study/caf"]["id"], lines["runs/study/mean"]["id"]]
    found = client.get("/api/differences", params={"run": chosen}).json()
    assert found["rows"] == [{"key": "aggregation.rule", "values": ["caf", "mean"]}]


def test_a_run_that_grows_is_read_again(tmp_path: Path) -> None:
    directory = simulate.RunDirectory.create(tmp_path / "runs" / "new", config.parse(BASE))
    client = client_of(tmp_path / "runs")
    before = runs_of(client)["runs/new"]
    assert (before["state"], before["done"], before["shown"]) == ("under way", 0, "")
    for seed in (1, 2):
        directory.seed(seed).path.mkdir()
        directory.seed(seed).append(Record(1, metrics={"accuracy": 0.5}, epsilon=0.25, accountant="pld"))
    after = runs_of(client)["runs/new"]
    assert (after["done"], after["shown"], after["epsilon"]) == (1, "50.0 ± 0.0 %", "0.25 so far")


def test_folders_of_strangers_are_shown_and_never_run(tmp_path: Path, watched: Path) -> None:
    """A plugin beside a configuration, values of wrong kinds, half a summary: told, not executed."""
    root = tmp_path / "runs"
    for name in ("plugin", "summary", "records", "kinds"):
        shutil.copytree(watched / "study" / "mean", root / name)
    text = (root / "plugin" / "config.toml").read_text()
    (root / "plugin" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (root / "plugin" / "config.toml").write_text(
        'plugins = ["evil.py"]\n' + text.replace('"ipm"', '"<i>mine"')
    )
    (root / "summary" / "summary.json").write_text('{"loss": 3')
    (root / "records" / "seed-1" / "metrics.jsonl").write_text('{"round": 1, "weights": {"99999": 1}}\n')
    (root / "kinds" / "config.toml").write_text(text.replace("rounds = 6", 'rounds = "many"'))
    client = client_of(root)
    lines = runs_of(client)
    assert {name: line["state"] for name, line in lines.items()} == {
        "runs/plugin": "finished",
        "runs/summary": "broken",
        "runs/records": "finished",
        "runs/kinds": "broken",
    }
    assert client.get(f"/api/runs/{lines['runs/plugin']['id']}").json()["config"]["attack.name"] == "<i>mine"
    assert client.get(f"/api/runs/{lines['runs/records']['id']}/trust").status_code == 400
    assert not (tmp_path / "ran").exists()


def test_the_map_tells_who_was_expelled_and_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "expelled", "run.seeds=[1]")
    (path,) = folder.glob("seed-1/*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["expelled"] = [Expulsion(5, "length", 9.0, 7.5).plain()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    client = client_of(tmp_path / "runs")
    told = client.get(f"/api/runs/{runs_of(client)['runs/expelled']['id']}/trust").json()
    (one,) = [event for event in told["incidents"] if event["kind"] == "expelled"]
    assert (one["client"], one["round"], one["reason"]) == (5, 3, "round 3, length: 9 > 7.5")
    assert [who["client"] for who in told["clients"] if who["expelled"]] == [5]


def test_links_are_not_followed(tmp_path: Path, watched: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(watched / "study")
    assert list(find(tmp_path / "runs")) == []


@pytest.mark.parametrize("link", ["state", "state/runs", "state/runs/default"])
def test_links_below_a_servers_folder_are_not_followed_either(tmp_path: Path, link: str) -> None:
    """Who may write into a server's folder does not choose which others of this machine are shown."""
    elsewhere, server = tmp_path / "elsewhere", tmp_path / "watched" / "server"
    (elsewhere / "runs" / "default" / "default").mkdir(parents=True)
    server.mkdir(parents=True)
    (server / "federation.toml").write_text("")
    (server / link).parent.mkdir(parents=True, exist_ok=True)
    (server / link).symlink_to(elsewhere / link.removeprefix("state").strip("/"))
    assert [one.kind for one in find(tmp_path / "watched")] == ["party"]


def test_runs_of_a_server_that_cannot_be_listed_are_none(tmp_path: Path) -> None:
    (tmp_path / "server" / "state").mkdir(parents=True)
    (tmp_path / "server" / "federation.toml").write_text("")
    (tmp_path / "server" / "state" / "runs").write_text("no folder")
    assert [one.kind for one in find(tmp_path)] == ["party"]


@pytest.mark.parametrize("secrets", [True, False])
def test_a_party_without_its_public_facts_is_no_run(watched: Path, tmp_path: Path, secrets: bool) -> None:
    """It is known by its secrets, or by its name beside another party's; what it lacks is said."""
    root = tmp_path / "runs"
    for name in ("client-0", "client-1", "server"):
        shutil.copytree(watched / "federation" / name, root / name)
    for name in ("client-1", "server"):
        (root / name / "federation.toml").unlink()
        if not secrets:
            shutil.rmtree(root / name / "secrets")
    client = client_of(root)
    lines = {one["name"]: one for one in client.get("/api/parties").json()}
    assert {name: "no federation.toml" in one["problem"] for name, one in lines.items()} == {
        "runs/client-0": False, "runs/client-1": True, "runs/server": True,
    }  # fmt: skip
    assert [one["role"] for _, one in sorted(lines.items())] == ["client", "client", "server"]
    view = client.get(f"/api/parties/{lines['runs/client-1']['id']}")
    assert (view.status_code, "no federation.toml" in view.json()["detail"]) == (400, True)
    assert set(runs_of(client)) == {"runs/server/pilot"}


@pytest.mark.parametrize("name", ["config.toml", "summary.json", "seed-1/metrics.jsonl"])
@pytest.mark.parametrize("below", ["", "baseline"])
def test_a_file_without_an_end_is_not_waited_for(
    watched: Path, tmp_path: Path, name: str, below: str
) -> None:
    """A pipe in a stranger's folder, or a link to one: nobody would ever write into it."""
    root = tmp_path / "runs"
    shutil.copytree(watched / "study" / "mean", root / "whole")
    shutil.copytree(watched / "study" / "caf", root / "caf")
    (root / "caf" / below / name).unlink()
    os.mkfifo(tmp_path / "pipe")
    (root / "caf" / below / name).symlink_to(tmp_path / "pipe")
    client = client_of(root)
    lines = runs_of(client)
    assert lines["runs/whole"]["state"] == "finished"
    broken = "" if (below, name) == ("baseline", "summary.json") else f"{Path(name).name} is no file"
    assert lines["runs/caf"]["problem"] == broken
    assert client.get(f"/api/runs/{lines['runs/caf']['id']}").status_code == (400 if broken else 200)


def test_a_run_that_is_only_called_like_a_party_is_a_run(watched: Path, tmp_path: Path) -> None:
    shutil.copytree(watched / "study" / "mean", tmp_path / "runs" / "server")
    assert [one.kind for one in find(tmp_path / "runs")] == ["run"]


# --- planner -----------------------------------------------------------------------------------------------

QUESTIONS = [
    {"clients": 100, "byzantine": 10, "clip": 2.25, "rounds": 30, "epsilon": 26.4, "delta": 1e-4, "dim": 69},
    {"clients": 100, "byzantine": 10, "clip": 2.25, "rounds": 30, "sigma_ind": 1.2, "sigma_cor": 0.65,
     "delta": 1e-4},
    {"clients": 7, "rounds": 40, "threat": "ldp", "unit": "example", "batch": 25, "examples": 2764,
     "sampling": "without-replacement", "noise_multiplier": 1.0, "delta": 1e-4},
    {"clients": 100, "byzantine": 10, "rounds": 30, "sigma_cor": 0.6, "assume": "published", "epsilon": 25.0},
    {"clients": 50, "byzantine": 3, "collusion": 2, "neighbours": 8, "rounds": 30, "epsilon": 8.0,
     "delta": 1e-4},
]  # fmt: skip


@pytest.mark.parametrize(
    "question", QUESTIONS, ids=["noise", "epsilon", "sampled", "published", "neighbours"]
)
def test_every_figure_equals_the_command_to_the_digit(question: dict, watched: Path) -> None:
    plan = client_of(watched).get("/api/plan", params=question).json()
    words = plan["command"].split()
    assert words[:2] == ["trilemma", "privacy"]
    done = CliRunner().invoke(command, [*words[1:], "--json"])
    assert plan["record"] == json.loads(done.stdout)
    told = plan["record"]["printed"] if plan["reason"] else plan["record"][plan["asked"]]
    assert {one["accountant"]: one["value"] for one in plan["figures"]} == told
    if not plan["toml_problem"]:
        config.parse(tomllib.loads(plan["toml"]))


def test_an_impossible_setting_says_why_in_the_commands_words(watched: Path) -> None:
    client = client_of(watched)
    question = {"clients": 10, "byzantine": 10, "rounds": 5, "sigma_ind": 1.0, "delta": 1e-5}
    refused = client.get("/api/plan", params=question)
    assert refused.status_code == 400
    assert refused.json()["detail"] == "at least one client is honest: 0 ≤ f < n = 10, got f = 10"
    for more in ({"byzantine": 1, "threat": "ldp", "neighbours": 3}, {"clients": 501, "neighbours": 3}):
        assert client.get("/api/plan", params={**question, **more}).status_code == 400
    many = client.get("/api/plan", params={**question, "byzantine": 6}).json()
    assert "2f < n" in many["toml_problem"]


def test_curves_of_the_planner_meet_its_figures(watched: Path) -> None:
    client = client_of(watched)
    plan = client.get("/api/plan", params=QUESTIONS[1]).json()
    curves = client.get("/api/plan/curves", params=QUESTIONS[1]).json()
    exact = next(one for one in plan["figures"] if one["accountant"] == "exact")["value"]
    over_rounds = {one["name"]: one["y"][-1] for one in curves["over_rounds"]}
    assert over_rounds["exact"] == pytest.approx(exact, rel=1e-9)
    noise = curves["over_noise"]
    assert noise["y"][noise["x"].index(1.0)] == exact
    assert noise["y"] == sorted(noise["y"], reverse=True)


def test_what_liars_hide_is_what_bounds_says(watched: Path) -> None:
    plan = client_of(watched).get("/api/plan", params={**QUESTIONS[1], "dim": 1290}).json()
    sizes = f"-n 100 -f 10 -d 1290 --rounds 30 --clip 2.25 --sigma-ind {plan['sigma_ind']}"
    words = f"bounds {sizes} --sigma-cor {plan['sigma_cor']} --rule caf --hidden --json"
    told = json.loads(CliRunner().invoke(command, words.split()).stdout)
    assert (plan["hidden"], plan["hidden_problem"]) == (told["hidden"]["most"], "")
    honest = client_of(watched).get("/api/plan", params={**QUESTIONS[1], "byzantine": 0}).json()
    assert honest["hidden"] is None
    assert "0 < f" in honest["hidden_problem"]


def test_seconds_grow_with_the_model_and_with_noise(watched: Path) -> None:
    client = client_of(watched)
    small, large, quiet, many = (
        client.get("/api/plan/seconds", params={**QUESTIONS[1], "dim": 1000, **more}).json()
        for more in ({}, {"dim": 10**6}, {"sigma_cor": 0.0}, {"clients": 2000})
    )
    assert large["rule"] == pytest.approx(1000 * small["rule"])
    assert large["noise"] == pytest.approx(1000 * small["noise"])
    assert 0 < quiet["noise"] < small["noise"]
    assert many == {"rule": None, "noise": None}


# --- studies and federations -------------------------------------------------------------------------------


def test_a_study_shows_the_worst_run_of_a_cell(watched: Path) -> None:
    client = client_of(watched)
    assert "runs/study" in [one["name"] for one in client.get("/api/studies").json()]
    view = client.get("/api/study", params={"name": "runs/study"}).json()
    assert (view["row"], view["rows"], view["keys"]) == (
        "aggregation.rule",
        ["caf", "mean"],
        ["aggregation.rule"],
    )
    caf = report.load(watched / "study" / "caf").summary.accuracy
    assert view["squares"][0][0]["value"] == caf.mean
    whole = client.get("/api/study", params={"name": "runs", "row": "attack.name", "column": "x"}).json()
    scores = [
        report.load(watched / name).summary.accuracy.mean for name in ("study/caf", "study/mean", HOSTILE)
    ]
    assert min(one["value"] for row in whole["squares"] for one in row if one) == min(scores)


def test_a_papers_runs_stand_beside_what_is_printed_with_a_verdict(tmp_path: Path) -> None:
    places = papers.studies["safe-dshb"].runs(quick=True)
    for place in places[:2]:
        make_run(tmp_path / "runs" / "safe-dshb" / place.cell.name)
    view = client_of(tmp_path / "runs").get("/api/study", params={"name": "runs/safe-dshb"}).json()
    found = [one for row in view["squares"] for one in row if one]
    assert len(found) == 2
    for one in found:
        assert one["printed"]
        assert one["verdict"].split(" by ")[0] in ("agrees", "ordering agrees", "differs")


def test_the_servers_folder_tells_who_answered(watched: Path) -> None:
    client = client_of(watched)
    lines = {one["name"]: one for one in client.get("/api/parties").json()}
    assert len(lines) == 5
    view = client.get(f"/api/parties/{lines['runs/federation/server']['id']}").json()
    (run,) = view["runs"]
    assert (run["name"], run["round"], run["rounds"], run["state"]) == ("pilot", 3, 3, "finished")
    assert [(one["heard"], one["absent"], one["now"]) for one in run["members"]][1:3] == [
        (3, 0, "heard"), (1, 2, "absent"),
    ]  # fmt: skip
    assert [one["heard_at"] for one in run["members"]] == [None] * 4  # nobody wrote events: one process
    assert [(one["expelled"], one["outside"]) for one in run["members"]] == [("", "")] * 4
    assert view["account"] is None


def test_events_tell_when_a_client_was_heard_and_who_is_outside(watched: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(watched / "federation" / "server", root / "server")
    file = events_file(Party.open(root / "server").running)
    EventLog(file, "server", "pilot")(EPOCH_OPENED(epoch=0, clients=[0, 1, 2], of=4))
    client = client_of(root)
    (line,) = client.get("/api/parties").json()
    (run,) = client.get(f"/api/parties/{line['id']}").json()["runs"]
    assert [one["outside"] for one in run["members"]] == ["", "", "", "did not answer"]


def test_a_partys_line_counts_who_is_on_the_roster_now(watched: Path, tmp_path: Path) -> None:
    shutil.copytree(watched / "federation", tmp_path / "runs")
    membership.leave(tmp_path / "runs", "3")
    lines = {one["name"]: one["clients"] for one in client_of(tmp_path / "runs").get("/api/parties").json()}
    assert lines == {
        "runs/server": 3, "runs/client-0": 4, "runs/client-1": 4, "runs/client-2": 4, "runs/client-3": 3,
    }, "as far as its own folder knows"  # fmt: skip


def test_a_clients_folder_tells_its_ledger_to_its_owner_alone(watched: Path, tmp_path: Path) -> None:
    """Whatever the page tells of a party, it tells when that folder is all there is, without its secrets."""
    root = tmp_path / "runs"
    shutil.copytree(watched / "federation" / "client-1", root / "client-1")
    shutil.rmtree(root / "client-1" / "secrets")
    client, alone = client_of(watched), client_of(root)
    lines = {one["name"]: one for one in client.get("/api/parties").json()}
    view = client.get(f"/api/parties/{lines['runs/federation/client-1']['id']}").json()
    (line,) = alone.get("/api/parties").json()
    again = alone.get(f"/api/parties/{line['id']}").json()
    assert {**view, "line": None} == {**again, "line": None}
    account = view["account"]
    assert (view["runs"], account["rounds"]) == ([], {"pilot/0": 3})
    assert account["left"] == pytest.approx(account["budget"] - account["spending"][-1]["epsilon"])
    assert 0 < account["spent"] < account["budget"]
    server = client.get(f"/api/parties/{lines['runs/federation/server']['id']}").text
    assert '"budget":' not in server.replace('"account":null', "")


def test_a_ledger_that_was_changed_is_not_believed(watched: Path, tmp_path: Path) -> None:
    shutil.copytree(watched / "federation" / "client-1", tmp_path / "runs" / "client-1")
    ledger = tmp_path / "runs" / "client-1" / "state" / "ledger"
    ledger.write_bytes(ledger.read_bytes().replace(b'"round":1', b'"round":9'))
    client = client_of(tmp_path / "runs")
    (line,) = client.get("/api/parties").json()
    account = client.get(f"/api/parties/{line['id']}").json()["account"]
    assert "changed or is out of place" in account["problem"]
    assert account["spending"] == []


@pytest.mark.parametrize("host", ["", "::", "[::]", "0.0.0.0", "0", "::0", "[::ffff:0.0.0.0]"])
def test_every_address_is_none_to_listen_on_with_or_without_brackets(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="every address"):
        serve([tmp_path], host, 0, print)


def test_what_a_ledger_spent_never_falls_whoever_counted_it() -> None:
    """Fewer releases cost no more than more of them: a later, tighter figure holds for those before, too."""
    costs = [{"rdp": 2.0}, {"rdp": 7.33}, {"rdp": 8.0, "pld": 6.51}, {"rdp": 9.0, "pld": 6.8}]
    entries = [Entry("a.0", place, Mechanism(1.0), epsilon, "ldp") for place, epsilon in enumerate(costs)]
    told = _spending(entries)
    assert [(one.epsilon, one.accountant) for one in told] == [
        (2.0, "rdp"), (6.51, "pld"), (6.51, "pld"), (6.8, "pld")
    ]  # fmt: skip
    assert [one.round for one in told] == [0, 1, 2, 3]


def test_a_stopped_run_does_not_lead_a_study(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "done")
    made = simulate.RunDirectory.create(
        tmp_path / "runs" / "left", config.parse(BASE, ["aggregation.rule=mda"])
    )
    for seed in (1, 2):
        made.seed(seed).path.mkdir()
        made.seed(seed).append(Record(1, metrics={"accuracy": 0.99, "loss": 0.01}))
    told = client_of(tmp_path / "runs").get("/api/study", params={"name": "runs", "score": "loss"}).json()
    assert told["low_is_good"]
    assert told["scores"] == ["accuracy", "loss"]
    squares = {row: told["squares"][place][0] for place, row in enumerate(told["rows"])}
    assert squares["caf"]["value"] is not None
    assert (squares["mda"]["value"], squares["mda"]["shown"]) == (None, "not finished")


def test_a_cell_says_in_what_its_runs_differ(tmp_path: Path) -> None:
    """The worst of two ε is no repetition of one run."""
    for rule, rounds, lr in (("caf", 2, 0.1), ("caf", 2, 0.2), ("mean", 3, 0.1)):
        options = [f"aggregation.rule={rule}", f"run.rounds={rounds}", f"algorithm.lr={lr}"]
        make_run(tmp_path / "runs" / f"{rule}-{rounds}-{lr}", *options)
    asked = {"name": "runs", "row": "aggregation.rule", "column": "run.rounds"}
    told = client_of(tmp_path / "runs").get("/api/study", params=asked).json()
    cell = next(one for row in told["squares"] for one in row if one and len(one["runs"]) == 2)
    assert cell["differ"] == ["algorithm.lr"]
    assert cell["shown"].endswith(" %")


def test_cells_of_a_sweep_go_by_what_is_their_own_and_folders_of_one_name_are_told_apart(
    tmp_path: Path,
) -> None:
    for place in ("lab", "ward"):
        make_run(tmp_path / place / "runs" / "sweep" / "0a1b")
    values = {"0a1b": {"aggregation.rule": "caf", "attack": {"name": "alie", "strength": 2.0}}}
    (tmp_path / "lab" / "runs" / "sweep" / "sweep.json").write_text(json.dumps({"cells": values}))
    told = (
        client_of(tmp_path / "lab" / "runs", tmp_path / "ward" / "runs")
        .get("/api/runs", params={"sort": "run", "down": False})
        .json()
    )
    assert told["watched"] == ["runs (lab)", "runs (ward)"]
    assert [one["title"] for one in told["runs"]] == [
        "runs (lab)/sweep: rule caf, attack alie(strength=2.0)", "runs (ward)/sweep/0a1b"
    ]  # fmt: skip


def test_the_newest_study_says_when(watched: Path) -> None:
    told = client_of(watched).get("/api/studies").json()
    newest = max(told, key=lambda one: one["changed"])
    assert newest["changed"] == pytest.approx((watched / "federation").stat().st_mtime, abs=600)
