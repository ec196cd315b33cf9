"""Slow, obvious targets and views for the tests of the attacks."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from trilemma.attacks import View, attacks
from trilemma.keys import Key


def gram_mean(gram):
    return torch.full((len(gram),), 1.0 / len(gram), dtype=torch.float64)


def gram_krum(f):
    def weights(gram):
        squares = gram.diagonal()
        distances = squares[:, None] + squares[None, :] - 2 * gram
        distances.fill_diagonal_(float("inf"))
        scores = distances.sort(dim=1).values[:, : max(1, len(gram) - f - 2)].sum(dim=1)
        return torch.nn.functional.one_hot(scores.argmin(), len(gram)).double()

    return weights


def gram_caf(f):
    def weights(gram):
        n = len(gram)
        c, best, answer = torch.ones(n, dtype=torch.float64), float("inf"), None
        while c.sum() > n - 2 * f:
            p = c / c.sum()
            centre = torch.eye(n, dtype=torch.float64) - p
            centred = centre @ gram @ centre.T
            values, vectors = torch.linalg.eigh(p.sqrt()[:, None] * centred * p.sqrt()[None, :])
            if values[-1] <= best:
                best, answer = values[-1], p
            tau = (centred @ (p.sqrt() * vectors[:, -1])).square() * (c > 0)
            if tau.max() == 0:
                break
            c = c * (1 - tau / tau.max())
            c[c < 1e-9] = 0.0  # equal messages reach zero together, but for rounding
        return answer

    return weights


def gram_clipped_mean(radius):
    """A rule that is not invariant under shifts, with weights that do not sum to one."""

    def weights(gram):
        return (radius / gram.diagonal().sqrt()).clamp(max=1.0) / len(gram)

    return weights


@dataclass
class GramRule:
    """A geometric rule; counts how often it was asked what."""

    weights: object
    geometric: bool = True
    aggregations: int = 0
    candidates: int = 0

    def weights_from_gram(self, gram):
        self.candidates += 1
        return self.weights(gram)

    def __call__(self, vectors, *, key=None):
        self.aggregations += 1
        wide = vectors.double()
        return SimpleNamespace(value=self.weights(wide @ wide.T) @ wide)


def median(vectors, *, key=None):
    return SimpleNamespace(value=vectors.median(dim=0).values)


def trimmed_mean(f):
    def rule(vectors, *, key=None):
        return SimpleNamespace(value=vectors.sort(dim=0).values[f : len(vectors) - f].mean(dim=0))

    return rule


def plain_mean(vectors, *, key=None):
    return SimpleNamespace(value=vectors.mean(dim=0))


def view_of(honest, byzantine=2, **changes):
    given = {"own": None, "target": plain_mean, "round": 0, "key": Key(7)}
    return View(honest=honest, byzantine=byzantine, **(given | changes))


def gaussian_rows(h, d, seed=1, mean=0.0):
    return torch.randn(h, d, generator=torch.Generator().manual_seed(seed)) + mean


def send(name, view, **settings):
    return attacks[name](**settings).build().craft(view)


def harm(view, messages, objective="distance"):
    """What the messages achieve against the real pipeline, measured on the vectors themselves."""
    value = view.target(view.stack(messages), key=view.key.fold("coin")).value.double()
    mean = view.honest.double().mean(dim=0)
    return float((value - mean).norm()) if objective == "distance" else -float(value @ mean)
