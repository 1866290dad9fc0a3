"""Every field of MegatronEngineConfig and its parts: where it goes, or why it goes nowhere.

The tables are the whole truth: a field that they do not name fails a test, a value that nothing honours is an error
before anything is built, and so is a field that the installed Megatron-Core does not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from ...converter.errors import ConfigError, MeshError, Problems
from ...converter.mesh import Mesh, pipeline
from ..api.configs import (
    DistributedDataParallelConfig,
    FP8EngineConfig,
    MegatronEngineConfig,
    TrainEngineConfig,
)
from ..api.parallel import ParallelStrategy
from . import mtp

__all__ = ["DDP", "FP8", "MEGATRON", "Here", "Only", "To", "check_fields", "check_model", "known", "undeclared"]


@dataclasses.dataclass(frozen=True)
class To:
    """Becomes `field` of Megatron-Core's `config`: core (TransformerConfig), ddp or optimizer; empty: of many."""

    config: str
    field: str = ""
    when: str = ""


@dataclasses.dataclass(frozen=True)
class Here:
    """Honoured by this package, or taken without effect, and why that is right."""

    where: str


@dataclasses.dataclass(frozen=True)
class Only:
    """One value is possible: why, and what to do."""

    value: Any
    why: str
    hint: str


Table = Mapping[str, To | Here | Only]

_RECOMPUTE = "with gradient_checkpointing"
_EXPERTS = "of a model with experts"
_SHARDED = "parameters are sharded by the distributed optimizer here"
_CHUNKS = "logits are whole; probabilities are made in chunks"

MEGATRON: Table = {
    "tensor_parallel_size": To("core", "tensor_model_parallel_size"),
    "pipeline_parallel_size": To("core", "pipeline_model_parallel_size"),
    "context_parallel_size": To("core", "context_parallel_size"),
    "expert_parallel_size": To("core", "expert_model_parallel_size"),
    "expert_tensor_parallel_size": To("core", "expert_tensor_parallel_size"),
    "virtual_pipeline_parallel_size": To("core", "virtual_pipeline_model_parallel_size"),
    "num_layers_in_first_pipeline_stage": To("core", "num_layers_in_first_pipeline_stage"),
    "num_layers_in_last_pipeline_stage": To("core", "num_layers_in_last_pipeline_stage"),
    "pipeline_model_parallel_layout": To("core", "pipeline_model_parallel_layout"),
    "sequence_parallel": To("core", "sequence_parallel"),
    "overlap_p2p_comm": To("core", "overlap_p2p_comm", "on GPUs"),
    "tp_comm_overlap": Only(
        False, "its buffers have one fixed shape, and micro-batches here differ in length", "tp_comm_overlap=false"
    ),
    "fp32_residual_connection": To("core", "fp32_residual_connection"),
    "wrap_with_ddp": Only(True, "without Megatron's DDP no gradient is reduced", "wrap_with_ddp=true"),
    "use_torch_fsdp2": Only(False, _SHARDED, "the fsdp engine has FSDP2"),
    "use_custom_fsdp": Only(False, _SHARDED, "the fsdp engine has FSDP2"),
    "ddp": To("ddp"),
    "overlap_param_gather_with_optimizer_step": To("optimizer", "overlap_param_gather_with_optimizer_step"),
    "use_precision_aware_optimizer": To("optimizer", "use_precision_aware_optimizer", "with Transformer Engine"),
    "main_grads_dtype": To("optimizer", "main_grads_dtype", "with use_precision_aware_optimizer"),
    "main_params_dtype": To("optimizer", "main_params_dtype", "with use_precision_aware_optimizer"),
    "exp_avg_dtype": To("optimizer", "exp_avg_dtype", "with use_precision_aware_optimizer"),
    "exp_avg_sq_dtype": To("optimizer", "exp_avg_sq_dtype", "with use_precision_aware_optimizer"),
    "async_save": Here("checkpoint: training states are written behind training"),
    "use_checkpoint_opt_param_scheduler": Here("checkpoint: false keeps the schedule where it is"),
    "use_deterministic_algorithms": To("core", "deterministic_mode"),
    "recompute_granularity": To("core", "recompute_granularity", _RECOMPUTE),
    "recompute_method": To("core", "recompute_method", _RECOMPUTE),
    "recompute_num_layers": To("core", "recompute_num_layers", _RECOMPUTE),
    "distribute_saved_activations": To("core", "distribute_saved_activations", _RECOMPUTE),
    "recompute_modules": To("core", "recompute_modules", _RECOMPUTE),
    "moe_router_dtype": To("core", "moe_router_dtype", _EXPERTS),
    "moe_shared_expert_overlap": To("core", "moe_shared_expert_overlap", "on GPUs, " + _EXPERTS),
    "moe_enable_deepep": To("core", "moe_flex_dispatcher_backend", "on GPUs, " + _EXPERTS),
    "moe_token_dispatcher_type": To("core", "moe_token_dispatcher_type", "on GPUs, " + _EXPERTS),
    "moe_permute_fusion": To("core", "moe_permute_fusion", "on GPUs, " + _EXPERTS),
    "moe_router_fusion": To("core", "moe_router_fusion", "on GPUs, " + _EXPERTS),
    "moe_router_bias_update_rate": To("core", "moe_router_bias_update_rate", _EXPERTS),
    "moe_z_loss_coeff": To("core", "moe_z_loss_coeff", _EXPERTS),
    "enable_chunked_logits": Only(False, _CHUNKS, "logprobs_chunk_size"),
    "entropy_requires_grad": Here("steps: gradients go through the entropy, or not"),
    "lm_head_loss_chunk_size": Only(0, _CHUNKS, "logprobs_chunk_size"),
    "enable_fp32_lm_head": Only(
        False, "the output layer runs in the compute dtype, log-probabilities in fp32", "enable_fp32_lm_head=false"
    ),
    "cross_entropy_loss_fusion": Only(
        False, "Megatron's cross entropy is not used: losses are functions of log-probabilities", "false"
    ),
    "use_fp8": Here("the same as fp8_config={}"),
    "fp8_config": To("core"),
    "bridge_type": Here("taken, without effect: the hub loads and saves"),
    "use_mbridge_save": Here("taken, without effect: the hub saves"),
    "use_bridge_for_update_weights": Here("taken, without effect: the hub syncs"),
    "disable_grad_buffers_cpu_backup": Here("always so: a step leaves no gradients that could be kept"),
    "enable_mtp": To("core", "mtp_num_layers", "as many as the checkpoint has"),
    "mtp_loss_coeff": To("core", "mtp_loss_scaling_factor", "with enable_mtp"),
}

