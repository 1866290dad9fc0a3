"""Tensor parallelism, module by module: DTensor parameters, plain tensors in between.

A style says how the parameters of one module are cut and what its forward does with its part. Parameters are DTensors
on the tp mesh, so that FSDP, checkpoints and exports know which part a rank holds; computation takes the local parts
and says its collectives itself (`engines/collectives.py`), without DTensor's dispatch.

Between two blocks every rank has a slice of the sequence, on which norms and residuals work: what would be an
all-reduce behind every block is a reduce-scatter there and an all-gather before the next one, and the activations that
the backward pass keeps are as many times fewer.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..converter.errors import PlanError, Problems
from .collectives import copy_to, gather_rows, join_slices, scatter_sum
from .token_logprobs import Vocabulary

SEQUENCE = 1
"""The dimension of hidden states (batch, sequence, hidden) that is cut between blocks."""


@dataclass(frozen=True)
class TensorParallel:
    """The tp mesh and what is done at the ends of a block."""

    mesh: DeviceMesh

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def enter(self, x: Tensor) -> Tensor:
        """Slices → the whole sequence, for work of which every rank does another part."""
        return gather_rows(x, SEQUENCE, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums of the whole sequence → this rank's slice of the sum."""
        return scatter_sum(x, SEQUENCE, self.group)


class Style:
    """How one module is cut. `apply` changes the module; its name is there for messages."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        raise NotImplementedError


Plan = Mapping[str, Style]
"""Pattern of module names (`*` for a number) → style. The first that matches counts."""


def parallelize(model: nn.Module, plan: Plan, tp: TensorParallel) -> None:
    """Cut the parameters and change the forwards in place; the model may be on the meta device.

    Raises PlanError naming every module that has parameters and no style: nothing stays whole by accident.
    """
    problems = Problems()
    styles: list[tuple[str, nn.Module, Style]] = []
    for name, module in model.named_modules():
        style = next((s for pattern, s in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style is not None:
            styles.append((name, module, style))
        elif any(True for _ in module.parameters(recurse=False)):
            problems.add(name, f"no tensor-parallel style for a {type(module).__name__}", "add it to the family's plan")
    problems.raise_as(PlanError, "The tensor-parallel plan does not cover the model:")
    aliases = _aliases(model)
    for name, module, style in styles:
        style.apply(name, module, tp)
    for (first, key), others in aliases:
        for module, other in others:  # a tied head: the same Parameter again
            setattr(module, other, getattr(first, key))


Place = tuple[nn.Module, str]


def _aliases(model: nn.Module) -> list[tuple[Place, list[Place]]]:
    """Parameters that stand in several places: the first place, and the others."""
    places: dict[int, list[Place]] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, key))
    return [(found[0], found[1:]) for found in places.values() if len(found) > 1]


def shard(module: nn.Module, key: str, dim: int, tp: TensorParallel) -> None:
    """Make a parameter a DTensor that is cut along `dim` as `torch.chunk` cuts."""
    parameter = module.get_parameter(key)
    if isinstance(parameter, DTensor):
        return
    cut = distribute_tensor(parameter.detach(), tp.mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter(key, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def local(parameter: Tensor | None) -> Any:
    """This rank's part, with the gradient finding its way back."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def product_of(layer: nn.Module) -> Callable[..., Tensor]:
    """How a linear layer multiplies (input, weight, bias): `F.linear`, or what it was given as `product`."""
    return getattr(layer, "product", F.linear)


def wrap(module: nn.Module, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] | None) -> None:
    """Change the hidden states that go into a module's forward, and its result (the first of a tuple)."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (before(args[0]), *args[1:])
        else:
            kwargs["hidden_states"] = before(kwargs["hidden_states"])
        result = inner(*args, **kwargs)
        if after is None:
            return result
        return (after(result[0]), *result[1:]) if isinstance(result, tuple) else after(result)

    module.forward = forward


# ------------------------------------------------------------------------------------------------ styles


class Colwise(Style):
    """A linear layer cut along its outputs. Its input is whole (see `Enter`), its result this rank's part."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        for key, _ in list(module.named_parameters(recurse=False)):
            shard(module, key, 0, tp)
        layer: Any = module
        module.forward = lambda x: product_of(layer)(x, local(layer.weight), local(layer.bias))


class Rowwise(Style):
    """A linear layer cut along its inputs. Its result is summed over the ranks; the bias is whole and added after."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        shard(module, "weight", 1, tp)
        layer: Any = module

        def forward(x: Tensor) -> Tensor:
            y = tp.leave(product_of(layer)(x, local(layer.weight)))
            return y if layer.bias is None else y + copy_to(layer.bias, tp.group)

        module.forward = forward


class Enter(Style):
    """A block (attention, MLP) whose layers each work on a part: its input is gathered once for all of them."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        wrap(module, tp.enter, None)


class VocabEmbedding(Style):
    """An embedding cut along the vocabulary, evenly or not."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        part = vocabulary(module.get_parameter("weight").shape[0], tp)
        shard(module, "weight", 0, tp)
        padding = getattr(module, "padding_idx", None)  # a row that gets no gradient
        if padding is not None:
            padding = padding - part.start if part.start <= padding < part.start + part.size else None

        def forward(ids: Tensor) -> Tensor:
            row = ids - part.start
            here = (row >= 0) & (row < part.size)
            found = F.embedding(torch.where(here, row, 0), local(module.get_parameter("weight")), padding)
            return tp.leave(torch.where(here[..., None], found, 0.0))

        module.forward = forward


class VocabHead(Style):
    """The output layer cut along the vocabulary; logits stay cut (`vocabulary` says where)."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        Colwise().apply(name, module, tp)
        wrap(module, tp.enter, None)


class Norm(Style):
    """A norm: the weight is whole, but every rank has its gradient from its own slice (or its own heads) only."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with replaced(module, {k: copy_to(p, tp.group) for k, p in module.named_parameters(recurse=False)}):
                return inner(*args, **kwargs)

        module.forward = forward


class AfterGather(Style):
    """A whole layer behind the last norm (a value head) that sees all rows, and does the same on every rank."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        wrap(module, lambda x: join_slices(x, SEQUENCE, tp.group), None)


class Whole(Style):
    """The same parameters, and the same work, on every rank."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        return None


def vocabulary(rows: int, tp: TensorParallel | None) -> Vocabulary:
    """This rank's rows of the vocabulary, as `torch.chunk` cuts them. Every rank must have some: see the checks."""
    if tp is None:
        return Vocabulary(0, rows)
    step = -(-rows // tp.size)
    start = min(step * tp.rank, rows)
    return Vocabulary(start, min(step, rows - start), tp.group, step)


@contextmanager
def local_parameters(module: nn.Module) -> Iterator[list[Tensor]]:
    """The module's own parameters are plain local tensors inside."""
    parts = {key: local(parameter) for key, parameter in module.named_parameters(recurse=False)}
    with replaced(module, parts):
        yield list(parts.values())


@contextmanager
def replaced(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """`module.key` is another tensor inside: an attribute of the object is found before a registered parameter."""
    module.__dict__.update(values)
    try:
        yield
    finally:
        for key in values:
            del module.__dict__[key]
