"""The configuration of a training engine: `TrainEngineConfig` and its parts.

Names and defaults are AReaL's. Every class checks its own fields as it is made (types, ranges, spellings); what
concerns several fields, the model or the world is `checks.check`'s.
"""

# `option` and `part` are dataclasses.field by another name.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .backends import (
    DTYPES,
    SCHEDULES,
    V_SCHEDULES,
    ArchonEngineConfig,
    ArchonFP8Config,
    DistributedDataParallelConfig,
    Dtype,
    FP8EngineConfig,
    FSDPEngineConfig,
    FSDPWrapPolicy,
    MegatronEngineConfig,
)
from .fields import config, maybe, nothing, of, option, part, settle
from .parallel import ParallelStrategy

__all__ = [
    "SCHEDULES",
    "V_SCHEDULES",
    "ArchonEngineConfig",
    "ArchonFP8Config",
    "DistributedDataParallelConfig",
    "FP8EngineConfig",
    "FSDPEngineConfig",
    "FSDPWrapPolicy",
    "MegatronEngineConfig",
    "MicroBatchSpec",
    "OptimizerConfig",
    "ParallelStrategy",
    "TrainEngineConfig",
]

AttnImpl = Literal["flash_attention_2", "flash_attention_3", "sdpa", "flex_attention", "eager"]


@dataclass(kw_only=True, slots=True)
class MicroBatchSpec:
    """How a batch is split. All data parallel ranks agree on the number of micro-batches."""

    n_mbs: int | None = option(1, "micro-batches, at least", least=1)
    granularity: int = option(1, "adjacent sequences that stay together", least=1)
    max_tokens_per_mb: int | None = option(None, "tokens of one micro-batch, at most; null: no limit", least=1)
    n_mbs_divisor: int = option(1, "the number of micro-batches is a multiple of it", least=1)
    packing_algorithm: Literal["ffd", "kk"] = option("ffd", "first fit decreasing, or Karmarkar-Karp (even sums)")

    def __post_init__(self) -> None:
        settle(self)


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """`adam` is AdamW (decoupled weight decay), as in AReaL."""

    type: Literal["adam", "sgd", "adam_bf16"] = option(
        "adam", "adam (AdamW), sgd, or adam_bf16 (moments in bfloat16, compensated)", names={"adamw": "adam"}
    )
    lr: float = option(1e-3, "peak learning rate", least=0)
    weight_decay: float = option(0.01, "decoupled weight decay", least=0)
    beta1: float = option(0.9, "decay of first moments (momentum for sgd)", least=0, most=1)
    beta2: float = option(0.999, "decay of second moments", least=0, most=1)
    eps: float = option(1e-8, "added to the denominator", least=0)
    min_lr_ratio: float = option(0.0, "last learning rate, as a part of lr", least=0, most=1)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = option("constant", "after the warm-up")
    warmup_steps_proportion: float = option(0.001, "warm-up as a part of all steps", least=0, most=1)
    warmup_steps: int | None = option(None, "warm-up in steps; null: warmup_steps_proportion", least=0)
    initial_loss_scale: float = option(2.0**32, "fp16: first loss scale", above=0)
    min_loss_scale: float = option(1.0, "fp16: smallest loss scale", above=0)
    loss_scale_window: float = option(5, "fp16: steps without overflow before the scale grows", above=0)
    hysteresis: int = option(2, "fp16: overflows before the scale shrinks", least=1)
    gradient_clipping: float = option(1.0, "largest gradient norm; 0: none", least=0)

    def __post_init__(self) -> None:
        settle(self)

    def warmup_of(self, total_steps: int) -> int:
        """Steps of warm-up in a run of so many."""
        return int(self.warmup_steps_proportion * total_steps) if self.warmup_steps is None else self.warmup_steps


@config
class TrainEngineConfig:
    """What an engine needs to know: the model, numerics, micro-batches, optimizer, parallelism, backend."""

    experiment_name: str = option("", "name of the experiment")
    trial_name: str = option("", "name of the trial")
    path: str = option("", "checkpoint: a directory in any format that the hub reads, or hf://OWNER/NAME")
    backend: str = option("", "fsdp, megatron or archon, with an allocation if wanted: fsdp:d4t2")
    parallel_strategy: ParallelStrategy | None = part(
        default_factory=nothing,
        converter=maybe(ParallelStrategy),
        help="sizes; null: those of backend, else all ranks are dp",
    )
    attn_impl: AttnImpl = option("flash_attention_2", "attention of transformers models; sdpa on the CPU")
    use_kernels: bool = option(False, "kernels from the Hub")
    init_from_scratch: bool = option(False, "random weights; path gives config.json only")
    is_critic: bool = option(False, "a value head in place of the vocabulary")
    temperature: float = option(1.0, "logits are divided by it", above=0)
    logprobs_chunk_size: int = option(1024, "tokens whose log-probabilities are computed at a time", least=1)
    mb_spec: MicroBatchSpec = part(default_factory=MicroBatchSpec, converter=of(MicroBatchSpec), help="micro-batches")
    pad_to_maximum: bool = option(False, "pad every micro-batch to max_tokens_per_mb")
    disable_dropout: bool = option(False, "train without dropout")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")
    dtype: Dtype = option("bfloat16", "compute dtype; parameters stay fp32", names=DTYPES)
    grad_reduce_dtype: Dtype = option("float32", "dtype in which gradients are reduced", names=DTYPES)
    optimizer_dtype: Dtype = option("float32", "dtype of parameters and moments that the optimizer sees", names=DTYPES)
    optimizer: OptimizerConfig | None = part(
        default_factory=nothing, converter=maybe(OptimizerConfig), help="null: the engine only evaluates"
    )
    weight_update_mode: Literal["disk", "xccl", "awex"] = option(
        "xccl", "how inference servers get new weights; WeightUpdateMeta says it with each update, and counts"
    )
    enable_delta_weight_update: bool = option(False, "send inference servers only what changed")
    weight_update_delta_method: Literal["adamw"] = option(
        "adamw", "taken, without effect: the digests of blocks find what changed, whatever the optimizer"
    )
    weight_update_anchor_interval: int = option(
        0, "with deltas, every so many updates a whole one; 0: if it must be", least=0
    )
    fsdp: FSDPEngineConfig = part(default_factory=FSDPEngineConfig, converter=of(FSDPEngineConfig), help="FSDP2's own")
    archon: ArchonEngineConfig = part(
        default_factory=ArchonEngineConfig, converter=of(ArchonEngineConfig), help="Archon's own"
    )
    megatron: MegatronEngineConfig = part(
        default_factory=MegatronEngineConfig, converter=of(MegatronEngineConfig), help="Megatron's own"
    )
    offload: bool = option(False, "offload() and onload() move the whole engine out of device memory and back")
    use_lora: bool = option(False, "train low-rank adapters only")
    lora_rank: int = option(32, "rank of the adapters", least=1)
    lora_alpha: int = option(16, "the adapters count alpha/rank times", least=1)
    target_modules: list[str] = option([], "modules with adapters; none, or all-linear: every linear layer")
    peft_type: Literal["lora"] = option("lora", "kind of adapter")
    enable_tree_training: bool = option(False, "share the prefixes of a group's sequences")
    seed: int = option(1, "seed of everything random in the engine", least=0)

    def __post_init__(self) -> None:
        settle(self)
