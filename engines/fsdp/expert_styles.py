"""How transformers' mixtures of experts are cut: whole experts dealt to the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...converter.errors import MeshError
from ..collectives import copy_to, join_slices, reduce_from, take_slice
from ..tensor_parallel import SEQUENCE, Style, TensorParallel, local_parameters, shard, wrap


class SparseBlock(Style):
    """A mixture of experts: the router sees the whole sequence, on every rank the same."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        group = tp.group
        wrap(module, lambda x: join_slices(x, SEQUENCE, group), lambda y: take_slice(y, SEQUENCE, group))


class Experts(Style):
    """Stacked experts (E, …) dealt to the ranks whole: rank r has experts r·E/tp … (r+1)·E/tp.

    A fused gate|up cannot be cut along its rows without cutting the gate from the up; whole experts keep every box
    contiguous. All ranks see all tokens; those of other ranks' experts are skipped, results are summed.
    """

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        held: Any = module
        if held.num_experts % tp.size:
            raise MeshError(
                f"{name}: {held.num_experts} experts do not divide among {tp.size} tensor-parallel ranks.",
                hint="Use a tensor_parallel_size that divides the number of experts.",
            )
        here = held.num_experts // tp.size
        for key, _ in list(module.named_parameters(recurse=False)):
            shard(module, key, 0, tp)
        held.num_experts = here
        held._is_expert_parallel = True  # transformers' own experts skip rows marked with the number `here`
        inner, first = module.forward, here * tp.rank

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            index = top_k_index - first
            mine = (index >= 0) & (index < here)
            weights = torch.where(mine, copy_to(top_k_weights, tp.group), 0.0)
            index = torch.where(mine, index, here)
            x = copy_to(hidden_states, tp.group)
            with local_parameters(module) as parts:
                y = inner(x, index, weights)
            if torch.is_grad_enabled() and held.config._experts_implementation == "eager" and not mine.any():
                # None of this rank's experts was asked for. The others still wait for it: to sum what goes back into
                # the inputs, and, in FSDP, to reduce the gradients of the parameters.
                y = y + sum(part.sum() for part in (x, weights, *parts)) * 0.0
            return reduce_from(y, tp.group)

        module.forward = forward
