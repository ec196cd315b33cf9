"""Membership inference: was this record used in training?

**Loss threshold** (the baseline): guesses "used" where the loss is small. **LiRA, offline, with few shadow
models**: compares the loss, as a logit, with its mean in models trained without the record. The published
attack has 64 models and more. Few make it weaker, and their deviation is pooled. Shadow models come in pairs,
each trained on one half of every client's records, so that every record is left out by one of the two.

**What is allowed.** As many members as others are asked about, m in all. If membership is a fair coin for
each record, the number of right guesses of any attack on an (ε, δ)-private model is, but for δ, at most that
of m coins that fall right with e^ε/(1 + e^ε). So a share surely above it refutes the certificate. Members and
others are assumed to be alike but for having been used. The threshold is chosen on one half and measured on
the other.

Reference: Yeom, Giacomelli, Fredrikson, Jha, "Privacy risk in machine learning", CSF 2018; Carlini, Chien,
Nasr, Song, Terzis, Tramèr, "Membership inference attacks from first principles", S&P 2022. The bound:
Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from trilemma import privacy
from trilemma.audit.final.found import Tried
from trilemma.audit.final.target import MOST, AskedRecords, FinalModel, at_least
from trilemma.base.keys import Key
from trilemma.data import FederatedData, Holdings
from trilemma.simulate import engine
from trilemma.simulate.experiment import Experiment

WHY = "e^ε/(1 + e^ε): the best share of right guesses about who was used, where it is a fair coin"


@dataclass(frozen=True)
class Shadow:
    """A model of the same kind, and which rows of the training examples it was trained on."""

    params: Tensor
    used: np.ndarray


def balanced(target: FinalModel, key: Key) -> tuple[AskedRecords, AskedRecords]:
    """Return as many members as others, drawn."""
    assert target.members is not None
    assert target.others is not None
    count = min(len(target.members), len(target.others), MOST)
    return target.members.drawn(count, key.fold("members")), target.others.drawn(count, key.fold("others"))


def loss_threshold(target: FinalModel, key: Key) -> Tried:
    """Guess by the loss."""
    members, others = balanced(target, key)
    scores = -target.losses(members), -target.losses(others)
    how = "says “used” where the model's loss is small; the threshold is chosen on one half"
    return guessed("membership, by loss", how, target, *scores)


def guessed(name: str, how: str, target: FinalModel, members: np.ndarray, others: np.ndarray) -> Tried:
    """Return how many guesses by a score are right: large for who was used."""
    halves = np.arange(len(members)) % 2 == 0
    threshold = _best(members[halves], others[halves])
    right = int((members[~halves] > threshold).sum() + (others[~halves] <= threshold).sum())
    of = 2 * int((~halves).sum())
    epsilon = target.epsilon
    return Tried(
        attack=name,
        how=how,
        measure="share of right guesses",
        found=right / of,
        low=at_least(right, of),
        chance=0.5,
        allowed=None if epsilon is None else min(1.0, 1 / (1 + math.exp(-epsilon)) + target.delta),
        why=f"{WHY}; {of} guesses" if epsilon is not None else "nothing is certified",
    )


def _best(members: np.ndarray, others: np.ndarray) -> float:
    """Return the threshold with the most right guesses."""
    tried = np.concatenate([[-np.inf], members, others])
    right = [(members > one).sum() + (others <= one).sum() for one in tried]
    return float(tried[int(np.argmax(right))])


def lira(target: FinalModel, shadows: Sequence[Shadow], rows: np.ndarray, key: Key) -> Tried:
    """Guess by how the loss compares with models trained without the record; `rows` are the members'."""
    assert target.members is not None
    assert target.others is not None
    count = min(len(target.members), len(target.others), MOST)
    mine = key.fold("members").numpy().permutation(len(target.members))[:count]
    theirs = key.fold("others").numpy().permutation(len(target.others))[:count]
    members, others = target.members.some(mine), target.others.some(theirs)
    used = np.stack([np.isin(rows[mine], one.used) for one in shadows])
    never = np.zeros((len(shadows), count), bool)
    both = []
    for asked, inside in ((members, used), (others, never)):
        found = np.stack([_logit(target.losses(asked, one.params)) for one in shadows])
        outside = np.where(inside, np.nan, found)
        both.append((_logit(target.losses(asked)), outside))
    spread = float(np.nanstd(np.concatenate([out - np.nanmean(out, 0) for _, out in both], 1))) or 1.0
    scores = [np.nan_to_num((own - np.nanmean(out, 0)) / spread) for own, out in both]
    how = f"compares the loss with that of {len(shadows)} models trained without the record (offline LiRA)"
    name = f"membership, LiRA with {len(shadows)} shadow models"
    return guessed(name, how, target, scores[0], scores[1])


def _logit(losses: np.ndarray) -> np.ndarray:
    """Return log p/(1 − p) for p = e^−loss, kept finite."""
    return np.asarray(-np.log(np.expm1(np.clip(losses, 1e-6, 50.0))))


def shadow(experiment: Experiment, number: int, key: Key) -> Shadow:
    """Train once more on one half of every client's examples, with noise and draws of its own."""
    held, draw = experiment.clients.data, key.fold("pair", number // 2).numpy()
    mixed = [draw.permutation(rows) for rows in held.holdings.train]
    halves = [np.sort(rows[number % 2 :: 2] if len(rows) > 1 else rows) for rows in mixed]
    data = FederatedData(held.dataset, Holdings(halves, [], []), least=held.poorest(experiment.honest))
    seed, config = key.fold("shadow", number).integer(), experiment.config
    noise = privacy.SimulatedNoise(
        Key(seed).fold("noise"), config.federation.clients, config.privacy.neighbours
    )
    again = replace(experiment, seed=seed, clients=replace(experiment.clients, data=data, noise=noise))
    progress = engine.start(again)
    while progress.round < config.run.rounds:
        progress, _ = engine.step(again, progress)
    return Shadow(
        progress.broadcast["params"], np.unique(np.concatenate([halves[i] for i in experiment.honest]))
    )
