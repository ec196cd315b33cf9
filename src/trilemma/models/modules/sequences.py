"""Multi-head attention and recurrent layers, taken apart into operations that are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trilemma.models.modules.recorder import Recorder


def multi_head_attention(
    recorder: Recorder,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """What `nn.MultiheadAttention` computes; query, key and value are (time, batch, width)."""
    rare = any(part is not None for part in (bias_k, bias_v, static_k, static_v)) or add_zero_attn
    dropping = training and dropout_p > 0.0
    if rare or query.dim() != 3 or (recorder.frame is None and not dropping):
        return NotImplemented
    sources = query, key, value
    with recorder:
        if use_separate_proj_weight:
            weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
            biases: Any = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        elif query is key and key is value:
            assert in_proj_weight is not None
            projected: Sequence[Tensor] = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)
        else:
            assert in_proj_weight is not None
            weights = in_proj_weight.chunk(3)
            biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        if use_separate_proj_weight or not (query is key and key is value):
            projected = [F.linear(*each) for each in zip(sources, weights, biases, strict=True)]
        time, batch, width = query.shape
        heads = [
            part.reshape(part.shape[0], batch, num_heads, width // num_heads).permute(1, 2, 0, 3)
            for part in projected
        ]
        mask = _mask(attn_mask, key_padding_mask, batch, num_heads, query.dtype)
        rate = dropout_p if training else 0.0
        if need_weights:
            scores = heads[0] @ heads[1].transpose(-2, -1) * (width // num_heads) ** -0.5
            shares = (scores if mask is None else scores + mask).softmax(-1)
            shares = F.dropout(shares, rate, rate > 0.0)
            mixed = shares @ heads[2]
        else:
            causal = is_causal and mask is None
            q, k, v = heads
            mixed = F.scaled_dot_product_attention(q, k, v, mask, rate, causal)
        output = F.linear(
            mixed.permute(2, 0, 1, 3).reshape(time, batch, width), out_proj_weight, out_proj_bias
        )
    if not need_weights:
        return output, None
    return output, shares.mean(1) if average_attn_weights else shares


def _mask(
    attention: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Return what is added to the scores (batch, heads, time, source)."""

    def added(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)

    total = None
    if attention is not None:
        total = added(attention)
        total = total.reshape(batch, heads, *total.shape[1:]) if total.dim() == 3 else total
    if padding is not None:
        columns = added(padding)[:, None, None]
        total = columns if total is None else total + columns
    return total


def lstm(recorder: Recorder, func: Any, *args: Any) -> Any:
    """`nn.LSTM` on padded sequences, without projections."""
    if len(args) != 9 or not isinstance(args[1], list | tuple) or _left_alone(recorder, args):
        return NotImplemented
    weights, biased, layers, directions = args[2], args[3], args[4], 2 if args[7] else 1
    if len(weights) != layers * directions * (4 if biased else 2):
        return NotImplemented

    def cell(
        gates: Tensor, state: tuple[Tensor, ...], again: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, ...]:
        i, f, g, o = (gates + again(state[0])).chunk(4, -1)
        memory = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(memory), memory

    output, states = _recurrent(recorder, cell, args[0], tuple(args[1]), *args[2:])
    return output, *states


Cell = Callable[[Tensor, tuple[Tensor, ...], Callable[[Tensor], Tensor]], tuple[Tensor, ...]]
"""(what enters, the state, what the state adds) -> the next state."""


def _of_one_state(cell: Cell) -> Callable[..., Any]:
    """A recurrent layer on padded sequences whose state is one tensor."""

    def operation(recorder: Recorder, func: Any, *args: Any) -> Any:
        if len(args) != 9 or not isinstance(args[2], list | tuple) or _left_alone(recorder, args):
            return NotImplemented
        output, states = _recurrent(recorder, cell, args[0], (args[1],), *args[2:])
        return output, states[0]

    return operation


def _gated(gates: Tensor, state: tuple[Tensor, ...], again: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    r, z, n = gates.chunk(3, -1)
    old_r, old_z, old_n = again(state[0]).chunk(3, -1)
    update = torch.sigmoid(z + old_z)
    fresh = torch.tanh(n + torch.sigmoid(r + old_r) * old_n)
    return (fresh + update * (state[0] - fresh),)


gru = _of_one_state(_gated)
rnn_tanh = _of_one_state(lambda gates, state, again: (torch.tanh(gates + again(state[0])),))
rnn_relu = _of_one_state(lambda gates, state, again: (torch.relu(gates + again(state[0])),))


def _left_alone(recorder: Recorder, args: tuple[Any, ...]) -> bool:
    """Tell whether the library's own kernel will do: nothing is written down, and nothing is dropped."""
    return recorder.frame is None and not (args[6] and args[5] > 0.0)


def _recurrent(
    recorder: Recorder,
    cell: Cell,
    x: Tensor,
    start: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Go through layers, directions and time; what enters is one product for all times."""
    each = 4 if biased else 2
    x = x.transpose(0, 1) if batch_first else x
    finals: list[tuple[Tensor, ...]] = []
    with recorder:
        for layer in range(layers):
            outputs = []
            for direction in range(2 if bidirectional else 1):
                number = layer * (2 if bidirectional else 1) + direction
                enter, again, *biases = weights[number * each : (number + 1) * each]
                gates = F.linear(x, enter, biases[0] if biased else None)
                state = tuple(part[number] for part in start)
                steps = []

                def recur(h: Tensor, again: Tensor = again, biases: list[Tensor] = biases) -> Tensor:
                    return F.linear(h, again, biases[1] if biased else None)

                for time in reversed(range(len(gates))) if direction else range(len(gates)):
                    state = cell(gates[time], state, recur)
                    steps.append(state[0])
                finals.append(state)
                outputs.append(torch.stack(steps[::-1] if direction else steps))
            x = torch.cat(outputs, -1)
            if layer < layers - 1:
                x = F.dropout(x, dropout, training and dropout > 0.0)
    states = [torch.stack(parts) for parts in zip(*finals, strict=True)]
    return x.transpose(0, 1) if batch_first else x, states
