"""What each backend has of its own: FSDPEngineConfig, ArchonEngineConfig, MegatronEngineConfig.

Names and defaults are AReaL's. Where this package knows more (pipeline schedules, sizes among Megatron's fields), the
forms that users know work besides.
"""

# `option` and `part` are dataclasses.field by another name.
# ruff: noqa: RUF009

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...converter.errors import ConfigError, Problem
from .fields import config, maybe, nearest, nothing, of, option, part, settle, squash

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "float": "float32"}

SCHEDULES = (
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v",
)  # fmt: skip
SINGLE_SCHEDULES = ("gpipe", "1f1b")
"""One stage a rank."""
V_SCHEDULES = ("zbv_zero_bubble", "dual_pipe_v")
"""Two stages a rank, in the shape of a V: the last stage lives on rank 0."""


def schedule_name(given: str) -> str | None:
    """A pipeline schedule's one name: `DualPipeV`, `ScheduleDualPipeV` and `dual-pipe-v` are `dual_pipe_v`. The path
    of a CSV file stays what it is; None for anything unknown."""
    if given.lower().endswith(".csv"):
        return given
    return {squash(name): name for name in SCHEDULES}.get(squash(given).removeprefix("schedule"))


@dataclass(kw_only=True, slots=True)
class FSDPWrapPolicy:
    """Which modules become FSDP units."""

    transformer_layer_cls_to_wrap: list[str] | None = option(None, "class names; null: the model's own choice")

    def __post_init__(self) -> None:
        settle(self)


@config
class FSDPEngineConfig:
    """FSDP2."""

    wrap_policy: FSDPWrapPolicy | None = part(
        default_factory=nothing, converter=maybe(FSDPWrapPolicy), help="which modules become units; null: each layer"
    )
    offload_params: bool = option(False, "keep parameters, gradients and optimizer state in host memory")
    memory_efficient_load: bool = option(
        False, "always so here: no rank holds more of the checkpoint than its own boxes"
    )
    per_layer_optim_step: bool = option(False, "stream the optimizer state layer by layer through the device (Adam)")
    optim_step_prefetch_layers: int = option(1, "layers fetched ahead by per_layer_optim_step", least=0)
    shard_vision_across_sp: bool = option(False, "share a vision tower's images among the ranks of a sequence")
    reshard_after_forward: bool = option(True, "free gathered parameters between forward and backward")
    enable_compile: bool = option(False, "torch.compile for each layer")

    def __post_init__(self) -> None:
        settle(self)


@dataclass(kw_only=True, slots=True)
class ArchonFP8Config:
    """Archon's FP8 matrix products."""

    mode: Literal["disabled", "blockwise"] = option("disabled", "blockwise: 128×128 scales")
    exclude_modules: list[str] = option(["output", "router", "score"], "modules that stay in the compute dtype")
    include_experts: bool = option(False, "experts too")
    use_triton: bool = option(True, "taken, without effect: the products are cuBLAS's")

    def __post_init__(self) -> None:
        settle(self)


@config
class ArchonEngineConfig:
    """Torch-native parallelism with a model of its own."""

    attn_type: Literal["varlen", "sdpa", "tree"] = option("varlen", "attention; sdpa where varlen has no kernel (CPU)")
    offload_params: bool = option(False, "keep parameters, gradients and optimizer state in host memory")
    enable_compile: bool = option(False, "torch.compile for each layer")
    ac_mode: Literal["none", "full", "selective", "memory_budget"] = option("selective", "activation checkpointing")
    selective_ac_option: str = option("op", "op, or every n-th layer")
    ac_memory_budget: float = option(0.5, "share of activations kept by memory_budget", least=0, most=1)
    ac_preserve_rng_state: bool = option(False, "the same dropout when recomputed")
    ac_debug: bool = option(False, "record what is recomputed")
    pp_schedule: str = option("interleaved_1f1b", "pipeline schedule, in any spelling, or the path of a CSV file")
    pp_layers_per_stage: int | None = option(None, "null: one or two stages a rank, as the schedule needs", least=1)
    pp_first_stage_less_layers: int = option(1, "layers that the embedding counts as", least=0)
    pp_last_stage_less_layers: int = option(1, "layers that the output counts as", least=0)
    reshard_after_forward_policy: Literal["default", "always", "never"] = option(
        "default", "free gathered parameters between forward and backward; default: not under pipelining"
    )
    fp8_config: ArchonFP8Config = part(default_factory=ArchonFP8Config, converter=of(ArchonFP8Config), help="FP8")
    use_deterministic_algorithms: bool = option(False, "deterministic kernels, slower")
    moe_router_dtype: Literal["fp32"] | None = option("fp32", "dtype of the router; null: the compute dtype")
    moe_router_bias_update_rate: float = option(
        1e-3, "how far a step moves the biases that balance experts (DeepSeek V3's rate); 0: they stay", least=0
    )

    def __post_init__(self) -> None:
        settle(self)
        name = schedule_name(self.pp_schedule)
        if name is None:
            what = f"{self.pp_schedule!r}, expected one of {', '.join(SCHEDULES)}, or a CSV file"
            hint = nearest(self.pp_schedule.lower(), SCHEDULES)
            problem = Problem("pp_schedule", what, hint if hint.startswith("did") else "")
            raise ConfigError("ArchonEngineConfig has mistakes.", [problem])
        self.pp_schedule = name


