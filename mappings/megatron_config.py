"""A `config.json` from Megatron's arguments and the tensors beside them, for checkpoints that carry no other.

Where shapes or names say something, they decide: arguments are what a run was started with, and fields such as
`num_query_groups` keep their defaults where they are not used. What no known family computes is refused by name; a
config that loads but computes something else would be worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .megatron_rope import rope_config, window_config
from .megatron_stored import EMBED, PROJ, QKV, Stored

HINT = "areal_hf_config"
"""The argument in which the whole `config.json` travels. Megatron ignores what it does not know, and saves its own
run's arguments: whoever trains on loses the copy, and never keeps a stale one."""

ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

_HEAD_DIM_DERIVED = {"mixtral", "qwen2", "qwen2_moe"}
"""Families whose published configs leave `head_dim` to hidden size and heads."""

_ONLY: dict[str, tuple[Any, ...]] = {
    # Arguments that change what the model computes, and the values that these families have. Absent ones pass: older
    # versions lack many.
    "apply_layernorm_1p": (False,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "is_hybrid_model": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "mrope_section": (None,),
    "no_rope_freq": (None,),
    "normalization": ("RMSNorm",),
    "openai_gelu": (False,),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "rotary_interleaved": (False,),
    "rotary_percent": (1.0,),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla",),
    "squared_relu": (False,),
    "swiglu": (True,),
}


class Underivable(ValueError):
    """The arguments describe a model, but none of a known family; the message lists all reasons."""


def config_from_args(found: Any) -> tuple[dict[str, Any], str] | None:
    """A `config.json` from a checkpoint's Megatron arguments, and a sentence on what was taken for granted.

    found   `args` (a dict, or None), `tensors` (with `name`, `shape`, `dtype`, `rank`, `chunk`), `format`, `facts`

    Returns None when there are no arguments: names and shapes alone do not tell how many heads there are. Raises
    Underivable when there are, but for a model that no known family describes.
    """
    args = found.args
    if not args:
        return None
    hint = args.get(HINT)
    if _fits(hint, args):
        return dict(hint), "derived from the copy of config.json in Megatron's arguments"
    model = _Model(args, Stored.of(found))
    try:
        config = model.build()
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise Underivable(f"Megatron's arguments are malformed: {error}") from None
    if model.problems:
        raise Underivable("Megatron's arguments describe no model of a known family: " + "; ".join(model.problems))
    said = "; ".join(model.assumed)
    return config, f"derived from Megatron's arguments and the tensors' shapes, as {config['model_type']}: {said}"


def _fits(hint: Any, args: Mapping[str, Any]) -> bool:
    """Whether the copy of a config is one, plain data, and of the model that the arguments describe."""
    if not isinstance(hint, dict) or not isinstance(hint.get("model_type"), str):
        return False
    same = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
    }
    if any(args.get(ours) != hint.get(theirs) for ours, theirs in same.items()):
        return False
    try:
        return json.loads(json.dumps(hint)) == hint
    except (TypeError, ValueError):
        return False


# ------------------------------------------------------------------------------------------------ the model


