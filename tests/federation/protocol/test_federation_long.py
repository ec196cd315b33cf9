"""Long messages: they lie in files, travel as they are, and are aggregated from there."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest
import torch

from federation_harness import PRIVATE, Direct, check_against_simulation, coordinator, seeded
from trilemma.aggregation import parse
from trilemma.federation.client import node
from trilemma.federation.party.public_facts import Timing
from trilemma.federation.protocol import disk_backed
from trilemma.federation.protocol.reasons import Refused

CLIENTS = 4
WIDE = ("model.name=mlp", "model.hidden=[64]", "data.holders=all")
PATIENT = Timing(round_limit=5.0, join_limit=1.0, poll=0.05)


@pytest.mark.parametrize("options", [(), PRIVATE], ids=["plain", "private"])
def test_a_run_with_messages_in_files_equals_the_simulation(tmp_path, monkeypatch, options):
    monkeypatch.setattr(node, "SHORT", 4096)
    monkeypatch.setattr(disk_backed, "IN_MEMORY", 0)
    parties, config = seeded(tmp_path / "federation", CLIENTS, *WIDE, *options, rounds=3, timing=PATIENT)
    seen = []
    transport = Direct(parties, tamper=lambda _client, _asked, answer: seen.append(type(answer)) or answer)
    coordinator(parties, transport)[0].go()
    check_against_simulation(parties, config, "run")
    assert seen.count(mmap.mmap) == 3 * CLIENTS


def test_a_client_lets_no_question_in_that_is_longer_than_its_configurations(tmp_path):
    parties, _ = seeded(tmp_path / "federation", CLIENTS, *WIDE, rounds=1)
    client = Direct(parties).clients[0]
    client.check_length(5 * 4096)
    with pytest.raises(Refused, match="block"):
        client.check_length(4 << 20)
    (parties[1].folder / "config.toml").unlink()
    with pytest.raises(Refused, match="failed"):  # whatever is wrong is said, and nothing is stored
        node.Node(parties[1]).check_length(4 << 20)


LIMITED = """
import mmap, resource, sys, torch
from pathlib import Path
import trilemma.learning.steps.server as server
from trilemma.aggregation import parse, stream
from trilemma.federation.protocol import kinds, wire
from trilemma.storage.mapped import stacked

def numbers(client, dim):
    return torch.randn(dim, generator=torch.Generator().manual_seed(client))

clients, dim, room = 16, 1 << 21, 64 << 20
folder = Path(sys.argv[1])
server.BLOCK = 1 << 20
torch.set_num_threads(1)
rules = [parse(name, f=3) for name in sys.argv[2:]]
small = torch.stack([numbers(client, 1 << 16) for client in range(clients)])
for rule in rules:
    stream(rule, [small, small])                 # what is compiled is compiled before the limit
for client in range(clients):
    header = kinds.Answer(client=client, run="run", epoch=0, round=0)
    (folder / str(client)).write_bytes(wire.dumps(header, {"vector": numbers(client, dim)}))

def sent(client):
    with (folder / str(client)).open("rb") as file:
        return wire.loads(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), kinds.Answer)[1]["vector"]

used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
X = stacked(folder, [sent(client) for client in range(clients)], dim)
for rule in rules:
    print(float(stream(rule, lambda: server.column_blocks(X)).value.norm()))
try:
    torch.zeros(clients, dim)
except RuntimeError:
    print("all of it does not fit")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_messages_on_files_are_aggregated_in_less_memory_than_they_have(tmp_path):
    """128 MB of messages with 64 MB for everything: a limit of the system's, not an estimate."""
    program = [sys.executable, "-c", LIMITED, str(tmp_path), "cwtm", "caf"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *limited, refused = done.stdout.splitlines()
    assert refused == "all of it does not fit"
    X = torch.stack([torch.randn(1 << 21, generator=torch.Generator().manual_seed(i)) for i in range(16)])
    expected = [float(parse(rule, f=3)(X).value.norm()) for rule in ("cwtm", "caf")]
    assert [float(text) for text in limited] == pytest.approx(expected, rel=1e-5)
