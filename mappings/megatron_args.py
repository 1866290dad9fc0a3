"""Megatron's arguments for a Hugging Face model: what a run needs in order to build it from the checkpoint alone.

Names are those of Megatron-LM core_v0.16.1 to core_v0.19 (megatron/training/arguments.py, and the fields of
megatron/core/transformer/transformer_config.py, which became arguments of the same name in 0.16). Which of them
`--use-checkpoint-args` takes: megatron/training/checkpointing.py, `load_args_from_checkpoint`. The way back is
`megatron_config`; the same facts with their sources: docs/dev/megatron-args.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .megatron_config import HINT, Underivable, config_from_args
from .megatron_rope import gqa_args, mla_args, window_args
from .schema import Dims
from .sizes import moe
from .torch_dist import always_indexed

__all__ = ["HINT", "Underivable", "args_from_config", "config_from_args"]

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_QK_NORM = {"qwen3", "qwen3_moe"}
_SEQUENCE = 4096
"""A training length is no property of a model. Megatron asks for one; its own loaders of Hugging Face models write this
one too (tools/checkpoint/loader_llama_mistral.py, loader_mixtral_hf.py)."""

_PLAIN: dict[str, Any] = {
    # What no family here has. A run takes several of them by force, tools read the others without a default
    # (Megatron-Bridge, megatron/bridge/training/mlm_compat/arguments.py).
    "add_position_embedding": True,
    "apply_layernorm_1p": False,
    "apply_query_key_layer_scaling": False,
    "bias_gelu_fusion": True,
    "bias_swiglu_fusion": True,
    "config_logger_dir": "",
    "context_parallel_size": 1,
    "cp_comm_type": ["p2p"],
    "experimental_attention_variant": None,
    "fp16_lm_cross_entropy": False,
    "fp8_param_gather": False,
    "heterogeneous_layers_config_path": None,
    "hidden_dropout": 0.0,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "init_method_xavier_uniform": False,
    "is_hybrid_model": False,
    "layernorm_zero_centered_gamma": False,
    "moe_latent_size": None,
    "no_persist_layer_norm": False,
    "normalization": "RMSNorm",
    "overlap_p2p_comm": False,
    "qk_l2_norm": False,
    "quick_geglu": False,
    "rotary_interleaved": False,
    "spec": None,
    "squared_relu": False,
    "swiglu": True,
    # Weights only: a run that resumes from here is not to ask for the rest.
    "no_save_optim": True,
    "no_save_rng": True,
    "tokenizer_model": None,
    "tokenizer_type": "HuggingFaceTokenizer",
}


def args_from_config(
    config: Mapping[str, Any],
    dims: Dims,
    mesh: Any,
    vocab: int,
    *,
    dtype: str = "BF16",
    family: str = "",
    ckpt_format: str = "torch_dist",
    spec: str = "te",
    grouped: bool | None = None,
) -> dict[str, Any]:
    """The arguments that a Megatron run needs in order to build this model with `--use-checkpoint-args`.

    config, dims  the model; `family` its table's name, where `model_type` says something else
    mesh, vocab   what the checkpoint is cut for, and the padded vocabulary that it holds
    ckpt_format   Megatron's name of the format: `torch_dist`, or `torch` for per-rank files
    spec, grouped whose names the experts and norms of per-rank files have; None leaves the choice to the run

    `params_dtype` is the text "torch.bfloat16"; whoever writes the pickle makes a reference of it.
    """
    family = family or str(config.get("model_type", ""))
    given = {name: value for name, value in config.items() if value is not None}
    if family == "mistral" and "sliding_window" not in config:
        given["sliding_window"] = 4096  # transformers' default; an explicit null means none
    args = {**_PLAIN, **_sizes(given, dims, vocab, mesh.tp)}
    args |= _mla(given, dims) if "c" in dims else _gqa(given, dims, family)
    args |= _experts(given, dims, family) if dims.get("e") else {"num_experts": None, "moe_layer_freq": 1}
    args |= _parallel(mesh, dims["layers"])
    name = _DTYPES.get(dtype, "bfloat16")
    return args | {
        "params_dtype": f"torch.{name}",
        "bf16": name == "bfloat16",
        "fp16": name == "float16",
        "ckpt_format": ckpt_format,
        "transformer_impl": "transformer_engine" if spec == "te" else "local",
        "moe_grouped_gemm": grouped if dims.get("e") else False,
        HINT: dict(config),
    }


def _sizes(config: Mapping[str, Any], dims: Dims, vocab: int, tp: int) -> dict[str, Any]:
    longest = int(config.get("max_position_embeddings", _SEQUENCE))
    return {
        "num_layers": dims["layers"],
        "mtp_num_layers": dims["mtp"] or None,
        "hidden_size": dims["h"],
        "ffn_hidden_size": dims["f"] or dims.get("m") or None,
        "num_attention_heads": dims["n"],
        "max_position_embeddings": longest,
        "seq_length": min(longest, _SEQUENCE),
        # The command line knows it as norm_epsilon, as do versions before 0.16.
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "init_method_std": config.get("initializer_range", 0.02),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "untie_embeddings_and_output_weights": not dims["tied"],
        "vocab_size": dims["v"],
        "padded_vocab_size": vocab,
        "make_vocab_size_divisible_by": _divisor(dims["v"], vocab, tp),
    }


def _divisor(true: int, padded: int, tp: int) -> int:
    """The number that, times TP, pads the true vocabulary to the stored one: 128, Megatron's default, where it does."""
    for candidate in (128, 64, 32, 16, 8, 4, 2, 1):
        if -(-true // (candidate * tp)) * candidate * tp == padded:
            return candidate
    return max(padded // tp, 1)


# ------------------------------------------------------------------------------------------------ attention


def _gqa(config: Mapping[str, Any], dims: Dims, family: str) -> dict[str, Any]:
    everywhere = bool(dims.get("o_bias")) and bool(config.get("mlp_bias"))
    return {
        "multi_latent_attention": False,
        "group_query_attention": dims["g"] != dims["n"],
        "num_query_groups": dims["g"],
        "kv_channels": dims["d"],
        "add_bias_linear": everywhere,
        "add_qkv_bias": bool(dims.get("qkv_bias")) and not everywhere,
        "qk_layernorm": family in _QK_NORM,
        **gqa_args(config),
        **window_args(config, dims["layers"], family),
    }


def _mla(config: Mapping[str, Any], dims: Dims) -> dict[str, Any]:
    """Multi-head latent attention. `kv_channels` is what the local attention sizes its output by."""
    nope = dims["y"] - dims["w"]
    return {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "num_query_groups": dims["n"],
        "q_lora_rank": dims["a"] or None,
        "kv_lora_rank": dims["c"],
        "qk_head_dim": nope,
        "qk_pos_emb_head_dim": dims["k"] - nope,
        "v_head_dim": dims["w"],
        "kv_channels": dims["w"],
        "qk_layernorm": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        **mla_args(config),
    }


# ------------------------------------------------------------------------------------------------ experts and mesh


def _experts(config: Mapping[str, Any], dims: Dims, family: str) -> dict[str, Any]:
    sigmoid = bool(dims.get("expert_bias"))
    normalised = bool(config.get("norm_topk_prob")) or family == "mixtral"
    shared = dims.get("s") or None
    flags = [int(moe(dims, layer)) for layer in range(dims["layers"])]
    groups, chosen = int(config.get("n_group", 1)), int(config.get("topk_group", 1))
    grouped = sigmoid and 1 <= chosen < groups
    return {
        "num_experts": dims["e"],
        "moe_ffn_hidden_size": dims["m"],
        # A list means one name for each layer in torch_dist, an int stacked layers: it has to say what was written.
        "moe_layer_freq": flags if always_indexed((), dims) else 1,
        "moe_router_topk": int(config["num_experts_per_tok"]),
        "moe_router_pre_softmax": not sigmoid and not normalised,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor", 1.0)) if sigmoid else None,
        "moe_router_num_groups": groups if grouped else None,
        "moe_router_group_topk": chosen if grouped else None,
        "moe_router_dtype": "fp32" if sigmoid else None,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": bool(shared) and not sigmoid,
    }


def _parallel(mesh: Any, layers: int) -> dict[str, Any]:
    """The mesh. Megatron takes virtual stages as layers in each, or, where stages are uneven, as their number; with a
    layout it takes neither."""
    uneven, virtual = mesh.first is not None or mesh.last is not None, mesh.vpp > 1 and mesh.layout is None
    return {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "virtual_pipeline_model_parallel_size": mesh.vpp if mesh.vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": layers // (mesh.pp * mesh.vpp) if virtual and not uneven else None,
        "num_virtual_stages_per_pipeline_rank": mesh.vpp if virtual and uneven else None,
        "decoder_first_pipeline_num_layers": mesh.first,
        "decoder_last_pipeline_num_layers": mesh.last,
        "pipeline_model_parallel_layout": mesh.layout,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.expert_tp,
    }
