"""Slow, obvious targets and views for the tests of the attacks."""

from types import SimpleNamespace

import torch

from trilemma import config, simulate
from trilemma.attacks import attacks
from trilemma.testing.targets import GramRule, gaussian_rows, gram_krum, plain_mean, trimmed_mean, view_of

__all__ = ["GramRule", "gaussian_rows", "gram_krum", "plain_mean", "trimmed_mean", "view_of"]


def gram_mean(gram):
    return torch.full((len(gram),), 1.0 / len(gram), dtype=torch.float64)


def gram_clipped_mean(radius):
    """A rule that is not invariant under shifts, with weights that do not sum to one."""

    def weights(gram):
        return (radius / gram.diagonal().sqrt()).clamp(max=1.0) / len(gram)

    return weights


def median(vectors, *, key=None):
    return SimpleNamespace(value=vectors.median(dim=0).values)


def send(name, view, **settings):
    return attacks[name](**settings).build().craft(view)


def harm(view, messages, objective="distance"):
    """What the messages achieve against the real pipeline, measured on the vectors themselves."""
    value = view.target(view.stack(messages), key=view.key.fold("coin")).value.double()
    mean = view.honest.double().mean(dim=0)
    return float((value - mean).norm()) if objective == "distance" else -float(value @ mean)


RUN = {
    "federation": {"clients": 20, "byzantine": 4},
    "algorithm": {"name": "cafcor", "lr": 0.1, "batch_size": 5},
    "aggregation": {"rule": "evidence+mean"},
    "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 30.0, "delta": 1e-4},
    "attack": {"name": "adaptive"},
    "run": {"rounds": 4},
}
"""A federation whose liars know its defence."""


def steps(*changes: str) -> list[simulate.engine.Record]:
    """Return the records of such a run, with changes."""
    ready = simulate.assemble(config.parse(RUN, changes), 1)
    progress, records = simulate.engine.start(ready), []
    for _ in range(ready.config.run.rounds):
        progress, record = simulate.engine.step(ready, progress)
        records.append(record)
    return records
