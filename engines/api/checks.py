"""`check`: can this backend run this configuration, with this model, on so many ranks?

Pure functions, asked before any process group is made. Everything that cannot be is collected; whatever another
backend could run is said with its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...converter.errors import ConfigError, Problems
from .allocation import TRAINING
from .backends import SCHEDULES, SINGLE_SCHEDULES, V_SCHEDULES
from .configs import TrainEngineConfig
from .fields import nearest
from .parallel import ParallelStrategy
from .topology import check_world, joined_sizes

__all__ = ["TP_FAMILIES", "check", "sequence_divisor"]

TP_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
    "archon": ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"),
}
"""The `model_type`s that a backend can run with tensor parallelism: of fsdp some, of archon all that it has."""

_CAN = {
    "pipeline parallelism": ("megatron", "archon"),
    "expert parallelism": ("megatron", "archon"),
    "FP8": ("megatron", "archon"),
    "replicas of shards (HSDP)": ("fsdp", "archon"),
    "chunks of layers on a pipeline rank (VPP)": ("megatron",),
}

_NOBODY = {
    "use_kernels": "kernels from the Hub",
    "enable_tree_training": "training on trees of sequences",
}
"""Fields of AReaL's that no backend here honours: switched on, they are refused and not ignored."""


@dataclass
class _Case:
    """What is being checked."""

    config: TrainEngineConfig
    model: Mapping[str, Any]
    backend: str
    device: str
    problems: Problems = field(default_factory=Problems)
    sizes: ParallelStrategy = field(default_factory=ParallelStrategy)

    def refuse(self, what: str, name: str, value: object) -> None:
        """This backend lacks `what`; say who has it."""
        if self.backend not in _CAN[what]:
            can = " and ".join(_CAN[what])
            self.problems.add(name, f"{value}: {self.backend} has no {what}", f"{can} can")

    def divides(self, size: int, what: str, number: int | None, by: str) -> None:
        if number is not None and number % size:
            self.problems.add(by, f"{size} does not divide {what}={number}", f"sizes that do: {_divisors(number)}")

    def number(self, *names: str) -> int | None:
        """The first of these fields of config.json that is there."""
        found = (self.model.get(name) for name in names)
        return next((value for value in found if isinstance(value, int)), None)


def _divisors(number: int, most: int = 64) -> str:
    return ", ".join(str(n) for n in range(1, min(number, most) + 1) if number % n == 0) or "none"


def check(
    config: TrainEngineConfig,
    hf_config: Mapping[str, Any],
    world_size: int,
    backend: str,
    *,
    parallel_strategy: ParallelStrategy | None = None,
    device: str = "",
) -> ParallelStrategy:
    """The sizes of the run, when this backend can run it.

    `hf_config` is the model's config.json; what it does not say is not checked. `device` is "cpu" or "cuda" where that
    is known. `parallel_strategy` takes the place of `config.parallel_strategy`. Raises ConfigError with everything that
    cannot be, each with the field that says it.
    """
    if backend not in TRAINING:
        raise ConfigError(f"{backend!r} is no training backend.", hint=nearest(backend, TRAINING))
    case = _Case(config, hf_config.get("text_config") or hf_config, backend, device)
    sizes = joined_sizes(config, backend, world_size, parallel_strategy, case.problems)
    try:
        case.sizes = ParallelStrategy(**sizes)
    except ConfigError as error:
        case.problems.found += error.problems
        # The experts' sizes are what contradicts itself; the others can be looked at without them.
        dense = {name: size for name, size in sizes.items() if "expert" not in name and "replicate" not in name}
        case.sizes = ParallelStrategy(**dense)
    check_world(case.sizes, world_size, case.problems)
    for rule in _RULES:
        rule(case)
    case.problems.raise_as(ConfigError, f"The {backend} engine cannot run this configuration.")
    return case.sizes


# ------------------------------------------------------------------------------------------------ the backend


def _capabilities(case: _Case) -> None:
    config, sizes = case.config, case.sizes
    if sizes.pp_size > 1:
        case.refuse("pipeline parallelism", "pipeline_parallel_size", sizes.pp_size)
    if sizes.ep_size > 1 or sizes.etp_size > 1:
        name = "expert_parallel_size" if sizes.ep_size > 1 else "expert_tensor_parallel_size"
        case.refuse("expert parallelism", name, max(sizes.ep_size, sizes.etp_size))
    if sizes.dp_replicate_size > 1:
        case.refuse("replicas of shards (HSDP)", "data_parallel_replicate_size", sizes.dp_replicate_size)
    if config.megatron.virtual_pipeline_parallel_size > 1:
        chunks = config.megatron.virtual_pipeline_parallel_size
        case.refuse("chunks of layers on a pipeline rank (VPP)", "megatron.virtual_pipeline_parallel_size", chunks)
    if config.megatron.fp8_config is not None:
        _fp8(case, "megatron", "megatron.fp8_config")
    if config.archon.fp8_config.mode != "disabled":
        _fp8(case, "archon", "archon.fp8_config.mode")
    if case.backend == "fsdp" and config.fsdp.shard_vision_across_sp:
        case.problems.add("fsdp.shard_vision_across_sp", "the models of this engine have no vision tower", "false")
    for name, what in _NOBODY.items():
        if getattr(config, name):
            case.problems.add(name, f"{what}: no backend here has it", f"{name}=false")


