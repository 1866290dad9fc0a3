"""From our configuration to Megatron-Core's (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig), and
to the model.

What becomes of every field of MegatronEngineConfig stands in `fields`; what it becomes is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...converter.errors import ConfigError
from ..api.configs import OptimizerConfig, TrainEngineConfig
from ..api.parallel import ParallelStrategy
from ..megatron_cpu import CPU_CONFIG, quiet
from ..megatron_model import MegatronConfig, build_model, transformer_config
from . import mtp, routers
from .fields import check_fields, check_model, known
from .specs import adapt, has_transformer_engine

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig

__all__ = ["check_fields", "core_config", "ddp_config", "make_model", "optimizer_config", "wrap"]

VOCABULARY_MULTIPLE = 128
"""Megatron-LM's make_vocab_size_divisible_by."""

CUDA_CONFIG: Mapping[str, Any] = {
    "use_cpu_initialization": False,
    "batch_p2p_comm": True,
    "overlap_p2p_comm": False,
    "deallocate_pipeline_outputs": True,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
}
"""What the CPU cannot do, and a GPU does better."""


# ------------------------------------------------------------------------------------------------ configurations


def core_config(
    config: TrainEngineConfig, hf_config: Mapping[str, Any], sizes: ParallelStrategy, device: torch.device
) -> MegatronConfig:
    """TransformerConfig, field by field. Raises ConfigError for what Megatron-Core cannot compute."""
    with quiet():
        import megatron.core.transformer  # it warns as it is imported
    megatron = config.megatron
    chunks = megatron.virtual_pipeline_parallel_size
    check_model(config, hf_config, sizes, experts=is_moe(hf_config))
    found = transformer_config(
        hf_config,
        tp=sizes.tp_size,
        pp=sizes.pp_size,
        vpp=chunks if chunks > 1 else None,
        ep=sizes.ep_size,
        etp=sizes.etp_size,
        layout=megatron.pipeline_model_parallel_layout,
        first=megatron.num_layers_in_first_pipeline_stage,
        last=megatron.num_layers_in_last_pipeline_stage,
        dtype=getattr(torch, config.dtype),
        mtp=mtp.depths_of(config, hf_config),
        mtp_loss_scaling_factor=megatron.mtp_loss_coeff,
        **_device_fields(device, megatron.overlap_p2p_comm),
        **_parallel_fields(config, hf_config, sizes, device),
        **_recompute_fields(config),
        **(_expert_fields(config, hf_config, uses_engine(config, device)) if is_moe(hf_config) else {}),
        **_fp8_fields(config, hf_config, device),
    )
    _scale_balancing_loss(found.core)
    return found


def _scale_balancing_loss(core: Any) -> None:
    """Give the coefficient of config.json the meaning that it has in transformers.

    There the loss is one of all layers together, and counts a token for each expert that it goes to; in Megatron-Core
    it is the sum over the layers, and a token counts once. Now it is the mean over the layers of transformers' loss.
    """
    if core.num_moe_experts is None or core.moe_router_load_balancing_type == "none":
        return
    freq = core.moe_layer_freq
    layers = sum(freq) if isinstance(freq, list) else sum(i % freq == 0 for i in range(core.num_layers))
    core.moe_aux_loss_coeff *= core.moe_router_topk / max(layers, 1)


def uses_engine(config: TrainEngineConfig, device: torch.device) -> bool:
    """Whether layers are Transformer Engine's. Not under adapters: what it fuses norms with hides its own input."""
    return has_transformer_engine(device) and not config.use_lora


def is_moe(hf_config: Mapping[str, Any]) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(hf_config.get(name) for name in names)


def _device_fields(device: torch.device, overlap: bool) -> dict[str, Any]:
    fields_ = dict(CPU_CONFIG) if device.type == "cpu" else dict(CUDA_CONFIG)
    fields_.pop("moe_token_dispatcher_type", None)
    if device.type == "cuda":
        # Both are Transformer Engine's.
        fields_["gradient_accumulation_fusion"] = False
        fields_["apply_rope_fusion"] = has_transformer_engine(device)
        fields_ |= {"overlap_p2p_comm": overlap, "batch_p2p_comm": not overlap}
    return fields_


