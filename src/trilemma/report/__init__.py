"""What runs gave, simulated or deployed: one `Result`, its tables, Markdown and pictures.

>>> import tempfile, pathlib
>>> from trilemma import config, report, simulate
>>> out = pathlib.Path(tempfile.mkdtemp()) / "run"
>>> summary = simulate.run(config.parse({}, ["run.rounds=3"]), out)
>>> result = report.load(out)
>>> len(result.records), result.summary == summary, result.params().shape
(3, True, torch.Size([69]))
"""

from typing import TYPE_CHECKING

from trilemma.base.on_demand import on_demand

if TYPE_CHECKING:
    from trilemma.report.curves import Curve, plot_curves
    from trilemma.report.loading import load
    from trilemma.report.privacy import verdict_of
    from trilemma.report.result import Result, plot_results
    from trilemma.report.statistics import deployed_statistics, simulated_statistics
    from trilemma.report.sweeps import SweepResult, load_sweep
    from trilemma.report.tables import Table, percent, results_table, tightest_epsilon
    from trilemma.report.trust import Suspect
    from trilemma.survey.result import StatisticsResult, read_statistics

__all__ = [
    "Curve",
    "Result",
    "StatisticsResult",
    "Suspect",
    "SweepResult",
    "Table",
    "deployed_statistics",
    "load",
    "load_sweep",
    "percent",
    "plot_curves",
    "plot_results",
    "read_statistics",
    "results_table",
    "simulated_statistics",
    "tightest_epsilon",
    "verdict_of",
]

on_demand(
    __name__, __all__, ["tables", "curves", "loading", "result", "privacy", "statistics", "sweeps", "trust"]
)
