"""How adapters are cut under tensor parallelism here, where a block and not a layer sums the parts of a result.

As `engines.fsdp.lora_styles` has it for layers cut by outputs. Of one cut by inputs, B of a partial A x is a part of
the same sum that the block takes. Where a layer is whole but works for other heads on every rank (`Cut.SUMMED`), so
do its adapters, and all their gradients are summed.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...converter.errors import PlanError
from ..collectives import copy_to
from ..fsdp.lora_styles import AdaptedColwise, AdaptedHead, adapted
from ..tensor_parallel import Colwise, Norm, Plan, Style, TensorParallel, VocabHead, local, shard
from .tensor_parallel import Inputs


def with_adapters(model: nn.Module, plan: Plan) -> Plan:
    """The plan for a stage with adapters in it: itself, when there are none."""
    return adapted(model, plan, _style)


def _style(name: str, style: Style | None) -> Style:
    if isinstance(style, VocabHead):
        return AdaptedHead()
    if isinstance(style, Colwise):
        return AdaptedColwise()
    if isinstance(style, Inputs):
        return AdaptedInputs()
    if isinstance(style, Norm):
        return AdaptedSummed()
    raise PlanError(f"{name}: there is no way to cut adapters here.", hint="tensor_parallel_size=1 needs none.")


class AdaptedInputs(Style):
    """A linear layer with adapters, cut along its inputs. Its result is a part of a sum that the block takes."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        layer: Any = module
        base, a, b = layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]
        Inputs().apply(name, base, tp)
        shard(a, "weight", 1, tp)
        scale = layer.scaling["default"]

        def forward(x: Tensor) -> Tensor:
            low = F.linear(F.linear(x, local(a.weight)), copy_to(b.weight, tp.group))
            return base(x) + scale * low

        module.forward = forward


class AdaptedSummed(Style):
    """A whole linear layer with adapters, whose gradients are parts of a sum on every rank."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        layer: Any = module
        for inner in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]):
            Norm().apply(name, inner, tp)