def _fp8(case: _Case, owner: str, name: str) -> None:
    """FP8 was asked for in the part of `owner`."""
    if case.backend == "fsdp":
        case.refuse("FP8", name, "FP8")
    elif case.backend != owner:
        case.problems.add(name, f"FP8 was asked of {owner}, and this is the {case.backend} engine", _FP8_FIELDS)
    elif case.device == "cpu":
        case.problems.add(name, "FP8 needs a GPU", f"{name}=null" if owner == "megatron" else f"{name}=disabled")


_FP8_FIELDS = "megatron.fp8_config and archon.fp8_config are the fields"


def _attention(case: _Case) -> None:
    config = case.config
    if case.backend == "fsdp" and case.device == "cpu" and config.attn_impl not in ("sdpa", "eager"):
        what = (
            f"{config.attn_impl} has no {'backward pass on' if config.attn_impl.startswith('flex') else 'kernel for'}"
        )
        case.problems.add("attn_impl", f"{what} the CPU", "attn_impl=sdpa")
    if case.backend == "archon":
        if case.device == "cpu" and config.archon.attn_type == "varlen":
            case.problems.add("archon.attn_type", "varlen has no kernel for the CPU", "archon.attn_type=sdpa")
        if config.archon.attn_type == "tree":
            case.problems.add("archon.attn_type", f"tree: {_NOBODY['enable_tree_training']}: no backend here has it")
        latent = case.number("kv_lora_rank") is not None
        if latent and config.archon.attn_type == "varlen" and config.attn_impl != "flex_attention":
            what = "latent attention has values of another width than keys, which flash kernels do not take"
            case.problems.add("archon.attn_type", what, "attn_impl=flex_attention, or archon.attn_type=sdpa")


# ------------------------------------------------------------------------------------------------ the model's numbers


def _heads(case: _Case) -> None:
    """Whole heads to every rank: first over tensor, then (Ulysses) over context parallel ranks, where KV heads are
    repeated until they go round, which they do when the query heads do."""
    tp, cp = case.sizes.tp_size, case.sizes.cp_size
    heads = case.number("num_attention_heads", "n_head")
    latent = case.number("kv_lora_rank") is not None  # every head makes its own keys and values
    groups = heads if latent else case.number("num_key_value_heads", "num_kv_heads") or heads
    if heads is None or groups is None:
        return
    case.divides(tp, "num_attention_heads", heads, "tensor_parallel_size")
    if groups % tp and not latent:
        shared = tp % groups == 0
        if case.backend != "megatron" or not shared:
            hint = f"sizes that do: {_divisors(groups)}" + ("; megatron can, it repeats them" if shared else "")
            case.problems.add("tensor_parallel_size", f"{tp} does not divide num_key_value_heads={groups}", hint)
    if cp == 1 or case.backend == "megatron" or heads % tp:
        return
    mine = heads // tp
    if mine % cp:
        what = f"{cp} does not divide the {mine} attention heads that each of tp={tp} ranks has"
        hint = f"sizes that do: {_divisors(mine)}; megatron can, it cuts the sequence and not the heads"
        case.problems.add("context_parallel_size", what, hint)


def _widths(case: _Case) -> None:
    tp = case.sizes.tp_size
    family = case.model.get("model_type")
    known = TP_FAMILIES.get(case.backend)
    if case.backend == "archon" and known and family and family not in known:
        hint = f"those with one: {', '.join(known)}; fsdp trains whatever transformers has"
        case.problems.add("model_type", f"archon has no model {family!r}", hint)
    elif tp > 1 and family and known and family not in known:
        others = " and ".join(name for name in TRAINING if name != case.backend)
        hint = f"those with one: {', '.join(known)}; {others} may have one"
        case.problems.add(
            "tensor_parallel_size", f"{tp}: {case.backend} has no tensor parallel plan for {family}", hint
        )
    if case.backend != "fsdp":  # which cuts matrices unevenly where it has to
        case.divides(tp, "intermediate_size", case.number("intermediate_size"), "tensor_parallel_size")
        case.divides(tp, "shared_expert_intermediate_size", _shared_width(case), "tensor_parallel_size")
    if (vocabulary := case.number("vocab_size")) is not None and vocabulary < tp:
        case.problems.add("tensor_parallel_size", f"{tp} is more than vocab_size={vocabulary}")


