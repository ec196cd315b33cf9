"""Few coordinates: what of a model is trained. Dimension is the price of privacy and of robustness.

The noise of a private message grows with √d, and so does what liars can hide in it. `choose` makes of a model
a model of smaller d, the same pure functions of a shorter vector, so that every algorithm, attack and rule
takes it as it is:

    "all"                          every parameter: the model itself
    "head"                         the last layer
    ["fc2.*", "conv1.bias"]        tensors by name or pattern (`fnmatch`), or whole layers
    {subspace = 1024}              θ = θ0 + P z with z ∈ R^1024, P (d × 1024) random with columns of norm 1
    {lora = 8}                     W + (α/r) B A of rank 8 in place of every linear layer's W, and the head

Everything else stays at θ0, which follows from the run's key alone and is the same at every client. Clipping
is of the gradient of what is trained, exact. `models.state_dict` gives the whole model back.
"""

from trilemma.models.coordinates.choice import choose
from trilemma.models.coordinates.options import Lora, Subspace, Train

__all__ = ["Lora", "Subspace", "Train", "choose"]
