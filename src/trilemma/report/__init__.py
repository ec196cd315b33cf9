"""Plots and pages."""

from trilemma.report.curves import Curve, plot_curves

__all__ = ["Curve", "plot_curves"]
