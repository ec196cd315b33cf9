"""Statistics between parties: paid for once, by every client, and then a training on the same ledgers."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from federation_harness import (
    INSTANT,
    Direct,
    check_against_simulation,
    command,
    coordinator,
    result_of,
    transcript,
)
from statistics_harness import STATISTICS, TASK, TRAINING, made, settings
from trilemma.base.errors import UserError
from trilemma.federation.client.account import own_statement
from trilemma.federation.operations.replanning import configure
from trilemma.federation.party import provisioning
from trilemma.federation.party.permission import Permission
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.server.replay import differences
from trilemma.federation.server.under_way import under_way
from trilemma.report import deployed_statistics
from trilemma.task import Task


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Statistics of a federation that have ended."""
    found = made(tmp_path_factory.mktemp("stats"))
    coordinator(found, Direct(found), "statistics")[0].go()
    return found


def test_deployed_statistics_are_those_of_the_simulation(finished):
    config = settings(STATISTICS).toml()
    check_against_simulation(finished, config, "statistics", Task.from_file(finished[0].task))
    assert differences(finished[0], "statistics")[1] == []


def test_every_figure_is_the_servers_and_holds_what_is_true(finished):
    result = deployed_statistics(finished[0], "statistics")
    assert result is not None
    assert result.heard == (0, 1, 2, 3, 4)
    assert result.verdict["guarantee"]["epsilon"] == pytest.approx(4.0, rel=1e-3)
    task = Task.from_file(finished[0].task)
    ages = [one["age"] for client in range(5) for one in task.records(client) if one.get("age", "?") != "?"]
    assert result.records.low <= len(ages) + 2 <= result.records.high
    mean = result.column("age").mean
    assert mean.low <= np.mean(ages) <= mean.high
    again = deployed_statistics(finished[0], "statistics")  # from the file beside the run
    assert again.plain() == result.plain()


def test_what_is_handed_out_has_no_single_message_in_it(finished):
    handed = result_of(finished, "statistics")
    assert set(handed) == {"params"}
    sent = transcript(finished, "statistics", 0)
    for client in finished[1:]:
        kept = (client.run_folder("statistics") / "result").read_bytes()
        assert all(row.numpy().tobytes() not in kept for row in sent)


def test_each_client_has_paid_once(finished):
    for client in finished[1:]:
        statement = own_statement(client)
        assert len(statement.entries) == 1
        assert statement.spent[1] == pytest.approx(4.0, rel=1e-3)
        assert statement.entries[0].mechanism.gaussian


def test_a_server_that_asks_twice_gets_the_same_bytes_or_a_refusal(tmp_path):
    """The same question is answered from the journal; a second run is another release, over budget here."""
    found = made(tmp_path, budget=4.0)
    coordinator(found, Direct(found), "statistics")[0].go()
    first = transcript(found, "statistics", 0)
    lines = [client.ledger.read_bytes() for client in found[1:]]
    shutil.rmtree(found[0].state)  # the server has forgotten that it asked
    coordinator(found, Direct(found), "statistics")[0].go()
    assert torch.equal(transcript(found, "statistics", 0), first)
    with pytest.raises(UserError, match="reach"):
        coordinator(found, Direct(found), "again")[0].go()
    assert [client.ledger.read_bytes() for client in found[1:]] == lines


def test_a_client_that_is_absent_is_left_out_and_counts_as_one_that_may_lie(tmp_path):
    found = made(tmp_path)
    coordinator(found, Direct(found, gone=[2]), "statistics")[0].go()
    result = deployed_statistics(found[0], "statistics")
    assert result.heard == (0, 1, 3, 4)
    assert result.records.value > 50


def test_a_site_that_lies_about_everything_stays_within_the_interval(tmp_path):
    found = made(tmp_path)

    def lie(client: int, asked: bytes, answer: bytes) -> bytes:
        if client != 4 or wire.kind_of(answer) != "answer":
            return answer
        header, tensors = wire.loads(answer, kinds.Answer)
        return wire.dumps(header, {name: torch.full_like(one, 127) for name, one in tensors.items()})

    coordinator(found, Direct(found, lie), "statistics")[0].go()
    result = deployed_statistics(found[0], "statistics")
    ages = [
        one["age"]
        for client in range(4)
        for one in Task.from_file(found[0].task).records(client)
        if "age" in one
    ]
    ages = [age for age in ages if age != "?"]
    mean = result.column("age").mean
    assert mean.low <= np.mean(ages) <= mean.high
    assert mean.low <= mean.value <= mean.high


def test_training_goes_on_with_the_same_ledgers(tmp_path):
    found = made(tmp_path)
    folder = found[0].folder.parent
    coordinator(found, Direct(found), "statistics")[0].go()
    told = deployed_statistics(found[0], "statistics")
    after = configure(folder, settings(TRAINING))
    assert [party.config.read_text() for party in after] == [settings(TRAINING).toml()] * 6
    coordinator(after, Direct(after), "train")[0].go()
    for client in after[1:]:
        entries = own_statement(client).entries
        assert [entry.run.split("/")[0] for entry in entries] == ["statistics", "train", "train"]
        assert 4.0 < own_statement(client).spent[1] <= 6.0
    assert deployed_statistics(found[0], "statistics").plain() == told.plain()
    again = json.loads(command("statistics", folder, "--json"))
    assert again == told.plain()


def test_a_configuration_that_cannot_be_loaded_changes_nothing(tmp_path):
    found = made(tmp_path)
    folder, before = found[0].folder.parent, [party.config.read_bytes() for party in found]
    for wrong in ({"federation": {"clients": 4, "tolerate": 1}}, {"data": {"centre": True}}):
        with pytest.raises(UserError):
            configure(folder, settings({**TRAINING, **wrong}))
    with under_way(found[0], "monday"), pytest.raises(UserError, match="'monday' is under way"):
        configure(folder, settings(TRAINING))
    assert [party.config.read_bytes() for party in found] == before


def test_between_machines_another_plan_is_allowed_by_each_owner(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    facts = Federation("stats", 5, host="fl.example.org", listen="127.0.0.1", examples=30, timing=INSTANT)
    found = provisioning.init(
        tmp_path / "there", facts, settings(STATISTICS).toml(), task=tmp_path / "task.py"
    )
    configure(found[1].folder, settings(TRAINING))
    assert Permission.load(found[1].allowed) == Permission()
    assert found[2].config.read_text() == settings(STATISTICS).toml()


def test_a_second_survey_of_the_same_records_costs_again(tmp_path):
    found = made(tmp_path, budget=8.0)
    coordinator(found, Direct(found), "first")[0].go()
    coordinator(found, Direct(found), "second")[0].go()
    spent = own_statement(found[1]).spent[1]
    assert 4.0 < spent < 8.0
    one, other = (transcript(found, run, 0) for run in ("first", "second"))
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    "more", [{"aggregation": {"rule": "cwtm", "tune": "clients"}}, {"evaluation": {"clients": True}}]
)
def test_statistics_are_no_model_that_is_scored_or_goes_on(finished, more):
    with pytest.raises(UserError, match="no model"):
        configure(finished[0].folder.parent, settings({**STATISTICS, **more}))
