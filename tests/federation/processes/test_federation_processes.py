"""Processes are stopped with everything they started, within a bound, and never mistaken for others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from trilemma.federation.processes import groups as processes
from trilemma.federation.processes.groups import Command, leads, members, recorded, start, stop, tail


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_the_whole_group_goes(tmp_path):
    parent = python("import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)")
    running = start(Command("parent", parent), tmp_path)
    wait_for(lambda: len(members(running)) == 2)
    stop([running], tmp_path)
    assert members(running) == []
    assert recorded(tmp_path) == []


def test_what_outlives_its_leader_is_found_and_stopped(tmp_path):
    running = start(
        Command("parent", python("import subprocess; subprocess.Popen(['sleep', '60'])")), tmp_path
    )
    wait_for(lambda: not leads(running))
    assert len(members(running)) == 1
    stop([running], tmp_path)
    assert members(running) == []


def test_one_that_will_not_go_is_killed(tmp_path):
    stubborn = python(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print(1, flush=True); time.sleep(60)"
    )
    running = start(Command("stubborn", stubborn), tmp_path)
    wait_for(lambda: tail(running.log) == "1")
    stop([running], tmp_path, grace=0.3)
    assert not leads(running)


@pytest.mark.skipif(sys.platform != "linux", reason="threads end one by one where pthread_exit says so")
def test_one_whose_first_thread_has_ended_has_not(tmp_path):
    """As every killed process with threads is for a moment: what it listens at and locks is not free yet."""
    rest = python(
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start();"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    running = start(Command("rest", rest), tmp_path)
    try:
        wait_for(lambda: psutil.Process(running.pid).status() == psutil.STATUS_ZOMBIE)
        assert leads(running)
    finally:
        stop([running], tmp_path, grace=0.3)
    assert not leads(running)
    assert recorded(tmp_path) == []


def test_a_recycled_pid_is_left_alone(tmp_path):
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        ours = processes.Running("old", stranger.pid, started="1", log="")
        assert members(ours) == []
        stop([ours], tmp_path)
        assert stranger.poll() is None
    finally:
        os.killpg(stranger.pid, signal.SIGKILL)
        stranger.wait()


def test_records_survive_the_process_that_wrote_them(tmp_path):
    running = start(Command("sleeper", ("sleep", "60"), {"A": "1"}), tmp_path)
    try:
        assert recorded(tmp_path) == [running]
        assert leads(recorded(tmp_path)[0])
    finally:
        stop([running], tmp_path)
