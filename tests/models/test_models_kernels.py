"""Triton's kernels on a processor, by its interpreter: what a GPU would compute, against plain torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

COMMON = """
import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_weight
from trilemma.models.layers.convolution import Stencil
torch.manual_seed(1)
near = lambda one, other: torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
def back(function, x, grad):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf, grad)[0]
"""

CHECKS = {
    "columns": """
from trilemma.models.kernels import cuda_columns
for s in (Stencil(3, 1, 1), Stencil(3, 2, 1), Stencil(5)):
    x = torch.randn(2, 3, 2, 7, 7)
    def unfolded(x):
        each = F.unfold(x.flatten(0, 1), s.kernel, 1, s.padding, s.stride)
        return each.view(2, 3, *each.shape[1:]).transpose(1, 2).flatten(2)
    found = cuda_columns.unfolded(x, s)
    near(found, unfolded(x))
    near(cuda_columns.folded(found, x.shape, s), back(unfolded, x, found))
""",
    "pooling": """
from trilemma.models.kernels import cuda_pooling
x, s = torch.randn(4, 32, 7, 7), Stencil(3, 2, 1)
z, taps = cuda_pooling.forth(x.movedim(1, -1).contiguous(), s)
pool = lambda x: F.max_pool2d(x, 3, 2, 1)
near(z.movedim(-1, 1), pool(x))
near(cuda_pooling.back(z, taps, 7, 7, s).movedim(-1, 1), back(pool, x, z.movedim(-1, 1)))
x, s = torch.randn(5, 8, 9), Stencil(2, 2)
z, taps = cuda_pooling.forth_apart(x, s)
near(z, F.max_pool2d(x, 2))
near(cuda_pooling.back_apart(z, taps, 8, 9, s), back(lambda x: F.max_pool2d(x, 2), x, z))
""",
    "normalisation": """
from trilemma.models.kernels import cuda_normalisation as own
x, g = torch.randn(2, 300, 32), torch.randn(2, 300, 32)
mean, squares = own.moments(x, None, 1)
near(mean, x.mean(1))
near(squares / 300, x.var(1, correction=0))
inverse = torch.rsqrt(squares / 300 + 1e-5)
z = own.Map(mean, inverse, torch.zeros(2, 32), True)
normal = lambda x: torch.cat([F.batch_norm(each, None, None, training=True) for each in x]).view(x.shape)
near(own.mapped(x, z), normal(x).relu())
weight, bias = own.slopes(x, g, inverse, z)
cut = torch.where(normal(x) > 0, g, 0.0)
near(bias, cut.sum(1))
near(weight, (cut * normal(x)).sum(1))
line = -inverse / 300 * inverse * weight, -inverse / 300 * bias
near(own.slope(x, g, None, 1, z, line), back(lambda x: normal(x).relu(), x, g))
""",
    "windows": """
from trilemma.models.kernels import cuda_windows
x, s = torch.randn(2, 2, 32, 7, 7), Stencil(3, 2, 1)
w, bias = torch.randn(2, 32, 32, 3, 3) / 10, torch.randn(2, 32)
convolve = lambda x: torch.stack([F.conv2d(*each, 2, 1) for each in zip(x, w, bias)])
forth, taps = cuda_windows.by_tap(w)
z = cuda_windows.convolve(cuda_windows.innermost(x), forth, bias, s)
near(z.movedim(-1, 2), convolve(x))
near(cuda_windows.back(z, taps, 7, 7, s).movedim(-1, 2), back(convolve, x, z.movedim(-1, 2)))
found = cuda_windows.weights(cuda_windows.innermost(x), z, s)
near(found, torch.stack([conv2d_weight(a, w[0].shape, g.movedim(-1, 1), 2, 1) for a, g in zip(x, z)]))
""",
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", CHECKS)
def test_kernels_compute_what_torch_does(name):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMMON + CHECKS[name]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not done.returncode, done.stderr
