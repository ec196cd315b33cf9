"""Modules of others: torch's own layers, with the settings people use.

`OTHERS` maps a name to how a module is made, its examples of two clients, its labels and its loss;
`others_networks` adds to it. Where an
example has no gradient of its own, or torch does not allow what is needed, `REFUSED` has a phrase that the
refusal says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLIENTS, SIZE = 2, 3


@dataclass(frozen=True)
class Other:
    """A module of somebody's, and data for it; `classes` is what its head tells apart."""

    module: Callable[[], nn.Module]
    x: Tensor | Mapping[str, Tensor]
    y: Tensor
    loss: Callable[[Any, Tensor], Tensor]


OTHERS: dict[str, Other] = {}
REFUSED: dict[str, str] = {}
SINGLE = {"bfloat16": 3e-2, "mixtral": 1e-4}
"""What does not run in double precision, and how far its gradients may be off."""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def floats(*shape: int) -> Tensor:
    return torch.randn(CLIENTS, SIZE, *shape, generator=_generator(1))


def labels(classes: int = 3) -> Tensor:
    return torch.randint(classes, (CLIENTS, SIZE), generator=_generator(2))


def tokens(length: int = 6, vocabulary: int = 12) -> Tensor:
    """Sentences of different lengths; 0 is padding, and tokens come twice."""
    ids = torch.randint(1, vocabulary, (CLIENTS, SIZE, length), generator=_generator(3))
    ids[..., 1] = ids[..., 0]
    ids[0, 1, length - 2 :] = 0
    ids[1, 2, 2:] = 0
    return ids


class Headed(nn.Module):
    """A layer and a head over all that comes out of it, whatever its shape."""

    def __init__(self, layer: nn.Module, example: Tensor, classes: int = 3, call: Any = None) -> None:
        super().__init__()
        self.layer, self.call = layer, call
        with torch.no_grad():
            width = self._flat(example).shape[1]
        self.head = nn.Linear(width, classes)

    def _flat(self, x: Tensor) -> Tensor:
        out = self.layer(x) if self.call is None else self.call(self.layer, x)
        return (out[0] if isinstance(out, tuple) else out).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self._flat(x)))


def layer(name: str, make: Callable[[], nn.Module], x: Tensor, call: Any = None) -> None:
    """Enter a layer with a head."""
    OTHERS[name] = Other(lambda: Headed(make(), x[0], call=call), x, labels(), nn.CrossEntropyLoss())


def network(name: str, make: Callable[[], nn.Module], x: Any, refused: str = "") -> None:
    """Enter a module that tells three classes apart."""
    OTHERS[name] = Other(make, x, labels(), nn.CrossEntropyLoss())
    if refused:
        REFUSED[name] = refused


# --- torch's own layers -----------------------------------------------------------------------------------

for bias in (True, False):
    layer(f"linear-bias-{bias}", lambda bias=bias: nn.Linear(5, 4, bias), floats(5))
    layer(f"linear-sequence-bias-{bias}", lambda bias=bias: nn.Linear(5, 4, bias), floats(6, 5))
    layer(f"linear-image-bias-{bias}", lambda bias=bias: nn.Linear(5, 4, bias), floats(2, 3, 5))

for axes, conv, transposed in (
    (1, nn.Conv1d, nn.ConvTranspose1d),
    (2, nn.Conv2d, nn.ConvTranspose2d),
    (3, nn.Conv3d, nn.ConvTranspose3d),
):
    image = floats(4, *(7, 6, 5)[:axes])
    for number, options in enumerate(
        (
            {},
            {"stride": 2, "padding": 1},
            {"dilation": 2, "padding": 2, "groups": 2},
            {"padding": "same", "groups": 4, "bias": False},
            {"padding": 1, "padding_mode": "circular"},
        )
    ):
        kernel = 2 if axes == 3 and number == 0 else 3
        layer(
            f"conv{axes}d-{number}",
            lambda conv=conv, kernel=kernel, options=options: conv(4, 8, kernel, **options),
            image,
        )
    layer(
        f"conv-transpose{axes}d",
        lambda transposed=transposed: transposed(4, 3, 3, stride=2, padding=1),
        image,
    )

layer("embedding", lambda: nn.Embedding(12, 4), tokens())
layer("embedding-padding", lambda: nn.Embedding(12, 4, padding_idx=0), tokens())
layer("embedding-sparse", lambda: nn.Embedding(12, 4, sparse=True), tokens())
layer("embedding-of-grids", lambda: nn.Embedding(12, 4), tokens().unflatten(2, (2, 3)))
for mode in ("sum", "mean", "max"):
    layer(f"embedding-bag-{mode}", lambda mode=mode: nn.EmbeddingBag(12, 4, mode=mode), tokens())