def dispatcher(config: TrainEngineConfig, hf_config: Mapping[str, Any], device: torch.device) -> str:
    """How tokens travel to experts. On the CPU by all-gather: Megatron's all-to-all takes its counts from the GPU."""
    if not is_moe(hf_config):
        return "alltoall"  # of no effect; allgather would be refused with rows of different lengths
    return "allgather" if device.type == "cpu" else config.megatron.moe_token_dispatcher_type


def _parallel_fields(
    config: TrainEngineConfig, hf_config: Mapping[str, Any], sizes: ParallelStrategy, device: torch.device
) -> dict[str, Any]:
    megatron, chosen = config.megatron, dispatcher(config, hf_config, device)
    wanted = megatron.sequence_parallel
    # Of two stages with several chunks each is the other's neighbour on both sides, and Megatron-Core (0.16) mixes up
    # the shapes that go to the one and to the other. With all-gathered experts it refuses rows of different lengths.
    variable = sizes.pp_size > 1 and megatron.virtual_pipeline_parallel_size == 1 and chosen != "allgather"
    return {
        "context_parallel_size": sizes.cp_size,
        "sequence_parallel": sizes.tp_size > 1 if wanted is None else wanted,
        "moe_token_dispatcher_type": chosen,
        "variable_seq_lengths": variable,
        "deterministic_mode": megatron.use_deterministic_algorithms,
        "fp32_residual_connection": megatron.fp32_residual_connection,
        "perform_initialization": config.init_from_scratch,
        **({"attention_dropout": 0.0} if config.disable_dropout else {}),
    }


def _recompute_fields(config: TrainEngineConfig) -> dict[str, Any]:
    megatron = config.megatron
    if not config.gradient_checkpointing or megatron.recompute_granularity is None:
        return {}
    full = megatron.recompute_granularity == "full"
    found: dict[str, Any] = {
        "recompute_granularity": megatron.recompute_granularity,
        "recompute_method": megatron.recompute_method if full else None,
        "recompute_num_layers": megatron.recompute_num_layers if full else None,
    }
    if megatron.recompute_modules is not None:
        found["recompute_modules"] = list(megatron.recompute_modules)
    if megatron.distribute_saved_activations is not None:
        found["distribute_saved_activations"] = megatron.distribute_saved_activations
    return found


def _expert_fields(config: TrainEngineConfig, hf_config: Mapping[str, Any], engine: bool) -> dict[str, Any]:
    megatron = config.megatron
    found: dict[str, Any] = {
        "moe_router_dtype": megatron.moe_router_dtype,
        "moe_shared_expert_overlap": megatron.moe_shared_expert_overlap,
        "moe_permute_fusion": megatron.moe_permute_fusion,
        "moe_router_fusion": megatron.moe_router_fusion,
        # A frozen model is what its adapters are for.
        "moe_router_bias_update_rate": 0.0 if config.use_lora else megatron.moe_router_bias_update_rate,
        "moe_z_loss_coeff": megatron.moe_z_loss_coeff,
        "moe_grouped_gemm": engine,
    }
    if megatron.moe_enable_deepep:
        found["moe_flex_dispatcher_backend"] = "deepep"
    if hf_config.get("output_router_logits"):  # config.json asks for the balancing loss
        found["moe_router_load_balancing_type"] = "aux_loss"
        found["moe_aux_loss_coeff"] = float(hf_config.get("router_aux_loss_coef") or 0.0)
    return found


