"""Rotary embeddings and sliding windows, from a `config.json` to Megatron's arguments and back.

Megatron: megatron/core/models/common/embeddings/{rotary_pos_embedding,yarn_rotary_pos_embedding}.py, the fields of
MLATransformerConfig, and, for YaRN without MLA (arguments from 0.19 on), megatron/training/argument_utils.py,
`_apply_yarn_config_from_args`. Transformers: modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Fields = dict[str, Any]
Given = Mapping[str, Any]

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What `--use-rope-scaling` means; all but the factor are constants of Megatron-Core (`_apply_scaling`)."""

MLA_DEFAULTS = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
"""MLATransformerConfig's, for arguments that do not say. The three in the middle have no flag on the command line."""


def scale_of(factor: float, mscale: float) -> float:
    """YaRN's attention scale, as DeepSeek's code, transformers and Megatron-Core all have it."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_of(config: Given) -> Fields:
    """The rotary parameters, whichever of its spellings a config uses; `rope_type` and `rope_theta` are there."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = config.get("rope_theta", 1e6 if config.get("model_type") == "mixtral" else 1e4)
    return {name: value for name, value in rope.items() if value is not None}


def _whole(number: float) -> float:
    """As an int where it is one: Megatron's `--rotary-base` is."""
    return int(number) if float(number).is_integer() else number


# ------------------------------------------------------------------------------------------------ to arguments


def gqa_args(config: Given) -> Fields:
    """Rotary arguments of a model without MLA."""
    rope = rope_of(config)
    kind = rope["rope_type"]
    args: Fields = {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "use_rotary_position_embeddings": kind != "yarn",
        "rotary_base": _whole(rope["rope_theta"]),
        "rotary_percent": float(rope.get("partial_rotary_factor", 1.0)),
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": float(rope.get("factor", 8.0)) if kind == "llama3" else LLAMA3["factor"],
        "rotary_seq_len_interpolation_factor": _whole(rope["factor"]) if kind == "linear" else None,
    }
    if kind == "yarn":
        args |= _yarn(rope, config) | {"yarn_correction_range_round_to_int": bool(rope.get("truncate", True))}
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
            args[f"yarn_{name}"] = args.pop(name)
    return args


def mla_args(config: Given) -> Fields:
    """Rotary arguments of a model with MLA, whose attention computes its own embedding."""
    rope = rope_of(config)
    args: Fields = {
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "use_rope_scaling": False,
        "rotary_base": _whole(rope["rope_theta"]),
        "rotary_percent": 1.0,
    }
    if rope["rope_type"] == "yarn":
        return args | {"rope_type": "yarn", **_yarn(rope, config)}
    # Megatron scales the softmax by the factor whether or not the type is YaRN.
    return args | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}


def _yarn(rope: Given, config: Given) -> Fields:
    """YaRN in Megatron's terms. Its factor on cos and sin is scale(mscale) / scale(mscale_all_dim), always;
    transformers takes mscale into account only beside mscale_all_dim, or an explicit `attention_factor`."""
    longest = config.get("max_position_embeddings", 4096)
    original = rope.get("original_max_position_embeddings", longest)
    factor = float(rope.get("factor", longest / original))
    mscale, everywhere = rope.get("mscale"), float(rope.get("mscale_all_dim", 0.0))
    if not (mscale and everywhere) or "attention_factor" in rope:
        wanted = rope.get("attention_factor", scale_of(factor, 1.0)) * scale_of(factor, everywhere)
        mscale = 1.0 if factor <= 1 or wanted == scale_of(factor, 1.0) else (wanted - 1.0) / (0.1 * math.log(factor))
    return {
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": float(mscale or 0.0),
        "mscale_all_dim": everywhere,
    }


def window_args(config: Given, layers: int, family: str) -> Fields:
    """Sliding windows. Hugging Face counts the token itself, Megatron the tokens to its left."""
    window = config.get("sliding_window")
    if family.startswith("qwen") and not config.get("use_sliding_window"):
        window = None
    if not window:
        return {"window_size": None, "window_attn_skip_freq": None}
    kinds = config.get("layer_types")
    if kinds is not None:
        flags = [int(kind == "sliding_attention") for kind in kinds[:layers]]
    elif family in ("qwen2", "qwen3"):
        flags = [int(i >= config.get("max_window_layers", 28)) for i in range(layers)]
    else:
        flags = [1] * layers
    return {"window_size": (int(window) - 1, 0), "window_attn_skip_freq": None if all(flags) else flags}


