"""Megatron-Core models from Hugging Face configurations: the same forward pass, field for field.

`transformer_config` turns a `config.json` and a mesh into Megatron's configuration, `build_model` builds this rank's
chunks of the GPT model. What Megatron-Core computes differently, or not at all, is an error that names the field:
nothing that matters for the forward pass is left to a default.

The local layer spec is used (no Transformer Engine), so this runs on the CPU too; see `megatron_cpu`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ..converter.errors import ConfigError, Problem
from .megatron_cpu import CPU_CONFIG, quiet

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

__all__ = ["FAMILIES", "MegatronConfig", "build_model", "transformer_config"]

FAMILIES = ("deepseek_v3", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")

_MOE = {"deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe"}
_QKV_BIAS = {"qwen2", "qwen2_moe"}
_QK_NORM = {"qwen3", "qwen3_moe"}


@dataclass(frozen=True)
class MegatronConfig:
    """`core` is what every layer of Megatron-Core is built from, `gpt` what GPTModel takes besides."""

    core: TransformerConfig
    gpt: dict[str, Any]


@dataclass
class _Reader:
    """Reads a configuration and collects everything in it that Megatron-Core cannot do."""

    config: Mapping[str, Any]
    problems: list[Problem] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.config.get(name, default)
        return default if value is None else value

    def need(self, name: str) -> Any:
        value = self.config.get(name)
        if value is None:
            self.refuse(name, "is missing")
        return value

    def refuse(self, name: str, why: str) -> None:
        self.problems.append(Problem(name, why))

    def want(self, name: str, wanted: Any, default: Any) -> None:
        """Refuse every value but `wanted`: Megatron-Core has no other."""
        value = self.get(name, default)
        if value != wanted:
            self.refuse(name, f"is {value!r}, Megatron-Core has only {wanted!r}")


def transformer_config(
    hf_config: Mapping[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    layout: str | None = None,
    first: int | None = None,
    last: int | None = None,
    dtype: torch.dtype = torch.float32,
    mtp: int = 0,
    **overrides: Any,
) -> MegatronConfig:
    """Megatron's configuration of the model that `hf_config` (the contents of a `config.json`) describes.

    `vpp` is the number of chunks per stage (None: not interleaved), `layout` an explicit pipeline layout such as
    `E|t*2|t*2|L`, `first` and `last` the layers of an uneven first and last stage, `etp` None means `tp`, `mtp` the
    number of multi-token-prediction layers that the checkpoint holds. `overrides` are further fields of
    TransformerConfig (optimisations, recomputation); they win.
    """
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    read = _Reader(hf_config)
    family = hf_config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"no Megatron-Core model for model_type {family!r}", hint=f"known: {', '.join(FAMILIES)}")

    core: dict[str, Any] = {
        **CPU_CONFIG,
        "num_layers": read.need("num_hidden_layers"),
        "hidden_size": read.need("hidden_size"),
        "ffn_hidden_size": read.need("intermediate_size"),
        "num_attention_heads": read.need("num_attention_heads"),
        "layernorm_epsilon": read.need("rms_norm_eps"),
        "normalization": "RMSNorm",
        "init_method_std": read.get("initializer_range", 0.02),
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": family in _QKV_BIAS and read.get("qkv_bias", True),
        "qk_layernorm": family in _QK_NORM,
        "hidden_dropout": 0.0,
        "attention_dropout": read.get("attention_dropout", 0.0),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp if etp is None else etp,
        "pipeline_model_parallel_layout": layout,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "mtp_num_layers": mtp or None,
    }
    read.want("hidden_act", "silu", "silu")
    gpt: dict[str, Any] = {
        "max_sequence_length": read.get("max_position_embeddings", 4096),
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": bool(read.get("tie_word_embeddings", False)),
    }
    _biases(read, core)
    if family == "deepseek_v3":
        _mla(read, core)
    else:
        _attention(read, family, core, gpt)
    if family in _MOE:
        _experts(read, family, core)
    if mtp and family != "deepseek_v3":
        read.refuse("mtp", f"{family} has no multi-token-prediction layers")
    if read.problems:
        raise ConfigError(f"Megatron-Core cannot run this {family} model", read.problems)
    config_class = MLATransformerConfig if family == "deepseek_v3" else TransformerConfig
    config = _made(config_class, {**core, **overrides})
    for name, value in gpt.pop("yarn", {}).items():
        setattr(config, name, value)
    return MegatronConfig(config, gpt)


def _made(kind: type[Any], values: dict[str, Any]) -> Any:
    """Raises ConfigError for a field that the installed Megatron-Core does not know, and for what it refuses itself."""
    unknown = sorted(values.keys() - {field.name for field in fields(kind)})
    if unknown:
        what = f"the installed Megatron-Core has no {', '.join(unknown)}"
        raise ConfigError(f"Megatron-Core cannot be configured: {what}.", hint="0.16 and 0.19 are tested.")
    try:
        with warnings.catch_warnings():
            # 0.16 warns of its own default.
            warnings.filterwarnings("ignore", "full scope is deprecated")
            return kind(**values)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"Megatron-Core refuses this configuration: {error}") from error


def _biases(read: _Reader, core: dict[str, Any]) -> None:
    """Biases of output and MLP projections come together (`add_bias_linear`) or not at all."""
    attention, mlp = bool(read.get("attention_bias", False)), bool(read.get("mlp_bias", False))
    if attention != mlp:
        read.refuse("attention_bias, mlp_bias", f"are {attention} and {mlp}, Megatron-Core has both or neither")
    elif attention and read.config.get("model_type") in _MOE:
        read.refuse("attention_bias", "is not possible beside experts without biases")
    core["add_bias_linear"] = attention


def _rope(read: _Reader) -> tuple[dict[str, Any], float]:
    """The rotary parameters (`rope_parameters`, before transformers 5 `rope_scaling`) and their base."""
    rope = dict(read.get("rope_parameters") or read.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.get("rope_theta", read.get("rope_theta"))
    if theta is None:
        read.refuse("rope_theta", "is missing")
        theta = 0.0
    return rope, theta


def _attention(read: _Reader, family: str, core: dict[str, Any], gpt: dict[str, Any]) -> None:
    heads, hidden = read.need("num_attention_heads"), read.need("hidden_size")
    core["num_query_groups"] = read.get("num_key_value_heads", heads)
    core["kv_channels"] = read.get("head_dim", hidden // heads)
    rope, theta = _rope(read)
    gpt["rotary_base"] = theta
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        read.refuse("rope_parameters.partial_rotary_factor", "is not known to this family")
    match rope["rope_type"]:
        case "default":
            pass
        case "linear":
            gpt["seq_len_interpolation_factor"] = rope["factor"]
        case "llama3":
            # Megatron-Core's copy of this formula has all but the factor written into it.
            fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
            for name, value in fixed.items():
                if rope.get(name) != value:
                    read.refuse(f"rope_parameters.{name}", f"is {rope.get(name)!r}, Megatron-Core has only {value}")
            gpt |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        case "yarn":
            gpt |= {"position_embedding_type": "yarn", "yarn": _yarn(read, rope)}
        case other:
            read.refuse("rope_parameters.rope_type", f"{other!r} is not implemented for this attention")
    _window(read, family, core)


def _yarn(read: _Reader, rope: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron-Core looks up in its configuration, without declaring it there, for YaRN outside of MLA."""
    if rope.get("attention_factor") is not None:
        read.refuse("rope_parameters.attention_factor", "is computed by Megatron-Core, not taken")
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope.get(
            "original_max_position_embeddings", read.get("max_position_embeddings")
        ),
        "yarn_beta_fast": rope.get("beta_fast") or 32,
        "yarn_beta_slow": rope.get("beta_slow") or 1,
        "yarn_mscale": rope.get("mscale"),
        "yarn_mscale_all_dim": rope.get("mscale_all_dim"),
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def _window(read: _Reader, family: str, core: dict[str, Any]) -> None:
    window = read.get("sliding_window")
    if family.startswith("qwen") and not read.get("use_sliding_window", False):
        window = None
    if not window:
        return
    # Hugging Face counts the token itself, Megatron-Core those to its left.
    core["window_size"] = (window - 1, 0)
    layers = read.need("num_hidden_layers")
    types = read.get("layer_types")
    if types is None and family in ("qwen2", "qwen3", "qwen2_moe"):
        read.refuse("layer_types", "is missing, and use_sliding_window is set")
    elif types is not None and family.startswith("qwen"):
        core["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in types[:layers]]


def _mla(read: _Reader, core: dict[str, Any]) -> None:
    """Multi-head latent attention."""
    if read.get("q_lora_rank") is not None or read.need("kv_lora_rank") is not None:
        # Transformers builds the norms of the latents without passing it `rms_norm_eps`.
        read.want("rms_norm_eps", 1e-6, 1e-6)
    read.want("rope_interleave", True, True)
    core |= {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": read.config.get("q_lora_rank"),
        "kv_lora_rank": read.need("kv_lora_rank"),
        "qk_head_dim": read.need("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": read.need("qk_rope_head_dim"),
        "v_head_dim": read.need("v_head_dim"),
        # The local attention sizes its output by this.
        "kv_channels": read.need("v_head_dim"),
    }
    rope, theta = _rope(read)
    core["rotary_base"] = theta
    match rope["rope_type"]:
        case "default":
            # Megatron-Core scales the softmax by the factor whether or not the rotary type is YaRN.
            core |= {"rope_type": "rope", "rotary_scaling_factor": 1.0}
        case "yarn":
            if rope.get("attention_factor") is not None:
                read.refuse("rope_parameters.attention_factor", "is computed by Megatron-Core, not taken")
            if rope.get("truncate") is False:
                read.refuse("rope_parameters.truncate", "is False, Megatron-Core always truncates for MLA")
            core |= {
                "rope_type": "yarn",
                "rotary_scaling_factor": rope["factor"],
                "original_max_position_embeddings": rope.get(
                    "original_max_position_embeddings", read.get("max_position_embeddings")
                ),
                "beta_fast": rope.get("beta_fast") or 32,
                "beta_slow": rope.get("beta_slow") or 1,
                "mscale": rope.get("mscale") or 1.0,
                "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
            }
        case other:
            read.refuse("rope_parameters.rope_type", f"{other!r} is not implemented for MLA")


def _experts(read: _Reader, family: str, core: dict[str, Any]) -> None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")  # by family, and by version of transformers
    experts = next((read.config[name] for name in names if read.config.get(name)), None)
    if experts is None:
        read.refuse(", ".join(names), "are all missing")
    topk = read.need("num_experts_per_tok")
    width = read.need("intermediate_size" if family == "mixtral" else "moe_intermediate_size")
    core |= {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": topk,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }
    normalised = family == "mixtral" or bool(read.get("norm_topk_prob", False))
    if family == "deepseek_v3":
        _sigmoid_router(read, topk, normalised, core)
        core["moe_shared_expert_intermediate_size"] = (read.get("n_shared_experts", 0) * (width or 0)) or None
    else:
        if normalised and topk == 1:
            read.refuse("num_experts_per_tok", "is 1 with normalised weights, for which Megatron-Core has no router")
        core |= {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not normalised}
    if family == "qwen2_moe":
        core |= {
            "moe_shared_expert_intermediate_size": read.need("shared_expert_intermediate_size"),
            "moe_shared_expert_gate": True,
        }
    core["moe_layer_freq"] = _moe_layers(read, family)


def _sigmoid_router(read: _Reader, topk: int, normalised: bool, core: dict[str, Any]) -> None:
    if normalised != (topk > 1):
        read.refuse("norm_topk_prob", f"is {normalised} with {topk} experts, Megatron-Core normalises from two on")
    core |= {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": read.get("routed_scaling_factor", 1.0),
        "moe_router_dtype": "fp32",
    }
    groups, chosen = read.get("n_group", 1), read.get("topk_group", 1)
    if groups > 1 and chosen < groups:
        if topk % chosen or topk // chosen != 2:
            read.refuse(
                "topk_group",
                f"{chosen} of {topk} experts: groups are ranked by their best two experts, Megatron-Core takes "
                f"num_experts_per_tok // topk_group = {topk // chosen}",
            )
        core |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _moe_layers(read: _Reader, family: str) -> int | list[int]:
    """1 where every layer has experts (all layers are then stacked in a checkpoint), else one flag per layer.

    DeepSeek always gets the flags, dense layers or not: Megatron-Bridge does so too.
    """
    layers = read.need("num_hidden_layers") or 0
    if family == "deepseek_v3":
        dense = set(range(min(read.get("first_k_dense_replace", 0), layers)))
        step = read.get("moe_layer_freq", 1)
        if step != 1:
            read.refuse("moe_layer_freq", f"is {step!r}, transformers knows only 1")
    elif family == "mixtral":
        dense = set()
    else:
        step, only = read.get("decoder_sparse_step", 1), read.get("mlp_only_layers", [])
        dense = {i for i in range(layers) if i in only or step <= 0 or (i + 1) % step}
    return [int(i not in dense) for i in range(layers)] if dense or family == "deepseek_v3" else 1


@cache
def _mla_core_attention() -> type:
    """Attention with differing widths of key and value.

    MLA passes both to its core attention. Megatron-Core's own local one computes them rightly but does not accept
    the arguments (0.16, 0.19), so that MLA cannot be built from the local spec as it is.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class MlaDotProductAttention(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
            del k_channels, v_channels
            super().__init__(*args, **kwargs)

    return MlaDotProductAttention


Adapt = Callable[[Any, list[Any], "TransformerConfig"], None]
"""Changes a chunk's specs before they are built: TransformerBlockSubmodules, specs of all its layers, the config."""


def build_model(
    config: MegatronConfig,
    *,
    vocab_size: int,
    adapt: Adapt | None = None,
    transformer_engine: bool = False,
    model_class: Any = None,
) -> list[GPTModel]:
    """This rank's part of the model: one GPTModel per virtual chunk. `vocab_size` is the padded size,
    `model_class` one of your own below GPTModel.

    Model parallelism has to be initialised. Parameters hold Megatron's random initial values, or nothing under
    `perform_initialization=False`.
    """
    with quiet():
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel

        # Any: Megatron-Core's own annotations of these functions are wrong.
        specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    core = config.core
    chunks: list[GPTModel] = []
    for chunk in range(core.virtual_pipeline_model_parallel_size or 1):
        stage = chunk if core.virtual_pipeline_model_parallel_size else None
        block = specs.get_gpt_decoder_block_spec(
            core, transformer_engine, normalization=core.normalization, vp_stage=stage
        )
        layers = list(block.layer_specs or [])
        mtp = None
        if core.mtp_num_layers:
            last = specs.get_gpt_decoder_layer_specs(core, transformer_engine, normalization=core.normalization)[-1]
            layers.append(last)
            mtp = specs.get_gpt_mtp_block_spec(core, last, transformer_engine, vp_stage=stage)
        if adapt is not None:
            adapt(block, layers if mtp is None else [*layers, mtp], core)
        elif core.multi_latent_attention and not transformer_engine:
            for layer in layers:
                layer.submodules.self_attention.submodules.core_attention = _mla_core_attention()
        model: GPTModel = (model_class or GPTModel)(
            core,
            block,
            vocab_size,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            mtp_block_spec=mtp,
            vp_stage=stage,
            parallel_output=True,
            **config.gpt,
        )
        chunks.append(_cast(model, core))
    return chunks


def _cast(model: GPTModel, core: TransformerConfig) -> GPTModel:
    """Megatron's Float16Module casts everything, and its trainer restores the biases of the routers to fp32."""
    if core.bf16 or core.fp16:
        model = model.to(core.params_dtype)
        for module in model.modules():
            restore: Any = getattr(module, "_maintain_float32_expert_bias", None)
            if restore is not None:
                restore()
    return model
