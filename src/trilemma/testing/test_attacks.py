"""What every attack must do, whoever wrote it; that it reaches its own objective needs a test of its own.

Shape, dtype, determinism, purity, any number of clients, honest messages that are no numbers or of any size.
What an attack does not promise (`trilemma.attacks.settings.Promise`) it says in `lacks`.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from trilemma.attacks import Attack, Crafted, attacks
from trilemma.attacks.settings import Promise
from trilemma.base.keys import Key
from trilemma.testing import chosen
from trilemma.testing.targets import (
    GramRule,
    Target,
    gaussian_rows,
    gram_krum,
    plain_mean,
    trimmed_mean,
    view_of,
)

NAMES = chosen.names("attack")
CRAFTING = [name for name in NAMES if attacks[name]().build().craft is not None]
POISONING = [name for name in NAMES if attacks[name]().build().poison is not None]
FINITE = [name for name in CRAFTING if "finite" not in attacks[name].lacks]


def craft(name: str, honest: Tensor, byzantine: int = 2, **changes: Any) -> Crafted:
    """Return what an attack with its defaults sends."""
    own = gaussian_rows(byzantine, honest.shape[1], seed=9).to(honest.dtype)
    attack = attacks[name]().build()
    assert attack.craft is not None
    return attack.craft(view_of(honest, byzantine, **({"own": own} | changes)))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_frozen_documented_and_build_an_attack_of_their_name(name: str) -> None:
    settings = attacks[name]()
    attack = settings.build()
    assert isinstance(attack, Attack)
    assert attack.name == name
    assert attacks.summary(name).endswith(".")
    assert settings.lacks <= set(get_args(Promise))
    assert type(settings).model_config["frozen"]
    with pytest.raises(ValueError, match="unknown_setting"):
        attacks[name].model_validate({"unknown_setting": 1})
    assert attacks[name].model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize("name", CRAFTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_messages_have_the_shape_and_type_of_honest_ones(name: str, dtype: torch.dtype) -> None:
    honest = gaussian_rows(6, 11).to(dtype)
    crafted = craft(name, honest, byzantine=3)
    assert crafted.messages.shape == (3, 11)
    assert crafted.messages.dtype == dtype


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("h", [1, 2, 7])
@pytest.mark.parametrize("target", [plain_mean, trimmed_mean(1), GramRule(gram_krum(1))])
def test_messages_are_finite_for_any_number_of_honest_clients(name: str, h: int, target: Target) -> None:
    crafted = craft(name, gaussian_rows(h, 5), target=target)
    assert crafted.messages.isfinite().all()
    assert crafted.strength is None or abs(crafted.strength) < float("inf")


@pytest.mark.parametrize("name", CRAFTING)
@pytest.mark.parametrize("target", [plain_mean, GramRule(gram_krum(1))])
def test_equal_keys_give_equal_messages(name: str, target: Target) -> None:
    honest = gaussian_rows(6, 300)
    first, again = craft(name, honest, target=target), craft(name, honest, target=target)
    assert same(first.messages, again.messages)
    assert first.strength == again.strength


@pytest.mark.parametrize("name", CRAFTING)
def test_the_global_generators_are_left_alone(name: str) -> None:
    before = torch.get_rng_state()
    craft(name, gaussian_rows(6, 30))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", CRAFTING)
@pytest.mark.parametrize("target", [plain_mean, GramRule(gram_krum(0))])
def test_no_byzantine_clients_send_nothing(name: str, target: Target) -> None:
    assert craft(name, gaussian_rows(4, 7), byzantine=0, target=target).messages.shape == (0, 7)


@pytest.mark.parametrize("name", CRAFTING)
def test_messages_without_coordinates_have_none(name: str) -> None:
    assert craft(name, torch.zeros(4, 0)).messages.shape == (2, 0)


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("value", [0.0, 5.0])
@pytest.mark.parametrize("target", [plain_mean, GramRule(gram_krum(2))])
def test_identical_honest_messages_are_no_trouble(name: str, value: float, target: Target) -> None:
    assert craft(name, torch.full((5, 4), value), target=target).messages.isfinite().all()


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_honest_messages_that_are_no_numbers_are_left_out(name: str, bad: float) -> None:
    honest = gaussian_rows(6, 5)
    spoilt = honest.clone()
    spoilt[2, 3] = bad

    def drop_then_average(vectors: Tensor, *, key: Any = None) -> Any:
        return plain_mean(vectors[vectors.isfinite().all(dim=1)])

    without = craft(name, honest[[0, 1, 3, 4, 5]], target=drop_then_average)
    crafted = craft(name, spoilt, target=drop_then_average)
    torch.testing.assert_close(crafted.messages, without.messages, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FINITE)
def test_an_answer_even_when_no_honest_message_is_a_number(name: str) -> None:
    honest = torch.full((3, 4), float("nan"))
    assert craft(name, honest).messages.isfinite().all()


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("scale", [1e-30, 1e18, 1e30])
def test_tiny_and_huge_messages_are_measured_without_overflow(name: str, scale: float) -> None:
    honest = gaussian_rows(6, 5)
    crafted = craft(name, honest * scale, own=honest[:2] * scale, target=trimmed_mean(1))
    assert crafted.messages.isfinite().all()
    if "scale" not in attacks[name].lacks:
        plain = craft(name, honest, own=honest[:2], target=trimmed_mean(1))
        torch.testing.assert_close(crafted.messages / scale, plain.messages, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CRAFTING)
def test_honest_messages_are_not_changed(name: str) -> None:
    honest = gaussian_rows(6, 50)
    before = honest.clone()
    craft(name, honest, target=trimmed_mean(1))
    assert torch.equal(honest, before)


@pytest.mark.parametrize("name", POISONING)
@pytest.mark.parametrize("classes", [2, 10])
def test_poisoned_labels_are_labels_and_follow_their_key(name: str, classes: int) -> None:
    poison = attacks[name]().build().poison
    assert poison is not None
    labels = torch.arange(200) % classes
    changed = poison(labels, classes, Key(1))
    assert changed.shape == labels.shape
    assert changed.dtype == labels.dtype
    assert 0 <= int(changed.min()) <= int(changed.max()) < classes
    assert not torch.equal(changed, labels)
    assert torch.equal(changed, poison(labels, classes, Key(1)))
    assert torch.equal(labels, torch.arange(200) % classes)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CRAFTING)
def test_the_device_does_not_change_the_messages(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    honest = gaussian_rows(12, 4000)
    on_cpu = craft(name, honest, target=GramRule(gram_krum(2)))
    own = gaussian_rows(2, 4000, seed=9).cuda()
    on_gpu = craft(name, honest.cuda(), own=own, target=GramRule(gram_krum(2)))
    assert on_gpu.messages.device.type == "cuda"
    torch.testing.assert_close(on_gpu.messages.cpu(), on_cpu.messages, rtol=1e-3, atol=1e-4, equal_nan=True)
