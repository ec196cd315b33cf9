"""Rules by name: configurations, the command line, and what they say about mistakes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from trilemma import aggregation as agg
from trilemma.base.errors import UserError


@pytest.mark.parametrize(
    "text",
    [
        *agg.rules,
        "nnm+cwmed",
        "bucketing(size=2)+krum",
        "clip(radius=1.5)+arc+nnm+geomed",
        "cc(radius=3.0,steps=5)",
        "nnm+bulyan",
    ],
)
def test_names_build_what_has_that_name(text: str):
    rule = agg.parse(text, f=2)
    assert rule.name == text
    assert rule.f == 2
    assert agg.parse(rule.name, f=2) == rule
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert rule.geometric == hasattr(rule, "weigh") or "+" in text or text == "bulyan"


def test_parameters_by_place_and_by_name():
    assert agg.parse("bucketing(3)+mean", f=1) == agg.parse("bucketing(size=3) + mean", f=1)
    assert agg.parse("cc(2, 4)", f=1) == agg.cc(f=1, radius=2, steps=4)
    assert agg.parse("CAF", f=1) == agg.caf(f=1)


def test_options_by_place_come_without_f():
    """As in the text form; where there are none, f may stand alone."""
    assert agg.cc(2.0, 4, f=1) == agg.cc(f=1, radius=2.0, steps=4)
    assert agg.krum(2) == agg.krum(f=2)
    assert agg.smea(f=np.int64(2)).f == 2
    assert agg.parse("smea(1e6)", f=1).budget == 1_000_000


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (
            lambda: agg.caf(f=-1),
            r"caf: f \(the number of .*\) must be a whole number ≥ 0; got -1",
        ),
        (lambda: agg.caf(f=True), "whole number ≥ 0; got True"),
        (lambda: agg.caf(), "must be a whole number ≥ 0$"),
        (lambda: agg.cc(1, 10.0, 3), "cc takes radius, steps, each once"),
        (lambda: agg.cc(1.0, f=1, radius=2.0), "each once"),
        (lambda: agg.smea(f=1, bugdet=3), "smea has no option 'bugdet': did you mean 'budget'"),
        (lambda: agg.bucketing(size=1.5, f=1), "must be a whole number ≥ 1; got 1.5"),
    ],
)
def test_wrong_options_are_explained(make, hint: str):
    with pytest.raises(UserError, match=hint):
        make()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("cwmde", "did you mean 'cwmed'"),
        ("nmm+caf", "did you mean 'nnm'"),
        ("krum+caf", "only mixing steps come before"),
        ("caf+nnm", "is a rule"),
        ("arc+nnm", "ends in the mixing step"),
        ("caf(3)", "takes no parameters"),
        ("cc(radius=1,radius=2)", "not a parameter"),
        ("clip(wide)+mean", "not a number"),
        ("clip(width=2)+mean", "takes radius"),
        ("clip(-1)+mean", "must be a number > 0"),
        ("bucketing(0)+mean", "whole number"),
        ("filter(bound=-1)", "σ0²"),
        ("cc(steps=0)", "steps"),
        ("smea(budget=0)", "budget"),
        ("nnm+(caf)", "cannot read"),
        ("", "cannot read"),
    ],
)
def test_mistakes_are_explained(text: str, hint: str):
    with pytest.raises(UserError, match=hint.replace("(", r"\(").replace(")", r"\)")):
        agg.parse(text, f=1)


def test_chains_need_one_f():
    with pytest.raises(UserError, match="same f"):
        agg.chain(agg.nnm(f=1), agg.caf(f=2))


def test_too_few_buckets_are_named():
    with pytest.raises(UserError, match="makes 2 messages out of 6"):
        agg.parse("bucketing(3)+caf", f=1)(np.zeros((6, 2)))


def test_every_rule_says_what_it_is():
    for registry in (agg.rules, agg.mixings):
        for name in registry:
            assert len(registry.summary(name)) > 20, name


def test_coordinate_rules_have_no_gram_weights():
    assert not agg.cwmed(f=1).geometric
    assert not hasattr(agg.cwmed(f=1), "weights_from_gram")
    with pytest.raises(UserError, match="not geometric"):
        agg.parse("nnm+cwmed", f=1).weights_from_gram(np.eye(5))


def test_chains_of_chains():
    X = np.random.default_rng(0).standard_normal((12, 40))
    nested = agg.chain(agg.arc(f=2), agg.chain(agg.nnm(f=2), agg.bulyan(f=2)))
    assert nested.name == "arc+nnm+bulyan"
    flat = agg.parse("arc+nnm+bulyan", f=2)(X)
    np.testing.assert_allclose(nested(X).value, flat.value)
    np.testing.assert_allclose(nested(X).weights, flat.weights)
    with pytest.raises(UserError, match="n > 4f"):
        nested(X[:8])


@pytest.mark.parametrize("name", ["cfa", "nnm+", "+cwmed", "", "cwmed+nnm", "nnm+nnn+mean", "nnm"])
def test_names_that_mean_nothing_are_refused(name: str):
    with pytest.raises(UserError):
        agg.parse(name, f=1)


@pytest.mark.parametrize("name", ["my-rule", "Mine", "rule_2.1"])
def test_a_rule_is_spelt_in_a_chain_as_it_is_registered(name: str):
    agg.rules.register(name)(type("Mine", (agg.mean,), {"__doc__": "The mean, again."}))
    try:
        assert agg.parse(f"nnm + {name}", f=1).name == f"nnm+{name}"
    finally:
        agg.rules.withdraw(name)
