"""From a configuration to what runs: the rule, the calibrated release and the algorithm.

Both the simulator and a real federation resolve a configuration here, so they cannot disagree about how much
noise a client adds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trilemma import aggregation, privacy
from trilemma.aggregation import Rule
from trilemma.config.load import Config
from trilemma.errors import ConfigError, PrivacyError
from trilemma.learning import Algorithm, Setup
from trilemma.privacy.types import NoiseLaw, Release


@dataclass(frozen=True)
class Resolved:
    """What a configuration means once the amount of data is known.

    `notes` are the reservations a reader of the results must see.
    """

    rule: Rule
    release: Release | None
    threat: privacy.Threat | None
    algorithm: Algorithm
    notes: tuple[str, ...] = ()


def resolve(config: Config, examples: int) -> Resolved:
    """Resolve `config` for clients of whom the poorest honest one holds `examples` training examples."""
    federation = config.federation
    rule = aggregation.parse(config.aggregation.rule, f=federation.f)
    release, threat, notes = _release(config, examples)
    algorithm = config.algorithm.options.build(
        Setup(federation.clients, federation.f, config.run.rounds, rule, release)
    )
    return Resolved(rule, release, threat, algorithm, notes)


def _release(config: Config, examples: int) -> tuple[Release | None, privacy.Threat | None, tuple[str, ...]]:
    wanted = config.privacy
    if wanted.clip is None:
        return None, None, ()
    shape = config.algorithm.options.exposure(wanted.clip, examples)
    if wanted.adjacency is not None:
        shape = replace(shape, adjacency=wanted.adjacency)
    if wanted.threat == "none":
        return shape, None, ("contributions are clipped but not noised: there is no privacy guarantee",)

    by_name = privacy.Threat(wanted.threat, *_who_counts(config), assume=wanted.assume)
    threat = by_name if wanted.collusion is None else replace(by_name, collusion=wanted.collusion)
    notes: list[str] = []
    if wanted.threat == "cdp" and config.aggregation.rule != "mean":
        gap = (
            f"central privacy is certified for the mean only: the ε of {config.aggregation.rule} under cdp "
            "is not a guarantee, it is what the mean would have"
        )
        if not wanted.uncertified:
            raise PrivacyError(
                f"{gap}; allowed: rule = 'mean', another threat model, or [privacy] uncertified = true"
            )
        notes.append(gap)
    if wanted.epsilon is not None and wanted.noise == "paper":
        law = config.algorithm.options.paper_noise(shape, wanted.epsilon, wanted.delta, config.run.rounds)
        notes.append("noise as the paper sets it is not calibrated to the target: read the certified ε")
    elif wanted.epsilon is not None:
        law = privacy.calibrate(
            wanted.epsilon,
            wanted.delta,
            config.run.rounds,
            wanted.clip,
            threat,
            unit=shape.unit,
            batch=shape.batch,
            sampling=shape.sampling,
            accountant=wanted.accountant,
            adjacency=shape.adjacency,
        )
    elif wanted.noise_multiplier is not None:
        # The multiplier is linear in σ, so one evaluation at σ = 1 gives the scale under any threat model.
        unit_multiplier = privacy.multiplier(replace(shape, law=NoiseLaw(sigma_ind=1.0)), threat)
        law = NoiseLaw(sigma_ind=wanted.noise_multiplier / unit_multiplier)
    elif wanted.sigma_ind is not None or wanted.sigma_cor is not None:
        law = NoiseLaw(wanted.sigma_ind or 0.0, wanted.sigma_cor or 0.0)
    else:
        raise ConfigError(
            f"[privacy] threat = {wanted.threat!r} but no noise; give epsilon, sigma_ind and sigma_cor, or "
            "noise_multiplier, or threat = 'none' to clip without a guarantee"
        )
    return replace(shape, law=law), threat, tuple(notes)


def _who_counts(config: Config) -> tuple[int, int]:
    """Return n and f as the threat model sees them.

    Under cdp a client hides in the noise of the mean, and only honest clients that are heard add to it; all
    liars may be among those. Under the others, not to hear a message is to see less of the same joint noise.
    """
    federation = config.federation
    if config.privacy.threat != "cdp":
        return federation.clients, federation.f
    heard, liars = federation.heard, max(federation.f, federation.byzantine)
    if liars >= heard:
        raise PrivacyError(
            f"no guarantee under cdp: all {heard} clients heard in a round could be among the {liars} that "
            f"lie and add no noise; allowed: [federation] sampled > {liars}, or another threat model"
        )
    return heard, liars