for shape in ((5,), (3, 5), (2, 3, 5)):
    for axes in range(1, len(shape) + 1):
        for affine in (True, False) if axes == 1 else (True,):
            name = f"{len(shape)}-{axes}" + ("" if affine else "-plain")
            layer(
                f"layer-norm-{name}",
                lambda shape=shape[-axes:], affine=affine: nn.Sequential(
                    nn.Linear(5, 5), nn.LayerNorm(shape, elementwise_affine=affine)
                ),
                floats(*shape),
            )
        layer(
            f"rms-norm-{len(shape)}-{axes}",
            lambda shape=shape[-axes:]: nn.Sequential(nn.Linear(5, 5), nn.RMSNorm(shape)),
            floats(*shape),
        )
layer("layer-norm-no-bias", lambda: nn.LayerNorm(5, bias=False), floats(3, 5))
for number, shape in enumerate(((4,), (4, 6), (4, 5, 5), (4, 3, 3, 3))):
    layer(f"group-norm-{number}", lambda: nn.GroupNorm(2, 4), floats(*shape))
for axes, instance in ((1, nn.InstanceNorm1d), (2, nn.InstanceNorm2d), (3, nn.InstanceNorm3d)):
    layer(f"instance-norm{axes}d", lambda instance=instance: instance(4, affine=True), floats(4, *[4] * axes))
for axes, norm in ((1, nn.BatchNorm1d), (2, nn.BatchNorm2d)):
    layer(f"batch-norm{axes}d-eval", lambda norm=norm: norm(4).eval(), floats(4, *[4] * axes))

for number, options in enumerate(
    (
        {},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"kdim": 4, "vdim": 4},
        {"num_heads": 1},
    )
):
    for first in (True, False):

        def attend(module: nn.Module, x: Tensor, first: bool = first) -> Tensor:
            x = x if first else x.transpose(0, 1)
            out = module(x, x, x, need_weights=not first)[0]
            return out if first else out.transpose(0, 1)

        layer(
            f"attention-{number}-{'batch' if first else 'time'}-first",
            lambda options=options, first=first: nn.MultiheadAttention(
                4, **{"num_heads": 2, **options}, batch_first=first
            ),
            floats(5, 4),
            attend,
        )


def masked(module: nn.Module, x: Tensor) -> Tensor:
    """Attend to vectors that are not padding, and to the past only."""
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return module(x, x, x, key_padding_mask=x[..., 0].cumsum(1) > 4, attn_mask=causal)[0]


layer("attention-masked", lambda: nn.MultiheadAttention(4, 2, batch_first=True), floats(5, 4), masked)

for kind in (nn.LSTM, nn.GRU, nn.RNN):
    for number, options in enumerate(
        (
            {},
            {"bidirectional": True, "num_layers": 2},
            {"num_layers": 2, "bias": False},
            *([{"proj_size": 3}, {"proj_size": 3, "bidirectional": True}] if kind is nn.LSTM else []),
            *([{"nonlinearity": "relu"}] if kind is nn.RNN else []),
        )
    ):
        layer(
            f"{kind.__name__.lower()}-{number}",
            lambda kind=kind, options=options: kind(4, 5, batch_first=True, **options),
            floats(6, 4),
        )
    layer(
        f"{kind.__name__.lower()}-time-first",
        lambda kind=kind: kind(4, 5),
        floats(6, 4),
        lambda module, x: module(x.transpose(0, 1))[0].transpose(0, 1),
    )


class Packed(nn.Module):
    """Sentences packed by their lengths, as recurrent layers like them."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(12, 4, padding_idx=0), kind(4, 5, batch_first=True, **options)
        self.head = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.table(ids), (ids != 0).sum(1), batch_first=True, enforce_sorted=False
        )
        out, _ = self.body(packed)
        return self.head(nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0].sum(1))


for kind in (nn.LSTM, nn.GRU, nn.RNN):
    network(f"{kind.__name__.lower()}-packed", lambda kind=kind: Packed(kind), tokens())


class Cells(nn.Module):
    """A cell that is called step by step."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = kind(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    network(f"{kind.__name__}", lambda kind=kind: Cells(kind), floats(4, 4))

layer("bilinear", lambda: nn.Bilinear(4, 4, 5), floats(4), lambda module, x: module(x, x.tanh()))
layer("prelu", lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(4)), floats(4))
layer("lazy-linear", lambda: nn.LazyLinear(4), floats(5))
layer("lazy-conv", lambda: nn.LazyConv2d(4, 3), floats(2, 6, 6))
layer("adaptive-pools", lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveMaxPool2d(2)), floats(2, 6, 6))
layer(
    "in-place",
    lambda: nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.LeakyReLU(0.1, inplace=True)
    ),
    floats(4),
)
layer("weight-norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), floats(4))
layer("spectral-norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)).eval(), floats(4))
layer("orthogonal", lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), floats(4))
layer(
    "transformer-encoder-layer",
    lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
    floats(5, 4),
)
layer(
    "transformer-decoder-layer",
    lambda: nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True),
    floats(5, 4),
    lambda module, x: module(x, x.flip(1)),
)


def _old_weight_norm() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(4, 5))


layer("weight-norm-old", _old_weight_norm, floats(4))
