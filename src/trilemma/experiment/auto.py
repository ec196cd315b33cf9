r"""Defaults that learn: rounds, step, batch and momentum of a private run, from public numbers alone.

They come from n, f, the examples m of the poorest client, the d numbers that are trained, [privacy] and the
rule; no record has a part in them, and all parties of a federation agree on them before it begins.

Noise against signal. A contribution is clipped at C. Where ε is kept over T rounds, each coordinate of the
honest clients' mean carries noise of variance V(T). Clipped gradients disagree: their mean has about half the
length C. So a round's aggregate has the squared length C²/4 + dV(T), and stochastic descent on a convex
function, from a distance D of its minimum, comes within

    D² / (2γT) + γ (C²/4 + dV(T)) / 2        which is least for        γ = D / √(T (C²/4 + dV(T))).

* `lr` is that γ. D is what nobody knows: 0.2 √d, as if each number had to move by 0.2; from 6 to 20.
* `clip` is 1: as long as gradients are longer than C, only γC counts, and γ is a multiple of 1/C.
* `rounds`: what a run gains grows with √(T/V(T)). More rounds need more noise, V(T) ~ T, once sampling and a
  small ε no longer pay for them: T doubles until another doubling gains less than a tenth. From 100, so that
  steps are short, to 800, because rounds cost.
* `batch_size` is an eighth of m, from 25 to 256: with fewer, the noise of a round is divided by few.
* `momentum` β remembers a tenth of the run, 1 − β = 10/T, and never more than the algorithm's own: what
  begins at zero and remembers longer than the run would never reach the length of a step. It averages the
  noise in which liars hide over that tenth, so a lie does not grow with T.

Reference: Nemirovski, Juditsky, Lan, Shapiro, "Robust stochastic approximation", SIAM J. Optim. 2009 (the
step); De, Berrada, Hayes, Smith, Balle, 2022 (clipping below the gradients, many examples in a batch).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trilemma.base.errors import ConfigError
from trilemma.experiment.schema import AUTO
from trilemma.learning.steps.momentum import MomentumSettings
from trilemma.privacy.threats.covariance import mean_noise

if TYPE_CHECKING:
    from trilemma.experiment.parsing import Config

NEAREST, EACH, FARTHEST = 6.0, 0.2, 20.0
AGREEING = 0.5
FEWEST, MOST, WORTH = 100, 800, 1.1
REMEMBERED = 0.1
SHARE, SMALLEST, LARGEST = 1 / 8, 25, 256

KEYS = ("run.rounds", "algorithm.lr", "algorithm.batch_size", "algorithm.momentum")
"""What is chosen, in this order, where a private run does not say it."""


def taken(tables: MutableMapping[str, Any]) -> frozenset[str]:
    """Take "auto" out of the tables; return where it stood.

    >>> said = {"run": {"rounds": "auto", "seeds": 3}}
    >>> taken(said), said
    (frozenset({'run.rounds'}), {'run': {'seeds': 3}})
    """
    found = set()
    for path in KEYS:
        table, key = path.split(".")
        inside = tables.get(table)
        if isinstance(inside, Mapping) and inside.get(key) == AUTO:
            tables[table] = {name: value for name, value in inside.items() if name != key}
            found.add(path)
    return frozenset(found)


def put_back(tables: MutableMapping[str, Any], asked: frozenset[str]) -> None:
    """Undo `taken`."""
    for path in asked:
        table, key = path.split(".")
        tables[table] = {**tables[table], key: AUTO}


def begun(config: Config, asked: frozenset[str]) -> Config:
    """Return the configuration with what can be chosen knowing neither m nor d; the rest is left open."""
    left = left_open(config, asked)
    if config.privacy.aims or left - {"run.rounds", "algorithm.momentum"}:
        return replace(config, auto=left)
    if "algorithm.momentum" not in left:
        return config
    numbers = {"momentum": momentum(config, config.run.rounds)}
    options = config.algorithm.options.model_copy(update=numbers)
    return replace(config, algorithm=replace(config.algorithm, options=options))


def left_open(config: Config, asked: frozenset[str]) -> frozenset[str]:
    """Return what is still to be chosen for a configuration: what was `asked` for, or is not said at all.

    Where no ε is aimed at, only the momentum is chosen unasked, and rounds are 100. Algorithms whose clients
    do not send momenta keep their own defaults.
    """
    options, private = config.algorithm.options, config.privacy.aims
    unsaid: set[str] = set()
    if isinstance(options, MomentumSettings):
        unsaid |= {"run.rounds"} - {f"run.{key}" for key in config.run.model_fields_set}
        if options.schedule is None:
            steps = {path for path in KEYS if path.startswith("algorithm.")}
            unsaid |= steps - {f"algorithm.{key}" for key in options.model_fields_set}
        if options.unit == "user":
            unsaid.discard("algorithm.batch_size")
        if "algorithm.lr" in asked and config.privacy.clip is None:
            raise ConfigError("[algorithm] lr = 'auto': it comes from clip and noise; give a number")
    elif odd := sorted(path.partition(".")[2] for path in asked if path.startswith("algorithm.")):
        name = config.algorithm.name
        raise ConfigError(f"[algorithm] {odd[0]} = 'auto': {name} has no rule for it; give a number")
    return frozenset(asked | (unsaid if private else unsaid & {"algorithm.momentum"}))


def settled(config: Config, examples: int, dim: int) -> Config:
    """Return the configuration with numbers in place of what is left open.

    `examples` is what the poorest client counts as holding, `dim` how many numbers are trained.

    >>> from trilemma.experiment import parse
    >>> private = {"threat": "ldp", "epsilon": 8.0}
    >>> found = settled(parse({"algorithm": "safe-dshb", "privacy": private}), examples=600, dim=771)
    >>> found.run.rounds, found.algorithm.options.batch_size, found.algorithm.options.lr
    (100, 75, 0.84)
    """
    if not config.auto:
        return config
    found: dict[str, Any] = {}
    if "algorithm.batch_size" in config.auto:
        found["algorithm.batch_size"] = _batch(examples)
    if "run.rounds" in config.auto:
        found["run.rounds"] = _rounds(_with(config, found), examples)
    rounds = found.get("run.rounds", config.run.rounds)
    if "algorithm.momentum" in config.auto:
        found["algorithm.momentum"] = momentum(config, rounds)
    if "algorithm.lr" in config.auto:
        found["algorithm.lr"] = _step(_with(config, found), examples, dim)
    numbers = ", ".join(f"{path.partition('.')[2]} = {value:g}" for path, value in found.items())
    n, epsilon = config.federation.clients, config.privacy.epsilon
    said = f"chosen from n = {n}, m = {examples}, d = {dim}, ε = {epsilon or math.inf:g}: {numbers}"
    return replace(_with(config, found), notes=(*config.notes, said))


def momentum(config: Config, rounds: int) -> float:
    """Return a momentum that remembers a tenth of the run at most, and no more than the algorithm's own."""
    own = type(config.algorithm.options).model_fields["momentum"].get_default()
    return float(min(own, max(0.0, round(1 - 1 / max(1.0, REMEMBERED * rounds), 4))))


