"""From a configuration to the stages of this rank: planned, built on the meta device, sharded, given memory, filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...converter.checkpoint import Checkpoint
from ...converter.errors import ConfigError
from ...converter.loading import Loaded
from ..api.configs import TrainEngineConfig
from ..weights import init_from_scratch, load
from .args import Config, ModelArgs
from .dims import ArchonParallelDims
from .model import Decoder
from .parallelize import Parallel, parallelize
from .schedules import Pipeline, plan_pipeline
from .specs import ModelSpec, elsewhere, spec_for

if TYPE_CHECKING:
    from .lora import ArchonLora

NAMING = "archon"

COPY = {"output.weight": "tok_embeddings.weight"}
"""A tied head, and what it is where that is on another stage."""


@dataclass(frozen=True)
class Plan:
    """What will be built: the family, its arguments, and the pipeline where there is one."""

    spec: ModelSpec
    args: ModelArgs
    pipeline: Pipeline | None


def plan(config: TrainEngineConfig, hf_config: Config, pp: int) -> Plan:
    """Raises ConfigError for a model that cannot be expressed, and layers that make no such pipeline."""
    spec = spec_for(hf_config)
    args = spec.args(hf_config)
    if config.disable_dropout:
        args = replace(args, attention=replace(args.attention, dropout=0.0))
    if pp == 1:
        return Plan(spec, args, None)
    archon = config.archon
    pipeline = plan_pipeline(
        archon.pp_schedule,
        pp,
        args.layers,
        layers_per_stage=archon.pp_layers_per_stage,
        first_less=archon.pp_first_stage_less_layers,
        last_less=archon.pp_last_stage_less_layers,
    )
    if pipeline.splits_backward and archon.enable_compile:
        what = f"{pipeline.name} runs the backward pass in two halves, which torch.compile cannot cut"
        raise ConfigError(f"archon.enable_compile: true: {what}.", hint="archon.enable_compile=false")
    if pipeline.splits_backward and archon.reshard_after_forward_policy == "always":
        what = f"{pipeline.name} runs the backward pass in two halves, between which FSDP would lose gradients"
        raise ConfigError(f"archon.reshard_after_forward_policy: always: {what}.", hint="default or never")
    return Plan(spec, args, pipeline)


def build(
    planned: Plan,
    config: TrainEngineConfig,
    dims: ArchonParallelDims,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Decoder], Parallel, ArchonLora | None]:
    """The stages of this rank, in order, sharded; parameters and expert biases have memory and no values yet. With
    `use_lora` there are adapters in them, and the other parameters, in `dtype`, are frozen."""
    pipeline = planned.pipeline
    stages = [None] if pipeline is None else [pipeline.parts[stage] for stage in pipeline.stages_of(dims.rank("pp"))]
    models: list[Decoder] = []
    for stage in stages:
        model = planned.spec.build(
            planned.args,
            stage,
            head="value" if config.is_critic else "vocabulary",
            router_dtype=torch.float32 if config.archon.moe_router_dtype == "fp32" else None,
            dtype=dtype,
        )
        models.append(model)
    lora = None
    if config.use_lora:
        from .lora import inject

        lora = inject(models, planned.spec.build(planned.args), config, torch.float32)
    common = {
        "compute": getattr(torch, config.dtype),
        "reduce": getattr(torch, config.grad_reduce_dtype),
        "device": device,
        "splits_backward": pipeline is not None and pipeline.splits_backward,
    }
    *_, parallel = [parallelize(model, dims, config, **common) for model in models]
    for model in models:
        materialize(model, device, on_cpu=config.archon.offload_params)
    return models, parallel, lora


def materialize(model: Decoder, device: torch.device, *, on_cpu: bool) -> None:
    """Memory; `on_cpu`: for parameters the host's (FSDP's CPU offload), for buffers the device's."""
    model.materialize("cpu" if on_cpu else device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def fill(
    parts: Sequence[Decoder],
    args: ModelArgs,
    checkpoint: Checkpoint,
    config: TrainEngineConfig,
    lora: ArchonLora | None = None,
) -> Loaded:
    """The values of a checkpoint of any format: every rank reads its own boxes. Adapters stay as they are."""
    absent = [set(elsewhere(args, part.part)) for part in parts]
    if lora is not None:
        return checkpoint.load_into(lora.base(), naming=NAMING, skip=sorted(set.intersection(*absent)))
    return load(
        parts,
        checkpoint,
        critic=config.is_critic,
        seed=config.seed,
        spread=args.initializer_range,
        naming=NAMING,
        skip=sorted(set.intersection(*absent)),
    )


def draw(parts: Sequence[Decoder], args: ModelArgs, seed: int) -> None:
    """Random values, the same on every layout; experts are balanced from nothing."""
    for part in parts:
        init_from_scratch(part, args.initializer_range, seed, COPY if args.tied else None)
        for moe in part.moe_layers():
            if moe.expert_bias is not None:
                moe.expert_bias.zero_()