def _shared_width(case: _Case) -> int | None:
    width, shared = case.number("moe_intermediate_size"), case.number("n_shared_experts")
    return case.number("shared_expert_intermediate_size") or (width * shared if width and shared else None)


def _experts(case: _Case) -> None:
    ep, etp = case.sizes.ep_size, case.sizes.etp_size
    experts = case.number("num_experts", "num_local_experts", "n_routed_experts")
    if ep > 1 and case.model and experts is None:
        case.problems.add("expert_parallel_size", f"{ep}, and the model has no experts", "expert_parallel_size=1")
    case.divides(ep, "the number of experts", experts, "expert_parallel_size")
    if case.backend == "fsdp":  # deals whole experts to the tensor parallel ranks
        case.divides(case.sizes.tp_size, "the number of experts", experts, "tensor_parallel_size")
    elif experts is not None:
        inner = case.number("moe_intermediate_size", "intermediate_size")
        case.divides(etp, "moe_intermediate_size", inner, "expert_tensor_parallel_size")
    if case.backend == "archon" and ep > 1:
        _archon_experts(case)


def _archon_experts(case: _Case) -> None:
    """Experts fold into dp_shard, context and (unless they are cut by etp themselves) tensor parallel ranks."""
    sizes, name = case.sizes, "expert_parallel_size"
    ep, etp, tp, cp = sizes.ep_size, sizes.etp_size, sizes.tp_size, sizes.cp_size
    if etp not in (1, tp):
        case.problems.add("expert_tensor_parallel_size", f"{etp}, expected 1 or tensor_parallel_size={tp}")
        return
    inner = cp if etp == tp else cp * tp
    ranks = sizes.dp_shard_size * inner
    if ep % inner or ranks % ep:
        fits = ", ".join(str(n) for n in range(inner, ranks + 1, inner) if ranks % n == 0)
        case.problems.add(name, f"{ep} is no multiple of {inner} that divides {ranks}", f"sizes that are: {fits}")


# ------------------------------------------------------------------------------------------------ layers and sequences


def _stages(case: _Case) -> None:
    config, pp = case.config, case.sizes.pp_size
    layers = case.number("num_hidden_layers", "n_layer")
    if case.backend == "megatron":
        chunks = config.megatron.virtual_pipeline_parallel_size
        if chunks > 1 and pp == 1:
            name = "megatron.virtual_pipeline_parallel_size"
            case.problems.add(name, f"{chunks} chunks on each pipeline rank, and no pipeline", "pipeline_parallel_size")
        if layers is not None and layers < pp * chunks and config.megatron.pipeline_model_parallel_layout is None:
            what = f"{pp}·{chunks} = {pp * chunks} chunks of layers, and num_hidden_layers={layers}"
            case.problems.add("pipeline_parallel_size", what)
    if case.backend == "archon" and pp > 1:
        _archon_stages(case, layers)


