"""Searched attacks against every rule the aggregation room has: adding a rule adds its tests."""

import pytest
import torch
from attack_helpers import gaussian_rows, harm, send, view_of

from trilemma import aggregation
from trilemma.attacks.search import Search
from trilemma.attacks.span import deviation, measure, minus_mean

CHAINS = [f"{step}+krum" for step in ("nnm", "bucketing") if step in aggregation.mixings] + ["nnm+cwmed"]
DIRECTIONS = {"alie": deviation, "foe": minus_mean}
F = 3


def rule(name):
    return aggregation.parse(name, f=F)


@pytest.mark.parametrize("name", ["alie", "foe"])
@pytest.mark.parametrize("target", [*aggregation.rules, *CHAINS])
@pytest.mark.parametrize("seed", range(2))
def test_a_searched_attack_is_never_weaker_than_its_grid_against_any_rule(name, target, seed):
    honest = gaussian_rows(13, 80, seed, mean=0.2)
    view = view_of(honest, F, target=rule(target), positions=(2, 3, 11))
    search = Search(points=9, refinements=6, passes=12, sides="positive")
    found = send(name, view, strength="search", search=search)
    span = measure(honest, DIRECTIONS[name])
    anchors = (1.5,) if name == "alie" else (1.1, 2.0, 11.0)
    count = 9 if view.target.geometric else 12 - 4 - (2 if name == "alie" else 3)
    grid = search.grid(span.radius / span.reach, count, anchors)
    best = max(harm(view, send(name, view, strength=tau).messages) for tau in grid)
    assert harm(view, found.messages) >= best * (1 - 1e-4)


@pytest.mark.parametrize("target", ["caf", "krum", "nnm+caf"])
def test_gram_space_predicts_what_the_real_rule_does(target):
    honest = gaussian_rows(13, 80, 4, mean=0.2)
    view = view_of(honest, F, target=rule(target))
    for tau in (0.1, 0.6, 1.3, 4.0):
        crafted = send("alie", view, strength=tau)
        stacked = view.stack(crafted.messages)
        predicted = view.target.weights_from_gram(stacked.double() @ stacked.double().T) @ stacked.double()
        torch.testing.assert_close(view.target(stacked).value.double(), predicted, rtol=1e-4, atol=1e-4)


def test_caf_under_privacy_noise_drops_a_fixed_alie_and_not_the_searched_one():
    honest = gaussian_rows(45, 4000, seed=5) + 1.0 / 30.0
    view = view_of(honest, 5, target=aggregation.parse("caf", f=5))
    strong, found = send("alie", view, strength=1.5), send("alie", view, strength="search")
    assert 0.1 < abs(found.strength) < 0.7
    weights = {}
    for name, crafted in (("strong", strong), ("found", found)):
        weights[name] = view.target(view.stack(crafted.messages)).weights[-5:]
    assert (weights["strong"] == 0).all()
    assert (weights["found"] > 0.9 / 50).all()
    assert harm(view, found.messages) > 10 * harm(view, strong.messages)