DDP: Table = {
    "grad_reduce_in_fp32": To("ddp", "grad_reduce_in_fp32"),
    "overlap_grad_reduce": To("ddp", "overlap_grad_reduce"),
    "overlap_param_gather": To("ddp", "overlap_param_gather"),
    "align_param_gather": To("ddp", "align_param_gather"),
    "use_distributed_optimizer": To("ddp", "use_distributed_optimizer"),
    "check_for_nan_in_grad": To("ddp", "check_for_nan_in_grad"),
    "bucket_size": To("ddp", "bucket_size"),
    "average_in_collective": To("ddp", "average_in_collective", "on GPUs"),
    "fp8_param_gather": Only(False, "parameters are kept in bfloat16: weights are read into them box by box", "false"),
}

FP8: Table = {
    "mode": To("core", "fp8"),
    "recipe": To("core", "fp8_recipe"),
    "param": Only(False, "parameters are kept in bfloat16: weights are read into them box by box", "param=false"),
    "margin": To("core", "fp8_margin"),
    "amax_history_len": To("core", "fp8_amax_history_len"),
    "amax_compute_algo": To("core", "fp8_amax_compute_algo"),
    "wgrad": To("core", "fp8_wgrad"),
    "dot_product_attention": To("core", "fp8_dot_product_attention"),
    "multi_head_attention": To("core", "fp8_multi_head_attention"),
    "tp_only_amax_red": To("core", "tp_only_amax_red"),
    "first_last_layers_bf16": To("core", "first_last_layers_bf16"),
    "num_layers_at_start_in_bf16": To("core", "num_layers_at_start_in_bf16"),
    "num_layers_at_end_in_bf16": To("core", "num_layers_at_end_in_bf16"),
    "direct_convert": Here("taken, without effect: an FP8 checkpoint is read as the values that it stands for"),
}

_PARTS: tuple[tuple[str, type, Table], ...] = (
    ("", MegatronEngineConfig, MEGATRON),
    ("ddp.", DistributedDataParallelConfig, DDP),
    ("fp8_config.", FP8EngineConfig, FP8),
)


