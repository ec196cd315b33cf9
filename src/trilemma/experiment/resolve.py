"""From a configuration to what runs: the rule, the calibrated release and the algorithm.

Both the simulator and a real federation resolve a configuration here, so they cannot disagree about how much
noise a client adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trilemma import aggregation, privacy
from trilemma.aggregation import Rule
from trilemma.aggregation.passes.gram import heaviest
from trilemma.base.errors import ConfigError, PrivacyError
from trilemma.experiment.parsing import Config
from trilemma.learning import Algorithm, Setup
from trilemma.learning.defences.evidence import Evidence
from trilemma.learning.defences.stage import stage_of, staged
from trilemma.learning.protocol import Clients
from trilemma.learning.steps.own_scores import OwnScores, release_of
from trilemma.models.types import Model
from trilemma.privacy.mechanism import History
from trilemma.privacy.noise.drawing import EXACT, Drawing
from trilemma.privacy.noise.grid_price import drawing
from trilemma.privacy.threats.catalogue import threat_models
from trilemma.privacy.types import Arithmetic, NoiseLaw, Release
from trilemma.privacy.verdict import objections


@dataclass(frozen=True)
class Resolved:
    """What a configuration means once the amount of data is known.

    `caveats` say why no guarantee holds although there is noise; `notes` are all the reservations a reader of
    the results must see. `printed` is the ε the paper claims for its own noise.
    """

    rule: Rule
    release: Release | None
    threat: privacy.Threat | None
    algorithm: Algorithm
    notes: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    printed: float | None = None
    own_scores: OwnScores | None = None
    """How clients evaluate the model on their own; None: they do not."""

    def beside(self, rounds: int, repeated: float = 0.0) -> History:
        """Return what is released in `rounds` rounds beside the messages, a share of it `repeated`."""
        return () if self.own_scores is None else self.own_scores.history(rounds, repeated)

    def verdict(self, rounds: int, delta: float) -> privacy.Verdict:
        """Return what `rounds` rounds guarantee, or why they guarantee nothing."""
        beside = self.beside(rounds)
        return privacy.judge(self.release, self.threat, rounds, delta, self.caveats, self.printed, beside)

    def among(self, members: int) -> Resolved:
        """Return the same where at times only so many `members` shared secrets.

        Noise is calibrated for n − f of them. If more clients were expelled, figures are worked out as if no
        more than are left had been there from the first round on, which is never too small. Figures that
        count on liars, as published, are no guarantee and stay what they are.
        """
        release, threat = self.release, self.threat
        shared = release is not None and release.law.sigma_cor > 0
        if threat is None or not shared or members >= threat.clients or threat.hidden:
            return self
        if members < threat.byzantine + 2:
            doubt = f"only {members} clients were left to share secrets, of whom {threat.byzantine} may lie"
            return replace(self, threat=None, caveats=(*self.caveats, doubt), notes=(*self.notes, doubt))
        note = f"more clients were expelled than may lie: ε is worked out for the {members} that were left"
        return replace(self, threat=replace(threat, clients=members), notes=(*self.notes, note))

    @property
    def certified(self) -> bool:
        """Whether an ε of this configuration is a guarantee."""
        if self.release is None or self.threat is None:
            return False
        return not objections(self.release, self.threat, self.caveats)


def resolve(
    config: Config,
    examples: int,
    model: Model | None = None,
    arithmetic: Arithmetic | None = None,
    rule: Rule | None = None,
    root: Clients | None = None,
    held_out: int | None = None,
) -> Resolved:
    """Resolve `config` for clients who all hold at least `examples` training examples, a public number.

    So is `held_out`, how many they hold at least to evaluate on, where they do; by default as many as are set
    aside of `examples`.

    `arithmetic` and `rule` are those of the configuration, unless given. On a grid the release also says how
    far drawn noise is from a Gaussian, for which the size of `model` must be known; more noise makes up for
    it where an ε is aimed at. `root` are the server's own examples.
    """
    if config.auto:
        raise ConfigError(
            f"{', '.join(sorted(config.auto))} = 'auto': chosen when a run or a federation begins; "
            "give numbers here"
        )
    federation = config.federation
    needed = config.algorithm.options.least_examples
    if needed > examples:
        raise ConfigError(
            f"[algorithm] batch_size = {needed}: the poorest client holds {examples} examples; "
            f"allowed: 1 to {examples}"
        )
    chosen = arithmetic or config.privacy.arithmetic
    rule = rule or aggregation.parse(config.aggregation.rule, federation.f, federation.shares)
    kept = config.evaluation.held_out(examples) if held_out is None else held_out
    own_scores = _own_scores(config, examples, kept, chosen)
    again = config.privacy.repeated
    beside = () if own_scores is None else own_scores.history(config.run.rounds, again)
    reckoned = EXACT
    for _ in range(_TRIES):
        release, threat, notes, caveats = _release(config, examples, reckoned, beside)
        sizes, neighbours = (federation.clients, federation.f, config.run.rounds), config.privacy.neighbours
        setup = Setup(*sizes, rule, release, chosen, root, neighbours, federation.scales)
        algorithm = staged(config.algorithm.options.build, setup)
        drawn = EXACT if model is None or threat is None else _drawn(setup, algorithm, model, threat)
        if not config.privacy.aims or drawn.spread <= reckoned.spread:
            break
        reckoned = drawn * _SPARE  # the noise that pays for it may need a finer grid
    else:
        raise PrivacyError("no noise was found that makes up for being drawn: give sigma_ind and sigma_cor")
    release = None if release is None else replace(release, drawing=drawn)
    paper = config.privacy.noise == "paper"
    printed = config.privacy.epsilon if paper else None
    notes = (*notes, *_around_own(config, examples), *_weights(config, rule))
    if own_scores is not None:
        notes = (*notes, *_said(algorithm, model, own_scores))
    return Resolved(rule, release, threat, algorithm, (*notes, *caveats), caveats, printed, own_scores)


_TRIES, _SPARE = 8, 1.01


def _drawn(setup: Setup, algorithm: Algorithm, model: Model, threat: privacy.Threat) -> Drawing:
    """Return how far the noise of one round is from the release's law: not at all in floating point."""
    grid = setup.grid(algorithm.message(model).dim)
    if grid is None or setup.release is None:
        return EXACT
    return drawing(setup.release.law, grid, setup.clients, shares=threat.model.shares)


