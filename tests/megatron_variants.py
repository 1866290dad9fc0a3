"""Configurations of every family, with what a model may have besides, and Megatron's arguments for them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import models
from areal_convert.converter.mesh import Mesh
from areal_convert.mappings import table
from areal_convert.mappings.megatron_args import HINT, args_from_config, config_from_args

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GROUPS = {"num_experts_per_tok": 4}  # Megatron-Core ranks groups by 4 // 2 experts, as transformers does by two
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in models.FAMILIES if name != "llama_rope"},
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "mha": ("llama", {"num_key_value_heads": 8}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral_window": ("mistral", {"sliding_window": 8}),
    "mixtral_window": ("mixtral", {"sliding_window": 8}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3_yarn": ("qwen3", {"rope_parameters": YARN | {"factor": 4.0, "original_max_position_embeddings": 64}}),
    "qwen3_yarn_even": ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.0, "truncate": False}}),
    "qwen2_moe_norm": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen3_moe_plain": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe_window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    "deepseek_yarn": ("deepseek_v3", GROUPS | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_yarn_plain": ("deepseek_v3", GROUPS | {"rope_parameters": YARN}),
    "deepseek_yarn_uneven": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}}),
}


def config_of(variant: str) -> dict[str, Any]:
    """What transformers writes as `config.json` for a model, without the model."""
    from transformers import AutoConfig

    family, changes = VARIANTS.get(variant, (variant, {}))
    fields = {**models._SMALL, **models._SPECS[family], "num_hidden_layers": 4, **changes}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
    return json.loads(json.dumps(config | {"dtype": "float32"}))


def args_of(variant: str, mesh: Mesh | None = None, **options: Any) -> dict[str, Any]:
    config = config_of(variant)
    dims = table(config["model_type"]).dims(config)
    return args_from_config(config, dims, mesh or Mesh(), 1024, dtype="F32", **options)


def derived(args: dict[str, Any], **more: Any) -> tuple[dict[str, Any], str]:
    bare = {name: value for name, value in args.items() if name != HINT}
    found = SimpleNamespace(args=bare, tensors=[], facts={}, format="torch_dist", **more)
    result = config_from_args(found)
    assert result is not None
    return result