def _fp8_fields(config: TrainEngineConfig, hf_config: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    if config.megatron.fp8_config is None:
        return {}
    from . import fp8

    return fp8.transformer_fields(config.megatron.fp8_config, hf_config, device, dtype=config.dtype)


def ddp_config(config: TrainEngineConfig) -> DistributedDataParallelConfig:
    """Megatron's DDP, field by field. A class of ours has the same names."""
    from megatron.core.distributed import DistributedDataParallelConfig as Core

    ours = config.megatron.ddp
    values = {field.name: getattr(ours, field.name) for field in fields(ours)}
    known(Core, values)
    return Core(**values)


def optimizer_config(config: TrainEngineConfig, optimizer: OptimizerConfig) -> CoreOptimizerConfig:
    """`min_lr` and the schedule are ours: rates are written into the groups before every step."""
    from megatron.core.optimizer import OptimizerConfig as Core

    megatron = config.megatron
    precision = {
        name: getattr(torch, getattr(megatron, name))
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    }
    extra = {} if megatron.fp8_config is None else {"fp8_recipe": megatron.fp8_config.recipe}
    values: dict[str, Any] = dict(
        optimizer="adam" if optimizer.type == "adam" else "sgd",
        lr=optimizer.lr,
        min_lr=0.0,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        sgd_momentum=optimizer.beta1,
        bf16=config.dtype == "bfloat16",
        fp16=config.dtype == "float16",
        params_dtype=getattr(torch, config.dtype),
        initial_loss_scale=optimizer.initial_loss_scale,
        min_loss_scale=optimizer.min_loss_scale,
        loss_scale_window=optimizer.loss_scale_window,
        hysteresis=optimizer.hysteresis,
        clip_grad=optimizer.gradient_clipping,
        use_distributed_optimizer=megatron.ddp.use_distributed_optimizer,
        overlap_param_gather=megatron.ddp.overlap_param_gather,
        overlap_param_gather_with_optimizer_step=megatron.overlap_param_gather_with_optimizer_step,
        use_precision_aware_optimizer=megatron.use_precision_aware_optimizer,
        **precision,
        **extra,
    )
    known(Core, values)
    return Core(**values)


# ------------------------------------------------------------------------------------------------ the model


def padded_vocabulary(size: int, tp: int) -> int:
    """Rows of the embedding: Megatron-LM's multiple of 128·tp, or of tp where that leaves a rank without a token."""
    for multiple in (VOCABULARY_MULTIPLE * tp, tp):
        padded = -(-size // multiple) * multiple
        if size > padded - padded // tp:
            return padded
    raise ConfigError(f"tensor_parallel_size={tp}: the {size} tokens of the vocabulary leave a rank without one.")


def make_model(
    core: MegatronConfig, vocabulary: int, attention: str, device: torch.device, *, engine: bool
) -> list[nn.Module]:
    """This rank's chunks on the device, with padded vocabulary, ready to be filled. `engine`: of Transformer Engine's
    layers."""
    chunks: Any = build_model(
        core,
        vocab_size=padded_vocabulary(vocabulary, core.core.tensor_model_parallel_size),
        adapt=None if engine else partial(adapt, attention=attention),
        transformer_engine=engine,
        model_class=mtp.model_class() if core.core.mtp_num_layers else None,
    )
    _mark_cut_parameters(chunks)
    if core.core.expert_tensor_parallel_size != core.core.tensor_model_parallel_size:
        _mark_expert_parameters(chunks)
    routers.count_tokens_alone(chunks)
    return [chunk.to(device) for chunk in chunks]


def _mark_cut_parameters(chunks: list[nn.Module]) -> None:
    """Say which parameters tensor parallel ranks have parts of.

    Megatron-Core says it while it draws initial values. Under `perform_initialization=False` every matrix would pass
    for a replica, and the gradient norm leave out those of all ranks but the first.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in (module for chunk in chunks for module in chunk.modules()):
        dim = next((dim for kind, dim in dims.items() if isinstance(module, kind)), None)
        weight: Any = getattr(module, "weight", None)
        if dim is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _mark_expert_parameters(chunks: list[nn.Module]) -> None:
    """Have the gradients of experts reduced over the ranks that have the same experts.

    Megatron-Core (0.16) tells experts from the rest by expert parallelism alone. Without it, and with experts that are
    not cut over the tensor parallel ranks, each of these has whole experts and a part of the tokens: nobody would add
    up their gradients.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if getattr(module, "is_expert", False):
            for parameter in module.parameters(recurse=False):
                parameter.allreduce = False  # type: ignore[attr-defined]


def wrap(chunks: list[nn.Module], core: Any, config: TrainEngineConfig) -> list[nn.Module]:
    """Each chunk in Megatron's DDP, and the schedules told how gradients are reduced."""
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

    ddp = ddp_config(config)
    early = config.megatron.overlap_param_gather_with_optimizer_step
    wrapped: list[Any] = [
        DistributedDataParallel(core, ddp, chunk, disable_bucketing=n > 0 or early) for n, chunk in enumerate(chunks)
    ]

    def each(name: str) -> Callable[..., Any] | list[Callable[..., Any]]:
        found = [getattr(chunk, name) for chunk in wrapped]
        return found[0] if len(found) == 1 else found

    if ddp.overlap_grad_reduce:
        core.no_sync_func = each("no_sync")
    if ddp.overlap_param_gather and ddp.align_param_gather:
        core.param_sync_func = each("start_param_sync")
    core.finalize_model_grads_func = finalize_model_grads
    return wrapped
