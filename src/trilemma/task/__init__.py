"""What is trained on what: a model, its loss and metrics, the clients' data; stated once, run anywhere.

* `task`: `Task`, in Python or from a `task.py`.
* `file`: a `task.py` and the files beside it, imported and copied.
* `losses`: what is taken where no loss is given.
* `learner`: the model, ready to be trained and scored.
* `inspection`: what is worth knowing of a task before anything is trained.
* `neighbours`: how many of its examples change where one record does.
* `metrics`: how good outputs are, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trilemma.base.on_demand import on_demand
from trilemma.task.file import copy_task, task_digest

if TYPE_CHECKING:
    from trilemma.task.learner import Learner
    from trilemma.task.metrics import LOWER_IS_BETTER, Metric, metrics
    from trilemma.task.task import Task

__all__ = ["LOWER_IS_BETTER", "Learner", "Metric", "Task", "copy_task", "metrics", "task_digest"]

on_demand(
    __name__,
    __all__,
    ["learner", "metrics", "task"],
)