_Words = tuple[str, ...]


def _own_scores(config: Config, examples: int, held_out: int, arithmetic: Arithmetic) -> OwnScores | None:
    """Return how clients evaluate, with the noise that keeps their scores within their own part of ε."""
    table, wanted, clients = config.evaluation, config.privacy, config.federation.clients
    turns, f = table.turns(config.run.rounds), config.federation.f
    if not table.clients:
        return None
    if held_out < 1:
        raise ConfigError("[evaluation] clients = true: a client has no example to evaluate on")
    given = table.epsilon is not None or table.noise_multiplier is not None
    if wanted.clip is None or wanted.threat == "none":
        if given:
            raise ConfigError(
                "[evaluation] has noise where messages have none, which hides nothing: give [privacy] threat "
                "and noise, or leave epsilon and noise_multiplier out"
            )
        return OwnScores(turns, f)
    shape = config.algorithm.options.exposure(wanted.clip, examples)
    like = release_of(shape.unit, wanted.adjacency or shape.adjacency, held_out)
    if table.noise_multiplier is not None:
        law = NoiseLaw(sigma_ind=table.noise_multiplier * like.sensitivity)
    else:
        epsilon = table.epsilon or (None if wanted.epsilon is None else wanted.epsilon * USUAL_SHARE)
        if epsilon is None:
            raise ConfigError(
                "[evaluation] clients = true: how much noise? Give [evaluation] epsilon, what all of them "
                "cost by themselves, or noise_multiplier; by default epsilon is a tenth of [privacy] epsilon"
            )
        law = privacy.calibrate(
            *(epsilon, wanted.delta, len(turns), like.clip, privacy.Threat("ldp", clients), like.unit),
            *(like.batch,),
            adjacency=like.adjacency,
        )
    return OwnScores.noised(turns, f, replace(like, law=law), clients, arithmetic)


