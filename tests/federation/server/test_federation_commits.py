"""What the server committed survives anything, and nothing is committed twice."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.protocol.epochs import Epoch
from trilemma.federation.server.commits import Commit, CommitLog

EPOCH = Epoch(2, (0, 1, 3), (0, 1, 2, 3))


def commit(rounds: int, **changes) -> Commit:
    record = {"round": rounds, "accuracy": 0.5} if rounds else {}
    state = {"params": torch.full((3,), float(rounds))}
    return Commit("run", "terms", rounds, EPOCH, state, state, unused=(2,), record=record, **changes)


def written(folder, commits: int) -> CommitLog:
    """Return a log of so many commits."""
    log = CommitLog(folder)
    for rounds in range(commits):
        log.append(commit(rounds))
    return log


def test_a_commit_is_read_back_whole(tmp_path):
    assert CommitLog(tmp_path).last() is None
    log = written(tmp_path, 3)
    last = CommitLog(tmp_path).last()
    assert (last.rounds, last.epoch, last.unused, last.record["round"]) == (2, EPOCH, (2,), 2)
    assert torch.equal(last.broadcast["params"], torch.full((3,), 2.0))
    assert [record["round"] for record in log.records()] == [1, 2]


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_only_the_next_round_can_be_committed(tmp_path, rounds):
    log = written(tmp_path, 2)
    with pytest.raises(UserError, match="the next one is 2"):
        log.append(commit(rounds))


@pytest.mark.parametrize("crash_at", range(3))
def test_a_crash_at_any_write_leaves_one_whole_round(tmp_path, monkeypatch, crash_at):
    """The commit replaces one file, then a line is appended; die before, between, or in the middle."""
    log = written(tmp_path, 2)
    with monkeypatch.context() as patch:
        if crash_at == 0:
            patch.setattr(files, "write_atomically", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        else:
            patch.setattr(CommitLog, "_write_record", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            log.append(commit(2))
    if crash_at == 2:  # half of the line made it to the disk
        with (tmp_path / "rounds.jsonl").open("a") as file:
            file.write('{"round": 2, "acc')
    again = CommitLog(tmp_path)
    finished = 1 if crash_at == 0 else 2
    untouched = (tmp_path / "rounds.jsonl").read_bytes()
    assert again.last().rounds == finished
    assert [record["round"] for record in again.records()] == [1]
    assert (tmp_path / "rounds.jsonl").read_bytes() == untouched, "who only looks changes nothing"
    assert again.recover().rounds == finished
    assert [record["round"] for record in again.records()] == list(range(1, finished + 1))
    for rounds in range(finished + 1, 4):
        again.append(commit(rounds))
    assert [record["round"] for record in again.records()] == [1, 2, 3]


def test_an_epoch_changes_without_a_round(tmp_path):
    log = written(tmp_path, 2)
    following = Commit("run", "terms", 1, Epoch(3, (0, 1), (0, 1)), {}, {}, record=commit(1).record)
    log.update_epoch(following)
    assert (log.last().rounds, log.last().epoch.number) == (1, 3)
    assert [record["round"] for record in log.records()] == [1]
    with pytest.raises(UserError, match="between two rounds"):
        log.update_epoch(commit(2))


def test_a_second_server_is_kept_out_until_the_first_is_gone(tmp_path, monkeypatch):
    holder = (
        "import sys, time; from pathlib import Path\n"
        "from trilemma.federation.server.commits import CommitLog\n"
        f"with CommitLog(Path({str(tmp_path)!r})).locked():\n  print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            monkeypatch.setattr(files, "PATIENCE", 0.0)
            with pytest.raises(UserError, match="another server"), CommitLog(tmp_path).locked():
                pass
        finally:
            process.kill()
    monkeypatch.setattr(files, "PATIENCE", 240.0)
    with CommitLog(tmp_path).locked():
        pass


# --- broken disks -----------------------------------------------------------------------------------------


def newest(folder):
    return max((folder / "commits").iterdir())


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 0x10
    path.write_bytes(content)


def test_the_last_five_commits_are_kept(tmp_path):
    written(tmp_path, 9)
    assert [path.name[:8] for path in sorted((tmp_path / "commits").iterdir())] == [
        f"{rounds:08d}" for rounds in range(4, 9)
    ]


@pytest.mark.parametrize("place", [0, 20, 60, 300, -1])
def test_a_broken_commit_is_stepped_over_with_a_message(tmp_path, place):
    """Wherever a bit flips, in the checksum, the header or the last number: the round before is the last."""
    log, said = written(tmp_path, 4), []
    flip(newest(tmp_path), place)
    assert log.last().rounds == 2, "who only looks steps over it too"
    again = CommitLog(tmp_path).recover(said.append)
    assert (again.rounds, again.epoch) == (2, EPOCH)
    assert torch.equal(again.broadcast["params"], torch.full((3,), 2.0))
    assert "broken" in said[0].text
    assert [record["round"] for record in log.records()] == [1, 2]
    log.append(commit(3))
    assert CommitLog(tmp_path).recover(said.append).rounds == 3
    assert [record["round"] for record in log.records()] == [1, 2, 3]
    assert len(said) == 1


@contextmanager
def unreadable(path, code):
    """A disk, or whoever keeps it, that does not let a file be read."""
    real = io.open

    def opened(file, *rest, **more):
        if str(file) == str(path):
            raise OSError(code, os.strerror(code))
        return real(file, *rest, **more)

    with patch.object(io, "open", opened):
        yield


def test_a_commit_that_the_disk_cannot_read_is_stepped_over_too(tmp_path):
    log, said = written(tmp_path, 4), []
    with unreadable(newest(tmp_path), errno.EIO):
        assert log.last().rounds == 2
        assert CommitLog(tmp_path).recover(said.append).rounds == 2
    assert "broken" in said[0].text
    with unreadable(min((tmp_path / "commits").iterdir()), errno.EIO):
        log.append(commit(3))
    assert log.recover().rounds == 3


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_a_commit_that_may_not_be_read_is_no_broken_one(tmp_path, code):
    """Another user's file, or a machine without memory: the round before is not the last."""
    log = written(tmp_path, 3)
    with unreadable(newest(tmp_path), code), pytest.raises(OSError, match=os.strerror(code)):
        log.recover()
    assert log.recover().rounds == 2


