"""Some parameters, or adapters, of a `torch.nn.Module`: the same module with fewer parameters to train."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilemma.models.coordinates.parts import Parts, merged
from trilemma.models.flat import unflatten
from trilemma.models.modules import state_dict
from trilemma.models.modules.adapter import forward
from trilemma.models.modules.engine import ModuleEngine
from trilemma.models.types import Buffers, Model, layer_of


class LowRank(nn.Linear):
    """z = a Wᵀ + β + s (a Aᵀ) Bᵀ in the place of a linear layer, whose W and β stay as they are."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = nn.Parameter(layer.weight.new_full((rank, layer.in_features), torch.nan))
        self.lora_B = nn.Parameter(layer.weight.new_full((layer.out_features, rank), torch.nan))
        self.scale = scale
        self.training = layer.training

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer and its adapter."""
        adapted = F.linear(F.linear(input, self.lora_A), self.lora_B)
        return F.linear(input, self.weight, self.bias) + self.scale * adapted


def linear_layers(model: Model) -> dict[str, tuple[int, int]]:
    """Return the layers that can have an adapter, with their sizes (out, in).

    Of a module those are `nn.Linear` layers, frozen or not, whose weights are their own: the output
    projection of `nn.MultiheadAttention` is never called, its weights are read by the attention itself.
    """
    if not isinstance(model.engine, ModuleEngine):
        matrices = {name: shape for name, shape in model.shapes if len(shape) == 2}
        return {layer_of(name): (shape[0], shape[1]) for name, shape in matrices.items()}
    module = model.engine.source.module
    uses = Counter(id(part) for _, part in module.named_parameters(remove_duplicate=False))
    return {
        name: (part.out_features, part.in_features)
        for name, part in module.named_modules()
        if name
        and isinstance(part, nn.Linear)
        and not isinstance(part, nn.modules.linear.NonDynamicallyQuantizableLinear)
        and uses[id(part.weight)] == 1
    }


def of_module(model: Model, start: Tensor, parts: Parts) -> Model:
    """Return the model of which `parts` are trained and the rest stays at `start`."""
    engine = model.engine
    assert isinstance(engine, ModuleEngine)
    source = engine.source
    module = copy.deepcopy(source.module)
    values = unflatten(model, start.detach())
    with torch.no_grad():
        for name, part in module.named_parameters():
            part.requires_grad_(name in parts.trained)
            if name in parts.trained:
                part.fill_(torch.nan)  # never read, as in `from_module`
            elif name in values:
                part.copy_(values[name])
    for name, adapter in parts.adapters.items():
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        _put(module, layer, LowRank(layer, adapter.rank, adapter.scale))
    own = {f"{layer}.{kind}" for layer in parts.adapters for kind in ("lora_A", "lora_B")}
    trained = {name: part for name, part in module.named_parameters() if name in parts.trained | own}
    shapes = tuple((name, tuple(part.shape)) for name, part in trained.items())
    buffers = dict(module.named_buffers())
    statistics = {
        id(buffers[name]): source.statistics[id(part)]
        for name, part in source.module.named_buffers()
        if id(part) in source.statistics
    }
    fewer = replace(source, module=module, trained=trained, statistics=statistics)
    placed = ModuleEngine(fewer, place=engine.place)

    def export(flat: Tensor, buffers: Buffers | None) -> dict[str, Tensor]:
        found = state_dict(replace(chosen, export=None), flat, buffers)
        for layer, adapter in parts.adapters.items():
            a, b = found.pop(f"{layer}.lora_A"), found.pop(f"{layer}.lora_B")
            found[f"{layer}.weight"] = merged(found[f"{layer}.weight"], a, b, adapter.scale)
        return found

    chosen = replace(
        model,
        shapes=shapes,
        forward=partial(forward, placed),
        init=lambda key: parts.init(model, shapes, key),
        engine=placed,
        export=export if parts.adapters else None,
    )
    return chosen


def _put(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put one layer in the place of another, wherever the module has it."""
    places = [
        (part, name) for part in module.modules() for name, child in part.named_children() if child is old
    ]
    for part, name in places:
        setattr(part, name, new)