@dataclass
class _Model:
    """Builds the config; collects what was taken for granted, and what cannot be."""

    args: Mapping[str, Any]
    stored: Stored
    assumed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def build(self) -> dict[str, Any]:
        for name, allowed in _ONLY.items():
            value = self.args.get(name, allowed[0])
            if value not in allowed:
                self.problems.append(f"{name} is {value!r}")
        position = self.get("position_embedding_type", "rope")
        if position not in ("rope", "yarn") and not self.get("use_rotary_position_embeddings"):
            self.problems.append(f"position_embedding_type is {position!r}")
        config = self._sizes()
        if self.problems:
            return config
        family = self._family(config)
        config = {"architectures": [ARCHITECTURES[family]], "model_type": family, **config}
        if family == "deepseek_v3":
            config |= self._mla(config)
        if family in _HEAD_DIM_DERIVED and config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
            del config["head_dim"]
        config |= self._biases(family) | self._experts(family, config["num_hidden_layers"])
        config |= self._window(family, config["num_hidden_layers"])
        config |= rope_config(self.args, mla=family == "deepseek_v3")
        self.assumed.append("token ids are not recorded")
        return config

    def get(self, name: str, default: Any = None) -> Any:
        value = self.args.get(name)
        return default if value is None else value

    def has(self, tensor: str, flag: str) -> bool:
        """Whether the model has a tensor; without any tensors at all, whether the arguments say so."""
        return tensor in self.stored if self.stored.shapes else bool(self.get(flag))

    def settle(self, name: str, measured: int | None, default: int | None = None) -> int:
        """A size: as measured, else as the arguments say, else the default."""
        said = self.args.get(name)
        if measured is not None:
            if isinstance(said, int) and said != measured:
                self.assumed.append(f"{name} is {measured} by the tensors, not {said}")
            return measured
        value = said if isinstance(said, int) and not isinstance(said, bool) else default
        if value is None or value <= 0:
            self.problems.append(f"{name} is {'missing' if value is None else value}")
            return 1
        return value

    def _sizes(self) -> dict[str, Any]:
        stored, rows = self.stored, self.stored.size(EMBED, 0)
        heads = self.settle("num_attention_heads", None)
        config: dict[str, Any] = {
            "hidden_act": "silu",
            "hidden_size": self.settle("hidden_size", stored.size(EMBED, 1)),
            "intermediate_size": self.settle("ffn_hidden_size", stored.half("mlp.linear_fc1.weight")),
            "num_hidden_layers": self.settle("num_layers", stored.layers or None),
            "num_attention_heads": heads,
            "max_position_embeddings": self.settle("max_position_embeddings", None, self.get("seq_length")),
            "rms_norm_eps": float(self.get("layernorm_epsilon", self.get("norm_epsilon", 1e-5))),
            "initializer_range": float(self.get("init_method_std", 0.02)),
            "attention_dropout": 0.0,
            "vocab_size": self._vocabulary(rows),
            "tie_word_embeddings": self._tied(),
            "use_cache": True,
        }
        config["dtype"] = config["torch_dtype"] = self._dtype()
        if not self._latent():
            config |= self._heads(heads, config["hidden_size"])
        return config

    def _dtype(self) -> str:
        names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
        said = str(self.get("params_dtype", "torch.bfloat16")).removeprefix("torch.")
        return names.get(self.stored.dtype, {"half": "float16", "float": "float32"}.get(said, said))

    def _vocabulary(self, rows: int | None) -> int:
        true = self.args.get("vocab_size")
        padded = rows or self.args.get("padded_vocab_size")
        if isinstance(true, int) and true > 0:
            if str(self.get("tokenizer_type", "")).startswith("Null"):
                true += 1  # for its end-of-document token
            if not isinstance(padded, int) or true <= padded:
                return true
        if not isinstance(padded, int):
            self.problems.append("vocab_size and padded_vocab_size are missing")
            return 1
        self.assumed.append(f"the vocabulary has {padded} entries, padding included if there is any")
        return padded

    def _tied(self) -> bool:
        """Per-rank files hold a copy of a tied head on the last of several stages; `torch_dist` never does."""
        said = not self.get("untie_embeddings_and_output_weights", False)
        if not self.stored.shapes:
            return said
        if "output_layer.weight" not in self.stored:
            return True
        return said and self.stored.stages > 1

    def _heads(self, heads: int, hidden: int) -> dict[str, Any]:
        """Head dimension and KV heads: linear_proj has heads × d columns, linear_qkv (heads + 2 × groups) × d rows."""
        columns, rows = self.stored.size(f"{PROJ}.weight", 1), self.stored.size(f"{QKV}.weight", 0)
        if columns is not None and columns % heads:
            self.problems.append(f"linear_proj has {columns} columns, which {heads} heads do not divide")
            return {}
        width = self.settle("kv_channels", columns // heads if columns else None, hidden // heads)
        groups = self.get("num_query_groups", heads) if self.get("group_query_attention") else heads
        if rows is not None:
            extra = rows - heads * width
            groups = extra // (2 * width)
            if groups < 1 or extra % (2 * width) or heads % groups:
                self.problems.append(f"linear_qkv has {rows} rows, which {heads} heads of {width} do not explain")
        return {"num_key_value_heads": groups, "head_dim": width}

    def _latent(self) -> bool:
        return self.has("self_attention.linear_kv_up_proj.weight", "multi_latent_attention")

    def _family(self, config: dict[str, Any]) -> str:
        norm = self.has("self_attention.q_layernorm.weight", "qk_layernorm")
        sparse = self.has("mlp.router.weight", "num_experts")
        if self._latent():
            if not sparse:
                self.problems.append("multi-latent attention without experts")
            return "deepseek_v3"
        if sparse:
            if self.has("mlp.shared_experts.gate_weight", "moe_shared_expert_gate"):
                return "qwen2_moe"
            return "qwen3_moe" if norm else "mixtral"
        if norm:
            return "qwen3"
        if self.has(f"{QKV}.bias", "add_qkv_bias"):
            return "llama" if self.has(f"{PROJ}.bias", "add_bias_linear") else "qwen2"
        if self.get("window_size") or config["hidden_size"] % config["num_attention_heads"]:
            return "mistral"
        self.assumed.append("it is called llama; a mistral without a sliding window is the same model")
        return "llama"

    def _biases(self, family: str) -> dict[str, Any]:
        qkv, out = self.has(f"{QKV}.bias", "add_qkv_bias"), self.has(f"{PROJ}.bias", "add_bias_linear")
        mlp = self.has("mlp.linear_fc1.bias", "add_bias_linear")
        qkv = qkv or (not self.stored.shapes and bool(self.get("add_bias_linear")))
        if mlp and family != "llama":
            self.problems.append(f"biases in the MLP, which {family} has not")
        if family in ("qwen2", "qwen2_moe"):
            if out:
                self.problems.append(f"a bias on the output projection, which {family} has not")
            return {"qkv_bias": qkv} if family == "qwen2_moe" else {}
        if qkv != out or (qkv and family in ("mistral", "mixtral", "deepseek_v3")):
            self.problems.append(f"attention biases in a place where {family} has none")
        config = {} if family in ("mistral", "mixtral") else {"attention_bias": qkv}
        return config | ({"mlp_bias": mlp} if family == "llama" else {})

    # -------------------------------------------------------------------------------------------- experts

    def _experts(self, family: str, layers: int) -> dict[str, Any]:
        if family not in ("deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe"):
            return {}
        config: dict[str, Any] = {"num_experts_per_tok": self.settle("moe_router_topk", None, 2)}
        experts = self.settle("num_experts", self.stored.size("mlp.router.weight", 0))
        measured = self.stored.half("mlp.experts.experts.linear_fc1.weight")
        width = self.settle("moe_ffn_hidden_size", measured, self.args.get("ffn_hidden_size"))
        flags = self._sparse_layers(layers)
        config |= {"router_aux_loss_coef": 0.001, "output_router_logits": False} if family != "deepseek_v3" else {}
        if family == "deepseek_v3":
            config |= {"n_routed_experts": experts, "moe_intermediate_size": width} | self._sigmoid(width, flags)
            return config
        self._refuse_routing(family)
        if family == "mixtral":
            if not all(flags) or self.get("moe_router_pre_softmax", False):
                self.problems.append("dense layers or weights that are not normalised, which mixtral has not")
            return config | {"num_local_experts": experts, "intermediate_size": width}
        if family == "qwen2_moe":
            config["shared_expert_intermediate_size"] = self._shared()
        return config | {
            "num_experts": experts,
            "moe_intermediate_size": width,
            "norm_topk_prob": not self.get("moe_router_pre_softmax", False),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, flag in enumerate(flags) if not flag],
        }

    def _shared(self) -> int:
        return self.settle(
            "moe_shared_expert_intermediate_size",
            self.stored.half("mlp.shared_experts.linear_fc1.weight", whole=True),
        )

    def _refuse_routing(self, family: str) -> None:
        plain = {"score_function": "softmax", "topk_scaling_factor": 1.0, "num_groups": 1}
        for name, value in plain.items():
            if self.get(f"moe_router_{name}", value) != value:
                self.problems.append(f"moe_router_{name} is {self.get(f'moe_router_{name}')!r}, which {family} has not")
        if self.has("mlp.router.expert_bias", "moe_router_enable_expert_bias"):
            self.problems.append(f"a selection bias of experts, which {family} has not")
        shared = self.has("mlp.shared_experts.linear_fc1.weight", "moe_shared_expert_intermediate_size")
        if shared and family != "qwen2_moe":
            self.problems.append(f"shared experts without a gate, which {family} has not")

    def _sparse_layers(self, layers: int) -> list[int]:
        """One flag for each layer. An int N in the arguments means every Nth layer, from the first on."""
        freq = self.get("moe_layer_freq", 1)
        flags = [int(i % freq == 0) for i in range(layers)] if isinstance(freq, int) and freq > 0 else freq
        if self.stored.indexed:
            flags = [int(i in self.stored.sparse) for i in range(layers)]
        if not isinstance(flags, list) or len(flags) != layers or not all(isinstance(f, int) for f in flags):
            self.problems.append(f"moe_layer_freq is {freq!r}, which says nothing about {layers} layers")
            return [1] * layers
        return flags

    def _sigmoid(self, width: int, flags: list[int]) -> dict[str, Any]:
        if self.get("moe_router_score_function", "softmax") != "sigmoid":
            self.problems.append("multi-latent attention with a softmax router")
        first = flags.index(1) if 1 in flags else len(flags)
        if not all(flags[first:]):
            self.problems.append("dense layers between those with experts, which deepseek_v3 has not")
        shared = self._shared() if self.get("moe_shared_expert_intermediate_size") else 0
        if shared % width:
            self.problems.append(f"shared experts of {shared}, no multiple of {width}")
        groups = self.get("moe_router_num_groups", 1)
        return {
            "n_shared_experts": shared // width,
            "first_k_dense_replace": first,
            "moe_layer_freq": 1,
            "n_group": groups,
            "topk_group": self.get("moe_router_group_topk", groups),
            "norm_topk_prob": self.get("moe_router_topk", 2) > 1,
            "routed_scaling_factor": float(self.get("moe_router_topk_scaling_factor", 1.0)),
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": self.stored.mtp if self.stored.shapes else self.get("mtp_num_layers", 0),
        }

    # -------------------------------------------------------------------------------------------- attention

    def _mla(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes of MLA, from the four projections where they lie whole."""
        stored, heads = self.stored, config["num_attention_heads"]
        inside = "self_attention.linear_"
        rank, q_rank = (stored.size(f"{inside}{n}_up_proj.weight", 1, whole=True) for n in ("kv", "q"))
        down, up = (stored.size(f"{inside}kv_{n}_proj.weight", 0, whole=True) for n in ("down", "up"))
        out = stored.size(f"{PROJ}.weight", 1)
        value = out // heads if out else None
        lora = self.has("self_attention.linear_q_up_proj.weight", "q_lora_rank")
        if config["rms_norm_eps"] != 1e-6:
            self.assumed.append("transformers normalises the latents with an epsilon of 1e-6, whatever the config says")
        return {
            "num_key_value_heads": heads,
            "q_lora_rank": self.settle("q_lora_rank", q_rank) if lora else None,
            "kv_lora_rank": self.settle("kv_lora_rank", rank),
            "qk_nope_head_dim": self.settle("qk_head_dim", up // heads - value if up and value else None),
            "qk_rope_head_dim": self.settle("qk_pos_emb_head_dim", down - rank if down and rank else None),
            "v_head_dim": self.settle("v_head_dim", value),
            "rope_interleave": True,
        }

    def _window(self, family: str, layers: int) -> dict[str, Any]:
        fields, problem = window_config(self.args, layers, family)
        if problem:
            self.problems.append(problem)
        return fields
