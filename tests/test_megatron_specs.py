"""The modules that stand in for Transformer Engine's: norms, attention, each against the same on one rank."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine_worker import run_ranks

BOUNDS = {2: [0, 8, 24, 28, 36], 4: [0, 8, 24, 40]}
"""By ranks: lengths are multiples of twice as many."""


def _zigzag(bounds: list[int], cp: int, rank: int) -> Tensor:
    """Places of this rank's tokens: written down from Megatron's description, not taken from the code under test."""
    places: list[int] = []
    for a, b in pairwise(bounds):
        size = (b - a) // (2 * cp)
        for chunk in (rank, 2 * cp - 1 - rank):
            places += range(a + chunk * size, a + (chunk + 1) * size)
    return torch.tensor(places)


def _naive(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], window: int | None) -> Tensor:
    """Attention from its definition, over all tokens at once; double precision."""
    total, heads, width = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    owner = torch.repeat_interleave(torch.arange(len(bounds) - 1), torch.tensor(bounds).diff())
    distance = torch.arange(total)[:, None] - torch.arange(total)[None, :]
    seen = (owner[:, None] == owner[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    scores = torch.einsum("qhd,khd->hqk", q, k) * width**-0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def _attention(window: int | None, bounds: list[int]) -> float:
    """The largest difference of output and gradients to attention on one rank."""
    from areal_convert.engines.megatron.zigzag import zigzag_attention

    g = torch.Generator().manual_seed(3)
    q, k, v, up = (
        torch.randn(bounds[-1], n, d, generator=g, dtype=torch.float64) for n, d in ((4, 6), (2, 6), (2, 5), (4, 5))
    )
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    want = _naive(whole[0], whole[1], whole[2], bounds, window)
    (want * up).sum().backward()
    mine = _zigzag(bounds, dist.get_world_size(), dist.get_rank())
    parts = [x[mine].clone().requires_grad_() for x in (q, k, v)]
    everyone: Any = dist.group.WORLD
    out = zigzag_attention(parts[0], parts[1], parts[2], bounds, everyone, 6**-0.5, window)
    (out * up[mine]).sum().backward()
    pairs = [(out, want)] + [(a.grad, b.grad) for a, b in zip(parts, whole, strict=True)]
    return max(float((a - b[mine]).abs().max()) for a, b in pairs)  # type: ignore[index, operator]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "window"), [(2, None), (2, 5), (4, None)])
def test_attention_over_cut_sequences_is_attention(ranks: int, window: int | None) -> None:
    """Output and gradients; packed sequences apart, grouped heads, another width of values."""
    assert max(run_ranks(ranks, _attention, window=window, bounds=BOUNDS[ranks])) < 1e-12


# ------------------------------------------------------------------------------------------------ norms


def _config(**changes: Any) -> Any:
    base = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "sequence_parallel": True}
    return SimpleNamespace(**{**base, **changes})


def _norm_gradients(kind: str) -> tuple[float, float]:
    """Sequence parallel: each rank norms its tokens, gradients of what is marked are summed as Megatron does it."""
    from areal_convert.engines.megatron.specs import torch_norm

    g = torch.Generator().manual_seed(5)
    x, up = torch.randn(12, 8, generator=g), torch.randn(12, 8, generator=g)
    one = torch_norm()(_config(normalization=kind, sequence_parallel=False), 8, eps=1e-6)
    (one(x) * up).sum().backward()
    part = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    cut = torch_norm()(_config(normalization=kind), 8, eps=1e-6)
    (cut(x[part]) * up[part]).sum().backward()
    for parameter in cut.parameters():
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad)
    pairs = zip(cut.parameters(), one.parameters(), strict=True)
    alone = any(getattr(p, "sequence_parallel", False) for p in one.parameters())
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs), float(alone)


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_of_a_cut_sequence_have_whole_gradients(kind: str) -> None:
    for difference, marked_alone in run_ranks(2, _norm_gradients, kind=kind):
        assert difference < 1e-5
        assert not marked_alone


def test_a_norm_is_what_transformers_computes() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from areal_convert.engines.megatron.specs import torch_norm

    x, weight = torch.randn(5, 16), torch.randn(16)
    ours, theirs = torch_norm()(_config(), 16, eps=1e-5), LlamaRMSNorm(16, eps=1e-5)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


def test_a_norm_that_torch_has_not_is_refused() -> None:
    from areal_convert.converter.errors import ConfigError
    from areal_convert.engines.megatron.specs import torch_norm

    with pytest.raises(ConfigError, match="L2Norm"):
        torch_norm()(_config(normalization="L2Norm"), 8)
    with pytest.raises(ConfigError, match="zero centred: True"):
        torch_norm()(_config(layernorm_zero_centered_gamma=True), 8)
