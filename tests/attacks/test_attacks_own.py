"""What the package's own attacks promise beyond `trilemma.testing.test_attacks`."""

import pytest
import torch
from attack_helpers import gaussian_rows

from trilemma.attacks import attacks
from trilemma.base.keys import Key
from trilemma.testing.test_attacks import craft


def test_the_names_of_the_configurations_are_there():
    on_data = {"none", "lf", "random-labels"}
    on_messages = {"sf", "alie", "foe", "ipm", "mimic", "min-max", "min-sum", "inf", "nan"}
    of_lp_proj = {"gaussian", "same-value", "scaled-flip", "data-poison"}
    assert on_data | on_messages | of_lp_proj <= set(attacks)


@pytest.mark.parametrize("name", ["gaussian", "same-value", "scaled-flip", "data-poison"])
def test_random_attacks_draw_from_the_key_and_differ_between_clients(name):
    honest = gaussian_rows(6, 30)
    own = torch.ones(2, 30)
    first = craft(name, honest, own=own, key=Key(1).fold("round", 1))
    other = craft(name, honest, own=own, key=Key(1).fold("round", 2))
    assert not torch.equal(first.messages, other.messages)
    assert not torch.equal(first.messages[0], first.messages[1])