# ------------------------------------------------------------------------------------------------ to a config


def rope_config(args: Given, *, mla: bool) -> Fields:
    """`rope_parameters` as transformers 5 reads them, `rope_theta` and `rope_scaling` as 4 does."""
    rope = _mla_rope(args) if mla else _gqa_rope(args)
    theta = float(args.get("rotary_base") or 1e4)
    config: Fields = {"rope_theta": theta, "rope_parameters": {"rope_theta": theta, **rope}}
    if rope["rope_type"] != "default":
        config["rope_scaling"] = dict(rope)
    return config


def _gqa_rope(args: Given) -> Fields:
    if args.get("position_embedding_type") == "yarn":
        values = {
            "factor": args.get("rotary_scaling_factor") or args.get("yarn_rotary_scaling_factor") or 1.0,
            "original": args.get("yarn_original_max_position_embeddings") or 4096,
            "fast": args.get("yarn_beta_fast") or 32.0,
            "slow": args.get("yarn_beta_slow") or 1.0,
        }
        rope = _yarn_config(*values.values(), *(_either(args, name, MLA_DEFAULTS[name]) for name in _MSCALES))
        return rope | ({"truncate": False} if args.get("yarn_correction_range_round_to_int") is False else {})
    if args.get("use_rope_scaling"):
        return {"rope_type": "llama3", **LLAMA3, "factor": float(args.get("rope_scaling_factor") or LLAMA3["factor"])}
    if args.get("rotary_seq_len_interpolation_factor"):
        return {"rope_type": "linear", "factor": float(args["rotary_seq_len_interpolation_factor"])}
    return {"rope_type": "default"}


_MSCALES = ("mscale", "mscale_all_dim")


def _either(args: Given, name: str, default: Any) -> Any:
    """An argument that Megatron-LM and Megatron-Bridge (`yarn_…`) spell differently."""
    for key in (name, f"yarn_{name}"):
        if args.get(key) is not None:
            return args[key]
    return default


def _mla_rope(args: Given) -> Fields:
    said = {name: args[name] for name in MLA_DEFAULTS if args.get(name) is not None}
    values = {**MLA_DEFAULTS, **said}
    kind = values.pop("rope_type")
    if kind != "yarn" or values["rotary_scaling_factor"] <= 1:
        return {"rope_type": "default"}  # YaRN by 1 is no scaling at all
    return _yarn_config(*values.values())


def _yarn_config(factor: float, original: int, fast: float, slow: float, mscale: float, everywhere: float) -> Fields:
    rope: Fields = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": int(original),
        "beta_fast": float(fast),
        "beta_slow": float(slow),
    }
    if everywhere:
        rope["mscale_all_dim"] = float(everywhere)
    if everywhere and mscale:
        rope["mscale"] = float(mscale)
    elif everywhere or mscale != 1:
        rope["attention_factor"] = scale_of(factor, mscale) / scale_of(factor, everywhere)
    return rope


def window_config(args: Given, layers: int, family: str) -> tuple[Fields, str]:
    """The fields of a sliding window, and what is wrong with it ("" for nothing)."""
    size, skip = args.get("window_size"), args.get("window_attn_skip_freq")
    if not size or size[0] < 0:
        return ({"sliding_window": None} if family in ("mistral", "mixtral") else {}), ""
    flags = [1] * layers
    if isinstance(skip, int):
        flags = [int((i + 1) % skip != 0) for i in range(layers)]
    elif skip is not None:
        flags = [int(bool(flag)) for flag in skip]
    window: Fields = {"sliding_window": size[0] + 1}
    if family in ("qwen2", "qwen3", "qwen2_moe"):
        window |= {"use_sliding_window": True, "max_window_layers": flags.index(1) if 1 in flags else layers}
        return window | {"layer_types": ["sliding_attention" if f else "full_attention" for f in flags]}, ""
    if not all(flags) or family not in ("mistral", "mixtral", "qwen3_moe"):
        return {}, f"a sliding window in {sum(flags)} of {layers} layers, which {family} has not"
    return window | ({"use_sliding_window": True} if family == "qwen3_moe" else {}), ""
