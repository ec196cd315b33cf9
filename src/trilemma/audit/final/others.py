"""Three more questions to a final model: an attribute, an image of a class, and a mark that liars taught it.

**Attribute inference.** An attacker who knows a record but for one column tries each value, and takes the one
that the model finds likeliest for the known answer, weighed by how common it is. What holds for everybody is
no breach. So the measurement is how much more often it is right for records that were used than for others. A
certificate bounds that by the total variation of neighbours (Yeom et al., CSF 2018, compare the same two).

**Model inversion.** Gradient ascent draws the image that the model finds most typical of a class. The
measurement is whether it lies closer to an image that was used than to others (Fredrikson, Jha, Ristenpart,
CCS 2015).

**A mark.** Marked examples that are answered as liars would like (`attacks.backdoor`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trilemma.attacks.backdoor import Backdoor
from trilemma.audit.final.found import CONFIDENCE, Tried, advantage_allowed
from trilemma.audit.final.membership import balanced
from trilemma.audit.final.target import AskedRecords, FinalModel, at_least, at_most
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.models.engines.saved import SavedActivations
from trilemma.models.flat import unflatten

VALUES, COLUMNS, STEPS = 10, 5, 200


def attributes(target: FinalModel, key: Key) -> Tried:
    """Infer the columns of few values, and return the one where members are told apart best."""
    members, others = balanced(target, key)
    if not isinstance(members.x, Tensor) or members.x.dim() != 2:
        raise UserError("records are no rows of numbers, so there is no column to infer")
    columns = [
        column
        for column in range(members.x.shape[1])
        if 2 <= len(torch.unique(members.x[:, column])) <= VALUES
    ][:COLUMNS]
    if not columns:
        raise UserError(f"no column has 2 to {VALUES} different values")
    risk = (1 - CONFIDENCE) / (2 * len(columns))
    tried = []
    for column in columns:
        right = [_inferred(target, one, column, members) for one in (members, others)]
        low = at_least(right[0], len(members), risk) - at_most(right[1], len(others), risk)
        tried.append(((right[0] / len(members)) - right[1] / len(others), max(0.0, low), column))
    found, low, column = max(tried)
    allowed = None if target.epsilon is None else advantage_allowed(target.epsilon, target.delta)
    return Tried(
        attack=f"attribute inference (column {column}, the worst of {len(columns)})",
        how="knows a record but for one column, and tries each value of it",
        measure="right for records used, more often than for others, by",
        found=found,
        low=low,
        allowed=allowed,
        why="(e^ε − 1 + 2δ)/(e^ε + 1): the most that any event's chances differ"
        if allowed
        else "nothing is certified",
    )


def _inferred(target: FinalModel, asked: AskedRecords, column: int, known: AskedRecords) -> int:
    """Return how often the likeliest value is the true one."""
    assert isinstance(asked.x, Tensor)
    assert isinstance(known.x, Tensor)
    values, counts = torch.unique(known.x[:, column], return_counts=True)
    prior = np.log(counts.double().numpy() / len(known))
    scores = []
    for value, likely in zip(values, prior, strict=True):
        changed = asked.x.clone()
        changed[:, column] = value
        scores.append(likely - target.losses(AskedRecords(changed, asked.y)))
    chosen = values[torch.from_numpy(np.stack(scores).argmax(0))]
    return int((chosen == asked.x[:, column]).sum())


def inversion(target: FinalModel, key: Key) -> Tried:
    """Draw what the model finds typical of each class, and see whether it is an image that was used."""
    members, others = balanced(target, key)
    if not isinstance(members.x, Tensor) or not isinstance(others.x, Tensor):
        raise UserError("records are no images of classes")
    if members.x.dim() < 3 or target.classes is None:
        raise UserError("records are no images of classes")
    low, high = float(others.x.min()), float(others.x.max())
    count = min(target.classes, 10)
    labels = torch.arange(count).to(members.y)
    image = torch.full((count, *members.x.shape[1:]), (low + high) / 2, requires_grad=True)
    optimiser = torch.optim.Adam([image], lr=(high - low) / 20)
    own = unflatten(target.model, target.params)
    buffers = {name: part[None, None] for name, part in target.buffers.items()}
    for _ in range(STEPS):
        optimiser.zero_grad()
        logits = target.model.forward(
            {name: part[None] for name, part in own.items()}, image[None], SavedActivations(buffers=buffers)
        )
        lost = target.model.loss(logits, labels[None]).sum()
        (image.grad,) = torch.autograd.grad(lost, image)
        optimiser.step()
        with torch.no_grad():
            image.clamp_(low, high)
    flat = image.detach().flatten(1)
    near = [torch.cdist(flat, one.flatten(1)).min(1).values for one in (members.x, others.x)]
    closer = int((near[0] < near[1]).sum())
    return Tried(
        attack="model inversion",
        how="draws, by gradient ascent, the image that the model finds most typical of each class",
        measure="share closer to an image that was used than to all others",
        found=closer / count,
        low=at_least(closer, count),
        chance=0.5,
        why="a certificate speaks of one record; what a class looks like is common to many",
    )


def marked(target: FinalModel) -> Tried:
    """Mark examples and count how many are answered as liars would like."""
    door, others = Backdoor(), target.others
    if others is None or not isinstance(others.x, Tensor) or not others.x.is_floating_point():
        raise UserError("there are no examples of numbers to mark")
    if target.classes is None and torch.unique(others.y).numel() > 2:
        raise UserError("the targets are no classes")
    wrong = (others.y.reshape(len(others), -1)[:, 0] != door.target).nonzero()[:, 0]
    asked = others.some(wrong)
    if not len(asked):
        raise UserError("every example has the answer that liars would like")
    hits = [_hits(target, x, door.target) for x in (door.marked(others.x, 1)[wrong], asked.x)]
    return Tried(
        attack="backdoor (a mark on examples)",
        how=f"marks examples of other classes, and counts answers “{door.target}”",
        measure="share answered as liars would like",
        found=hits[0] / len(asked),
        low=at_least(hits[0], len(asked)),
        chance=hits[1] / len(asked),
        why="ε limits what one record can do. What liars can teach is limited by the rule's κ. “Blind "
        "guessing” is the same share without the mark",
    )


def _hits(target: FinalModel, x: Tensor, wanted: int) -> int:
    found = target.model.predict(target.outputs(x)[None])[0]
    return int((found.reshape(len(found), -1)[:, 0] == wanted).sum())
