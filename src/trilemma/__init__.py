"""Trilemma: federated learning that is private, Byzantine-robust and useful at the same time.

The rooms of the house, from the ground up:

* `trilemma.aggregation`: robust rules; a geometric rule is a map from the Gram matrix to weights.
* `trilemma.privacy`: a threat model is a covariance; accounting, calibration, ledger, secrets.
* `trilemma.attacks`: what Byzantine clients send, at fixed or searched strength.
* `trilemma.data`, `trilemma.models`: data sets and partitions; models and gradients for k clients at once.
* `trilemma.learning`: an algorithm is three pure functions on stacked state.
* `trilemma.simulate`: the engine that runs n clients on one machine.
"""

__version__ = "0.1.0"
