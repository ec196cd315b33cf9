"""A run in one call: what a configuration says, as arguments.

>>> import tempfile, pathlib, torch, trilemma as tl
>>> x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
>>> y = (x.sum(1) > 0).long()
>>> task = tl.Task(model=lambda: torch.nn.Linear(3, 2), clients=[(x, y)] * 5, test=(x, y))
>>> out = pathlib.Path(tempfile.mkdtemp()) / "run"
>>> result = tl.run(task, byzantine=1, attack="sf", rule="caf", rounds=5, seeds=2, out=out)
>>> [*result.summary.metrics], len(result.records), [*result.state_dict()]
(['accuracy'], 10, ['weight', 'bias'])
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ValidationError

from trilemma import experiment as configuration
from trilemma import learning, report, simulate
from trilemma.base.errors import ConfigError, Stopped, UserError, known_as, nearest
from trilemma.base.options import mistakes
from trilemma.experiment import Config
from trilemma.experiment.schema import AggregationTable, DataTable, FederationTable, PrivacyTable, RunTable
from trilemma.report.run_metadata import BASELINE
from trilemma.task import Learner, Task

if TYPE_CHECKING:
    from trilemma.report.progress import ProgressBar

TABLES = ("algorithm", "attack", "data", "model", "privacy")
"""Tables that are an argument of their own: a name, or a mapping with a name and options."""

FLAT: Mapping[str, type[BaseModel]] = {
    "federation": FederationTable,
    "aggregation": AggregationTable,
    "run": RunTable,
}
"""Tables whose keys are arguments."""


class Privacy(PrivacyTable):
    """Who is trusted, how contributions are clipped, how much noise is added: the `[privacy]` table.

    >>> Privacy(threat="secldp", clip=1.0, epsilon=8).delta
    1e-05
    >>> Privacy(epsilon=8)
    Traceback (most recent call last):
    trilemma.base.errors.ConfigError: privacy: noise without a threat model certifies nothing: give ...
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            said = mistakes(error, PrivacyTable.model_fields)
            raise ConfigError("\n".join(f"privacy: {mistake}" for mistake in said)) from None


def run(
    task: Task | Path | str | None = None,
    *,
    algorithm: str | Mapping[str, Any] = "dsgd",
    rule: str = "mean",
    attack: str | Mapping[str, Any] = "none",
    byzantine: int = 0,
    privacy: PrivacyTable | Mapping[str, Any] | None = None,
    rounds: int | Literal["auto"] = "auto",
    seeds: int | str | Sequence[int] = 1,
    out: Path | str | None = None,
    resume: bool = False,
    baseline: bool = False,
    progress: bool | None = None,
    observer: simulate.Observer | None = None,
    **more: Any,
) -> report.Result:
    """Train a federation and return its result.

    Every argument is a key of a configuration and is refused as there; `more` takes the others: `clients`,
    `tolerate`, `placement`, `sampled`, `device`, `evaluate_every`, `returned`, …, and, without a task, `data`
    and `model`. What has options of its own is given by name or as a mapping, as in
    `algorithm={"name": "cafcor", "lr": 0.5}`.

    Args:
        task: Your own model and data: a `Task`, or the path of a `task.py`. Default: `data` and `model`.
        algorithm: How clients and server learn.
        rule: How the server combines messages.
        attack: What the Byzantine clients send.
        byzantine: How many clients lie: the last ones.
        privacy: Clipping, noise and who is trusted; default: none of it.
        rounds: Number of rounds; "auto": 100, and chosen from public numbers where an ε is aimed at.
        seeds: One run per seed: 3 means 1 to 3; or a list; or text such as "1-3,7".
        out: The directory of the run; default: a new one below `runs/`.
        resume: Continue the run in `out`, if there is one, as it was configured. A `Task` made in Python is
            not on disk and cannot be compared: give the same again.
        baseline: Also run with nobody lying and the plain mean.
        progress: Draw a progress bar, on standard error; default: in a terminal and in a notebook.
        observer: Is told about every round (`simulate.Observer`): for a tracker of experiments.
        more: Other keys of the configuration.
    """
    with _in_arguments():
        return _run(
            task, out, resume, baseline, progress, observer,
            algorithm=algorithm, rule=rule, attack=attack, byzantine=byzantine, privacy=privacy,
            rounds=rounds, seeds=seeds, **more,
        )  # fmt: skip