def undeclared() -> set[str]:
    """Fields that no table names, and names that are no fields: none, or somebody forgot to say where one goes."""
    return {
        prefix + name
        for prefix, cls, table in _PARTS
        for name in {field.name for field in dataclasses.fields(cls)} ^ table.keys()
    }


def known(cls: type, values: Iterable[str]) -> None:
    """Raises ConfigError naming every field that the installed Megatron-Core's class has not."""
    missing = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
    if missing:
        raise ConfigError(
            f"{cls.__name__} of the installed megatron-core {_installed()} has no {', '.join(missing)}.",
            hint="Install a version that has them (0.16 or 0.19 are tested), or leave the options out.",
        )


def _installed() -> str:
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return "(of unknown version)"


# ------------------------------------------------------------------------------------------------ what cannot be


def check_fields(config: TrainEngineConfig, sizes: ParallelStrategy, device: torch.device) -> None:
    """Raises ConfigError for every value that this engine does not honour, before any process group."""
    problems, megatron = Problems(), config.megatron
    parts = (megatron, megatron.ddp, megatron.fp8_config)
    for (prefix, _, table), part in zip(_PARTS, parts, strict=True):
        for name, entry in table.items() if part is not None else ():
            if isinstance(entry, Only) and (value := getattr(part, name)) != entry.value:
                problems.add(f"megatron.{prefix}{name}", f"{value!r}: {entry.why}", entry.hint)
    if config.is_critic:
        problems.add("is_critic", "megatron has no value head", "fsdp can")
    if sizes.dp_replicate_size > 1:
        problems.add("data_parallel_replicate_size", "megatron has no replicas of shards (HSDP)", "fsdp can")
    if megatron.sequence_parallel and sizes.tp_size == 1:
        problems.add("megatron.sequence_parallel", "there is one tensor parallel rank", "null")
    if megatron.overlap_p2p_comm and megatron.virtual_pipeline_parallel_size == 1:
        problems.add("megatron.overlap_p2p_comm", "needs chunks of layers", "virtual_pipeline_parallel_size=2")
    if megatron.moe_enable_deepep != (megatron.moe_token_dispatcher_type == "flex"):
        what = "needs the flex dispatcher" if megatron.moe_enable_deepep else "false: the flex dispatcher is DeepEP's"
        problems.add("megatron.moe_enable_deepep", what, "true, with moe_token_dispatcher_type=flex")
    if config.gradient_checkpointing:
        _recomputation(megatron, problems)
    _overlaps(config, problems)
    _optimizer(config, problems)
    _device(config, device, problems)
    problems.raise_as(ConfigError, "The megatron engine cannot run this configuration.")


def _recomputation(megatron: MegatronEngineConfig, problems: Problems) -> None:
    if megatron.recompute_granularity == "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(megatron, name) is None:
                problems.add(f"megatron.{name}", "null, and recompute_granularity is full", "uniform, 1")
        if megatron.recompute_modules is not None:
            what = "which modules, and recompute_granularity is full: all of them"
            problems.add("megatron.recompute_modules", what, "recompute_granularity=selective, or null")


def _overlaps(config: TrainEngineConfig, problems: Problems) -> None:
    ddp = config.megatron.ddp
    if not ddp.grad_reduce_in_fp32 and config.grad_reduce_dtype == "float32":
        what = "false, and grad_reduce_dtype is float32"
        problems.add("megatron.ddp.grad_reduce_in_fp32", what, "grad_reduce_dtype=bfloat16, or true")
    if ddp.overlap_param_gather:
        for name in ("overlap_grad_reduce", "use_distributed_optimizer"):
            if not getattr(ddp, name):
                problems.add("megatron.ddp.overlap_param_gather", f"needs {name}", "set both")
    if config.megatron.overlap_param_gather_with_optimizer_step and not ddp.overlap_param_gather:
        name = "megatron.overlap_param_gather_with_optimizer_step"
        problems.add(name, "needs ddp.overlap_param_gather", "set both")


def _optimizer(config: TrainEngineConfig, problems: Problems) -> None:
    megatron, optimizer = config.megatron, config.optimizer
    if optimizer is not None and optimizer.type != "adam" and megatron.ddp.use_distributed_optimizer:
        what = f"true: Megatron-Core's distributed optimizer is adam, and optimizer.type is {optimizer.type}"
        problems.add("megatron.ddp.use_distributed_optimizer", what, "false, or optimizer.type=adam")
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    for name in names if not megatron.use_precision_aware_optimizer else ():
        if (value := getattr(megatron, name)) != "float32":
            problems.add(f"megatron.{name}", f"{value}, without use_precision_aware_optimizer", "set both")
    if megatron.use_precision_aware_optimizer and not megatron.ddp.use_distributed_optimizer:
        what = "needs ddp.use_distributed_optimizer"
        problems.add("megatron.use_precision_aware_optimizer", what, "set both")


