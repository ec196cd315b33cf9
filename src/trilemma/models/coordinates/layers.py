"""Some tensors, or adapters, of a model of `trilemma.models.layers`: the tape is told what to keep."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from trilemma.models.coordinates.parts import Parts, Placed, merged
from trilemma.models.coordinates.taps import BiasTap, LowRankTap, WeightTap
from trilemma.models.engines.tape import Tap, Tape
from trilemma.models.flat import unflatten
from trilemma.models.types import Buffers, Model, Params, Shapes, layer_of


def of_layers(model: Model, start: Tensor, parts: Parts) -> Model:
    """Return the model of which `parts` are trained and the rest stays at `start`.

    Layers of which nothing is trained are not on the tape: no gradient is computed for them, and below the
    first layer that is trained there is no backward pass at all.
    """
    frozen = Placed(start.detach())
    shapes = _shapes(model, parts)
    touched = {layer_of(name) for name, _ in shapes}

    def complete(params: Params) -> dict[str, Tensor]:
        """Return every tensor of the model, those that are trained among them."""
        some = params[shapes[0][0]]
        personal = some.dim() > len(shapes[0][1])
        full = unflatten(model, frozen.at(some.device))
        if personal:
            # A layer takes its tensors either all shared or all with a client axis.
            full = {
                name: value.expand(len(some), *value.shape) if layer_of(name) in touched else value
                for name, value in full.items()
            }
        for layer, adapter in parts.adapters.items():
            a, b = params[f"{layer}.lora_A"], params[f"{layer}.lora_B"]
            full[f"{layer}.weight"] = merged(full[f"{layer}.weight"], a, b, adapter.scale)
        return {**full, **{name: params[name] for name in parts.trained}}

    def forward(params: Params, x: Tensor, tape: Tape | None = None) -> Tensor:
        tape = Tape() if tape is None else tape
        full = complete(params)
        if tape.record:
            tape.narrow = lambda tap: _kept(tap, parts, params)
        return model.forward(full, x, tape)

    def export(flat: Tensor, buffers: Buffers | None) -> dict[str, Tensor]:
        return {name: part.clone() for name, part in complete(unflatten(chosen, flat.detach())).items()}

    chosen = replace(
        model,
        shapes=shapes,
        forward=forward,
        init=lambda key: parts.init(model, shapes, key),
        export=export,
    )
    return chosen


def _shapes(model: Model, parts: Parts) -> Shapes:
    """Return what is trained in the model's order, adapters in the place of their layer's weights."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for name, shape in model.shapes:
        layer = layer_of(name)
        if name in parts.trained:
            found.append((name, shape))
        elif layer in parts.adapters and name == f"{layer}.weight":
            rank = parts.adapters[layer].rank
            found += [(f"{layer}.lora_A", (rank, shape[1])), (f"{layer}.lora_B", (shape[0], rank))]
    return tuple(found)


def _kept(tap: Tap, parts: Parts, params: Params) -> Tap | None:
    """Return what of a layer goes on the tape."""
    if tap.name in parts.adapters:
        a, b = params[f"{tap.name}.lora_A"], params[f"{tap.name}.lora_B"]
        return LowRankTap(tap, a, b, parts.adapters[tap.name].scale)
    weight, bias = (f"{tap.name}.{kind}" in parts.trained for kind in ("weight", "bias"))
    if weight and bias:
        return tap
    if weight or bias:
        return WeightTap(tap) if weight else BiasTap(tap)
    return None
