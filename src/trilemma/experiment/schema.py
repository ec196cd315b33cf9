"""What a configuration may say, table by table.

A table is a frozen pydantic model. Tables that choose something by name (`[data]`, `[model]`, `[algorithm]`,
`[attack]`, `[data.partition]` and `[data.features]`) also carry the options of what was chosen; those options
are declared by the thing itself, in its own file, and found through its registry.

Longer than most modules, so that all tables stand in one place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from trilemma.aggregation.steps.weights import RATIO, normalised
from trilemma.aggregation.steps.weights import check as check_weights
from trilemma.base.errors import UserError, hint, nearest
from trilemma.base.options import Options, mistakes
from trilemma.models import Lora, Subspace, Train
from trilemma.privacy.accounting.accountants import accountants
from trilemma.privacy.threats.catalogue import sharing, threat_models
from trilemma.privacy.types import Adjacency, Arithmetic, Assumption

AUTO = "auto"
"""What is said where a number is to be chosen (`config.auto`)."""

CLIP = 1.0
"""The usual bound on a contribution: while gradients are longer, only its product with the step counts."""

MOST_CLIENTS, MOST_ROUNDS, MOST_SEEDS = 10_000_000, 100_000_000, 10_000
"""What one configuration may ask for: more is a slip of the pen. A day has 86,400,000 milliseconds."""


class SettingsTable(Options):
    """One table of a configuration."""


class DataTable(SettingsTable):
    """`[data]`: who holds what, and what is learned from. Options of the data set stand beside these keys."""

    holders: Literal["honest", "all"] = Field(
        default="honest",
        description="divide the data among honest clients only (Byzantine ones mirror them), or among all",
    )
    examples: int | None = Field(
        default=None,
        ge=1,
        description="training examples in all, drawn from the seed; default: those there are",
    )
    project: int | None = Field(
        default=None, ge=1, description="project features at random to this many numbers; drawn from the seed"
    )
    norm: float | None = Field(
        default=None, gt=0, description="shorten features that are longer than this public constant to it"
    )
    centre: bool = Field(
        default=False,
        description="take each client's own mean off its examples; nothing of it is sent (user-level ε only)",
    )
    whiten: bool = Field(
        default=False,
        description="centre, and by each client's own covariance give its examples the same variance in "
        "every direction (user-level ε only)",
    )

    @property
    def around_own(self) -> bool:
        """Whether what a client learns from an example depends on its other examples."""
        return self.centre or self.whiten

    @property
    def caveat(self) -> str:
        """What users of the model have to do to their own examples first; "": nothing."""
        if not self.around_own:
            return ""
        then = ", then whitens them by their covariance (the symmetric root)" if self.whiten else ""
        return f"whoever uses the model takes the mean of its own examples off them{then}"


class ModelTable(SettingsTable):
    """`[model]`: what of the model is trained. Options of the model stand beside these keys."""

    train: Train = Field(
        default="all",
        description='what is trained and travels: "all", "head" (the last layer), names or patterns of '
        "tensors, {subspace = 1024} (θ0 + Pz, P random) or {lora = 8} (low-rank adapters, and the head "
        "unless head = false; on = [names of layers], alpha)",
    )

    @field_validator("train", mode="before")
    @classmethod
    def _one_kind(cls, value: object) -> object:
        """Say once what is wrong: pydantic alone would try every kind and name them all."""
        if isinstance(value, str) and value not in ("all", "head"):
            raise ValueError(
                f"{hint(value, ('all', 'head'))}names stand in a list, as in [{value!r}]; {_TRAIN}"
            )
        if isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value):
            return tuple(value)
        if isinstance(value, str | Subspace | Lora):
            return value
        if not isinstance(value, dict):
            raise ValueError(_TRAIN)
        for kind in (Subspace, Lora):
            if next(iter(kind.model_fields)) in value:
                try:
                    return kind.model_validate(value)
                except ValidationError as error:
                    raise ValueError("; ".join(mistakes(error, kind.model_fields))) from None
        raise ValueError(_TRAIN)


_TRAIN = 'allowed: "all", "head", a list of names, {subspace = …} or {lora = …}'


class ExportRule(Options):
    """`[federation] export`: what an export of a federation's model waits for."""

    needs: int = Field(ge=1, description="owners who must have approved an evidence pack about the model")