def _archon_stages(case: _Case, layers: int | None) -> None:
    """As `archon.schedules.plan_pipeline` deals layers out; a schedule from a CSV file is looked at there."""
    archon, pp, name = case.config.archon, case.sizes.pp_size, case.config.archon.pp_schedule
    halves = f"{name} runs the backward pass in two halves"
    if archon.enable_compile and ("zero_bubble" in name or name == "dual_pipe_v"):
        what = f"{halves}, which torch.compile cannot cut"
        case.problems.add("archon.enable_compile", what, "archon.enable_compile=false")
    if archon.reshard_after_forward_policy == "always" and ("zero_bubble" in name or name == "dual_pipe_v"):
        what = f"{halves}, between which FSDP would lose the gradients of parameters that it has freed"
        case.problems.add("archon.reshard_after_forward_policy", what, "default or never")
    if layers is None or name not in SCHEDULES:
        return
    first, last = archon.pp_first_stage_less_layers, archon.pp_last_stage_less_layers
    counted = layers + first + last
    usual = pp if name in SINGLE_SCHEDULES else 2 * pp
    stages = -(-counted // archon.pp_layers_per_stage) if archon.pp_layers_per_stage else usual
    exact = name in (*SINGLE_SCHEDULES, *V_SCHEDULES)
    if stages != usual if exact else stages % pp:
        wanted = f"{usual}" if exact else f"a multiple of {pp}"
        what = f"{archon.pp_layers_per_stage} gives {stages} stages, {name} needs {wanted}"
        case.problems.add("archon.pp_layers_per_stage", what)
        return
    each, over = divmod(counted, stages)
    if each < max(last, 1 if stages > 2 else 0) or each + (over > 0) < first:
        what = f"{name} makes {stages} stages of {pp} ranks, and num_hidden_layers={layers}"
        case.problems.add("pipeline_parallel_size", what, "some stage would have no layer")


def _recomputation(case: _Case) -> None:
    """As `archon.checkpointing` does it, where `gradient_checkpointing` turns it on."""
    archon = case.config.archon
    if case.backend != "archon" or not case.config.gradient_checkpointing:
        return
    option = archon.selective_ac_option
    if archon.ac_mode == "memory_budget" and not archon.enable_compile:
        what = "memory_budget is the compiler's choice, and archon.enable_compile is false"
        case.problems.add("archon.ac_mode", what, "archon.enable_compile=true, or archon.ac_mode=selective")
    if archon.ac_mode == "selective" and option != "op" and not (option.isdecimal() and int(option) > 0):
        what = f"{option!r}, expected op, or a number of blocks of at least 1"
        case.problems.add("archon.selective_ac_option", what)
    if archon.ac_mode == "selective" and option == "op" and archon.ac_debug:
        what = "torch records nothing where single operations are chosen (ac_mode=selective, op)"
        case.problems.add("archon.ac_debug", what, "archon.ac_mode=full records")


def sequence_divisor(backend: str, sizes: ParallelStrategy) -> int:
    """Tokens of a micro-batch are padded to a multiple of it: tensor and context parallel ranks get even parts."""
    twice = backend == "megatron" and sizes.cp_size > 1  # each rank has a part of the front and one of the back
    return sizes.tp_size * sizes.cp_size * (2 if twice else 1)


def _sequences(case: _Case) -> None:
    spec, sizes = case.config.mb_spec, case.sizes
    divisor = sequence_divisor(case.backend, sizes)
    limit = spec.max_tokens_per_mb
    if case.config.pad_to_maximum and limit is None:
        case.problems.add("pad_to_maximum", "there is no maximum", "mb_spec.max_tokens_per_mb")
    if limit is not None and (limit < divisor or (case.config.pad_to_maximum and limit % divisor)):
        what = f"{limit}, and tp{sizes.tp_size}·cp{sizes.cp_size} cut micro-batches into {divisor} even parts"
        case.problems.add("mb_spec.max_tokens_per_mb", what, f"a multiple of {divisor}")


# ------------------------------------------------------------------------------------------------ optimizer, adapters


def _optimizer(case: _Case) -> None:
    config = case.config
    optimizer, layerwise = config.optimizer, case.backend == "fsdp" and config.fsdp.per_layer_optim_step
    if optimizer is not None and config.dtype == "float16" and case.backend != "megatron":
        what = f"{config.dtype}: {case.backend} does not scale losses, small gradients would be lost"
        case.problems.add("dtype", what, "dtype=bfloat16; megatron can")
    if optimizer is not None and optimizer.type == "adam_bf16" and case.backend != "fsdp":
        case.problems.add("optimizer.type", f"{case.backend} has no adam_bf16", "fsdp can")
    if config.optimizer_dtype != "float32" and case.backend != "fsdp":
        what = f"{config.optimizer_dtype}: {case.backend} keeps its own dtypes"
        case.problems.add(
            "optimizer_dtype", what, "megatron.main_params_dtype" if case.backend == "megatron" else "fsdp can"
        )
    if layerwise and optimizer is not None and optimizer.type != "adam":
        case.problems.add("fsdp.per_layer_optim_step", f"streams the state of adam, and not of {optimizer.type}")
    if layerwise and config.fsdp.offload_params:
        what = "offload_params keeps the optimizer state in host memory already"
        case.problems.add("fsdp.per_layer_optim_step", what, "set one of the two")


def _lora(case: _Case) -> None:
    config = case.config
    if not config.use_lora:
        return
    if case.backend == "archon" and config.archon.fp8_config.mode != "disabled":
        what = "products in FP8 take no adapters"
        case.problems.add("use_lora", what, "archon.fp8_config.mode=disabled")
    if case.backend == "megatron" and config.megatron.fp8_config is not None:
        what = "FP8 is Transformer Engine's, whose layers take no adapters"
        case.problems.add("use_lora", what, "megatron.fp8_config=null")
    if case.backend == "fsdp" and config.fsdp.per_layer_optim_step:
        what = "adapters have too little state to stream layer by layer"
        case.problems.add("fsdp.per_layer_optim_step", what, "false under use_lora")
    if config.is_critic:
        case.problems.add("use_lora", "a critic's value head is no adapter and would not be trained", "use_lora=false")
    if config.init_from_scratch:
        case.problems.add("use_lora", "adapters of random weights are of no use to anybody", "init_from_scratch=false")


_RULES = (_capabilities, _attention, _heads, _widths, _experts, _stages, _sequences, _recomputation, _optimizer, _lora)
