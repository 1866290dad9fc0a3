"""Mixture of experts: a router, experts in three stacked parameters, and what every token visits besides.

    t tokens · k experts of a token · s slots, t·k · e experts · h hidden · m width of an expert

A token's k places with experts are its *slots*. Slots are sorted by expert, so that each expert's rows lie together;
`Experts` sees such rows and their counts and nothing else, and expert parallelism is what is done around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .args import MoeArgs
from .mlp import GatedMLP

_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class Router(nn.Module):
    """Which experts a token visits, and with which weights.

    dtype  of logits and scores; None: that of the activations, with scores in fp32 as transformers has it
    """

    def __init__(self, args: MoeArgs, hidden: int, dtype: torch.dtype | None = torch.float32) -> None:
        super().__init__()
        self.args, self.dtype = args, dtype
        self.gate = nn.Linear(hidden, args.experts, bias=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """(t, h) → weights (t, k) in fp32, experts (t, k). `bias` (e,) moves the choice and not the weights."""
        args = self.args
        logits = self.gate(x) if self.dtype is None else F.linear(x.to(self.dtype), self.gate.weight.to(self.dtype))
        scores = logits.float().softmax(-1) if args.score == "softmax" else logits.float().sigmoid()
        chosen = self._choose(scores.detach() if bias is None else scores.detach() + bias)
        weights = scores.gather(1, chosen)
        if args.normalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total if args.score == "softmax" else total + 1e-20)
        return weights * args.scale, chosen

    def _choose(self, scores: Tensor) -> Tensor:
        """The best k experts of the best groups; a group counts as much as its two best experts."""
        args = self.args
        if args.groups > 1:
            grouped = scores.unflatten(1, (args.groups, -1))
            best = grouped.topk(2, -1).values.sum(-1).topk(args.top_groups, -1).indices
            outside = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter(1, best, False)
            scores = grouped.masked_fill(outside[:, :, None], float("-inf")).flatten(1)
        return scores.topk(args.top_k, -1).indices


class Experts(nn.Module):
    """All experts of a layer, or those of one rank: w1 and w3 (e, m, h), w2 (e, h, m).

    run  does the work in place of the usual functions; None: these
    """

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, width, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, width, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, width))
        self.run: Callable[..., Tensor] | None = None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """`rows` (s, h) sorted by expert, `counts` (e,) of each → (s, h)."""
        w1, w3, w2 = (_local(w) for w in (self.w1, self.w3, self.w2))
        run = self.run or (_grouped if _groups(rows, w1) else one_by_one)
        return run(rows, counts, w1, w3, w2)


def _groups(rows: Tensor, w1: Tensor) -> bool:
    """Whether one kernel can do all experts: it takes bf16, some rows, and rows of whole 16 bytes."""
    aligned = w1.shape[1] % 8 == 0 and w1.shape[2] % 8 == 0
    return rows.dtype == torch.bfloat16 and _grouped_mm is not None and aligned and len(rows) > 0


def _grouped(rows: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    ends = counts.cumsum(0).to(torch.int32)
    gate, up = (_grouped_mm(rows, w.mT, offs=ends) for w in (w1, w3))
    return _grouped_mm(F.silu(gate) * up, w2.mT, offs=ends)


def one_by_one(
    rows: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, product: Callable[..., Tensor] = F.linear
) -> Tensor:
    """Every expert's rows (s, h), in the order of experts, through its three matrices."""
    parts = rows.split(counts.tolist())
    experts = zip(parts, w1.unbind(0), w3.unbind(0), w2.unbind(0), strict=True)
    return torch.cat([product(F.silu(product(x, gate)) * product(x, up), down) for x, gate, up, down in experts])


def _local(weight: Tensor) -> Tensor:
    given: Any = weight
    return given.to_local() if hasattr(given, "device_mesh") else weight


class MoE(nn.Module):
    """The MLP of a sparse layer.

    expert_bias  (e,) fp32, where choices are balanced without an auxiliary loss; it is no parameter: it is moved by
                 `update_expert_biases`, and checkpoints have it
    seen         (e,) how many slots each expert was given since that was last called, in training, padding left out
    """

    expert_bias: Tensor | None
    seen: Tensor

    def __init__(self, args: MoeArgs, hidden: int, router_dtype: torch.dtype | None = torch.float32) -> None:
        super().__init__()
        self.args = args
        self.router = Router(args, hidden, router_dtype)
        self.experts = Experts(args.experts, hidden, args.width)
        self.shared_experts = GatedMLP(hidden, args.shared_width) if args.shared_width else None
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if args.shared_gate else None
        self.register_buffer("expert_bias", torch.zeros(args.experts, dtype=torch.float32) if args.bias else None)
        self.register_buffer("seen", torch.zeros(args.experts, dtype=torch.float32), persistent=False)

    def reset(self) -> None:
        """The right values in buffers that no checkpoint has."""
        self.seen.zero_()

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """(1, t, h) → (1, t, h). `real` (t,): which tokens are no padding; None: all."""
        flat = x[0]
        weights, chosen = self.router(flat, self.expert_bias)
        slots = chosen.flatten()
        order = slots.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = self._count(slots)
        if self.training and self.expert_bias is not None and torch.is_grad_enabled():
            self.seen += counts if real is None else self._count(slots, real)
        rows = _Spread.apply(flat, order, inverse, self.args.top_k)
        out = Permute.apply(self.experts(rows, counts), inverse, order)
        out = (out.unflatten(0, (-1, self.args.top_k)) * weights.to(out.dtype)[..., None]).sum(1)
        return (out + self.shared(flat))[None] if self.shared_experts is not None else out[None]

    def _count(self, slots: Tensor, real: Tensor | None = None) -> Tensor:
        """(e,) how many of these slots each expert is given; `real` (t,): of those tokens."""
        ones = torch.ones_like(slots) if real is None else real.to(slots.dtype).repeat_interleave(self.args.top_k)
        return torch.zeros_like(self.seen, dtype=torch.int64).index_add_(0, slots, ones)

    def shared(self, flat: Tensor) -> Tensor:
        """What every token visits besides: (t, h) → (t, h)."""
        assert self.shared_experts is not None
        out = self.shared_experts(flat)
        return out if self.shared_expert_gate is None else self.shared_expert_gate(flat).sigmoid() * out


class _Spread(torch.autograd.Function):
    """Each token's row at every one of its slots, sorted by expert: (t, h) → (s, h).

    The backward pass sums a token's slots in their order: no atomics, the same bits every time and on every layout.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """`x[order]`, whose backward pass is `grad[inverse]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None


@torch.no_grad()
def update_expert_biases(layers: Iterable[MoE], rate: float, groups: Sequence[dist.ProcessGroup] = ()) -> None:
    """Balance without an auxiliary loss: experts with fewer tokens than the mean become likelier by `rate`, those with
    more less likely, and counting starts anew. Once an optimizer step.

    groups  over which the ranks that saw different tokens are summed, one after the other (`dp_cp`)

    Only the sign counts: a layer computed twice by activation checkpointing counts its tokens twice, all alike.
    """
    balanced = [layer for layer in layers if layer.expert_bias is not None]
    if not balanced:
        return
    seen = torch.stack([layer.seen for layer in balanced])
    for group in groups:
        dist.all_reduce(seen, group=group)
    steps = (seen.mean(1, keepdim=True) - seen).sign() * rate
    for layer, step in zip(balanced, steps, strict=True):
        assert layer.expert_bias is not None
        layer.expert_bias += step
        layer.seen.zero_()
