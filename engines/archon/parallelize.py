"""A stage on the meta device → sharded: tensor and expert parallelism, checkpointed and compiled blocks, FSDP units."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ..api.configs import TrainEngineConfig
from ..tensor_parallel import TensorParallel, vocabulary
from ..token_logprobs import Vocabulary
from .checkpointing import checkpoint_blocks, compile_blocks
from .dims import ArchonParallelDims
from .expert_parallel import expert_parallel, shard_experts
from .fp8 import use_fp8
from .model import Decoder
from .tensor_parallel import sliced_experts, tensor_parallel


@dataclass(frozen=True)
class Parallel:
    """What whoever runs a parallelized stage has to know; the same for all stages of a rank.

    vocabulary   which columns of the logits are here
    cp_group     the ranks that have slices of the tokens, for `Packing.group`; None: all tokens are here
    stream       this rank's place among those that share its batch, for `Packing.stream`; None: it shares it with none
    unit         tokens of a micro-batch (of all cp ranks) are padded to a multiple of it
    loss_factor  every rank multiplies its part of the loss by it before the backward pass: gradients are averaged over
                 as many ranks
    bias_groups  for `update_expert_biases`: over them the ranks that saw different tokens are summed

    Inputs: token ids (1, t/cp) and positions (t/cp,), the same on all tp ranks. Between stages: hidden states
    (1, t/cp/tp, h). Logits: (1, t/cp, `vocabulary.size`); a critic's values: (1, t/cp, 1) on every tp rank.
    """

    dims: ArchonParallelDims
    tp: TensorParallel | None
    vocabulary: Vocabulary
    cp_group: dist.ProcessGroup | None
    stream: int | None
    unit: int
    loss_factor: int
    bias_groups: tuple[dist.ProcessGroup, ...]


def parallelize(
    model: Decoder,
    dims: ArchonParallelDims,
    config: TrainEngineConfig,
    *,
    compute: torch.dtype,
    reduce: torch.dtype,
    device: torch.device,
    splits_backward: bool = False,
) -> Parallel:
    """Shard a stage in place; it stays on the meta device. `dims` are built; dropouts that are to be off are 0 already.

    compute          dtype of activations and gathered parameters
    reduce           dtype in which gradients are reduced
    splits_backward  the pipeline schedule runs backward passes in two halves (`Pipeline.splits_backward`)

    Raises ConfigError, MeshError or PlanError for what cannot be cut or combined so.
    """
    deterministic(config.archon.use_deterministic_algorithms, device)
    use_fp8(model, config.archon.fp8_config, device)
    expert_parallel(model, dims)
    tp = tensor_parallel(model, dims)
    compile_blocks(model, config.archon)
    again = config.gradient_checkpointing
    checkpoint_blocks(model, config.archon, compute_again=again, splits_backward=splits_backward)
    _shard(model, dims, config, compute, reduce, device)
    counted = ("dp_cp", "tp") if sliced_experts(dims) else ("dp_cp",)
    return Parallel(
        dims,
        tp,
        vocabulary(model.args.vocab, tp),
        dims.group("cp") if dims.cp > 1 else None,
        dims.rank("cp_tp") if dims.cp * dims.tp > 1 else None,
        dims.cp * dims.tp,
        dims.gradient_divisor,
        tuple(dims.group(kind) for kind in counted if dims.size(kind) > 1),
    )


def deterministic(wanted: bool, device: torch.device) -> None:
    """The same bits every time. It concerns the whole process, and an operation that cannot do it raises; False leaves
    everything as it is. cuBLAS reads its setting as it is first used: nothing must have been multiplied on the GPU."""
    if not wanted:
        return
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


# ------------------------------------------------------------------------------------------------ FSDP units


def _shard(
    model: Decoder,
    dims: ArchonParallelDims,
    config: TrainEngineConfig,
    compute: torch.dtype,
    reduce: torch.dtype,
    device: torch.device,
) -> None:
    """Units: every block; embedding; final norm with the head; the rest. A tied embedding stays with the rest, since a
    parameter can only be in one unit."""
    archon, mesh = config.archon, dims.mesh("fsdp")
    stored = {parameter.dtype for parameter in model.parameters()}
    if mesh.size() == 1 and stored == {compute} and not archon.offload_params:
        return  # nothing to shard, cast or move: FSDP would only copy every parameter several times a step
    policy = MixedPrecisionPolicy(param_dtype=None if stored == {compute} else compute, reduce_dtype=reduce)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if archon.offload_params else OffloadPolicy()
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    again = _reshards(archon.reshard_after_forward_policy, dims.pp)
    shard_experts(model, dims, {**common, "reshard_after_forward": again})
    for block in model.layers.values():
        unit: Any = fully_shard(block, reshard_after_forward=again, **common)
        if dims.ep > 1 and unit.sparse:
            unit.set_modules_to_forward_prefetch([unit.moe.experts])  # they are gathered beside attention
    if model.tok_embeddings is not None and not model.tied:
        fully_shard(model.tok_embeddings, reshard_after_forward=again, **common)
    head = model.output if model.output is not None else model.score
    if model.norm is not None and head is not None and not model.tied:
        # Wanted again as the backward pass begins.
        fully_shard([model.norm, head], reshard_after_forward=False, **common)
    fully_shard(model, reshard_after_forward=False, **common)


def _reshards(policy: str, pp: int) -> bool:
    """Under pipelining every micro-batch would gather everything anew."""
    return pp == 1 if policy == "default" else policy == "always"
