"""Modules of others: blocks of well-known networks as their authors write them, and transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from others import REFUSED, floats, layer, network, tokens
from torch import Tensor, nn


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised by F.batch_norm, as in BiT and NF-RegNet."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0, eps=1e-6
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class LayerScale(nn.Module):
    """x + γ f(x)."""

    def __init__(self, width: int, inplace: bool = False) -> None:
        super().__init__()
        self.inner, self.gamma, self.inplace = (
            nn.Linear(width, width),
            nn.Parameter(0.1 * torch.ones(width)),
            inplace,
        )

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        return x + (found.mul_(self.gamma) if self.inplace else found * self.gamma)


class RootMeanSquare(nn.Module):
    """LLaMA's norm, by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class CrossCovariance(nn.Module):
    """XCiT: patches by a convolution and a frozen normalisation, attention between channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.frozen = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8).eval()
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24)
        self.temperature, self.gamma = nn.Parameter(torch.ones(2, 1, 1)), nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.patches(x)).flatten(2).transpose(1, 2)
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 4, 1)
        found = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature).softmax(-1) @ v
        return self.head((x + self.gamma * found.permute(0, 3, 1, 2).reshape(b, n, c)).mean(1))


class Experts(nn.Module):
    """Two experts, each for the tokens whose router says so."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = self.router(flat).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (mine,) = torch.where(chosen == number)
            out = out.index_add(0, mine, expert(flat[mine]) * weights[mine, number, None])
        return self.head(out.view_as(x).mean(1))


class Energy(nn.Module):
    """Takes a derivative in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            force = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
        return self.head(force)


class _Swish(torch.autograd.Function):
    """Written the old way: no rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(x, slope)
        return x * torch.sigmoid(slope * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, slope = ctx.saved_tensors
        gate = torch.sigmoid(slope * x)
        bent = gate * (1 - gate) * x
        return grad * (gate + slope * bent), (grad * bent * x).sum_to_size(slope.shape)


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.slope, self.head = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Swish.apply(self.inner(x), self.slope))


class TimeMix(nn.Module):
    """RWKV's way with time: a state that is written in place, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.key, self.value = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.key(x).exp(), self.value(x)
        out, above, below = torch.zeros_like(x), x.new_zeros(len(x), 4), x.new_zeros(len(x), 4)
        decay = torch.exp(-torch.exp(self.decay))
        for step in range(x.shape[1]):
            above, below = above * decay + k[:, step] * v[:, step], below * decay + k[:, step]
            out[:, step] = above / below
        return self.head(out.mean(1))


class Scan(nn.Module):
    """Mamba's way with time: a depthwise convolution and a scan whose steps depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.step = nn.Conv1d(4, 4, 3, padding=2, groups=4), nn.Linear(4, 4)
        self.rates, self.into, self.out = nn.Parameter(torch.rand(4, 2)), nn.Linear(4, 2), nn.Linear(4, 2)
        self.skip, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        u = F.silu(self.mix(x.mT)[..., : x.shape[1]].mT)
        delta = F.softplus(self.step(u))[..., None]
        decay, push = torch.exp(-delta * self.rates.exp()), delta * self.into(u)[:, :, None] * u[..., None]
        state, found = torch.zeros_like(decay[:, 0]), []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + push[:, step]
            found.append((state * self.out(u)[:, step, None]).sum(-1))
        return self.head((torch.stack(found, 1) + self.skip * u).mean(1))


class TiedLanguage(nn.Module):
    """One matrix as a table and, transposed by hand, as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(12, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.inner(self.table(ids)).tanh() @ self.table.weight.t()).mean(1)[:, :3]


class Functional(nn.Module):
    """Calls functions on parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3, 4))])
        self.b = nn.ParameterDict(
            {"shift": nn.Parameter(torch.randn(3)), "gain": nn.Parameter(torch.randn(4))}
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bi,oi->bo", x, self.w[0]).tanh() * self.b["gain"]
        return torch.addmm(self.b["shift"], h, self.w[1].t())


def _scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))


def _called(module: nn.Module) -> nn.Module:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            own = {name: self.gain * part for name, part in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, own, (x,))

    return Inner()


