"""The command line of a Megatron-LM run that builds the model which a set of arguments describes.

`--use-checkpoint-args` takes only some of the arguments out of a checkpoint (megatron/training/checkpointing.py,
`load_args_from_checkpoint`): neither the norms' epsilon nor `--qk-layernorm`, nothing of MLA, of rotary scaling, of the
gate of shared experts, of windows, of groups of experts, and until 0.19 nothing of MTP. A run that does not name them
computes something else without a word. So the whole line is written down.

Flags: megatron/training/arguments.py at core_v0.16.1, `_add_network_size_args` and what it makes of TransformerConfig.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .megatron_rope import LLAMA3, MLA_DEFAULTS, rope_of
from .schema import Dims

_VALUES = tuple(
    name
    for line in (
        "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels max_position_embeddings seq_length",
        "normalization make_vocab_size_divisible_by position_embedding_type rotary_base rotary_percent",
        "rotary_seq_len_interpolation_factor attention_dropout hidden_dropout tokenizer_type",
        "yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow window_size window_attn_skip_freq",
        "num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk",
        "moe_router_score_function moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk",
        "moe_router_dtype q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type",
        "rotary_scaling_factor mscale mscale_all_dim mtp_num_layers",
    )
    for name in line.split()
)
_SWITCHES = tuple(
    name
    for line in (
        "swiglu untie_embeddings_and_output_weights group_query_attention add_qkv_bias qk_layernorm use_rope_scaling",
        "multi_latent_attention moe_router_pre_softmax moe_router_enable_expert_bias moe_shared_expert_gate bf16 fp16",
    )
    for name in line.split()
)


def flags(args: Mapping[str, Any]) -> list[str]:
    """Flags and values for everything about the model, in a fixed order. The mesh is the run's own choice."""
    line: list[str] = []
    for name in _VALUES:
        if args.get(name) is not None and not (name == "moe_layer_freq" and not args.get("num_experts")):
            line += [_flag(name), _value(args[name])]
    line += ["--norm-epsilon", _value(args["layernorm_epsilon"])]
    if args.get("group_query_attention"):
        line += ["--num-query-groups", _value(args["num_query_groups"])]
    if args.get("use_rope_scaling"):
        line += ["--rope-scaling-factor", _value(args["rope_scaling_factor"])]
    line += [_flag(name) for name in _SWITCHES if args.get(name)]
    return line if args.get("add_bias_linear") else [*line, "--disable-bias-linear"]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _value(value: Any) -> str:
    """As Megatron's parsers read it: layer lists as an expression (`([0]*3+[1]*58)`), tuples without blanks."""
    if isinstance(value, list):
        return f"({'+'.join(_runs(value))})"
    return f"({','.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def _runs(values: Sequence[int]) -> list[str]:
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return [f"[{value}]*{count}" for value, count in runs]


# ------------------------------------------------------------------------------------------------ what cannot be said


def unsaid(config: Mapping[str, Any], dims: Dims) -> list[str]:
    """What this model computes and Megatron-LM's arguments cannot express: its run would compute something else."""
    given = {name: value for name, value in config.items() if value is not None}
    reasons = [*_rope_unsaid(given, "c" in dims)]
    if given.get("hidden_act", "silu") != "silu":
        reasons.append(f"hidden_act is {given['hidden_act']!r}, --swiglu means silu")
    if bool(dims.get("o_bias")) != bool(given.get("mlp_bias")):
        reasons.append("biases in attention and MLP: --disable-bias-linear concerns both")
    if dims.get("expert_bias"):
        reasons += _router_unsaid(given)
    if "c" in dims and given.get("rms_norm_eps", 1e-6) != 1e-6:
        reasons.append("rms_norm_eps: transformers normalises the latents of MLA with 1e-6 all the same")
    return reasons


def _router_unsaid(config: Mapping[str, Any]) -> list[str]:
    """megatron/core/transformer/moe/moe_utils.py, `group_limited_topk`; transformers ranks groups by two experts."""
    topk, groups, chosen = (int(config.get(name, 1)) for name in ("num_experts_per_tok", "n_group", "topk_group"))
    reasons = []
    if bool(config.get("norm_topk_prob")) != (topk > 1):
        reasons.append("norm_topk_prob: with a sigmoid router Megatron normalises from two experts on")
    if groups > chosen and topk != 2 * chosen:
        reasons.append(f"topk_group: Megatron ranks groups by their best {topk} // {chosen} experts, not by two")
    return reasons


def _rope_unsaid(config: Mapping[str, Any], mla: bool) -> list[str]:
    """The GPT builder of 0.16 and 0.17 passes neither `--rope-scaling-factor` nor the interpolation factor on; three
    of MLA's fields have no flag at all."""
    rope = rope_of(config)
    kind = rope["rope_type"]
    if kind == "default":
        return []
    if kind == "linear" and not mla:
        return ["rope_type 'linear': heeded from Megatron-LM 0.18 on"]
    if kind == "yarn" and not mla:
        return ["rope_type 'yarn' without MLA: known from Megatron-LM 0.19 on"]
    if kind == "llama3" and not mla:
        fixed = dict(LLAMA3)
    elif kind == "yarn":
        fixed = {name: MLA_DEFAULTS[name] for name in ("original_max_position_embeddings", "beta_fast", "beta_slow")}
        fixed["truncate"] = True
    else:
        return [f"rope_type is {kind!r}"]
    return [
        f"rope {name} is {rope[name]!r}, Megatron-LM has {value!r}{' before 0.18' if name == 'factor' else ''}"
        for name, value in fixed.items()
        if rope.get(name, value) != value
    ]