def _device(config: TrainEngineConfig, device: torch.device, problems: Problems) -> None:
    """What needs a GPU, or Transformer Engine."""
    megatron = config.megatron
    names = ("moe_permute_fusion", "moe_router_fusion", "moe_enable_deepep", "moe_shared_expert_overlap")
    if device.type == "cpu":
        for name in (*names, "overlap_p2p_comm"):
            if getattr(megatron, name):
                what = "gloo has no such sends" if name == "overlap_p2p_comm" else "is a kernel for GPUs"
                problems.add(f"megatron.{name}", what, f"{name}=false")
        if megatron.ddp.average_in_collective:
            problems.add("megatron.ddp.average_in_collective", "gloo has no average", "false")
        if config.dtype == "float16":
            problems.add("dtype", "float16 with its loss scale needs a GPU", "bfloat16")
    if device.type == "cpu" or find_spec("transformer_engine") is None:
        for name in ("use_precision_aware_optimizer", "moe_router_fusion", "moe_permute_fusion"):
            if getattr(megatron, name) and (device.type != "cpu" or name not in names):
                what = "needs Transformer Engine, which needs a GPU" if device.type == "cpu" else "needs it installed"
                problems.add(f"megatron.{name}", f"is Transformer Engine's: {what}", f"{name}=false")


def check_model(
    config: TrainEngineConfig, hf_config: Mapping[str, Any], sizes: ParallelStrategy, *, experts: bool
) -> None:
    """Raises ConfigError for what this model cannot be trained with, where another could."""
    problems, megatron, found = Problems(), config.megatron, None
    layers = hf_config.get("num_hidden_layers") or sizes.pp_size
    try:
        found = pipeline(stages(megatron, Mesh(pp=sizes.pp_size)), layers, mtp.depths_of(config, hf_config))
    except MeshError as error:
        problems.found += error.problems
    mtp.check(config, hf_config, sizes, found, problems)
    if sizes.tp_size > 1 and megatron.sequence_parallel is False:
        name, hint = "megatron.sequence_parallel", "null, or true"
        if experts:
            problems.add(name, "false: Megatron-Core trains experts over tensor parallel ranks with it only", hint)
        if hf_config.get("kv_lora_rank") is not None:
            what = "false: without it Megatron-Core adds up norms' gradients that are whole on every rank (MLA)"
            problems.add(name, what, hint)
    if megatron.distribute_saved_activations and sizes.tp_size > 1 and megatron.sequence_parallel is not False:
        what = "activations are cut by sequence parallelism already"
        problems.add("megatron.distribute_saved_activations", what, "sequence_parallel=false, or null")
    if megatron.recompute_modules and config.gradient_checkpointing:
        problems.found += _modules(megatron.recompute_modules, hf_config, experts).found
    problems.raise_as(ConfigError, "The megatron engine cannot train this model so.")


def stages(megatron: MegatronEngineConfig, mesh: Mesh) -> Mesh:
    """The mesh with its pipeline stages as the configuration cuts them."""
    return dataclasses.replace(
        mesh,
        vpp=megatron.virtual_pipeline_parallel_size,
        first=megatron.num_layers_in_first_pipeline_stage,
        last=megatron.num_layers_in_last_pipeline_stage,
        layout=megatron.pipeline_model_parallel_layout,
    )


_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def _modules(chosen: list[str], hf_config: Mapping[str, Any], experts: bool) -> Problems:
    """Parts of a layer that are recomputed."""
    problems, name = Problems(), "megatron.recompute_modules"
    for module in chosen:
        if module not in _MODULES:
            problems.add(name, f"{module!r} is none", f"there are: {', '.join(_MODULES)}")
        elif module in ("moe", "moe_act", "shared_experts") and not experts:
            problems.add(name, f"{module}: the model has no experts")
        elif module == "mla_up_proj" and hf_config.get("kv_lora_rank") is None:
            problems.add(name, f"{module}: the model has no latent attention")
    return problems