class Variational(nn.Module):
    """Draws in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mean(x) + torch.randn_like(x) * self.spread(x))


layer("weight-standardised", lambda: Standardised(3, 4, 3), floats(3, 6, 6))
layer("layer-scale", lambda: LayerScale(4), floats(5, 4))
layer("layer-scale-in-place", lambda: LayerScale(4, inplace=True), floats(5, 4))
layer("rms-norm-by-hand", lambda: nn.Sequential(nn.Linear(4, 4), RootMeanSquare(4)), floats(5, 4))
network("xcit", CrossCovariance, floats(3, 8, 8))
network("experts", Experts, floats(5, 4))
network("energy", Energy, floats(4))
network("autograd-function", Swish, floats(4))
network("time-mix", TimeMix, floats(5, 4))
network("scan", Scan, floats(5, 4))
network("tied", TiedLanguage, tokens())
network("functional", Functional, floats(4))
network("functional-call", lambda: _called(nn.Linear(4, 3)), floats(4))
network("scripted", _scripted, floats(4), refused="scripted")
network("variational", Variational, floats(4), refused="draws from torch")
network("lazy-unseen", lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)), floats(5), refused="[Ll]azy")
network(
    "bfloat16",
    lambda: nn.Sequential(_Cast(torch.bfloat16), nn.Linear(4, 3).to(torch.bfloat16), _Cast(torch.float32)),
    floats(4),
)


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


# --- transformers -----------------------------------------------------------------------------------------

IDS = {"input_ids": tokens(), "attention_mask": (tokens() > 0).long()}
PIXELS = {"pixel_values": floats(3, 8, 8)}
SMALL = {"vocab_size": 12, "num_labels": 3, "pad_token_id": 0}


def hub(
    name: str, family: str, x: Mapping[str, Tensor], kind: str = "ForSequenceClassification", **config: Any
) -> None:
    """Enter a family of transformers, small and with random weights."""
    if importlib.util.find_spec("transformers") is None:
        return

    def make() -> nn.Module:
        import transformers

        return getattr(transformers, family + kind)(getattr(transformers, f"{family}Config")(**config))

    network(name, make, x)


_BODY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
hub("bert", "Bert", IDS, **SMALL, **_BODY, **_QUIET)
hub("roberta", "Roberta", IDS, max_position_embeddings=16, **SMALL, **_BODY, **_QUIET)
hub("electra", "Electra", IDS, embedding_size=4, **SMALL, **_BODY, **_QUIET)
hub("albert", "Albert", IDS, embedding_size=4, classifier_dropout_prob=0.0, **SMALL, **_BODY, **_QUIET)
hub(
    "deberta",
    "DebertaV2",
    IDS,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    **SMALL,
    **_BODY,
    **_QUIET,
)
hub(
    "distilbert",
    "DistilBert",
    IDS,
    dim=8,
    n_layers=1,
    n_heads=2,
    hidden_dim=8,
    dropout=0.0,
    attention_dropout=0.0,
    seq_classif_dropout=0.0,
    **SMALL,
)
hub(
    "gpt2",
    "GPT2",
    IDS,
    n_embd=8,
    n_layer=1,
    n_head=2,
    n_positions=8,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    **SMALL,
)
hub("llama", "Llama", IDS, num_key_value_heads=1, **SMALL, **_BODY)
hub("qwen2", "Qwen2", IDS, num_key_value_heads=1, **SMALL, **_BODY)
hub("mistral", "Mistral", IDS, num_key_value_heads=1, **SMALL, **_BODY)
hub("gemma", "Gemma", IDS, num_key_value_heads=1, head_dim=4, **SMALL, **_BODY)
hub(
    "mixtral",
    "Mixtral",
    IDS,
    num_key_value_heads=1,
    num_local_experts=2,
    num_experts_per_tok=1,
    **SMALL,
    **_BODY,
)
hub(
    "vit",
    "ViT",
    PIXELS,
    "ForImageClassification",
    image_size=8,
    patch_size=4,
    num_labels=3,
    **_BODY,
    **_QUIET,
)
hub(
    "deit",
    "DeiT",
    PIXELS,
    "ForImageClassification",
    image_size=8,
    patch_size=4,
    num_labels=3,
    **_BODY,
    **_QUIET,
)
hub(
    "convnext",
    "ConvNext",
    PIXELS,
    "ForImageClassification",
    num_labels=3,
    patch_size=2,
    hidden_sizes=[4, 4],
    depths=[1, 1],
    num_stages=2,
)
hub(
    "resnet-eval",
    "ResNet",
    PIXELS,
    "ForImageClassification",
    num_labels=3,
    embedding_size=4,
    hidden_sizes=[4, 8],
    depths=[1, 1],
    layer_type="basic",
)
REFUSED["resnet-eval"] = "batch normalisation"


class Encoder(nn.Module):
    """An encoder of transformers that has no head of its own."""

    def __init__(self, family: str, config: Mapping[str, Any], kind: str) -> None:
        super().__init__()
        import transformers

        self.body = getattr(transformers, family + kind)(getattr(transformers, f"{family}Config")(**config))
        self.head = nn.Linear(8, 3)

    def forward(self, **x: Tensor) -> Tensor:
        return self.head(self.body(**x, return_dict=True)[0].mean(1))


if importlib.util.find_spec("transformers") is not None:
    network(
        "t5",
        lambda: Encoder(
            "T5",
            {
                "vocab_size": 12,
                "d_model": 8,
                "d_kv": 4,
                "d_ff": 8,
                "num_layers": 1,
                "num_heads": 2,
                "dropout_rate": 0.0,
            },
            "EncoderModel",
        ),
        IDS,
    )
    network(
        "mamba",
        lambda: Encoder(
            "Mamba",
            {
                "vocab_size": 12,
                "hidden_size": 8,
                "state_size": 2,
                "num_hidden_layers": 1,
                "use_mambapy": False,
            },
            "Model",
        ),
        {"input_ids": tokens()},
    )
    network(
        "rwkv",
        lambda: Encoder(
            "Rwkv", {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 2, "context_length": 8}, "Model"
        ),
        {"input_ids": tokens()},
    )
    REFUSED["rwkv"] = "changes its own parameters"