def _batch(examples: int) -> int:
    return min(examples, max(SMALLEST, min(LARGEST, math.ceil(SHARE * examples))))


def _rounds(config: Config, examples: int) -> int:
    """Double the rounds as long as √(T/V(T)) grows by a tenth with it."""
    rounds, variance = FEWEST, _variance(config, examples, FEWEST)
    while variance > 0 and rounds < MOST:
        doubled = _variance(config, examples, 2 * rounds)
        if math.sqrt(2 * variance / doubled) < WORTH:
            break
        rounds, variance = 2 * rounds, doubled
    return rounds


def _step(config: Config, examples: int, dim: int) -> float:
    """Return γ, to two digits."""
    clip, rounds = config.privacy.clip, config.run.rounds
    assert clip is not None
    noise = dim * _variance(config, examples, rounds)
    return float(f"{_distance(dim) / math.sqrt(rounds * ((AGREEING * clip) ** 2 + noise)):.2g}")


def _distance(dim: int) -> float:
    """Return D.

    >>> [_distance(dim) for dim in (18, 2500, 10**6)]
    [6.0, 10.0, 20.0]
    """
    return min(FARTHEST, max(NEAREST, EACH * math.sqrt(dim)))


def _variance(config: Config, examples: int, rounds: int) -> float:
    """Return V(T) as Rényi's accountant has it, which is a little too much and answers at once."""
    from trilemma.experiment.resolve import resolve

    asked: dict[str, Any] = {"run.rounds": rounds}
    if config.privacy.aims and config.privacy.accountant is None:
        asked["privacy.accountant"] = "rdp"
    release = resolve(_with(config, asked, open_=False), examples).release
    federation = config.federation
    if release is None:
        return 0.0
    n, f, scales = federation.clients, federation.f, federation.scales
    return mean_noise(release.law, n, f, config.privacy.neighbours, scales)


def _with(config: Config, numbers: Mapping[str, Any], open_: bool = True) -> Config:
    """Return the configuration with numbers assigned; what is not among them stays open, or need not."""
    changed = config.with_(*(f"{path}={json.dumps(value)}" for path, value in numbers.items()))
    return changed if open_ else replace(changed, auto=frozenset())
