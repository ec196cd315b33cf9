"""Some tensors, or adapters, of a model of `trilemma.models.layers`: it is told what to save."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from trilemma.models.coordinates.parts import Parts, Placed, merged
from trilemma.models.engines.saved import SavedActivations, Terms
from trilemma.models.engines.terms import Product, Term
from trilemma.models.flat import unflatten
from trilemma.models.types import Buffers, Model, Params, Shapes, layer_of


def of_layers(model: Model, start: Tensor, parts: Parts) -> Model:
    """Return the model of which `parts` are trained and the rest stays at `start`.

    Layers of which nothing is trained save nothing: no gradient is computed for them, and below the
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

    def forward(params: Params, x: Tensor, saved: SavedActivations | None = None) -> Tensor:
        saved = SavedActivations() if saved is None else saved
        if saved.record:
            saved.narrow = partial(_kept, parts, params)
            saved.floats += 4 * x.shape[:2].numel() * sum(part.rank for part in parts.adapters.values())
        return model.forward(complete(params), x, saved)

    def export(flat: Tensor, buffers: Buffers | None) -> dict[str, Tensor]:
        return {name: part.clone() for name, part in complete(unflatten(chosen, flat.detach())).items()}

    chosen = replace(
        model, shapes=shapes, forward=forward, init=lambda key: parts.init(model, shapes, key), export=export
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


def _kept(parts: Parts, params: Params, name: str, terms: Terms) -> Terms | None:
    """Return what of a layer is trained."""
    if name in parts.adapters:
        a, b = (params[f"{name}.lora_{which}"].detach() for which in "AB")
        return partial(_adapted, name, terms, a, b, parts.adapters[name].scale)
    wanted = parts.trained & {f"{name}.weight", f"{name}.bias"}
    if not wanted:
        return None
    return lambda grad: {key: term for key, term in terms(grad).items() if key in wanted}


def _adapted(name: str, terms: Terms, a: Tensor, b: Tensor, scale: float, grad: Tensor) -> dict[str, Term]:
    """Return the terms of A (r × in) and B (out × r) of z = a (W + s B A)ᵀ + β, shared or per client.

    An example's gradients are outer products again, G_A = s (Bᵀ ∂ℓ/∂z) ⊗ a and G_B = s ∂ℓ/∂z ⊗ (A a), so
    their norms need nothing formed.
    """
    whole = terms(grad)[f"{name}.weight"]
    assert isinstance(whole, Product)
    pulled, pushed = scale * (grad @ b), scale * (whole.right[:, :, 0] @ a.mT)
    return {
        f"{name}.lora_A": Product(pulled[:, :, None], whole.right),
        f"{name}.lora_B": Product(whole.left, pushed[:, :, None]),
    }