class FederationTable(SettingsTable):
    """`[federation]`: how many clients there are and how many lie."""

    clients: int = Field(default=7, ge=1, le=MOST_CLIENTS, description="number of clients n")
    byzantine: int = Field(default=0, ge=0, description="number of Byzantine clients")
    tolerate: int | None = Field(
        default=None, ge=0, description="f the rule is told; default: the number of Byzantine clients"
    )
    placement: Literal["last", "random"] = Field(
        default="last", description="which clients are Byzantine: the last ones, or drawn from the seed"
    )
    sampled: int | None = Field(
        default=None, ge=1, description="clients S whose messages count in a round; default: all"
    )
    weights: tuple[float, ...] = Field(
        default=(),
        description="public weights of the clients: their sizes, or shares that sum to 1; default: all alike",
    )
    cap: float | None = Field(
        default=None,
        gt=0,
        lt=0.5,
        description="largest weight W of the f heaviest; default: where κ is twice that of equal weights",
    )
    ratio: float = Field(
        default=RATIO, ge=1, description="how many times as much as the lightest the heaviest may weigh"
    )

    export: ExportRule | None = Field(
        default=None,
        description="{needs = 2}: so many owners must approve an evidence pack before a model is exported",
    )

    @property
    def f(self) -> int:
        """Number of Byzantine clients the rule is told to tolerate."""
        return self.byzantine if self.tolerate is None else self.tolerate

    @property
    def shares(self) -> tuple[float, ...]:
        """The weights, normalised; () where all are alike."""
        return normalised(self.weights)

    @property
    def scales(self) -> tuple[float, ...]:
        """What clients multiply their messages by, so that noise cancels in the weighted sum: n w_i."""
        return tuple(self.clients * share for share in self.shares)

    @property
    def participants(self) -> int:
        """Number of clients whose messages the server aggregates in a round."""
        return self.clients if self.sampled is None else self.sampled

    @model_validator(mode="after")
    def _possible(self) -> FederationTable:
        if self.participants > self.clients:
            raise ValueError(
                f"sampled = {self.sampled} of {self.clients} clients; allowed: 1 to {self.clients}"
            )
        if self.export is not None and self.export.needs > self.clients:
            raise ValueError(
                f"export needs {self.export.needs} of {self.clients} owners; allowed: 1 to {self.clients}"
            )
        if self.byzantine >= self.clients:
            raise ValueError(
                f"{self.byzantine} of {self.clients} clients Byzantine leaves nobody to learn for"
            )
        largest = (self.participants - 1) // 2
        if self.f > largest:
            raise ValueError(
                f"f = {self.f} Byzantine of n = {self.participants} clients: no rule can tell liars from "
                f"honest clients unless 2f < n; allowed: 0 to {largest} of {self.participants} (to simulate "
                "more liars anyway, set tolerate to what the rule should expect)"
            )
        if self.weights and self.sampled is not None:
            raise ValueError(
                f"sampled = {self.sampled} with weights: a few heavy clients could be all that is heard; "
                "leave one of them out"
            )
        if self.weights:
            try:
                check_weights(self.weights, self.clients, self.f, self.cap, self.ratio)
            except UserError as error:
                raise ValueError(str(error)) from None
        return self


class AggregationTable(SettingsTable):
    """`[aggregation]`: the rule, as a chain of names."""

    rule: str = Field(default="mean", description='a rule or a chain, e.g. "caf" or "nnm+cwmed"')
    root: int = Field(
        default=0, ge=0, description="public examples at the server, taken out of the training data"
    )
    tune: Literal["no", "model", "alone", "clients", "clients-alone"] = Field(
        default="no",
        description="what goes on learning after the last round: nothing; the clients' model, on the "
        "server's public examples; every client from there, at home on its own (in a federation when its "
        "owner calls `trilemma export`); or, for comparison, either without the clients' model (alone, "
        "clients-alone)",
    )

    @model_validator(mode="after")
    def _from_something(self) -> AggregationTable:
        if self.tune in ("model", "alone") and self.root < 2:
            raise ValueError(f"tune = {self.tune!r} needs public examples at the server; allowed: root = 100")
        return self


def _threat(name: str) -> str:
    if name not in (names := [*threat_models, "none"]):
        raise ValueError(nearest(name, names))
    return name


