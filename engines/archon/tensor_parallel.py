"""Tensor parallelism of a decoder: the plan of `specs.tensor_plan` in the styles of `engines/tensor_parallel.py`.

Between blocks every rank has a slice of the sequence. A block (attention, MLP, mixture of experts) gathers it once, and
everything in it that is cut by inputs gives parts of one sum, which is reduced and scattered once as the block ends.

Where experts are dealt to tensor-parallel ranks whole (ep > 1, etp = 1), a mixture of experts does not gather: every
rank routes and sends out the tokens of its own slice. What all tokens visit besides gathers for itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...converter.errors import MeshError, Problems
from ..collectives import copy_to, gather_rows, scatter_sum
from ..tensor_parallel import (
    AfterGather,
    Colwise,
    Norm,
    Plan,
    Style,
    TensorParallel,
    VocabEmbedding,
    VocabHead,
    Whole,
    local,
    product_of,
    replaced,
    shard,
    wrap,
)
from ..tensor_parallel import parallelize as apply_plan
from .args import GqaArgs, ModelArgs
from .dims import ArchonParallelDims
from .model import Decoder
from .specs import Cut, tensor_plan


class Block(Style):
    """Gathers slices of the sequence, and scatters the sum of what its layers give."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        wrap(module, tp.enter, tp.leave)


class Inputs(Style):
    """A linear layer cut along its inputs. Its result is a part of a sum that the block takes; rank 0 adds the bias."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        shard(module, "weight", 1, tp)
        layer: Any = module
        part = 1.0 if tp.rank == 0 else 0.0

        def forward(x: Tensor) -> Tensor:
            y = product_of(layer)(x, local(layer.weight))
            return y if layer.bias is None else y + copy_to(layer.bias, tp.group) * part

        module.forward = forward


class Routing(Style):
    """A router at work on some tokens, or for a part of every expert: its gate's gradients are summed."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        router: Any = module
        inner, gate = router.forward, router.gate

        def forward(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            with replaced(gate, {"weight": copy_to(gate.weight, tp.group)}):
                return inner(x, bias)

        module.forward = forward


class CutExperts(Style):
    """Every rank has a part of the inner dimension of all experts."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        for key, dim in EXPERT_DIMS.items():
            shard(module, key, dim, tp)


class SlicedMoE(Style):
    """A mixture of experts at work on this rank's slice; its shared experts, cut as a dense MLP is, see all tokens."""

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        moe: Any = module
        run, inner = moe.forward, moe.shared
        moe.forward = lambda x, real=None: run(x, None if real is None else real.chunk(tp.size)[tp.rank])
        moe.shared = lambda flat: scatter_sum(inner(gather_rows(flat, 0, tp.group)), 0, tp.group)


EXPERT_DIMS = {"w1": 1, "w3": 1, "w2": 2}
"""The inner dimension of each of the stacked parameters."""

_STYLES: dict[Cut, Style] = {
    Cut.OUTPUTS: Colwise(),
    Cut.INPUTS: Inputs(),
    Cut.SUMMED: Norm(),
    Cut.WHOLE: AfterGather(),
    Cut.EXPERTS: CutExperts(),
    Cut.BLOCK: Block(),
}


def sliced_experts(dims: ArchonParallelDims) -> bool:
    """Whether tensor-parallel ranks route and send out the tokens of their own slices."""
    return dims.tp > 1 and dims.ep > 1 and dims.expert_tp == 1


def plan_of(args: ModelArgs, dims: ArchonParallelDims) -> Plan:
    """Pattern of module names → style."""
    own: dict[str, Style] = {"tok_embeddings": VocabEmbedding(), "output": VocabHead()}
    if args.moe is not None:
        own |= {"layers.*.moe.router": Routing(), "layers.*.moe.router.gate": Whole()}
        if dims.ep > 1:
            own["layers.*.moe.experts"] = Whole()  # `expert_parallel` has placed them
        if sliced_experts(dims):
            own["layers.*.moe"] = SlicedMoE()
    return own | {name: _STYLES[cut] for name, cut in tensor_plan(args).items() if name not in own}


def tensor_parallel(model: Decoder, dims: ArchonParallelDims) -> TensorParallel | None:
    """Cut a stage for its tp ranks in place; it may be on the meta device. None where there is one such rank.

    Raises MeshError when heads do not divide, PlanError for a module that the plan does not know.
    """
    if dims.tp == 1:
        return None
    _check(model.args, dims.tp)
    tp = TensorParallel(dims.mesh("tp"))
    from .lora_styles import with_adapters

    apply_plan(model, with_adapters(model, plan_of(model.args, dims)), tp)
    return tp


def _check(args: ModelArgs, tp: int) -> None:
    problems = Problems()
    heads = {"num_attention_heads": args.attention.heads}
    if isinstance(args.attention, GqaArgs):
        heads["num_key_value_heads"] = args.attention.kv_heads
    for key, number in heads.items():
        if number % tp:
            problems.add(key, f"{number} do not divide among {tp} ranks", "choose a tensor_parallel_size that divides")
    problems.raise_as(MeshError, f"{args.family} does not fit tensor_parallel_size={tp}:")
