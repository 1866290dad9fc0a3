"""Collectives that autograd goes through, on plain tensors.

Tensor parallelism is written with pairs whose backward passes are each other's forward: what is copied forward is
summed backward. All of them are the identity when the group is None.

| function            | forward                      | backward                     |
|---------------------|------------------------------|------------------------------|
| `copy_to`           | nothing                      | sum over the group           |
| `reduce_from`       | sum over the group           | nothing                      |
| `gather_rows`       | all-gather along `dim`       | reduce-scatter along `dim`   |
| `scatter_sum`       | reduce-scatter along `dim`   | all-gather along `dim`       |
| `join_slices`       | all-gather along `dim`       | own slice                    |
| `take_slice`        | own slice of `dim`           | all-gather along `dim`       |
| `swap_shards`       | all-to-all of two dimensions | the reverse all-to-all       |

`gather_rows` and `join_slices` differ in what comes after: there different work on every rank (gradients add up), here
the same work on every rank (each rank's own slice of the gradient is the gradient).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup

# torch 2.13 renamed them.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to(x: Tensor, group: Group | None) -> Tensor:
    """`x`, the same on all ranks, enters work that differs by rank."""
    return x if group is None else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: Group | None) -> Tensor:
    """The sum of the ranks' partial results, on all of them."""
    return x if group is None else _ReduceFrom.apply(x, group)


def gather_rows(x: Tensor, dim: int, group: Group | None) -> Tensor:
    """All ranks' parts of a dimension, equal in size, in rank order."""
    return x if group is None else _GatherRows.apply(x, dim, group)


def scatter_sum(x: Tensor, dim: int, group: Group | None) -> Tensor:
    """This rank's part of the sum of the ranks' partial results; the dimension must divide."""
    return x if group is None else _ScatterSum.apply(x, dim, group)


def join_slices(x: Tensor, dim: int, group: Group | None) -> Tensor:
    """All ranks' slices of a dimension, for work that every rank then repeats."""
    return x if group is None else _JoinSlices.apply(x, dim, group)


def take_slice(x: Tensor, dim: int, group: Group | None) -> Tensor:
    """This rank's slice of what is the same on all ranks; the inverse of `join_slices`. The dimension must divide."""
    return x if group is None else _TakeSlice.apply(x, dim, group)


def swap_shards(x: Tensor, cut: int, join: int, group: Group | None) -> Tensor:
    """Cut one dimension over the ranks and join another one: heads for sequence and back again (Ulysses)."""
    return x if group is None else _SwapShards.apply(x, cut, join, group)


# ------------------------------------------------------------------------------------------------ without autograd


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over the group in a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Equal parts of all ranks, put together along `dim`."""
    whole = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _ALL_GATHER(whole, x.contiguous(), group=group)
    return torch.cat(whole.chunk(group.size()), dim) if dim else whole


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part of the sum along `dim`."""
    parts = torch.cat(x.chunk(group.size(), dim), 0) if dim else x.contiguous()
    out = parts.new_empty(parts.shape[0] // group.size(), *parts.shape[1:])
    _REDUCE_SCATTER(out, parts, group=group)
    return out


def all_to_all(x: Tensor, cut: int, join: int, group: Group) -> Tensor:
    """Send the n-th part along `cut` to rank n; join what comes along `join`."""
    sent = torch.stack(x.chunk(group.size(), cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), join)


def _slice(x: Tensor, dim: int, group: Group) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


# ------------------------------------------------------------------------------------------------ autograd


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce(grads[0], ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return reduce_scatter(grads[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_gather(grads[0], ctx.dim, ctx.group), None, None


class _JoinSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _slice(grads[0], ctx.dim, ctx.group), None, None


class _TakeSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _slice(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_gather(grads[0], ctx.dim, ctx.group), None, None


class _SwapShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int, group: Group) -> Tensor:
        ctx.cut, ctx.join, ctx.group = cut, join, group
        return all_to_all(x, cut, join, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_to_all(grads[0], ctx.join, ctx.cut, ctx.group), None, None, None
