"""What methods remember of every client, in files: the same numbers, whole or stepped over, never lost."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from federation_harness import Direct, asks, coordinator, result_of, seeded
from trilemma.base.errors import UserError
from trilemma.federation.operations import checks
from trilemma.federation.protocol import disk_backed, wire
from trilemma.federation.protocol.disk_backed import Memory
from trilemma.federation.server import commits
from trilemma.federation.server.commits import KEPT, CommitLog
from trilemma.learning.defences.evidence import history as evidence_history
from trilemma.learning.steps import gridded
from trilemma.storage import mapped

CLIENTS = 4
LDP = ("privacy.threat=ldp", "privacy.clip=0.1", "privacy.sigma_ind=0.5")
METHODS = {
    "cafcor": ("algorithm.name=cafcor", "algorithm.weight_decay=0.1", "aggregation.rule=caf", *LDP),
    "byz-clip21": ("algorithm.name=byz-clip21-sgd2m", *LDP),
    "byz-clip21+": ("algorithm.name=byz-clip21-sgd2m+", *LDP),
    "fedavg": ("algorithm.name=fedavg", *LDP),
    "lbgm": ("algorithm.name=lbgm", "algorithm.threshold=0.9"),
}
REMEMBERED = {"cafcor": {"momentum"}, "byz-clip21": {"m"}, "byz-clip21+": {"v", "g", "m"}, "lbgm": {"last"}}


def federation(folder, *options, rounds=2, tolerate=1):
    return seeded(folder, CLIENTS, *options, rounds=rounds, tolerate=tolerate)[0]


@pytest.fixture
def on_files(monkeypatch):
    """Everything counts as long, and is read ten columns at a time."""
    monkeypatch.setattr(disk_backed, "IN_MEMORY", 0)
    monkeypatch.setattr(gridded, "TOGETHER", 10)
    monkeypatch.setattr(disk_backed, "TOGETHER", 10)
    monkeypatch.setattr(evidence_history, "TOGETHER", 10 * CLIENTS)


def run(parties, **changes):
    runner, said = coordinator(parties, Direct(parties, **changes))
    runner.go()
    return runner.log, said


def references(path):
    return {one.file for one in commits._references(path)}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_the_same_with_its_memory_in_files(tmp_path, request, method):
    """Number for number: the model, and what the server remembers."""
    ran = []
    for folder in ("in memory", "in files"):
        parties = federation(tmp_path / folder, *METHODS[method])
        log, _ = run(parties)
        ran.append((result_of(parties, "run")["params"], log.last().remembered))
        assert (log.folder / "memory").exists() == (folder == "in files" and method in REMEMBERED)
        assert not list((log.folder / "messages").glob("*")), "it has no name"
        request.getfixturevalue("on_files")
    (plain, kept), (filed, in_files) = ran
    assert torch.equal(plain, filed)
    assert {name for parts in in_files.values() for name in parts} == REMEMBERED.get(method, set())
    for client, parts in kept.items():
        for name, tensor in parts.items():
            assert torch.equal(tensor, in_files[client][name])
            assert mapped.lies_in_a_file(in_files[client][name])


def test_only_what_the_kept_commits_refer_to_is_kept(tmp_path, on_files):
    """A commit is small; who was not heard keeps its file; five commits' files are there, and no others."""
    parties = federation(tmp_path / "federation", *METHODS["cafcor"], rounds=8)

    def silent(client, asked, answer):
        return None if client == 3 and asks(asked, *range(1, 8)) else answer

    log, _ = run(parties, tamper=silent)
    kept = log._kept()
    assert len(kept) == KEPT
    assert {path.name for path in log.memory.folder.iterdir()} == set.union(*map(references, kept))
    assert len(set.union(*map(references, kept))) == 3 * KEPT + 1, "of the silent client its first"
    assert all(path.stat().st_size < 4 * 69 * CLIENTS + 4096 for path in kept)
    commit = log.recover()
    assert sorted(commit.remembered) == list(range(CLIENTS))


def broken(path, how):
    content = path.read_bytes()
    changed = content[:40] + bytes([content[40] ^ 1]) + content[41:]
    path.write_bytes({"longer": content + b"\0", "changed": changed}[how])


@pytest.mark.parametrize("how", ["changed", "longer"])
def test_a_broken_file_costs_the_rounds_that_need_it(tmp_path, on_files, how):
    """The commits that refer to it are stepped over, as if they were broken themselves; the run goes on."""
    parties = federation(tmp_path / "federation", *METHODS["cafcor"], rounds=3)

    def stop(client, asked, answer):
        if asks(asked, 2):
            raise KeyboardInterrupt("the server is killed")
        return answer

    with pytest.raises(KeyboardInterrupt):
        run(parties, tamper=stop)
    log = CommitLog(parties[0].run_folder("run"))
    newest, *older = log._kept()
    broken(log.memory.folder / min(references(newest) - set.union(*map(references, older))), how)
    assert not list(checks.memory(parties[0])), "an older commit is whole: nothing for an operator to do"
    again, said = run(parties)
    assert any("broken" in text for text in said)
    assert [record["round"] for record in again.records()] == [1, 2, 3]
    again.check()


