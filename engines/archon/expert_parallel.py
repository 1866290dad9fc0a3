"""Expert parallelism: whole experts dealt to the ranks of a group, and an all-to-all that brings every token to them.

    s rows of this rank, sorted by expert · r rows that came here · e experts of the layer · n of them here · h hidden

A rank's rows go out as they lie, since rank k has the experts k·n … (k + 1)·n. They come ordered by sender, are put in
the order of experts (of the same expert: by sender), and go back the same way. Nothing is dropped and nothing padded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from ...converter.errors import MeshError
from ..tensor_parallel import local, replaced
from .dims import ArchonParallelDims
from .model import Decoder
from .moe import Experts, Permute
from .tensor_parallel import EXPERT_DIMS


def expert_parallel(model: Decoder, dims: ArchonParallelDims) -> None:
    """Deal the experts of a stage out in place; it may be on the meta device. Does nothing when ep is 1.

    Raises MeshError when the experts do not divide.
    """
    if dims.ep == 1:
        return
    for moe in model.moe_layers():
        if moe.args.experts % dims.ep:
            raise MeshError(
                f"{moe.args.experts} experts do not divide among expert_parallel_size={dims.ep} ranks.",
                hint="Use a size that divides the number of experts.",
            )
        _place(moe.experts, dims)
        _send_out(moe.experts, dims)


def _place(experts: Experts, dims: ArchonParallelDims) -> None:
    """Parameters become DTensors: dealt along the experts, and cut along the inner dimension where etp says so."""
    cut = dims.expert_tp > 1
    mesh = dims.mesh("ep_tp") if cut else dims.mesh("ep")
    for key, dim in EXPERT_DIMS.items():
        whole = experts.get_parameter(key)
        placements = [Shard(0), Shard(dim)] if cut else [Shard(0)]
        placed = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
        experts.register_parameter(key, nn.Parameter(placed, requires_grad=whole.requires_grad))


def _send_out(experts: Experts, dims: ArchonParallelDims) -> None:
    group = dims.group("ep")
    inner = experts.forward
    # FSDP averages over the ranks that hold the same experts; tokens came from all that have different ones.
    factor = dims.mesh("expert_fsdp").size() / dims.gradient_divisor

    def forward(rows: Tensor, counts: Tensor) -> Tensor:
        parts = {key: _scaled(local(experts.get_parameter(key)), factor) for key in EXPERT_DIMS}
        with replaced(experts, parts):
            return _visit(inner, rows, counts, group)

    apart: Any = torch.compiler.disable(forward)  # how many rows come is known as it runs
    experts.forward = apart


def _visit(run: Any, rows: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`run` on the ranks that have the experts: rows (s, h), counts (e,) → (s, h)."""
    ranks = group.size()
    sent = counts.view(ranks, -1)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    out, back = torch.stack([sent.sum(1), came.sum(1)]).tolist()  # the one wait for the device
    here = came.shape[1]
    owner = torch.arange(here, device=rows.device).repeat(ranks)
    owner = owner.repeat_interleave(came.flatten(), output_size=sum(back))
    order = owner.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    visitors = Permute.apply(_Exchange.apply(rows, out, back, group), order, inverse)
    return _Exchange.apply(Permute.apply(run(visitors, came.sum(0)), inverse, order), back, out, group)


class _Exchange(torch.autograd.Function):
    """The first `sent[0]` rows to rank 0, and so on; `came[k]` rows from rank k, in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], came: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.came, ctx.group = sent, came, group
        return _exchange(rows, sent, came, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchange(grads[0], ctx.came, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], came: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(came), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), came, sent, group=group)
    return out


def _scaled(weight: Tensor, factor: float) -> Tensor:
    return weight if factor == 1.0 else _ScaledGradient.apply(weight, factor)


class _ScaledGradient(torch.autograd.Function):
    """The same values, `factor` times the gradient. FSDP could divide by another number itself, but for gloo."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None


# ------------------------------------------------------------------------------------------------ FSDP


def shard_experts(model: Decoder, dims: ArchonParallelDims, common: dict[str, Any]) -> None:
    """FSDP units of their own, over the ranks that hold the same experts."""
    if dims.ep == 1:
        return
    ranks = dims.size("dp_shard_mod_ep")
    for moe in model.moe_layers():
        few = moe.args.experts // dims.ep < ranks
        inner = all(local(p).shape[1] % ranks == 0 for p in moe.experts.parameters())
        # With fewer experts than ranks some would hold nothing: cut every expert then.
        place = (lambda p: Shard(1)) if few and inner else None
        fully_shard(moe.experts, shard_placement_fn=place, **{**common, "mesh": dims.mesh("expert_fsdp")})
