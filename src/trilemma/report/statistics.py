"""Private statistics as one result, simulated or of a federation: what is known, its price, its proposals.

Between parties the noise is secret and every client has paid in its own ledger. A simulation's noise follows
from its seed: it shows what would be told, and protects nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trilemma.base.errors import ConfigError
from trilemma.base.records import Record
from trilemma.experiment import Config, load
from trilemma.experiment.resolve import Resolved
from trilemma.learning.statistics import PrivateStatistics
from trilemma.privacy.types import NoiseLaw
from trilemma.simulate import engine
from trilemma.simulate.experiment import assemble
from trilemma.simulate.rehearsal import verify
from trilemma.survey.figures import columns, correlations
from trilemma.survey.proposal import propose
from trilemma.survey.result import FILE, StatisticsResult, read_statistics
from trilemma.survey.sites import drifts, sites
from trilemma.survey.told import Told, heard
from trilemma.task import Task
from trilemma.task.surveyed import refuse_unknown

if TYPE_CHECKING:
    from trilemma.federation.party.layout import Party

SIMULATED = (
    "a simulation: its noise follows from the seed and protects nobody. Between parties: trilemma federation"
)
BY_MESSAGES = (
    "sites, drift and, where sites may lie, intervals come from single messages: what the server may know. A "
    "client that reads them counts among the colluders ([privacy] collusion)"
)


def options_of(config: Config) -> PrivateStatistics:
    """Return what a configuration asks of the data; refuse one that trains."""
    options = config.algorithm.options
    if not isinstance(options, PrivateStatistics):
        raise ConfigError(
            f"[algorithm] name = {config.algorithm.name!r} trains a model; allowed here: statistics"
        )
    return options


def simulated_statistics(config: Config, task: Task) -> StatisticsResult:
    """Return the statistics that a federation of this task's clients would get, once."""
    options = options_of(config)
    if config.privacy.threat != "none" and "arithmetic" not in config.privacy.model_fields_set:
        config = config.with_("privacy.arithmetic=grid")  # as between parties: no others are certified
    refuse_unknown(task.of(config.federation.clients), options.columns)
    experiment = assemble(config, config.run.seeds[0], task)
    verify(experiment)
    largest = int(experiment.clients.data.sizes.max())
    if largest > options.batch_size:
        raise ConfigError(
            f"[algorithm] batch_size = {options.batch_size} promises that no client holds more records, and "
            f"one holds {largest}: intervals would be wrong; allowed: {largest} or more"
        )
    progress, record = engine.step(experiment, engine.start(experiment))
    return concluded(
        config,
        experiment.resolved,
        progress.broadcast["params"].numpy(force=True),
        progress.server["messages"].numpy(force=True),
        record,
        (SIMULATED,) if config.privacy.threat != "none" else (),
    )


def deployed_statistics(server: Party, run: str) -> StatisticsResult | None:
    """Return the statistics of a federation's run from its server's folder; None: it is not finished.

    They are worked out once, and kept beside the run: what the federation runs next is another plan.
    """
    from trilemma.federation.party.task import load_task
    from trilemma.federation.server.commits import CommitLog

    folder = server.run_folder(run)
    if (folder / FILE).is_file():
        return read_statistics(folder)
    options_of(load(server.config))
    log = CommitLog(folder)
    last = log.last()
    if last is None or not last.rounds or not log.result.is_file():
        return None
    log.check_began_with(server)
    task = load_task(server)
    value, messages = last.broadcast["params"].numpy(), last.server["messages"].numpy()
    result = concluded(task.config, task.resolved, value, messages, Record.read(last.record))
    result.save(folder)
    return result


def concluded(
    config: Config,
    resolved: Resolved,
    value: np.ndarray[Any, Any],
    messages: np.ndarray[Any, Any],
    record: Record,
    notes: tuple[str, ...] = (),
) -> StatisticsResult:
    """Return what follows from a round of statistics: its aggregate, its messages and its record."""
    options, federation, privacy = options_of(config), config.federation, config.privacy
    rows = tuple(record.weights)
    known, there = heard(messages[: len(rows)].astype(np.float64), rows)
    release = resolved.release
    central = privacy.threat == "cdp"
    told = Told(
        options.layout,
        value.astype(np.float64),
        None if central else known,
        there,
        tuple(record.weights[site] for site in there),
        federation.clients,
        federation.f,
        NoiseLaw() if release is None else release.law,
        options.batch_size,
        privacy.neighbours,
    )
    by_column = tuple(columns(told, options.least))
    own = () if central else (BY_MESSAGES,)
    return StatisticsResult(
        records=told.total(options.layout.records),
        columns=by_column,
        correlations=tuple(correlations(told)),
        sites=tuple(sites(told, options.label, options.least)),
        drift=tuple(drifts(told)),
        proposal=propose(told, by_column, options.label),
        verdict=resolved.verdict(1, privacy.delta).plain(),
        heard=there,
        clients=federation.clients,
        liars=federation.f,
        rule=config.aggregation.rule,
        notes=(*notes, *(own if release is not None else ()), *resolved.notes),
        config=config.dump(),
    )
