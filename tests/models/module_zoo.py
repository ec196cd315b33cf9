"""Modules as their authors write them, each with a batch for three clients and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from trilemma.models.modules import token_cross_entropy

CLIENTS, SIZE = 3, 4
WEIGHT = torch.tensor([[0.25, 0.25, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]])


@dataclass(frozen=True)
class Exhibit:
    """A module, its examples and its loss; `mixes` where no example has a gradient of its own."""

    module: Callable[[], nn.Module]
    x: Tensor | Mapping[str, Tensor]
    y: Tensor
    loss: Callable[[Any, Tensor], Tensor]
    mixes: bool = False


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _floats(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(CLIENTS, SIZE, *shape, generator=_generator(seed))


def _labels(classes: int, *shape: int, seed: int = 2) -> Tensor:
    return torch.randint(classes, (CLIENTS, SIZE, *shape), generator=_generator(seed))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
            if stride > 1
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


def resnet(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Return a narrow ResNet-18: eight units of two convolutions."""
    units = [
        Residual(inputs, outputs, stride, norm)
        for inputs, outputs, stride in [
            (4, 4, 1),
            (4, 4, 1),
            (4, 8, 2),
            (8, 8, 1),
            (8, 8, 2),
            (8, 8, 1),
            (8, 8, 2),
            (8, 8, 1),
        ]
    ]
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1, bias=False),
        norm(4),
        nn.ReLU(inplace=True),
        *units,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 5, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.position
        return self.head(self.body(h)[:, 0])


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(10, 7)
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(self.embedding(x))
        h, _ = self.gru(h.transpose(0, 1))
        return self.head(h).transpose(0, 1)


class Language(nn.Module):
    """Tied embeddings, positions broadcast over the batch, causal mask, padding."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.position = nn.Embedding(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.position(torch.arange(x.shape[1]))
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.layer(h, src_mask=causal, src_key_padding_mask=x == 0)
        return self.head(h if self.batch_first else h.transpose(0, 1))


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 6))
        self.b = nn.Parameter(torch.randn(8, 2))
        self.right = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + F.linear(x, self.a) @ self.b.T) @ self.right


class Cube(torch.autograd.Function):
    """x³ with a scale, written the old way: no rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return scale * x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return 3 * scale * x**2 * grad, (x**3 * grad).sum_to_size(scale.shape)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.inner(x), self.scale)


class Twice(nn.Module):
    """One layer used twice, another as a function, a scalar gain."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.layer(torch.tanh(self.layer(x)))) * self.gain
        return self.head(h) + F.linear(h, self.layer.weight[:4])


def _frozen() -> nn.Module:
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()).eval().requires_grad_(False)
    return nn.Sequential(body, nn.Linear(8, 4))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8, hidden_dropout_prob=0.0, num_labels=3,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=30, n_embd=8, n_layer=2, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )  # fmt: skip


def _tokens(vocabulary: int) -> Tensor:
    ids = _labels(vocabulary - 1, 6) + 1
    ids[0, 1, 4:] = 0
    ids[2, 3, 2:] = 0
    return ids


def _next(ids: Tensor) -> Tensor:
    following = torch.cat([ids[..., 1:], torch.zeros_like(ids[..., :1])], -1)
    return torch.where(following == 0, -100, following)


MLP = nn.CrossEntropyLoss()
ZOO: dict[str, Exhibit] = {
    "mlp": Exhibit(
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 4)
        ),
        _floats(6),
        _labels(4),
        MLP,
    ),
    "cnn": Exhibit(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.GroupNorm(2, 6),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 6, 3, stride=2, groups=3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24, 4),
        ),
        _floats(3, 8, 8),
        _labels(4),
        MLP,
    ),
    "signal": Exhibit(
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, dilation=2, padding="same"),
            nn.Unflatten(2, (2, 2, 2)),
            nn.Conv3d(4, 3, (1, 2, 2), padding=(1, 0, 0)),
            nn.Flatten(),
            nn.LazyLinear(2),
        ),
        _floats(2, 8),
        _labels(2),
        MLP,
    ),
    "resnet-group": Exhibit(
        lambda: resnet(lambda c: nn.GroupNorm(2, c)), _floats(3, 16, 16), _labels(5), MLP
    ),
    "resnet-batch": Exhibit(lambda: resnet(nn.BatchNorm2d), _floats(3, 16, 16), _labels(5), MLP, mixes=True),
    "vit": Exhibit(VisionTransformer, _floats(3, 8, 8), _labels(5), MLP),
    "bert": Exhibit(
        _bert,
        {"input_ids": _tokens(30), "attention_mask": (_tokens(30) > 0).long()},
        _labels(3),
        MLP,
    ),
    "gpt": Exhibit(
        _gpt,
        {"input_ids": _tokens(30), "attention_mask": (_tokens(30) > 0).long()},
        _next(_tokens(30)),
        token_cross_entropy,
    ),
    "tagger": Exhibit(Tagger, _tokens(20), _labels(4, 6), token_cross_entropy),
    "language": Exhibit(Language, _tokens(20), _next(_tokens(20)), token_cross_entropy),
    "language-time-first": Exhibit(
        lambda: Language(batch_first=False), _tokens(20), _next(_tokens(20)), token_cross_entropy
    ),
    "lora": Exhibit(Lora, _floats(6), _labels(4), MLP),
    "frozen": Exhibit(_frozen, _floats(6), _labels(4), MLP),
    "regression": Exhibit(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)),
        _floats(6),
        _floats(),
        nn.MSELoss(),
    ),
    "multi-label": Exhibit(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 4)),
        _floats(6),
        _labels(2, 4).float(),
        nn.BCEWithLogitsLoss(),
    ),
    "custom": Exhibit(Custom, _floats(6), _labels(5), MLP),
    "twice": Exhibit(Twice, _floats(6), _labels(4), MLP),
}
