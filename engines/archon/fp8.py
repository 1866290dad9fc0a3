"""Matrix products in FP8, scaled by blocks: linear layers, and experts where `include_experts` says so.

    m, n rows of the operands · k what is summed over

A product a·bᵀ of a (m, k) and b (n, k) is made of e4m3 values with a scale, in fp32, for every block: 1×128 of
activations and of gradients, 128×128 of weights. All three products of a layer are made so: results, gradients of
inputs, and gradients of weights (1×128 on both sides, along the tokens). Parameters stay what they are, in the dtype of
FSDP and of the optimizer, and sums are taken in at least fp32.

On Hopper GPUs it is cuBLAS's kernel (torch 2.10, CUDA 12.9; `use_triton` changes nothing). On the CPU the same values
are multiplied in fp32, for tests: configurations that ask for FP8 without such a GPU are refused.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...converter.errors import ConfigError
from ..api.backends import ArchonFP8Config
from .model import Decoder
from .moe import one_by_one

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Quantized:
    """values (m, k) in e4m3, scales (m / rows, k / 128) in fp32, rounded up; a block has `rows` rows, 1 or 128."""

    values: Tensor
    scales: Tensor
    rows: int


def quantize(x: Tensor, rows: int) -> Quantized:
    """(m, k), padded with zeros to whole blocks → each block scaled so that its largest value is e4m3's largest."""
    padded = _padded(x, rows)
    blocks = padded.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))
    top = blocks.abs().amax((1, 3), keepdim=True)
    scales = torch.where(top > 0, top / LARGEST, 1.0)
    # The division may round beyond the largest value, which e4m3 has no infinity for.
    values = (blocks / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Quantized(values.view_as(padded), scales.squeeze(3).squeeze(1), rows)


def dequantize(q: Quantized) -> Tensor:
    """(m, k) in fp32, with the padding."""
    blocks = q.values.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, q.rows))
    return (blocks * q.scales.unsqueeze(1).unsqueeze(3)).view(q.values.shape)


def _padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, -x.shape[1] % BLOCK, 0, -x.shape[0] % rows))


# ------------------------------------------------------------------------------------------------ products


def product(a: Tensor, b: Tensor, rows: tuple[int, int]) -> Tensor:
    """a·bᵀ, (m, k) and (n, k) → (m, n) in the dtype of a; `rows` of the blocks of a and of b."""
    if not a.numel():  # an expert that nobody visits
        return a.new_zeros(a.shape[0], b.shape[0])
    if a.is_cuda:  # whole tiles, for the kernel
        left, right = (quantize(_padded(x, BLOCK), r) for x, r in zip((a, b), rows, strict=True))
        found = _kernel(left, right, a.dtype)
    else:
        left, right = (quantize(x, r) for x, r in zip((a, b), rows, strict=True))
        found = (dequantize(left) @ dequantize(right).T).to(a.dtype)
    return found[: a.shape[0], : b.shape[0]]


def _kernel(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    kinds: Any = F.ScalingType
    recipes = {1: kinds.BlockWise1x128, BLOCK: kinds.BlockWise128x128}
    scaled_mm: Any = F.scaled_mm
    scales = _laid_out(a), _laid_out(b)
    return scaled_mm(a.values, b.values.t(), scales[0], recipes[a.rows], scales[1], recipes[b.rows], output_dtype=dtype)


def _laid_out(q: Quantized) -> Tensor:
    """Scales as cuBLAS wants them: of 1×128 blocks one column after the other, (m, k / 128); of tiles turned around and
    padded to a multiple of 4, (k / 128, m / 128) with the first dimension running fastest."""
    if q.rows == 1:
        return q.scales.t().contiguous().t()
    return F.pad(q.scales, (0, -q.scales.shape[1] % 4)).t()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, (1, BLOCK))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        by_x = product(grad, weight.t(), (1, BLOCK)) if ctx.needs_input_grad[0] else None
        by_weight = product(grad.t(), x.t(), (1, 1)) if ctx.needs_input_grad[1] else None
        return by_x, by_weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with its products in FP8."""
    y = _Linear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


# ------------------------------------------------------------------------------------------------ models


def use_fp8(model: Decoder, config: ArchonFP8Config, device: torch.device) -> list[str]:
    """Give the linear layers of a stage, but for those in `exclude_modules`, products in FP8; in place, before tensor
    parallelism. Returns the names of those that have them.

    exclude_modules  a word excludes every module that has it in its name as a part between dots, or that it matches as
                     a pattern. Gates of shared experts, with one output, are left alone

    Raises ConfigError for a GPU without such products.
    """
    if config.mode == "disabled":
        return []
    _check_device(device)
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module.out_features == 1 or _excluded(name, config.exclude_modules):
            continue
        layer: Any = module
        layer.product = linear
        layer.forward = partial(_forward, layer)
        found.append(name)
    if config.include_experts:
        for moe in model.moe_layers():
            moe.experts.run = partial(one_by_one, product=linear)
    return found


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _excluded(name: str, words: Sequence[str]) -> bool:
    return any(word in name.split(".") or fnmatch.fnmatchcase(name, word) for word in words)


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0) or not hasattr(F, "scaled_mm"):
        found = f"compute capability {'.'.join(map(str, capability))}, torch {torch.__version__}"
        raise ConfigError(
            f"archon.fp8_config: products scaled by blocks need a Hopper GPU (9.0) and torch 2.10; this is {found}.",
            hint="archon.fp8_config.mode=disabled",
        )