USUAL_SHARE = 0.1
"""Of an ε that is aimed at, what clients' own evaluations may cost by themselves where nothing is said."""


def _said(algorithm: Algorithm, model: Model | None, own_scores: OwnScores) -> _Words:
    """Refuse evaluations that would mean nothing; return the notes for those that mean something."""
    if algorithm.own_models:
        raise ConfigError(
            f"[evaluation] clients = true: the models of {algorithm.name} are the clients' own, and one "
            "score for all is asked for; leave it out"
        )
    if model is not None and model.buffers:
        raise ConfigError(
            "[evaluation] clients = true: running statistics of batch normalisation are the clients' own; "
            "use nn.GroupNorm, or leave it out"
        )
    if own_scores.release is None:
        return ()
    deviation, times = own_scores.release.law.sigma_ind, len(own_scores.turns)
    return (
        f"clients evaluate {times} times, each share of right answers with noise of standard deviation "
        f"{deviation:.3g}; its cost is in ε",
    )


def _weights(config: Config, rule: Rule) -> _Words:
    """Return what must be said where clients have weights: what liars may weigh, and what that costs."""
    federation = config.federation
    if not federation.shares:
        return ()
    heavy = heaviest(np.array(federation.shares), federation.f)
    kappa, alike = (one.kappa(federation.clients) for one in (rule, rule.weighed(())))
    costs = "" if kappa is None or not alike else f"; κ = {kappa:.3g}, where equal weights have {alike:.3g}"
    return (
        f"public weights from {min(federation.shares):.3g} to {max(federation.shares):.3g}: "
        f"f = {federation.f} liars weigh at most {heavy:.3g}{costs}",
    )


def _around_own(config: Config, examples: int) -> _Words:
    """Return what must be said where clients look at examples around their own mean."""
    holding = config.holding
    if not holding.around_own:
        return ()
    by = "mean and covariance" if holding.whiten else "mean"
    many = f", with many times more than their numbers (the poorest has {examples})" if holding.whiten else ""
    return (
        f"clients see examples by their own {by}: that is for clients who hold all classes alike{many}; "
        + holding.caveat,
    )


def _release(
    config: Config, examples: int, reckoned: Drawing, beside: History
) -> tuple[Release | None, privacy.Threat | None, _Words, _Words]:
    """Return the release, the threat model, what must be said, and why there is no guarantee.

    Noise for a target is calibrated as if it were drawn as `reckoned`, and leaves room for what is released
    `beside`.
    """
    wanted = config.privacy
    if wanted.clip is None:
        return None, None, (), ()
    shape = config.algorithm.options.exposure(wanted.clip, examples)
    if wanted.adjacency is not None:
        shape = replace(shape, adjacency=wanted.adjacency)
    if wanted.threat == "none":
        return shape, None, ("contributions are clipped but not noised: there is no privacy guarantee",), ()
    if config.holding.around_own and shape.unit == "example":
        raise ConfigError(
            "[data] centre and whiten: one example moves all others of its client, and no ε for an example "
            "covers that; allowed: both false, or an algorithm with user-level privacy"
        )

    least, liars = _who_counts(config)
    most = least if threat_models[wanted.threat].central else config.federation.clients
    by_name = privacy.Threat(
        *(wanted.threat, least, liars),
        assume=wanted.assume,
        neighbours=wanted.neighbours,
        most=most,
        scales=config.federation.scales,
    )
    threat = by_name if wanted.collusion is None else replace(by_name, collusion=wanted.collusion)
    caveats = [_gap(config, gap, cure) for gap, cure in _central_gaps(config)]
    if wanted.epsilon is not None and wanted.noise == "paper":
        caveats.append("noise as the paper sets it is not calibrated to the ε it claims")
    law = _law(config, wanted.clip, shape, threat, reckoned, beside)
    return replace(shape, law=law), threat, (), tuple(caveats)


