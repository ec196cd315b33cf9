"""The one-run test: many canaries in a single run, each there or not by a coin, and guesses about them.

Every canary has a coordinate of its own to speak on. Where an example is protected, they are examples of one
client; where a whole client is, each is a client, which under `ldp` may be as many as one likes and otherwise
as many as share noise. The observer guesses the coins it is surest of; how many that is was decided before,
from what is certified.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from trilemma.audit.bounds import one_run
from trilemma.audit.canaries import LOUD, WholeBatch, canary_model
from trilemma.audit.observer import AuditObserver
from trilemma.audit.outcomes import AuditOutcome
from trilemma.audit.subject import Subject
from trilemma.audit.trials import CanaryReading, TrialNoise, play
from trilemma.base.keys import Key
from trilemma.data import Dataset, FederatedData, Holdings
from trilemma.models.types import Model
from trilemma.privacy import Noiseless, SimulatedNoise
from trilemma.privacy.accounting.gaussian import gaussian_mu
from trilemma.privacy.types import NoiseSource
from trilemma.simulate.experiment import SimulatedClients

TOGETHER = 1 << 25
"""Numbers that all messages of the run may have: where clients are canaries, each has a coordinate."""


def from_one_run(subject: Subject, canaries: int, risk: float, key: Key) -> AuditOutcome:
    """Return what one run with many canaries shows about ε."""
    coins_key = key.fold("one run", "coins")
    if subject.release.unit == "example":
        count = min(canaries, subject.examples)
        coins = coins_key.numpy().random(count) < 0.5
        scores = _examples(subject, coins, key.fold("one run"))
    else:
        observer = AuditObserver.of(subject.threat, subject.release.law)
        affordable = math.isqrt(TOGETHER // subject.rounds)
        count = min(canaries, affordable) if observer.members == 1 else observer.members
        coins = coins_key.numpy().random(count) < 0.5
        scores = _clients(subject, coins, observer, key.fold("one run"))
    guesses = worth_guessing(count, subject)
    surest = np.argsort(-np.abs(scores))[:guesses]
    right = int(((scores > 0) == coins)[surest].sum())
    found = one_run(count, guesses, right, subject.delta, risk)
    facts = {"canaries": count, "guesses": guesses, "right": right}
    return AuditOutcome("one run", "ε", found, subject.certified, facts=facts)


def worth_guessing(count: int, subject: Subject, risk: float = 0.01) -> int:
    """Return how many guesses promise the best bound if what is certified is exact, by a normal model."""
    epsilon = subject.certified or 1.0
    mu = gaussian_mu(min(epsilon, 50.0), subject.delta)
    best, most = count, -1.0
    for level in np.linspace(0.0, mu / 2 + 3.0, 40):
        right, wrong = float(ndtr(mu / 2 - level)), float(ndtr(-mu / 2 - level))
        guesses = round(count * (right + wrong))
        if guesses < 1:
            break
        expected = math.floor(guesses * right / (right + wrong))
        bound = one_run(count, guesses, expected, subject.delta, risk)
        if bound > most:
            best, most = guesses, bound
    return best


def _reading(subject: Subject, model: Model, key: Key) -> CanaryReading:
    probes = WholeBatch(
        tuple(range(subject.rounds)),
        model,
        Noiseless(),
        torch.zeros(subject.rounds, 1, model.dim - 1),
        torch.zeros(subject.rounds, 1),
    )
    sent = subject.always(subject.first_broadcast(model, key))
    return CanaryReading.of(subject.algorithm, probes, subject.release.law, sent, key)


def _examples(subject: Subject, coins: np.ndarray, key: Key) -> np.ndarray:
    """Return the log-likelihood ratio of every example's coin."""
    count, release = len(coins), subject.release
    model = canary_model(count + 1)
    x = torch.cat([LOUD * torch.eye(count), LOUD * torch.eye(count), torch.zeros(1, count)])
    y = release.clip * torch.tensor([1.0] * count + [-1.0] * count + [0.0])
    absent = release.adjacency == "add-remove"
    numbers = np.arange(count)
    canaries = numbers[coins] if absent else np.where(coins, numbers, count + numbers)
    blanks = np.full(subject.examples - count, 2 * count)
    held = Holdings([np.concatenate([canaries, blanks])], [], [])
    data = FederatedData(Dataset("canaries", x, y, x[:1], y[:1], classes=None), held)
    observer = AuditObserver.of(subject.threat, release.law)
    noise = TrialNoise(SimulatedNoise(key.fold("noise"), observer.members), observer.members)
    sent = subject.always(subject.first_broadcast(model, key))
    reading = _reading(subject, model, key)

    silent = WholeBatch((0,), model, Noiseless(), torch.zeros(1, 1, count), torch.zeros(1, 1))
    seen, nothing = (
        reading.releases(play(subject.algorithm, clients, sent, key))
        for clients in (SimulatedClients((0,), data, model, noise), silent)
    )
    seen = observer.residual(seen - nothing, noise)[:, 0, :count]
    size = release.clip / release.batch
    rate = release.sampling.rate if subject.amplified else 1.0
    heads = _present(seen, size, observer.variance, rate)
    tails = torch.zeros_like(heads) if absent else _present(-seen, size, observer.variance, rate)
    return np.asarray((heads - tails).sum(0))


def _present(seen: Tensor, size: float, variance: float, rate: float) -> Tensor:
    """Return log [(1 − q) + q N(R; size)/N(R; 0)]."""
    exponent = (size * seen - size**2 / 2) / variance
    if rate == 1:
        return exponent
    return torch.logaddexp(torch.full_like(exponent, math.log1p(-rate)), math.log(rate) + exponent)


def _clients(subject: Subject, coins: np.ndarray, observer: AuditObserver, key: Key) -> np.ndarray:
    """Return how much every client's messages look like heads."""
    count = len(coins)
    model = canary_model(count + 1)
    ids, x = tuple(range(count)), LOUD * torch.eye(count)[:, None]
    sent = subject.always(subject.first_broadcast(model, key))
    reading = _reading(subject, model, key)

    def releases(noise: NoiseSource, signs: Tensor) -> Tensor:
        clients = WholeBatch(ids, model, noise, x, subject.release.clip * signs[:, None])
        return reading.releases(play(subject.algorithm, clients, sent, key))

    nothing = releases(Noiseless(), torch.zeros(count))
    moves = releases(Noiseless(), torch.ones(count)) - nothing
    noise = SimulatedNoise(key.fold("noise"), count)
    seen = releases(noise, torch.from_numpy(np.where(coins, 1.0, -1.0)).float()) - nothing
    residual = seen + observer.weight * (seen.sum(1, keepdim=True) - seen)
    return np.asarray((moves * residual).sum((0, 2)))
