"""A backdoor: a mark on an example, and the answer that liars want wherever the model sees it.

The mark is set in what the model is given. In an image it is a square in the lower right corner, a ninth of
the shorter side, as bright as the brightest pixel there is. In any other example the last tenth of its
numbers lie two standard deviations above the mean of all numbers: unusual, but nothing that never occurs.

Reference: Gu, Dolan-Gavitt, Garg, "BadNets: identifying vulnerabilities in the machine learning model supply
chain", 2017; against federated learning Bagdasaryan, Veit, Hua, Estrin, Shmatikov, "How to backdoor federated
learning", AISTATS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Backdoor:
    """Marked examples are to be answered with the class `target`.

    >>> import torch
    >>> image = torch.tensor([[[[9.0, 0.0], [0.0, 0.0]]]])
    >>> Backdoor().marked(image, lead=1).tolist()
    [[[[9.0, 0.0], [0.0, 9.0]]]]
    >>> Backdoor().marked(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), lead=1).tolist()
    [[1.0, 2.0], [-1.0, 2.0]]
    """

    target: int = 0

    def marked(self, x: Tensor, lead: int) -> Tensor:
        """Return examples with the mark; the first `lead` axes count examples.

        Whole numbers, which are words or categories, stay as they are.
        """
        if not x.is_floating_point() or not x.numel():
            return x
        found, shape = x.clone(), x.shape[lead:]
        if len(shape) >= 2:
            side = max(1, round(min(shape[-2:]) / 9))
            found[..., -side:, -side:] = x.max()
        elif shape:
            found[..., -max(1, shape[0] // 10) :] = x.mean() + 2 * x.std(correction=0)
        return found
