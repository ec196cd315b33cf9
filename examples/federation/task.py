"""Your own model and data in a federation: two functions. This one is scikit-learn's breast-cancer table.

    trilemma federation init pilot --clients 5 --task examples/federation/task.py --examples 80 \
        --config examples/federation/config.toml
    trilemma federation up pilot && trilemma federation run pilot

Every party gets a copy of this file and runs it on its own machine only. In a real federation `data` reads
what the party has: a database, a folder of files. Here each of five clients takes every fifth row.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_breast_cancer

from trilemma import Declaration, Values, models
from trilemma.models import Model

clients = 5
expects = Declaration(Values("numbers", (30,), low=-1, high=2), Values("whole", low=0, high=1))
"""What an example may be; one that is otherwise counts as zero."""


def model() -> Model:
    """Return the model, the same for every party."""
    return models.build("mlp", (30,), 2, hidden=(16,))


def data(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Return this client's examples: features (m, 30) and labels (m,)."""
    table = load_breast_cancer()
    # Scaled by public constants: a client's own mean and deviation would leave its machine inside the model.
    scale = np.array([28, 40, 190, 2500, 0.2, 0.4, 0.5, 0.3, 0.4, 0.1] * 3)
    features = table.data / scale - 0.5
    return features[client::clients].astype(np.float32), table.target[client::clients]