@dataclass(kw_only=True, slots=True)
class DistributedDataParallelConfig:
    """Megatron's DDP wrapper."""

    grad_reduce_in_fp32: bool = option(True, "reduce gradients in fp32")
    overlap_grad_reduce: bool = option(False, "reduce while the backward pass runs")
    overlap_param_gather: bool = option(False, "gather parameters while the forward pass runs")
    align_param_gather: bool = option(False, "all stages gather at the same time")
    use_distributed_optimizer: bool = option(True, "shard optimizer state over data parallel ranks")
    check_for_nan_in_grad: bool = option(False, "stop at NaN")
    bucket_size: int | None = option(None, "elements of a bucket; null: Megatron's own", least=1)
    average_in_collective: bool = option(False, "average as part of the collective")
    fp8_param_gather: bool = option(False, "gather parameters in FP8")

    def __post_init__(self) -> None:
        settle(self)


@dataclass(kw_only=True, slots=True)
class FP8EngineConfig:
    """FP8 by Transformer Engine, for Megatron."""

    mode: Literal["e4m3", "hybrid"] = option("e4m3", "hybrid: e5m2 for gradients")
    recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = option("delayed", "how scales are found")
    param: bool = option(False, "keep parameters in FP8")
    margin: int = option(0, "margin of the scaling factor", least=0)
    amax_history_len: int = option(1, "steps of history for delayed scaling", least=1)
    amax_compute_algo: Literal["most_recent", "max"] = option("most_recent", "which of the history counts")
    wgrad: bool = option(True, "weight gradients in FP8")
    dot_product_attention: bool = option(False, "attention's products in FP8")
    multi_head_attention: bool = option(False, "the whole attention in FP8")
    tp_only_amax_red: bool = option(False, "reduce amax over tensor parallel ranks only")
    first_last_layers_bf16: bool = option(False, "first and last layers in bfloat16")
    num_layers_at_start_in_bf16: int = option(1, "how many at the start", least=0)
    num_layers_at_end_in_bf16: int = option(1, "how many at the end", least=0)
    direct_convert: bool = option(True, "move FP8 weights without a detour over bfloat16")

    def __post_init__(self) -> None:
        settle(self)