def _run(
    task: Task | Path | str | None,
    out: Path | str | None,
    resume: bool,
    baseline: bool,
    progress: bool | None,
    observer: simulate.Observer | None,
    **arguments: Any,
) -> report.Result:
    own: Any = Task.from_file(task) if isinstance(task, str | Path) else task
    if own is not None and not isinstance(own, Task):
        raise ConfigError(f"task is a {type(own).__name__}; allowed: a Task, or the path of a task.py")
    settings = configured(own, **arguments)
    if settings.attack.name != "none" and not settings.federation.byzantine:
        raise ConfigError(
            f"attack = {settings.attack.name!r}, and nobody plays it: byzantine = 0; allowed: byzantine = 1 "
            "or more, or no attack"
        )
    if resume and out is None:
        raise ConfigError("resume continues the run in a directory: name it with out")
    directory = simulate.named_directory(settings) if out is None else Path(out)
    train = simulate.run_or_resume if resume else simulate.run
    with _bar(progress) as bar:

        def announce(chosen: Config, _: Learner | None) -> None:
            if bar is not None:
                for note in chosen.notes:
                    bar.say(spoken(note))

        everyone = simulate.Everyone([one for one in (bar, observer) if one is not None])
        try:
            train(settings, directory, everyone, own, announce=announce)
            if baseline and settings.federation.byzantine:
                honest = simulate.without_liars(simulate.RunDirectory.open(directory).config)
                train(honest, directory / BASELINE, bar, own)
        except KeyboardInterrupt:
            again = f"out={str(directory)!r}, resume=True"
            raise Stopped(f"stopped; what was finished is kept. Go on: the same call with {again}") from None
    result = report.load(directory, task=own)
    if settings.run.log:
        from trilemma.simulate.trackers import track

        track(directory, result.config, result.summary, result.markdown())
    return result


def statistics(
    task: Task | Path | str,
    columns: Mapping[str, Any],
    *,
    privacy: PrivacyTable | Mapping[str, Any] | None = None,
    rule: str = "mean",
    attack: str | Mapping[str, Any] = "none",
    byzantine: int = 0,
    seed: int = 1,
    label: str | None = None,
    correlations: bool = False,
    most: int = 1000,
    least: int = 10,
    **more: Any,
) -> report.StatisticsResult:
    """Return private statistics of all clients' records, as a federation of them would get, once.

    >>> import torch, trilemma as tl
    >>> x, y = torch.rand(400, 1), torch.randint(2, (400,))
    >>> task = tl.Task(model=lambda: torch.nn.Linear(1, 2), clients=[(x, y)] * 5)
    >>> columns = {"x0": {"low": 0, "high": 1}, "label": {"values": [0, 1]}}
    >>> found = tl.statistics(task, columns, privacy=tl.Privacy(threat="ldp", epsilon=2))
    >>> mean = found.column("x0").mean
    >>> mean.low < float(x.mean()) < mean.high
    True

    Args:
        task: Whose records: a `Task`, or the path of a `task.py`. See `trilemma.task.surveyed` for which.
        columns: What is counted, by name: low, high and bins; edges; values; or {} where bounds are to be
            found. All of it is public.
        privacy: Noise and who is trusted; default: none of it, and exact numbers.
        rule: How the server combines messages.
        attack: What the Byzantine clients send.
        byzantine: How many clients lie: the last ones.
        seed: What is drawn, the noise too: it protects nobody.
        label: The column that is to be predicted.
        correlations: Whether pairs of columns are correlated.
        most: How many records every client holds at most (public).
        least: Counts below this are not shown.
        more: Other keys of the configuration, as in `run`.
    """
    asked = {"columns": dict(columns), "label": label, "correlations": correlations, "least": least}
    said = {key: value for key, value in asked.items() if value is not None}
    with _in_arguments():
        own = Task.from_file(task) if isinstance(task, str | Path) else task
        settings = configured(
            own,
            algorithm={"name": "statistics", "batch_size": most, **said},
            **{"privacy": privacy, "rule": rule, "attack": attack, "byzantine": byzantine, "seeds": [seed]},
            **more,
        )
        return report.simulated_statistics(settings, own)