def _law(
    config: Config,
    clip: float,
    shape: Release,
    threat: privacy.Threat,
    reckoned: Drawing,
    beside: History,
) -> NoiseLaw:
    """Return the noise that `[privacy]` asks for: by a target ε, as the paper sets it, or given outright."""
    wanted = config.privacy
    if wanted.epsilon is not None and wanted.noise == "paper":
        return config.algorithm.options.paper_noise(shape, wanted.epsilon, wanted.delta, config.run.rounds)
    if wanted.epsilon is not None:
        return privacy.calibrate(
            wanted.epsilon,
            wanted.delta,
            wanted.planned(config.run.rounds),
            clip,
            threat,
            unit=shape.unit,
            batch=shape.batch,
            sampling=shape.sampling,
            accountant=wanted.accountant,
            adjacency=shape.adjacency,
            drawing=reckoned,
            beside=beside,
        )
    if wanted.noise_multiplier is not None:
        if not math.isfinite(shape.clip):
            raise ConfigError("[privacy] noise_multiplier is of what a unit can move: give a finite clip")
        # The multiplier is linear in σ, so one evaluation at σ = 1 gives the scale under any threat model.
        unit_multiplier = privacy.multiplier(replace(shape, law=NoiseLaw(sigma_ind=1.0)), threat)
        return NoiseLaw(sigma_ind=wanted.noise_multiplier / unit_multiplier)
    if wanted.sigma_ind is not None or wanted.sigma_cor is not None:
        return NoiseLaw(wanted.sigma_ind or 0.0, wanted.sigma_cor or 0.0)
    raise ConfigError(
        f"[privacy] threat = {wanted.threat!r} but no noise; give epsilon, sigma_ind and sigma_cor, or "
        "noise_multiplier, or threat = 'none' to clip without a guarantee"
    )


def _central_gaps(config: Config) -> Iterator[tuple[str, str]]:
    """Yield where the mean's noise is not what an outsider under cdp is left with, and what would help."""
    rule, federation = config.aggregation.rule, config.federation
    if not threat_models[config.privacy.threat].central:
        return
    if rule != "mean":
        yield (
            f"central privacy is certified for the mean only: the ε of {rule} under cdp is not a guarantee, "
            "it is what the mean would have",
            "rule = 'mean'",
        )
    if federation.participants < federation.clients and not config.algorithm.options.fresh_noise:
        yield (
            f"messages carry noise of earlier rounds, and {federation.participants} of {federation.clients} "
            "clients are heard in a round: who compares the means of rounds takes that noise out again",
            "all clients heard in every round, algorithm.momentum = 0",
        )


def _gap(config: Config, gap: str, cure: str) -> str:
    if not config.privacy.uncertified:
        raise PrivacyError(f"{gap}; allowed: {cure}, another threat model, or [privacy] uncertified = true")
    return gap


def _who_counts(config: Config) -> tuple[int, int]:
    """Return n and f as the threat model sees them.

    Under cdp a client hides in the noise of the mean. Only honest clients that are heard add to that noise,
    and all liars may be among the heard. Under the other models a message that is not heard only shows less
    of the same joint noise, but a client that is expelled no longer shares secrets.
    """
    federation = config.federation
    if not threat_models[config.privacy.threat].central:
        return _least_members(config), federation.f
    participants, liars = federation.participants, max(federation.f, federation.byzantine)
    if liars >= participants:
        raise PrivacyError(
            f"no guarantee under cdp: all {participants} clients heard in a round could be among the "
            f"{liars} that lie and add no noise; allowed: [federation] sampled > {liars}, or another "
            "threat model"
        )
    return participants, liars


def _least_members(config: Config) -> int:
    """Return among how many clients noise cancels at least: all, less the liars that may be expelled.

    Nobody can have been expelled before a run's first release. Where all share secrets with all, more members
    only help: a client whose secrets are known leaves the others as if it were not there. On a graph they may
    not, so there the worst number of members counts (`Threat.most`). A published figure counts on liars that
    stay.
    """
    federation = config.federation
    rule = aggregation.parse(config.aggregation.rule, f=federation.f)
    stage = stage_of(rule)
    if not isinstance(stage, Evidence) or config.privacy.assume == "published" or config.run.rounds == 1:
        return federation.clients
    return federation.clients - federation.f
