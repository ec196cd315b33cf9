"""What Byzantine clients send: attacks on messages and on data, at fixed or searched strength.

`attacks` holds the settings of every attack under the name configurations use; settings build the attack, and
its `craft` turns a `View` of this round's honest messages into the Byzantine ones.

>>> import torch
>>> from trilemma.base.keys import Key
>>> {"alie", "data-poison", "foe", "gaussian", "ipm", "lf", "mimic", "none"} <= set(attacks)
True
>>> view = View(
...     honest=torch.tensor([[1.0, 0.0], [3.0, 2.0]]), own=None, byzantine=1,
...     target=lambda x, key=None: x, round=0, key=Key(0),
... )
>>> attacks["sf"]().build().craft(view).messages.tolist()
[[-2.0, -1.0]]
>>> attacks["ipm"](strength=10.0).build().craft(view).messages.tolist()
[[-20.0, -10.0]]
>>> attacks["mimic"](victim=0).build().craft(view).messages.tolist()
[[1.0, 0.0]]
"""

from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.types import Attack, Crafted, Outcome, Target, View
from trilemma.base.registry import discover

discover(__name__)

__all__ = ["Attack", "AttackSettings", "Crafted", "Outcome", "Target", "View", "attacks"]
