"""What a model is made of, read from its config.json: every field is used, refused or known to mean nothing.

A field that changes what the model computes and that these models cannot express is an error with its name. What says
nothing about the computation (token ids, generation defaults, versions) is passed over; a field that nobody knows is
passed over when it is off (None, false, 0, empty), and an error when it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...converter.errors import ConfigError, Problems

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RopeArgs:
    """Rotary embedding. `kind` default, linear, llama3 or yarn; the other fields are those of transformers."""

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GqaArgs:
    """Grouped-query attention; MHA and MQA are its ends."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MlaArgs:
    """Multi-head latent attention. `q_rank` None: the query has no low-rank pair. `scale` multiplies the scores."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool = True
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MoeArgs:
    """Routed experts.

    width, shared_width  of each expert, and of the one that every token visits (0: there is none)
    shared_gate          a sigmoid gate in front of that one
    score                softmax or sigmoid of the router's logits
    normalize            the chosen weights are made to sum to 1
    scale                multiplies the chosen weights
    groups, top_groups   experts are chosen within the best groups
    bias                 a bias for the choice alone, moved to balance experts without an auxiliary loss
    """

    experts: int
    top_k: int
    width: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    bias: bool = False
    shared_width: int = 0
    shared_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """A whole decoder.

    windows   of each layer: how many tokens it sees back, None for all
    sparse    of each layer: whether its MLP is made of experts
    ignored   what the config announces and these models leave out without changing the logits
    """

    family: str
    vocab: int
    hidden: int
    layers: int
    width: int
    eps: float
    tied: bool
    attention: GqaArgs | MlaArgs
    rope: RopeArgs
    windows: tuple[int | None, ...]
    sparse: tuple[bool, ...]
    moe: MoeArgs | None = None
    initializer_range: float = 0.02
    ignored: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------ reading

_WORDS = """
    architectures auto_map bos_token_id dtype eos_token_id finetuning_task gradient_checkpointing id2label is_decoder
    is_encoder_decoder label2id max_position_embeddings model_type name_or_path output_attentions output_hidden_states
    pad_token_id prefix problem_type pruned_heads quantization_config return_dict sep_token_id task_specific_params
    tokenizer_class torch_dtype torchscript transformers_version use_cache use_bfloat16 use_return_dict
    chunk_size_feed_forward cross_attention_hidden_size add_cross_attention tie_encoder_decoder tf_legacy_loss
    do_sample early_stopping max_length min_length num_beams num_beam_groups num_return_sequences temperature top_k
    top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    diversity_penalty forced_bos_token_id forced_eos_token_id remove_invalid_values return_dict_in_generate
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens output_scores decoder_start_token_id
    router_aux_loss_coef aux_loss_alpha seq_aux ep_size pretraining_tp qk_head_dim
    """
_MEANINGLESS = frozenset(_WORDS.split())
"""Fields that do not change logits here: token ids, generation, storage, and the weight of an auxiliary loss that only
`output_router_logits` (refused) turns on. `max_position_embeddings` matters to yarn alone, which reads it."""


@dataclass
class Fields:
    """The fields of a config.json, and which of them have been asked for. Findings are collected."""

    given: Config
    problems: Problems = field(default_factory=Problems)
    asked: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value; None counts as absent."""
        self.asked.add(name)
        value = self.given.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None, *, alias: str = "") -> int:
        """A whole number of at least 1; `alias` is another spelling. Missing without a default, it is a finding."""
        value = self.get(name, self.get(alias, default) if alias else default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            what = "is missing" if value is None else f"{value!r}, expected a number of at least 1"
            self.problems.add(name, what, "the model's config.json has to say it" if value is None else "")
            return 1
        return value

    def number(self, name: str, default: float) -> float:
        """A number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.problems.add(name, f"{value!r}, expected a number")
            return default
        return float(value)

    def only(self, name: str, value: Any, why: str) -> None:
        """Absent, off where `value` is, or this very value: there is no other here."""
        found = self.get(name, value)
        if found != value:
            self.problems.add(name, f"{found!r}, and {why}", f"{name}={value!r} is what there is")

    def rest(self) -> None:
        """Everything that nobody asked for and that is not known to mean nothing."""
        for name, value in self.given.items():
            known = name in self.asked | _MEANINGLESS or name.startswith("_") or name.endswith("_version")
            if not known and value:
                hint = "if it does not change the logits, take it out of config.json"
                self.problems.add(name, f"{value!r}: the model of this engine has no such thing", hint)


def begin(config: Config) -> Fields:
    """Fields of a config, with what no family here has refused."""
    fields = Fields(config)
    fields.only("hidden_act", "silu", "only SiLU-gated MLPs are there")
    fields.only("output_router_logits", False, "there is no auxiliary loss: experts are balanced by the router's bias")
    fields.only("mlp_bias", False, "MLPs have no biases")
    fields.only("is_causal", True, "attention is causal")
    return fields


def finish(fields: Fields, args: ModelArgs) -> ModelArgs:
    """`args`, when everything in the config was understood. Raises ConfigError with all findings."""
    fields.rest()
    if not fields.problems:
        _check(args, fields.problems)
    fields.problems.raise_as(ConfigError, f"This {args.family} cannot be built by the archon engine:")
    return args


def _check(args: ModelArgs, problems: Problems) -> None:
    """Sizes that contradict each other, where each alone is one."""
    attention, moe = args.attention, args.moe
    if isinstance(attention, GqaArgs) and attention.heads % attention.kv_heads:
        what = f"{attention.kv_heads} does not divide num_attention_heads={attention.heads}"
        problems.add("num_key_value_heads", what)
    if args.rope.dim % 2:
        problems.add("head_dim", f"{args.rope.dim} rotary dimensions do not come in pairs")
    if moe is None:
        return
    if moe.groups > 1 and (moe.experts % moe.groups or moe.experts < 2 * moe.groups):
        what = f"{moe.groups} groups of {moe.experts} experts, expected whole groups of at least two"
        problems.add("n_group", what)
    elif moe.top_groups > moe.groups:
        problems.add("topk_group", f"{moe.top_groups} of {moe.groups} groups")
    elif moe.top_k > moe.experts // moe.groups * moe.top_groups:
        within = f"{moe.experts // moe.groups * moe.top_groups} experts to choose from"
        problems.add("num_experts_per_tok", f"{moe.top_k}, and there are {within}")


def read_gqa(fields: Fields, *, qk_norm: bool = False, qkv_bias: bool | None = None) -> GqaArgs:
    """`qkv_bias` None: as `attention_bias` says, and then the output has one too."""
    heads = fields.size("num_attention_heads")
    bias = bool(fields.get("attention_bias", False)) if qkv_bias is None else qkv_bias
    return GqaArgs(
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=fields.size("head_dim", fields.size("hidden_size") // heads),
        qkv_bias=bias,
        o_bias=bias and qkv_bias is None,
        qk_norm=qk_norm,
        dropout=fields.number("attention_dropout", 0.0),
    )


def read_rope(fields: Fields, dim: int, theta: float = 10000.0) -> RopeArgs:
    """Rotary parameters in any of their spellings: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    outer = fields.number("rope_theta", theta)
    stated = [fields.get(name, {}) for name in ("rope_parameters", "rope_scaling")]
    rope = Fields(stated[0] or stated[1], fields.problems)
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope.only("partial_rotary_factor", 1.0, "all of a head is rotated")
    args: dict[str, Any] = {"dim": dim, "theta": rope.number("rope_theta", outer), "kind": kind}
    if kind in ("linear", "llama3"):
        args["factor"] = _stated(rope, "factor")
    if kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
        args |= {name: _stated(rope, name) for name in names}
        args["original_length"] = rope.size("original_max_position_embeddings")
    elif kind == "yarn":
        args |= _yarn(fields, rope)
    elif kind not in ("default", "linear"):
        fields.problems.add("rope_type", f"{kind!r}: no such rotary embedding here", "default, linear, llama3, yarn")
    rope.asked |= {"mscale", "mscale_all_dim", "rope_theta"}
    if kind in ("default", "linear", "llama3", "yarn"):
        rope.rest()
    return RopeArgs(**args)


def _stated(rope: Fields, name: str) -> float:
    """A number that this kind of rotary embedding cannot do without."""
    if rope.get(name) is None:
        rope.problems.add(f"rope_parameters.{name}", "is missing")
    return rope.number(name, 1.0)


def _yarn(fields: Fields, rope: Fields) -> dict[str, Any]:
    from .rotary import yarn_scale

    longest = fields.get("max_position_embeddings", 0)
    original = rope.size("original_max_position_embeddings", longest or None)
    factor = rope.number("factor", longest / original)
    mscale, everywhere = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    both = mscale and everywhere
    usual = yarn_scale(factor, mscale) / yarn_scale(factor, everywhere) if both else yarn_scale(factor)
    return {
        "factor": factor,
        "original_length": original,
        "beta_fast": rope.number("beta_fast", 32.0) or 32.0,
        "beta_slow": rope.number("beta_slow", 1.0) or 1.0,
        "truncate": bool(rope.get("truncate", True)),
        "attention_factor": rope.number("attention_factor", usual),
    }


def read_windows(
    fields: Fields, layers: int, *, switched: bool, by_layer: bool = False, usual: int | None = None
) -> tuple[int | None, ...]:
    """How far each layer sees back.

    switched  `sliding_window` counts only when `use_sliding_window` says so
    by_layer  layers from `max_window_layers` on have a window, the others none
    usual     the window of a config that has no field for it; null in the field is none
    """
    window = fields.get("sliding_window", None if "sliding_window" in fields.given else usual)
    kinds = fields.get("layer_types", [])
    first = fields.get("max_window_layers", 28)
    on = bool(fields.get("use_sliding_window", not switched)) and bool(window)
    if kinds:
        known = {"full_attention": None, "sliding_attention": window if on else None}
        if set(kinds) - known.keys() or len(kinds) != layers:
            what = f"{kinds!r}, expected full_attention or sliding_attention for each of {layers} layers"
            fields.problems.add("layer_types", what)
            return (None,) * layers
        return tuple(known[kind] for kind in kinds)
    return tuple(window if on and (not by_layer or layer >= first) else None for layer in range(layers))


def sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Qwen's words: every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""
    step, dense = fields.size("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