def load(
    directory: Path | str, run: str | None = None, task: Task | None = None
) -> report.Result | report.SweepResult:
    """Read what is in a folder: the result of a run or of a federation, or those of a sweep.

    Arguments as `report.load`; a sweep has neither runs with names nor a task.
    """
    if (Path(directory) / "sweep.json").is_file():
        return report.load_sweep(directory)
    return report.load(directory, run, task)


def configured(task: Task | None = None, **arguments: Any) -> Config:
    """Return the configuration that arguments mean; see `run`.

    >>> configured(byzantine=2, rule="cwmed", seeds=3).run.seeds
    (1, 2, 3)
    >>> configured(bizantine=2)
    Traceback (most recent call last):
    trilemma.base.errors.ConfigError: unknown argument 'bizantine': did you mean 'byzantine'? Allowed: ...
    """
    raw: dict[str, Any] = {}
    where = {key: name for name, table in FLAT.items() for key in table.model_fields}
    inside = {"partition": "data", "features": "data", **dict.fromkeys(DataTable.model_fields, "data")}
    for key, value in arguments.items():
        if key == "seeds":
            value = (f"1-{value}" if value > 0 else ()) if isinstance(value, int) else value
        if key in where:
            raw.setdefault(where[key], {})[key] = value
        elif key in inside:
            raw["data"] = {**_table(raw.get("data", {})), key: value}
        elif key in TABLES and value is not None:
            raw[key] = {**raw.get(key, {}), **_table(value)}
        elif key == "federation":
            raise ConfigError(
                "federation is no argument: pass its keys themselves, as clients=…, byzantine=…"
            )
        elif key not in TABLES:
            raise ConfigError(f"unknown argument {key!r}: {_meant(key, [*where, *inside, *TABLES])}")
    return configuration.parse(raw, own=None if task is None else configuration.Own(task.clients_known))


def _table(value: Any) -> dict[str, Any]:
    """Read a name, a mapping or a table of the configuration."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return dict(value)
    return {"name": value}


def _meant(key: str, known: Sequence[str]) -> str:
    """Say what an unknown argument may have meant: another, or an option of an algorithm."""
    for name, options in learning.algorithms.items():
        for option in (key,) if key in options.model_fields else known_as(key, options.model_fields):
            return f"it is an option of the algorithm, as in algorithm={{'name': {name!r}, {option!r}: …}}"
    return nearest(key, known)


@contextmanager
def _in_arguments() -> Iterator[None]:
    """Say what is wrong in terms of arguments: there is neither a file nor a command line here."""
    try:
        yield
    except UserError as error:
        said = spoken(str(error))
        if said == str(error):
            raise
        raise type(error)(said) from None


def spoken(message: str) -> str:
    """Return a message about tables of a file and flags of a command in terms of arguments.

    >>> spoken("[run] rounds = 0: too few; allowed: another --out, or [privacy] clip")
    'rounds = 0: too few; allowed: another out, or privacy clip'
    >>> spoken("[algorithm] lr = 'fast': must be a number")
    "algorithm: lr = 'fast': must be a number"
    """
    flat = "|".join(FLAT)
    message = re.sub(rf"\[({flat})\] ", "", message)
    message = re.sub(r"^\[([a-z.]+)\] ", r"\1: ", message, flags=re.MULTILINE)
    message = re.sub(r"\[([a-z.]+)\](?= [a-z])", r"\1", message)
    return re.sub(r"(?<![\w-])--([a-z])", r"\1", message)


def _bar(progress: bool | None) -> AbstractContextManager[ProgressBar | None]:
    from rich.console import Console

    console = Console(stderr=True)
    wanted = console.is_terminal or console.is_jupyter if progress is None else progress
    if not wanted:
        return nullcontext()
    from trilemma.report.progress import ProgressBar

    return ProgressBar(console)
