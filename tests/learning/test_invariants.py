"""Identities between algorithms, and invariants of each, from the specifications."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trilemma import aggregation, config, learning, privacy
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.learning.protocol import Algorithm
from trilemma.testing.test_algorithms import CLIENTS, make_clients, run_rounds


def build(name: str, release: privacy.Release | None = None, rule: str = "mean", f: int = 0, **options):
    settings = learning.algorithms[name](**options)
    setup = learning.Setup(CLIENTS, f, rounds=10, rule=aggregation.parse(rule, f=f), release=release)
    return settings.build(setup)


def messages(algorithm: Algorithm, rounds: int = 5) -> list[torch.Tensor]:
    return [sent.messages.vectors for sent, _ in run_rounds(algorithm, make_clients(), rounds)]


def assert_same(a: Algorithm, b: Algorithm, tolerance: float = 0.0) -> None:
    for x, y in zip(messages(a), messages(b), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def test_byz_clip21_without_clip_and_feedback_is_byz_sgdm() -> None:
    common = {"lr": 0.5, "batch_size": 16}
    clip21 = build("byz-clip21-sgd2m", beta=0.1, beta_hat=1.0, **common)
    assert_same(clip21, build("byz-sgdm", momentum=0.9, **common), tolerance=1e-6)


def test_cafcor_without_correlated_noise_is_batch_clipped_safe_dshb() -> None:
    release = privacy.Release(0.5, privacy.NoiseLaw(sigma_ind=0.3))
    common = {"lr": 0.5, "batch_size": 16, "momentum": 0.9}
    assert_same(build("cafcor", release, **common), build("safe-dshb", release, unit="user", **common))


def test_momentum_starts_at_zero_or_at_the_first_gradient() -> None:
    """With a step too small to move the model, messages without momentum are the gradients to be averaged."""
    still = {"lr": 1e-20, "batch_size": 16}
    gradients = messages(build("dsgd", momentum=0.0, **still))
    for start, before in (("zero", torch.zeros_like(gradients[0])), ("first", gradients[0])):
        for sent, gradient in zip(
            messages(build("dsgd", momentum=0.9, start=start, **still)), gradients, strict=True
        ):
            before = 0.9 * before + 0.1 * gradient
            torch.testing.assert_close(sent, before)


def test_dsgd_with_the_mean_is_gradient_descent_on_the_mean_loss() -> None:
    """f = 0, mean, no momentum, whole data as batch: one step is one gradient step on all data."""
    clients = make_clients()
    algorithm = build("dsgd", lr=1.0, momentum=0.0, batch_size=2100)
    begin = algorithm.init(clients.model, clients.ids, Key(1).fold("init"))
    _, done = next(iter(run_rounds(algorithm, clients, 1)))
    params = begin.broadcast["params"].clone().requires_grad_()
    batch = clients.everything()
    logits = batch.x.reshape(-1, 68) @ params[:68] + params[68]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.y.reshape(-1).float())
    (gradient,) = torch.autograd.grad(loss, params)
    torch.testing.assert_close(done.broadcast["params"], (params - gradient).detach(), rtol=1e-5, atol=1e-6)


def test_byz_clip21_message_is_feedback_plus_accumulated_noise() -> None:
    """m_i = g_i + β̂ Σ_t ω_i^t."""
    release = privacy.Release(0.1, privacy.NoiseLaw(sigma_ind=0.5))
    clients = make_clients()
    total = torch.zeros(CLIENTS, clients.model.dim)
    for t, (sent, _) in enumerate(run_rounds(build("byz-clip21-sgd2m", release, beta_hat=0.3), clients, 6)):
        total += clients.noise.draw(release.law, clients.ids, clients.model.dim, t, torch.device("cpu"))
        expected = sent.state["g"] + 0.3 * total
        torch.testing.assert_close(sent.messages.vectors, expected, rtol=1e-5, atol=1e-5)


def test_byz_clip21_releases_at_most_tau() -> None:
    """Without noise the message moves by at most β̂ τ a round."""
    release = privacy.Release(0.05, privacy.NoiseLaw())
    before = torch.zeros(CLIENTS, 69)
    for vectors in messages(build("byz-clip21-sgd2m", release, beta=1.0, beta_hat=0.5)):
        assert ((vectors - before).norm(dim=1) <= 0.5 * 0.05 * (1 + 1e-5)).all()
        before = vectors


def test_correlated_noise_cancels_in_the_mean_over_all_clients() -> None:
    quiet = privacy.Release(1.0, privacy.NoiseLaw())
    loud = replace(quiet, law=privacy.NoiseLaw(sigma_cor=10.0))
    for a, b in zip(messages(build("cafcor", quiet), 1), messages(build("cafcor", loud), 1), strict=True):
        torch.testing.assert_close(a.mean(0), b.mean(0), rtol=0, atol=1e-5)
        assert (a - b).abs().mean() > 1.0


def test_algorithms_are_called_as_in_configurations() -> None:
    """Messages to users name them, and a user knows the name that a configuration takes."""
    assert [build(name).name for name in learning.algorithms] == list(learning.algorithms)


@pytest.mark.parametrize("said", ["unit='example'", "sampling='poisson'"])
def test_an_algorithm_without_privacy_has_no_options_that_say_what_it_protects(said: str) -> None:
    with pytest.raises(ConfigError, match=said.split("=")[0]):
        config.load("byz-sgdm-mnist", [f"algorithm.{said}"])