def test_a_log_without_any_whole_commit_says_so(tmp_path, on_files):
    parties = federation(tmp_path / "federation", *METHODS["cafcor"], rounds=KEPT + 1)
    log, _ = run(parties)
    for path in log.memory.folder.iterdir():
        broken(path, "changed")
    log.last()  # who only looks at records looks at lengths only
    with pytest.raises(UserError, match="no commit in"):
        log.recover()
    (found,) = checks.memory(parties[0])
    assert "no commit in" in found.text


def test_a_full_disk_ends_the_server_with_a_reason_and_loses_nothing(tmp_path, on_files, monkeypatch):
    """Room is taken before it is written to: otherwise the system would end the process without a word."""
    parties = federation(tmp_path / "federation", *METHODS["fedavg"], rounds=3)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    honest, calls = mapped.take_room, []

    def take_room(handle, size):
        calls.append(size)
        if len(calls) == 2 * CLIENTS + 1:  # the second round's: each message takes room, and its row
            raise full
        honest(handle, size)

    monkeypatch.setattr(mapped, "take_room", take_room)
    with pytest.raises(OSError, match="No space left"):
        run(parties)
    log = CommitLog(parties[0].run_folder("run"))
    assert log.last().rounds == 1
    run(parties)
    assert [record["round"] for record in log.records()] == [1, 2, 3]
    undisturbed = federation(tmp_path / "undisturbed", *METHODS["fedavg"], rounds=3)
    run(undisturbed)
    assert torch.equal(result_of(parties, "run")["params"], result_of(undisturbed, "run")["params"])


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    memory = Memory(tmp_path)

    def pieces():
        yield {"x": torch.ones(3)}
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        memory.keep(pieces(), {"x": (6,)})
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_is_a_part_of_a_file_is_not_taken_for_all_of_it(tmp_path):
    memory = Memory(tmp_path)
    kept = memory.keep(iter([{"x": torch.arange(4.0)}, {"x": torch.arange(2.0)}]), {"x": (6,)})["x"]
    assert kept.tolist() == [0, 1, 2, 3, 0, 1]
    reference = memory.reference(kept.view(2, 3))
    assert reference is not None
    assert memory.tensor(reference).tolist() == [[0, 1, 2], [3, 0, 1]]
    assert memory.reference(kept[:3]) is None
    assert memory.reference(kept[::2]) is None
    assert memory.reference(kept.clone()) is None
    assert Memory(tmp_path / "another").reference(kept) is None


def test_rows_are_one_file_and_those_that_lie_there_already_are_not_written_again(tmp_path):
    memory = Memory(tmp_path)
    rows = torch.randn(3, 5)
    rows[2] = -0.0
    kept = memory.keep_rows(rows)
    assert torch.equal(kept.view(torch.int32), rows.view(torch.int32))
    assert memory.keep_rows(kept) is kept
    reference = memory.reference(kept)
    assert reference is not None
    rows[2] = 0.0
    assert memory.reference(memory.keep_rows(rows)) != reference, "minus zero is another number"
    memory.forget_all_but([reference])
    assert [path.name for path in tmp_path.iterdir()] == [reference.file]
    assert torch.equal(memory.tensor(reference).view(torch.int32), kept.view(torch.int32))


EVIDENCE = ("algorithm.name=cafcor", "aggregation.rule=evidence+mean", *LDP)


def test_evidence_is_the_same_with_its_sums_in_files_and_no_commit_holds_them(tmp_path, request):
    """Number for number; and whichever of the kept commits a run goes on from, its sums are those of then."""
    ran = []
    for folder in ("in memory", "in files"):
        parties = federation(tmp_path / folder, *EVIDENCE, rounds=3)
        log, _ = run(parties)
        ran.append((result_of(parties, "run")["params"], log))
        request.getfixturevalue("on_files")
    (plain, in_memory), (filed, in_files) = ran
    assert torch.equal(plain, filed)
    for one, other in zip(in_memory._kept(), in_files._kept(), strict=True):
        before, after = (
            commits.Commit.from_block(wire.unsealed(path.read_bytes()), log.memory, thorough=True).server
            for path, log in ((one, in_memory), (other, in_files))
        )
        sums = after["evidence.sums"]
        assert torch.equal(before["evidence.sums"], sums)
        assert in_files.memory.reference(sums) is not None
        assert other.stat().st_size < one.stat().st_size - sums.nbytes + 4096


@pytest.mark.parametrize(
    "change",
    [{"shape": [7]}, {"shape": [1 << 39, 1 << 39]}, {"shape": [-6]}, {"dtype": "float16"}, {"dtype": "int8"}],
)
def test_a_reference_that_says_something_else_is_refused(tmp_path, change):
    memory = Memory(tmp_path)
    kept = memory.keep(iter([{"x": torch.arange(6.0)}]), {"x": (6,)})["x"]
    reference = memory.reference(kept)
    with pytest.raises(wire.WireError):
        memory.tensor(reference.model_copy(update=change))
    assert memory.tensor(reference).tolist() == kept.tolist(), "the file is as it was"
