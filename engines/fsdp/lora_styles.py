"""How adapters are cut under tensor parallelism: with the layer that they stand at.

| layer             | A (rank × in)                         | B (out × rank)                       |
|-------------------|---------------------------------------|--------------------------------------|
| cut by outputs    | whole; its gradient is summed         | cut by outputs                       |
| cut by inputs     | cut by inputs                         | whole; its gradient is summed        |
| whole             | whole, the same work on every rank    | whole, the same work on every rank   |

No collective on activations is added. Of a layer cut by outputs, every rank's B gives its own part of the outputs, and
the gradient that comes back through A is partial, as that through W is. Of one cut by inputs, B of a partial A x is a
partial sum as W x is, and goes into the same reduce-scatter.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...converter.errors import PlanError
from ..collectives import copy_to
from ..lora import is_lora_layer
from ..tensor_parallel import Colwise, Plan, Rowwise, Style, TensorParallel, VocabHead, Whole, local, shard, wrap


def with_adapters(model: nn.Module, plan: Plan) -> Plan:
    """The plan for a model with adapters in it: itself, when there are none."""
    return adapted(model, plan, _style)


def adapted(model: nn.Module, plan: Plan, style_of: Callable[[str, Style | None], Style]) -> Plan:
    """A plan in which every layer with adapters has what `style_of` gives for its name and the style that it would have
    had without them."""
    own: dict[str, Style] = {}
    for name, module in model.named_modules():
        if is_lora_layer(module):
            style = next((s for pattern, s in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
            own[name] = style_of(name, style)
    inside: dict[str, Style] = {"*.base_layer": Whole(), "*.lora_[AB].*": Whole()} if own else {}
    return {**inside, **own, **plan}


def _style(name: str, style: Style | None) -> Style:
    if isinstance(style, VocabHead):
        return AdaptedHead()
    if isinstance(style, Colwise):
        return AdaptedColwise()
    if isinstance(style, Rowwise):
        return AdaptedRowwise()
    if isinstance(style, Whole):
        return style
    raise PlanError(f"{name}: there is no way to cut adapters here.", hint="tensor_parallel_size=1 needs none.")


class AdaptedColwise(Style):
    """A linear layer with adapters, cut along its outputs. PEFT's own forward puts the parts together."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        layer: Any = module
        Colwise().apply(name, layer.base_layer, tp)
        a = layer.lora_A["default"]
        a.forward = lambda x: F.linear(x, copy_to(a.weight, tp.group))
        Colwise().apply(name, layer.lora_B["default"], tp)


class AdaptedHead(Style):
    """The output layer with adapters, cut along the vocabulary."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        AdaptedColwise().apply(name, module, tp)
        wrap(module, tp.enter, None)


class AdaptedRowwise(Style):
    """A linear layer with adapters, cut along its inputs; one sum over the ranks for both parts."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        layer: Any = module
        base, a, b = layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]
        shard(base, "weight", 1, tp)
        shard(a, "weight", 1, tp)
        scale = layer.scaling["default"]

        def forward(x: Tensor) -> Tensor:
            low = F.linear(F.linear(x, local(a.weight)), copy_to(b.weight, tp.group))
            y = tp.leave(F.linear(x, local(base.weight)) + scale * low)
            return y if base.bias is None else y + copy_to(base.bias, tp.group)

        module.forward = forward
