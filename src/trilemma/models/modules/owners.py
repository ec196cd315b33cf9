"""Whose data a number was computed from: carried through every operation, never told from sizes.

A module that takes all examples as one batch mixes nothing as long as every number in it depends on one
example at most. So while a batch goes through, every tensor has a shadow of the same shape that says on whom
each of its numbers depends: on nobody (0), on the parameters (1), or on example e (e + 2). Shadows belong to
storages, so views and what is written into them need no rules.

An operation that would mix examples, whose result's shape or routing depends on data, or that is not known
here, ends it (`NotFlat`). What an operation does may depend on shapes, constants and settings alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

PARAMETER, FIRST = 1.0, 2.0
"""What marks a parameter, and the first example."""


class NotFlat(RuntimeError):
    """The module cannot be taken through as one batch."""


class NormalisedTogether(NotFlat):
    """Statistics are taken over the examples of a batch."""


class Owners(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries the shadows along with every operation that runs under it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no, as in `reference`: torch would import its compiler."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shadows: dict[StorageWeakRef, Tensor] = {}

    @staticmethod
    def numbers(examples: int, device: torch.device) -> Tensor:
        """Return what marks the examples, (n,)."""
        return FIRST + torch.arange(examples, dtype=torch.float32, device=device)

    def begin(self, numbers: Tensor, parameters: Iterable[Tensor], *examples: Iterable[Tensor]) -> None:
        """Mark parameters, and tensors (n, …) whose rows are those of the examples."""
        for value in parameters:
            self.mark(value, numbers.new_full((), PARAMETER))
        for column in chain(*examples):
            self.mark(column, numbers.view(-1, *[1] * (column.dim() - 1)))

    def rows(self, outputs: Any, examples: int) -> None:
        """Insist that the rows of outputs are the examples'."""
        for leaf in tree_leaves(outputs):
            if not isinstance(leaf, Tensor | int | float | str | None):
                raise NotFlat(
                    f"the module's outputs are in a {type(leaf).__name__}, which cannot be looked into"
                )
            if isinstance(leaf, Tensor) and rows_of(self.of(leaf), examples) != (0, 1, 1):
                raise NotFlat("the outputs of the module are not one row for every example")

    def of(self, tensor: Tensor) -> Tensor:
        """Return the shadow of a tensor."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return self._of(tensor)

    def _of(self, tensor: Tensor) -> Tensor:
        found = self.shadows.get(_storage(tensor))
        if found is None:
            return torch.zeros((), device=tensor.device).expand(tensor.shape)
        if len(found) * tensor.element_size() != tensor.untyped_storage().nbytes():
            raise NotFlat("a tensor is read as numbers of another type")
        return found.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def mark(self, tensor: Tensor, shadow: Tensor) -> None:
        """Say whose a tensor is; `shadow` is broadcast to it."""
        with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            storage = _storage(tensor)
            if storage not in self.shadows:
                if not shadow.any():
                    return
                count = tensor.untyped_storage().nbytes() // tensor.element_size()
                if len(self.shadows) % 64 == 0:
                    self.shadows = {key: each for key, each in self.shadows.items() if not key.expired()}  # type: ignore[no-untyped-call]
                self.shadows[storage] = torch.zeros(count, device=tensor.device)
            self._of(tensor).copy_(shadow)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and its shadow."""
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        owned = any(_storage(each) in self.shadows for each in given)
        if not owned:
            return func(*args, **kwargs)
        if func.is_view:
            found = func(*args, **kwargs)
            if {_storage(each) for each in tree_leaves(found)} - {_storage(each) for each in given}:
                raise NotFlat(f"{func} has made a copy")
            return found
        call = _Call(self, func, args, kwargs)
        shadows = call.shadows()
        found = func(*args, **kwargs)
        results = call.written() or [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        for number, tensor in enumerate(results):
            self.mark(tensor, shadows(tensor, number))
        return found


class _Call:
    """One operation and what it is given."""

    def __init__(self, owners: Owners, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.owners, self.func = owners, func
        names = [argument.name for argument in func._schema.arguments]
        self.given = {argument.name: argument.default_value for argument in func._schema.arguments}
        self.given |= {**dict(zip(names, args, strict=False)), **kwargs}

    def written(self) -> list[Tensor]:
        """Return what it writes into."""
        names = [a.name for a in self.func._schema.arguments if a.alias_info and a.alias_info.is_write]
        return [self.given[name] for name in names]

    def shadows(self) -> Shadow:
        """Return what the shadow of each of its results is."""
        packet = self.func.overloadpacket
        pure = _pure(packet)
        rule = _RULES.get(packet) or _RULES.get(pure)
        kinds = [self.func, getattr(pure, self.func._overloadname, None)]
        if rule is None and any(torch.Tag.pointwise in kind.tags for kind in kinds if kind is not None):
            rule = _pointwise
        if rule is None:
            raise NotFlat(f"{self.func} is not known to keep examples apart")
        with torch.no_grad():
            return rule(self)

    def owner(self, name: str) -> Tensor:
        """Return the shadow of an argument."""
        return self.owners.of(self.given[name])

    def free(self, *names: str) -> None:
        """Insist that arguments are nobody's."""
        for name in names:
            each = self.given.get(name)
            if isinstance(each, Tensor) and float(self.owners.of(each).amax()) >= FIRST:
                raise NotFlat(f"{name} of {self.func} depends on an example")


Shadow = Callable[[Tensor, int], Tensor]
Rule = Callable[[_Call], Shadow]


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _pure(packet: Any) -> Any:
    """Return the operation that does not work in place."""
    name = packet._qualified_op_name.removeprefix("aten::")
    return getattr(aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None


def join(*shadows: Tensor) -> Tensor:
    """Return whose numbers are that depend on all of these."""
    found, *rest = torch.broadcast_tensors(*shadows)  # type: ignore[no-untyped-call]
    for each in rest:
        if bool(((found != each) & (found >= FIRST) & (each >= FIRST)).any()):
            raise NotFlat("an operation mixes the examples of a batch")
        found = torch.maximum(found, each)
    result: Tensor = found
    return result


def along(shadow: Tensor, axes: Sequence[int]) -> Tensor:
    """Return whose the numbers along some axes are, all together; the axes stay, of length one."""
    if not axes or not shadow.numel():
        return shadow
    most = shadow.amax(tuple(axes), keepdim=True)
    if bool(((shadow >= FIRST) & (shadow != most)).any()):
        raise NotFlat("an operation mixes the examples of a batch")
    return most


def _all(call: _Call) -> list[Tensor]:
    leaves = tree_leaves(list(call.given.values()))
    return [call.owners.of(each) for each in leaves if isinstance(each, Tensor)]


def _pointwise(call: _Call) -> Shadow:
    found = join(*_all(call))
    return lambda out, number: found


def _cross(call: _Call) -> Shadow:
    found = join(call.owner("self"), call.owner("other"))
    each = along(found, [call.given["dim"] % found.dim()])
    return lambda out, number: each


def _reduction(call: _Call) -> Shadow:
    """Sums, means, extremes, softmax, sorting: along some axes."""
    own = call.owner("self") if "self" in call.given else call.owner("input")
    axes = call.given.get("dim")
    axes = range(own.dim()) if axes is None or axes == [] else [axes] if isinstance(axes, int) else axes
    axes = [axis % max(own.dim(), 1) for axis in axes] if own.dim() else []
    found = along(own, axes)

    def shadow(out: Tensor, number: int) -> Tensor:
        if out.dim() == own.dim():
            return found
        return found.reshape([size for axis, size in enumerate(found.shape) if axis not in axes])

    return shadow


def _rows(call: _Call) -> Shadow:
    """What treats every row of its first axis alike, as convolutions and pools do."""
    names = ("input", "self", "query", "key", "value", "attn_bias", "attn_mask", "grid", "indices")
    rows = [name for name in names if isinstance(call.given.get(name), Tensor)]
    call.free(*(name for name, each in call.given.items() if isinstance(each, Tensor) and name not in rows))
    shadows = []
    for name in rows:
        each = call.owner(name)
        # A mask of less than four axes has none of rows.
        first = 0 if name.startswith("attn") and each.dim() < 4 else 1
        shadows.append(along(each, range(first, each.dim())).flatten())
    found = join(*shadows)

    def shadow(out: Tensor, number: int) -> Tensor:
        results = out.is_floating_point() and out.numel() > 0
        if results or (out.dim() and len(out) == len(found)):
            return found.view(-1, *[1] * (out.dim() - 1))
        return found.new_zeros(())  # kept for the way back: a seed, or what is not there

    return shadow


def _last(call: _Call) -> Shadow:
    """Layer and root mean square norms."""
    call.free("weight", "bias")
    own = call.owner("input")
    found = along(own, range(own.dim() - len(call.given["normalized_shape"]), own.dim()))
    return lambda out, number: found


def _groups(call: _Call) -> Shadow:
    """Group norm: its statistics are one row per example."""
    call.free("weight", "bias")
    own = call.owner("input")
    found = along(own.flatten(1), [1]).view(-1)
    return lambda out, number: found.view(-1, *[1] * (out.dim() - 1))


def _channels(call: _Call) -> Shadow:
    """Batch normalisation: by given statistics, or by those of each channel."""
    call.free("weight", "bias", "running_mean", "running_var")
    own = call.owner("input")
    if not call.given.get("training"):
        return lambda out, number: own.new_zeros(()) if number else own
    try:
        each = along(own, [axis for axis in range(own.dim()) if axis != 1])
    except NotFlat:
        raise NormalisedTogether from None
    return lambda out, number: each.flatten() if number else each


def _product(call: _Call) -> Shadow:
    """Matrix products, with something added perhaps."""
    given = call.given
    left, right = ("batch1", "batch2") if "batch1" in given else ("mat1", "mat2") if "mat1" in given else (
        "self", "mat2" if "mat2" in given else "vec" if "vec" in given else "tensor"
    )  # fmt: skip
    one, other = call.owner(left), call.owner(right)
    inner = 0 if other.dim() == 1 else -2
    one, other = along(one, [one.dim() - 1]), along(other, [other.dim() + inner if inner else 0])
    if call.func.overloadpacket in (aten.mv, aten.dot):
        one, other = one.squeeze(-1), other.squeeze(-1)
    added = [call.owner("self")] if left != "self" else []
    found = join(one, other, *added)
    return lambda out, number: found


def _lookup(call: _Call) -> Shadow:
    """An embedding."""
    call.free("weight")
    found = call.owner("indices").unsqueeze(-1)
    return lambda out, number: found


def _move(call: _Call) -> Shadow:
    """What only puts numbers elsewhere: the shadow is moved alike."""
    call.free("index", "repeats")
    moved = {
        name: each
        if name in ("index", "repeats")
        else 0.0
        if name == "value" and call.func.overloadpacket is aten.constant_pad_nd
        else tree_map_only(Tensor, call.owners.of, each)
        for name, each in call.given.items()
    }
    found = tree_leaves(call.func(**moved))
    return lambda out, number: found[number]


def _constant(call: _Call) -> Shadow:
    return lambda out, number: torch.zeros((), device=out.device)


def _fill(call: _Call) -> Shadow:
    found = call.owner("value") if isinstance(call.given["value"], Tensor) else None
    return lambda out, number: torch.zeros((), device=out.device) if found is None else found


def _copy(call: _Call) -> Shadow:
    found = call.owner("src")
    return lambda out, number: found


def _gather(call: _Call) -> Shadow:
    """Reads along an axis where an index says, which may depend on an example."""
    own, index, axis = call.owner("self"), call.given["index"], call.given["dim"]
    where = call.owner("index")
    if bool(where.any()):
        own, index = along(own, [axis % own.dim()]).expand(own.shape), torch.zeros_like(index)
    if call.func.overloadpacket is aten.gather:
        found = join(aten.gather(own, axis, index), where)
    else:
        place = [1] * own.dim()
        place[axis] = -1
        found = join(aten.index_select(own, axis, index), where.view(place))
    return lambda out, number: found


def _index(call: _Call) -> Shadow:
    """x[i, j, …] with whole numbers; with a mask only where nothing depends on an example."""
    own, places = call.owner("self"), call.given["indices"]
    owners = [None if each is None else call.owners.of(each) for each in places]
    if any(
        where is not None and each.dtype in (torch.bool, torch.uint8) and bool(where.any())
        for each, where in zip(places, owners, strict=True)
    ):
        raise NotFlat("a mask that depends on examples decides how many numbers there are")
    if any(each is not None and each.dtype == torch.bool for each in places) and len(places) > 1:
        raise NotFlat("a mask beside other places is not known to keep examples apart")
    routed = [axis for axis, where in enumerate(owners) if where is not None and bool(where.any())]
    own = along(own, routed).expand(own.shape)
    fixed = [torch.zeros_like(each) if axis in routed else each for axis, each in enumerate(places)]
    found = aten.index(own, fixed)
    if routed:
        used = [axis for axis, each in enumerate(places) if each is not None]
        who = join(*(owners[axis] for axis in used))  # type: ignore[arg-type]
        if used == list(range(used[0], used[-1] + 1)):
            who = who.view(*who.shape, *[1] * (own.dim() - used[-1] - 1))
        else:
            who = who.view(*who.shape, *[1] * (own.dim() - len(used)))
        found = join(found, who)
    return lambda out, number: found


def _put(call: _Call) -> Shadow:
    """x[i, j, …] = values at places that depend on no example."""
    own, places = call.owner("self").clone(), call.given["indices"]
    if any(each is not None and bool(call.owners.of(each).any()) for each in places):
        raise NotFlat("where numbers are put depends on an example")
    values = call.owner("values")
    if call.given.get("accumulate"):
        values = join(values, aten.index(own, places))
    found = aten.index_put(own, places, values)
    return lambda out, number: found


def _scatter(call: _Call) -> Shadow:
    """Writes along an axis where an index says."""
    own, axis = call.owner("self"), call.given["dim"]
    source = call.owner("src") if isinstance(call.given.get("src"), Tensor) else own.new_zeros(())
    source = along(source, [axis % own.dim()]) if source.dim() else source
    found = join(along(own, [axis % own.dim()]), along(call.owner("index"), [axis % own.dim()]), source)
    return lambda out, number: found


def _asked(call: _Call) -> Shadow:
    raise NotFlat(f"the module asks what a number is that depends on examples or parameters ({call.func})")


def _named(rule: Rule, names: str) -> dict[Any, Rule]:
    return {getattr(aten, name): rule for name in names.split() if hasattr(aten, name)}


_RULES: dict[Any, Rule] = {
    **_named(
        _pointwise, "_to_copy masked_fill clone prelu _prelu_kernel lerp where contiguous complex polar"
    ),
    **_named(_pointwise, "bitwise_not logical_not nan_to_num relu leaky_relu elu hardtanh"),
    **_named(_cross, "linalg_cross"),
    **_named(
        _reduction,
        "sum mean amax amin max min argmax argmin var var_mean std std_mean prod logsumexp any all "
        "linalg_vector_norm norm nansum count_nonzero softmax _softmax log_softmax _log_softmax cumsum "
        "cumprod logcumsumexp cummax cummin sort argsort topk kthvalue median nanmedian aminmax "
        "_safe_softmax _fft_r2c _fft_c2c _fft_c2r",
    ),
    **_named(
        _rows,
        "convolution _convolution max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d "
        "avg_pool3d adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
        "adaptive_avg_pool1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d "
        "upsample_linear1d upsample_bicubic2d upsample_trilinear3d grid_sampler_2d grid_sampler_3d "
        "mkldnn_convolution cudnn_convolution max_unpool2d "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    **_named(_last, "native_layer_norm _fused_rms_norm"),
    **_named(_groups, "native_group_norm"),
    **_named(
        _channels,
        "native_batch_norm cudnn_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
        "_batch_norm_no_update",
    ),
    **_named(_product, "mm bmm addmm baddbmm mv dot"),
    **_named(_lookup, "embedding"),
    **_named(
        _move,
        "cat stack repeat roll flip rot90 constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d im2col tril triu repeat_interleave "
        "_unsafe_view _reshape_copy unfold_copy diag_embed slice_scatter select_scatter pixel_shuffle "
        "pixel_unshuffle channel_shuffle view_copy permute_copy",
    ),
    **_named(_gather, "gather index_select"),
    **_named(_index, "index _unsafe_index"),
    **_named(_put, "index_put _unsafe_index_put _index_put_impl"),
    **_named(_scatter, "scatter scatter_add scatter_reduce"),
    **_named(_copy, "copy copy_"),
    **_named(_fill, "fill fill_"),
    **_named(
        _constant,
        "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_empty_strided "
        "zero zero_ sym_size",
    ),
    **_named(_asked, "_local_scalar_dense item equal is_nonzero"),
}
"""How the shadows of results follow from those of arguments; pointwise operations need no entry."""


def rows_of(shadow: Tensor, examples: int) -> tuple[int, int, int] | None:
    """Return where the examples lie in a tensor: (axis, outer, inner); None: it is nobody's.

    The axis is one of outer · examples · inner numbers, and every example has its numbers there alone.

    >>> rows_of(torch.tensor([[2.0, 2.0, 3.0, 3.0]]), 2), rows_of(torch.tensor([2.0, 3.0, 2.0, 3.0]), 2)
    ((1, 1, 2), (0, 2, 1))
    """
    if not shadow.numel() or float(shadow.amax()) < FIRST:
        return None
    for axis, size in enumerate(shadow.shape):
        if size % examples:
            continue
        rest = [other for other in range(shadow.dim()) if other != axis]
        most = shadow.amax(rest) if rest else shadow
        if bool(((shadow >= FIRST) & (shadow != most.view(-1, *[1] * (shadow.dim() - axis - 1)))).any()):
            continue
        for inner in (size // examples, 1):
            pattern = FIRST + torch.arange(examples, device=shadow.device).repeat_interleave(inner)
            pattern = pattern.repeat(size // len(pattern))
            if bool(((most < FIRST) | (most == pattern)).all()):
                return axis, prod(pattern.shape) // (examples * inner), inner
    raise NotFlat("an example's numbers do not lie together on one axis")