@config
class MegatronEngineConfig:
    """Megatron-Core.

    The sizes may stand here, as they do in Megatron's own configurations: they are the same thing as
    `parallel_strategy`, and a contradiction between the two is refused. `use_fp8=True` is `fp8_config={}`.
    """

    tensor_parallel_size: int | None = option(None, "as in parallel_strategy; null: not said here", least=1)
    pipeline_parallel_size: int | None = option(None, "as in parallel_strategy", least=1)
    context_parallel_size: int | None = option(None, "as in parallel_strategy", least=1)
    expert_parallel_size: int | None = option(None, "as in parallel_strategy", least=1)
    expert_tensor_parallel_size: int | None = option(None, "as in parallel_strategy", least=1)
    virtual_pipeline_parallel_size: int = option(1, "chunks of layers on each pipeline rank", least=1)
    num_layers_in_first_pipeline_stage: int | None = option(None, "layers there, where not as many", least=1)
    num_layers_in_last_pipeline_stage: int | None = option(None, "layers there, where not as many", least=1)
    pipeline_model_parallel_layout: str | None = option(
        None, "which stage has what, E|t*2|t*2|L: E embedding, t layer, L loss; null: even stages"
    )
    sequence_parallel: bool | None = option(None, "shard norms over the sequence; null: where tensor_parallel_size > 1")
    overlap_p2p_comm: bool = option(False, "send between pipeline stages while they compute; needs chunks (VPP)")
    tp_comm_overlap: bool = option(False, "overlap tensor parallel communication with matrix products")
    fp32_residual_connection: bool = option(False, "residual stream in fp32")
    wrap_with_ddp: bool = option(True, "Megatron's DDP wrapper")
    use_torch_fsdp2: bool = option(False, "torch's FSDP2 in place of DDP")
    use_custom_fsdp: bool = option(False, "Megatron's FSDP in place of DDP")
    ddp: DistributedDataParallelConfig = part(
        default_factory=DistributedDataParallelConfig,
        converter=of(DistributedDataParallelConfig),
        help="the DDP wrapper",
    )
    overlap_param_gather_with_optimizer_step: bool = option(False, "gather parameters while the optimizer steps")
    use_precision_aware_optimizer: bool = option(False, "optimizer state in the dtypes below")
    main_grads_dtype: Dtype = option("float32", "dtype of main gradients", names=DTYPES)
    main_params_dtype: Dtype = option("float32", "dtype of master parameters", names=DTYPES)
    exp_avg_dtype: Dtype = option("float32", "dtype of first moments", names=DTYPES)
    exp_avg_sq_dtype: Dtype = option("float32", "dtype of second moments", names=DTYPES)
    async_save: bool = option(False, "write checkpoints in the background")
    use_checkpoint_opt_param_scheduler: bool = option(True, "take the schedule from the checkpoint")
    use_deterministic_algorithms: bool = option(False, "deterministic kernels, slower")
    recompute_granularity: Literal["full", "selective"] | None = option("full", "activation checkpointing")
    recompute_method: Literal["uniform", "block"] | None = option("uniform", "which layers are recomputed")
    recompute_num_layers: int | None = option(1, "layers of one recomputed unit", least=1)
    distribute_saved_activations: bool | None = option(None, "share saved activations among tensor parallel ranks")
    recompute_modules: list[str] | None = option(None, "modules recomputed when selective")
    moe_router_dtype: Literal["fp32", "fp64"] | None = option("fp32", "dtype of the router; null: the compute dtype")
    moe_shared_expert_overlap: bool = option(False, "shared experts while tokens travel")
    moe_enable_deepep: bool = option(False, "DeepEP kernels")
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = option("alltoall", "how tokens travel")
    moe_permute_fusion: bool = option(False, "fused permutation")
    moe_router_fusion: bool = option(False, "fused router")
    moe_router_bias_update_rate: float = option(0.0, "update of the router's expert bias", least=0)
    moe_z_loss_coeff: float | None = option(None, "weight of the router's z loss", least=0)
    enable_chunked_logits: bool = option(False, "logits in chunks of lm_head_loss_chunk_size")
    entropy_requires_grad: bool = option(False, "gradients through the entropy")
    lm_head_loss_chunk_size: int = option(0, "tokens of a chunk; 0: all at once", least=0)
    enable_fp32_lm_head: bool = option(False, "output layer in fp32")
    cross_entropy_loss_fusion: bool = option(False, "fused cross entropy")
    use_fp8: bool = option(False, "FP8 with the defaults of fp8_config")
    fp8_config: FP8EngineConfig | None = part(
        default_factory=nothing, converter=maybe(FP8EngineConfig), help="FP8; null: none"
    )
    bridge_type: Literal["mbridge", "megatron-bridge"] = option("mbridge", "taken, without effect: the hub loads")
    use_mbridge_save: bool = option(False, "taken, without effect: the hub saves")
    use_bridge_for_update_weights: bool = option(False, "taken, without effect: the hub syncs")
    disable_grad_buffers_cpu_backup: bool = option(False, "drop gradient buffers when offloaded")
    enable_mtp: bool = option(False, "train multi-token prediction layers")
    mtp_loss_coeff: float = option(0.1, "weight of the multi-token prediction loss", least=0)

    def __post_init__(self) -> None:
        settle(self)
        if self.use_fp8 and self.fp8_config is None:
            self.fp8_config = FP8EngineConfig()
        self.use_fp8 = self.fp8_config is not None
