"""Megatron-Bridge's `run_config.yaml`, read and written without Megatron-Bridge.

Beside a `torch_dist` checkpoint, Megatron-Bridge keeps the configuration of its run; `model` in it names the class that
builds the model (`_target_`) and its fields, which are TransformerConfig's (megatron/bridge/training/checkpointing.py,
`save_checkpoint`; model_load_save.py, `load_model_config`). Its training starts from a Megatron-LM checkpoint without
the file, its `AutoBridge.load_megatron_model` and `export_ckpt` do not. Tried with 0.3.1 and 0.6.0; see
docs/dev/megatron-args.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...mappings.megatron_args import args_from_config
from ..remote.mounts import ensure

FILE = "run_config.yaml"
LIMIT = 16 * 1024 * 1024

_PROVIDERS = ("gpt_provider", "mla_provider", "llama", "qwen", "mistral", "deepseek")
"""Modules below `megatron.bridge.models` whose classes set defaults of GPTModelProvider and nothing else."""

_SAME = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization layernorm_epsilon
init_method_std attention_dropout hidden_dropout add_bias_linear add_qkv_bias qk_layernorm position_embedding_type
rotary_base rotary_percent rope_scaling_factor window_size window_attn_skip_freq mtp_num_layers vocab_size bf16 fp16
make_vocab_size_divisible_by moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size
moe_shared_expert_gate moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_enable_expert_bias
moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_dtype multi_latent_attention
q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor mscale
mscale_all_dim original_max_position_embeddings beta_fast beta_slow yarn_original_max_position_embeddings
yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int tensor_model_parallel_size
pipeline_model_parallel_size virtual_pipeline_model_parallel_size expert_model_parallel_size
expert_tensor_parallel_size pipeline_model_parallel_layout
"""
"""Fields that Megatron-LM's arguments and the providers call the same."""

_OTHERWISE = {
    # Megatron-LM's argument → the provider's field.
    "num_experts": "num_moe_experts",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "max_position_embeddings": "seq_length",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
_FIELDS = {**{name: name for name in _SAME.split()}, **_OTHERWISE}

_MODELS = "megatron.bridge.models"
_BLOCK_SPEC = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"


# ------------------------------------------------------------------------------------------------ reading


def read_run_config(where: Path) -> dict[str, Any] | None:
    """Megatron-LM's arguments, as far as the `run_config.yaml` of a checkpoint (or of the directory above) says them.

    Returns None without such a file, and for models that are none of plain GPT's.
    """
    import yaml

    for path in (where / FILE, where.parent / FILE):
        try:
            if path.stat().st_size > LIMIT:
                return None
            ensure(path)
            run = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return None
        model = run.get("model") if isinstance(run, dict) else None
        return _arguments(model) if isinstance(model, dict) and _plain(model) else None
    return None


def _plain(model: Mapping[str, Any]) -> bool:
    target = str(model.get("_target_") or model.get("_builder_") or "")
    inside = target.removeprefix(f"{_MODELS}.").split(".")[0]
    return inside in _PROVIDERS or "megatron.training.models.gpt." in target


def _arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    inner = model.get("transformer")
    said = {**inner, **model} if isinstance(inner, dict) else dict(model)
    # Fields under one name in both, also those that only their refusal concerns.
    args = {name: value for name, value in said.items() if not isinstance(value, dict) and not name.startswith("_")}
    args |= {name: said[theirs] for name, theirs in _OTHERWISE.items() if theirs in said}
    if said.get("position_embedding_type") == "yarn":
        args |= {n: said.get(f"yarn_{n}") for n in ("rotary_scaling_factor", "mscale", "mscale_all_dim")}
    args["group_query_attention"] = said.get("num_query_groups") is not None
    args["untie_embeddings_and_output_weights"] = not said.get("share_embeddings_and_output_weights", True)
    args["swiglu"] = bool(said.get("gated_linear_unit")) and _name(said.get("activation_func")).endswith("silu")
    args["params_dtype"] = _name(said.get("params_dtype")) or None
    return args


def _name(value: Any) -> str:
    """The name of a function or type, which stands as `{_target_: …, _call_: false}`."""
    return str(value.get("_target_", "")) if isinstance(value, dict) else str(value or "")


# ------------------------------------------------------------------------------------------------ writing


def run_config(config: Mapping[str, Any], dims: Mapping[str, int], mesh: Any, vocab: int, dtype: str) -> bytes:
    """The YAML text with which Megatron-Bridge builds this model and loads the checkpoint beside it.

    It stands for weights alone: no optimizer, no random state, no tokenizer (its path is the user's).
    """
    args = args_from_config(config, dims, mesh, vocab, dtype=dtype)
    run = {
        "checkpoint": {
            "_target_": "megatron.bridge.training.config.CheckpointConfig",
            "ckpt_format": "torch_dist",
            "fully_parallel_save": True,
            "save_optim": False,
            "save_rng": False,
        },
        "model": _model(args),
        "tokenizer": {
            "_target_": "megatron.bridge.training.tokenizers.config.TokenizerConfig",
            "tokenizer_type": "HuggingFaceTokenizer",
        },
    }
    return ("\n".join(_lines(run, "")) + "\n").encode()


def _model(args: Mapping[str, Any]) -> dict[str, Any]:
    mla = bool(args["multi_latent_attention"])
    provider = "mla_provider.MLAModelProvider" if mla else "gpt_provider.GPTModelProvider"
    fields: dict[str, Any] = {theirs: args[ours] for ours, theirs in _FIELDS.items() if ours in args}
    if args["position_embedding_type"] == "yarn":
        fields |= {f"yarn_{n}": fields.pop(n) for n in ("rotary_scaling_factor", "mscale", "mscale_all_dim")}
    if not mla:
        fields.pop("multi_latent_attention")
    reference = {"_target_": args["params_dtype"], "_call_": False}
    fields |= {
        "_target_": f"{_MODELS}.{provider}",
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "gated_linear_unit": True,
        "params_dtype": reference,
        "pipeline_dtype": reference,
        "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"],
        "should_pad_vocab": True,
    }
    if args["num_experts"]:
        fields |= {
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
            "transformer_layer_spec": {"_target_": _BLOCK_SPEC, "_partial_": True, "use_transformer_engine": True},
        }
    return fields


def _lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Block style, keys in order, scalars as PyYAML resolves them."""
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, float):  # YAML 1.1 takes 1e-06 for a text: it wants the point
        text = repr(value)
        return text.replace("e", ".0e", 1) if "e" in text and "." not in text else text
    if isinstance(value, int):
        return str(value)
    return "'" + str(value).replace("'", "''") + "'"
