"""One gradient norm for every layout: each parameter's square is summed over the mesh dimensions that cut *it*.

A replica counts once, a shard adds its part. Summing everything over one fixed group, as is often done, counts
replicated parameters several times, or leaves out the shards of dimensions that the group does not span.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..converter.errors import MeshError


def gradient_norm(gradients: Iterable[Tensor], device: torch.device | None = None) -> Tensor:
    """The 2-norm of all gradients of the whole model, the same number (fp64, 0-d) on every rank.

    gradients  of this rank, plain tensors or DTensors, in the same order on all ranks that share a mesh dimension; a
               plain tensor counts as whole on every rank
    device     where the sums are reduced (NCCL cannot reach CPU-offloaded gradients); None: the first gradient's

    Raises MeshError for a DTensor that holds partial sums: its norm is not the sum of anything local.
    """
    by_cut: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for gradient in gradients:
        by_cut.setdefault(cutting_groups(gradient), []).append(_local(gradient))
    if not by_cut:
        return torch.zeros((), dtype=torch.float64, device=device)
    device = device or next(iter(by_cut.values()))[0].device
    squares = {cut: _sum_of_squares(parts, device) for cut, parts in by_cut.items()}
    _reduce(squares)
    return torch.stack(list(squares.values())).sum().sqrt()


def agreed(norm: Tensor) -> Tensor:
    """The norm, or NaN on every rank when it is not finite on any: all ranks skip a step, or none does.

    A whole (replicated) gradient is counted where it is, and a fault of one rank need not show on another.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return norm
    faults = (~torch.isfinite(norm)).to(torch.float64)
    dist.all_reduce(faults)
    return norm if not faults else torch.full_like(norm, math.nan)


def clip(gradients: Sequence[Tensor], norm: Tensor, largest: float) -> float:
    """Scale the gradients in place so that their norm is at most `largest` (0: leave them). Returns the factor."""
    factor = min(1.0, largest / (float(norm) + 1e-6)) if largest > 0 else 1.0
    if factor < 1.0:
        parts = [_local(g) for g in gradients]
        for same in _by_kind(parts):
            torch._foreach_mul_(same, factor)
    return factor


def cutting_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups of the mesh dimensions that this tensor is cut along; a dimension of one rank cuts nothing."""
    given: Any = tensor
    if not hasattr(given, "device_mesh"):
        return ()
    found = []
    for dim, placement in enumerate(given.placements):
        if placement.is_partial():
            raise MeshError("A gradient holds partial sums: it has to be reduced before its norm is taken.")
        if not placement.is_replicate() and given.device_mesh.size(dim) > 1:
            found.append(given.device_mesh.get_group(dim))
    return tuple(found)


def _reduce(squares: dict[tuple[dist.ProcessGroup, ...], Tensor]) -> None:
    """Sum every entry over its groups: one all-reduce a group for all entries that it cuts.

    Groups go in the order of the mesh dimensions, the same on all ranks: a sum that is half reduced on one rank only
    would count parts twice.
    """
    for group in dict.fromkeys(group for cut in squares for group in cut):
        cuts = [cut for cut in squares if group in cut]
        packed = torch.stack([squares[cut] for cut in cuts])
        dist.all_reduce(packed, group=group)
        squares.update(zip(cuts, packed.unbind(0), strict=True))


def _local(tensor: Tensor) -> Tensor:
    given: Any = tensor
    return given._local_tensor if hasattr(given, "device_mesh") else tensor


def _sum_of_squares(parts: list[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for same in _by_kind(parts):
        norms = torch._foreach_norm(same, 2, dtype=torch.float32)
        total += torch.stack([n.to(device, torch.float64) for n in norms]).square().sum()
    return total


def _by_kind(parts: Iterable[Tensor]) -> list[list[Tensor]]:
    """What a foreach kernel takes at once: the same device and dtype, nothing empty."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in parts:
        if part.numel():
            kinds.setdefault((part.device, part.dtype), []).append(part)
    return list(kinds.values())