def test_after_a_broken_commit_of_a_later_epoch_another_one_begins(tmp_path):
    """Clients may hold keys of the epoch that the broken commit was about: it is not opened again."""
    log = written(tmp_path, 3)
    log.update_epoch(replace(commit(2), epoch=Epoch(3, (0, 1), (0, 1))))
    flip(newest(tmp_path), -1)
    assert log.recover().epoch == Epoch(3)


def test_a_run_whose_commits_are_all_broken_does_not_start_over(tmp_path):
    log = written(tmp_path, 2)
    for path in (tmp_path / "commits").iterdir():
        flip(path, -1)
    with pytest.raises(UserError, match=r"no commit in .* is as it was written"):
        log.recover()


def test_a_broken_record_costs_its_line_and_not_the_run(tmp_path):
    """Records are for readers; a run is continued from its commit."""
    log = written(tmp_path, 4)
    records = tmp_path / "rounds.jsonl"
    records.write_bytes(records.read_bytes().replace(b'{"round": 2', b'\xff"round": 2'))
    assert [record["round"] for record in log.records()] == [1, 3]
    assert log.recover().rounds == 3
    assert [record["round"] for record in log.records()] == [1, 3]


def test_a_stray_file_among_the_commits_is_nobodys_commit(tmp_path):
    log = CommitLog(tmp_path)
    log.append(commit(0))
    (tmp_path / "commits" / "copy-of-00000009-00000001.commit").write_bytes(b"")
    log.append(commit(1))
    assert log.recover().rounds == 1


def test_a_folder_in_a_commits_place_is_stepped_over_and_put_aside(tmp_path):
    log, said = written(tmp_path, 4), []
    path = newest(tmp_path)
    path.unlink()
    path.mkdir()
    (path / "file").touch()
    assert log.last().rounds == 2
    assert CommitLog(tmp_path).recover(said.append).rounds == 2
    assert "broken" in said[0].text
    log.append(commit(3))
    assert log.recover().rounds == 3
