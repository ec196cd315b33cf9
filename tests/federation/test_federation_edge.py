"""Numbers at the edge of float32 from one client: turned away, or put aside by the rule; the model stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from federation_harness import Direct, coordinator, make, result_of, small_config
from trilemma.federation.protocol import disk_backed, kinds, wire

CLIENTS, LIAR = 5, 4
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 1e-45
NUMBERS = (LARGEST, -LARGEST, SMALLEST, -0.0, np.nan, np.inf, -np.inf, None)
"""One for each round; None: large and small ones of both signs beside each other."""

LDP = ("privacy.threat=ldp", "privacy.clip=0.1", "privacy.sigma_ind=0.5")
METHODS = {
    "byz-clip21": ("algorithm.name=byz-clip21-sgd2m",),
    "byz-clip21 noised": ("algorithm.name=byz-clip21-sgd2m", *LDP),
    "lbgm": ("algorithm.name=lbgm", "algorithm.threshold=0.5"),
    "qsgd": ("algorithm.name=qsgd", "algorithm.bucket=20"),
    "sketch": ("algorithm.name=sketch", "algorithm.columns=12", "algorithm.rows=5", "algorithm.kept=6"),
    "fedavg": ("algorithm.name=fedavg",),
    "cafcor": ("algorithm.name=cafcor", *LDP),
    "evidence": ("algorithm.name=cafcor", *LDP),
}


def read(block: bytes) -> tuple[kinds.Answer, dict[str, torch.Tensor]]:
    return wire.loads(block, kinds.Detail if wire.kind_of(block) == "detail" else kinds.Answer)


def at_the_edge(block: bytes, number: float | None, first: bool) -> bytes:
    """Put a number in the place of the first, or of all, that a message holds."""
    header, tensors = read(block)
    spoilt = {}
    for name, tensor in tensors.items():
        content = bytearray(wire.raw(tensor))
        start = len(content) % 4 if len(content) % 4 == 1 else 0  # behind LBGM's first byte
        floats = np.frombuffer(content, "<f4", offset=start, count=(len(content) - start) // 4)
        several = np.resize(np.array([LARGEST, SMALLEST, -LARGEST, -0.0], np.float32), len(floats))
        changed = slice(1 if first else None)
        floats[changed] = several[changed] if number is None else number
        spoilt[name] = torch.frombuffer(content, dtype=tensor.dtype).reshape(tensor.shape)
    return wire.dumps(header, spoilt)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True], ids=["all, in memory", "the first, in files"])
@pytest.mark.parametrize("name", METHODS)
def test_a_liar_at_the_edge_of_numbers_harms_nobody(tmp_path, monkeypatch, name, first):
    if first:
        monkeypatch.setattr(disk_backed, "IN_MEMORY", 0)
    noisy = any("sigma" in option for option in METHODS[name])
    rule = "caf" if first else "cwmed"
    if name == "evidence":
        rule = "evidence+caf" if first else "evidence+mean"
    options = (*METHODS[name], f"aggregation.rule={rule}")
    config = small_config(CLIENTS, *options, rounds=len(NUMBERS), tolerate=1)
    parties = make(tmp_path / "federation", CLIENTS, config, budget=1e9 if noisy else None)

    def lie(client, asked, answer):
        if client != LIAR or wire.kind_of(answer) not in ("answer", "detail"):
            return answer
        return at_the_edge(answer, NUMBERS[read(answer)[0].round], first)

    runner, _ = coordinator(parties, Direct(parties, lie))
    assert runner.go().rounds == len(NUMBERS)
    for record in runner.log.records():
        rejected = [client for client, _ in record["rejected"]]
        assert set(rejected) <= {LIAR}
        assert not record["absent"]
        if not noisy and not np.isfinite(NUMBERS[record["round"] - 1] or 0.0):
            assert rejected == [LIAR], "what is not finite is turned away"
    assert float(result_of(parties, "run")["params"].abs().max()) < 10
    expelled = {one["client"] for record in runner.log.records() for one in record.get("expelled", ())}
    assert expelled == ({LIAR} if name == "evidence" else set())