class PrivacyTable(SettingsTable):
    """`[privacy]`: who is trusted, how contributions are clipped, how much noise is added.

    Noise is given as a target (`epsilon`), as standard deviations (`sigma_ind`, `sigma_cor`), as a multiple
    of the sensitivity (`noise_multiplier`), or not at all (then clipping alone gives no guarantee).
    """

    threat: Annotated[str, AfterValidator(_threat)] = Field(
        default="none", description=f"who is trusted with what: {', '.join(threat_models)}; or none"
    )
    clip: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=True,
        description='bound C on a contribution\'s norm; default, or "auto": 1 where there is noise',
    )
    epsilon: float | None = Field(
        default=None, gt=0, allow_inf_nan=True, description="target ε for the whole run"
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="target δ for the whole run")
    repeated: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the rounds that may happen twice within the target ε; a federation's `init` "
        "sets a tenth",
    )
    sigma_ind: float | None = Field(default=None, ge=0, description="std of independent noise")
    sigma_cor: float | None = Field(default=None, ge=0, description="std of pairwise cancelling noise")
    noise_multiplier: float | None = Field(
        default=None, ge=0, description="independent noise as a multiple of the sensitivity"
    )
    noise: Literal["certified", "paper"] = Field(
        default="certified", description="calibrate to a certificate, or by the algorithm's paper"
    )
    arithmetic: Arithmetic = Field(
        default="float",
        description="where contribution and noise meet: float, or grid: integers, as in any real federation",
    )
    broadcast_bound: float = Field(
        default=1e6, gt=0, description="largest number in a broadcast that a private client answers"
    )
    collusion: int | None = Field(
        default=None, ge=0, description="Byzantine clients q that collude with the server"
    )
    neighbours: int | None = Field(
        default=None,
        ge=1,
        description="others k that a client shares secrets with; default: all. Noise then costs k streams a "
        "round, and the certificate holds whichever of them collude",
    )
    assume: Assumption = Field(
        default="guaranteed",
        description="guaranteed: noise for every number of liars from 0 to f; published: as CafCor's paper, "
        "whose ε holds only if liars exist that keep their secrets",
    )
    uncertified: bool = Field(
        default=False, description="run although no privacy guarantee is known for this combination"
    )
    adjacency: Adjacency | None = Field(
        default=None, description="replace (default), add-remove, or published: the papers' convention"
    )
    accountant: Annotated[str, AfterValidator(accountants.validate)] | None = Field(
        default=None,
        description="accountant used to calibrate; default: the tightest, exact without sampling, else pld",
    )

    def planned(self, rounds: int) -> int:
        """Return how many releases a target ε is for.

        >>> PrivacyTable(repeated=0.1).planned(15)
        17
        """
        return math.ceil((1 + self.repeated) * rounds)

    @property
    def aims(self) -> bool:
        """Whether noise is calibrated to a target ε."""
        return self.epsilon is not None and self.noise == "certified"

    @model_validator(mode="before")
    @classmethod
    def _clipped(cls, said: Any) -> Any:
        """Clip at the usual bound where there is noise: without a bound it protects nothing."""
        if not isinstance(said, Mapping) or said.get("clip") not in (None, AUTO):
            return said
        ways = ("epsilon", "sigma_ind", "sigma_cor", "noise_multiplier")
        noise = any(said.get(key) is not None for key in ways)
        others = {key: value for key, value in said.items() if key != "clip"}
        return {**others, "clip": CLIP} if noise else others

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> PrivacyTable:
        sigmas = self.sigma_ind is not None or self.sigma_cor is not None
        ways = [self.epsilon is not None, sigmas, self.noise_multiplier is not None]
        if sum(ways) > 1:
            raise ValueError(
                "noise is given twice: allowed is one of epsilon; sigma_ind and sigma_cor; noise_multiplier"
            )
        if any(ways) and self.threat == "none":
            raise ValueError(
                "noise without a threat model certifies nothing: give threat = "
                f"{', '.join(name for name in threat_models if name != 'none')}; to train without privacy, "
                "leave out [privacy]"
            )
        if self.neighbours is not None and self.threat not in sharing():
            raise ValueError(
                f"neighbours = {self.neighbours}: only {' and '.join(sharing())} share secrets; leave it out"
            )
        if self.threat != "none" and not threat_models[self.threat].shares and self.sigma_cor:
            raise ValueError(
                f"under {self.threat} nobody shares secrets: sigma_cor must be 0 ({' and '.join(sharing())} "
                "have it)"
            )
        return self


class EvaluationTable(SettingsTable):
    """`[evaluation]`: clients count right answers on examples of their own that they do not train on.

    Each adds its own noise, where messages have any, and pays for it in its ledger; the server takes the mean
    of what is left when the f largest and the f smallest are put aside. Where an ε is aimed at, messages get
    so much more noise that both together keep to it.
    """

    clients: bool = Field(default=False, description="whether clients evaluate the model, on their own")
    every: int | None = Field(
        default=None, ge=1, description="rounds between clients' evaluations; default: about five in a run"
    )
    hold_out: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="share of its examples that a client sets aside for it, where it has no validation "
        "examples",
    )
    epsilon: float | None = Field(
        default=None,
        gt=0,
        description="ε that all evaluations of a run cost by themselves, at [privacy] delta; default: a "
        "tenth of [privacy] epsilon",
    )
    noise_multiplier: float | None = Field(
        default=None, gt=0, description="or their noise as a multiple of a unit's largest move of the score"
    )

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> EvaluationTable:
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ValueError("noise is given twice: allowed is one of epsilon and noise_multiplier")
        return self

    def held_out(self, examples: int) -> int:
        """Return how many of so many examples a client sets aside: at least one."""
        return max(1, math.floor(self.hold_out * examples))

    def turns(self, rounds: int) -> tuple[int, ...]:
        """Return after which rounds clients evaluate: every so many, and after the last.

        >>> EvaluationTable(clients=True, every=4).turns(10), EvaluationTable().turns(10)
        ((4, 8, 10), ())
        """
        if not self.clients:
            return ()
        every = self.every or max(1, rounds // 5)
        return tuple(sorted({*range(every, rounds + 1, every), rounds}))


class RunTable(SettingsTable):
    """`[run]`: how long, which seeds, where."""

    rounds: int = Field(
        default=100,
        ge=1,
        le=MOST_ROUNDS,
        description='number of rounds T; "auto", which is the default where an ε is aimed at: chosen',
    )
    seeds: tuple[int, ...] = Field(default=(1,), min_length=1, description="one run per seed")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where to compute")
    precision: Literal["float32", "tf32"] = Field(
        default="float32",
        description="tf32: while clients train, a GPU may round factors of products to 10 bits",
    )
    evaluate_every: int | None = Field(
        default=None, ge=1, description="rounds between evaluations; default: about 50 in a run"
    )
    checkpoint_every: int | None = Field(
        default=None, ge=1, description="rounds between checkpoints; default: at most 5 % of the time"
    )
    returned: Literal["last", "sampled", "average"] = Field(
        default="last",
        description="the model a run returns: last, a uniformly sampled iterate, or their mean",
    )

    at_once: int | None = Field(
        default=None, ge=1, description="clients that are stepped together; default: all of them"
    )
    state: Literal["memory", "disk"] = Field(
        default="memory",
        description="where clients' state and messages are; disk: in mapped files, with at_once, on a CPU",
    )
    log: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = Field(
        default=(),
        description="also write TensorBoard's event files into the run's directory, or to MLflow, or to "
        "Weights & Biases",
    )

    @field_validator("seeds", mode="before")
    @classmethod
    def _seed_ranges(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        return parse_seeds(value) if isinstance(value, str) else value

    @field_validator("seeds")
    @classmethod
    def _each_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(seeds) > MOST_SEEDS:
            raise ValueError(f"{len(seeds):,} are more seeds than the {MOST_SEEDS:,} a run may have")
        return tuple(dict.fromkeys(seeds))


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds as people write them.

    >>> parse_seeds("1-3,7")
    (1, 2, 3, 7)
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"cannot read seeds {text!r}; allowed: numbers and ranges, as in 1-5 or 1,3,7")
        if len(seeds) + int(last or first) - int(first) >= MOST_SEEDS:
            raise ValueError(f"{text!r} are more seeds than the {MOST_SEEDS:,} a run may have")
        seeds.extend(range(int(first), int(last or first) + 1))
    return tuple(dict.fromkeys(seeds))
