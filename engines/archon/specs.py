"""The families: what each one's config.json means, how its modules are cut, and which layers go to which stage.

Adding a family is a function from config.json to ModelArgs, and a line in SPECS; its tensor names are its table in
`mappings/`, under the same name.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ...converter.errors import ConfigError, Problems
from ..api.fields import nearest
from .args import (
    Config,
    Fields,
    GqaArgs,
    MlaArgs,
    ModelArgs,
    MoeArgs,
    begin,
    finish,
    read_gqa,
    read_rope,
    read_windows,
    sparse_layers,
)
from .model import Decoder, Head, Part
from .rotary import yarn_scale


class Cut(Enum):
    """What tensor parallelism does to a module. Between blocks every rank has a slice of the sequence; a `BLOCK`
    gathers it, every rank makes a part of each result, and the parts are summed into slices again."""

    VOCABULARY = "rows of the vocabulary; embeddings are summed, logits stay cut"
    OUTPUTS = "rows of the weight, and of the bias"
    INPUTS = "columns of the weight; results are parts of a sum, to which one rank adds the bias"
    SUMMED = "whole, at work on other tokens or for other heads on every rank: its gradients are summed"
    WHOLE = "whole, the same work on every rank, the same gradients"
    EXPERTS = "the inner dimension of w1, w3 and w2, where experts are cut; results are parts of a sum"
    BLOCK = "no parameters of its own: gathers slices of the sequence and scatters a sum"


_ENDS = {"tok_embeddings": Cut.VOCABULARY, "norm": Cut.SUMMED, "output": Cut.VOCABULARY, "score": Cut.WHOLE}
_L = "layers.*."
_LAYER = {
    _L + "attention": Cut.BLOCK,
    _L + "attention_norm": Cut.SUMMED,
    _L + "ffn_norm": Cut.SUMMED,
    _L + "attention.wo": Cut.INPUTS,
}
_GQA = {_L + f"attention.w{x}": Cut.OUTPUTS for x in "qkv"} | {_L + f"attention.{x}_norm": Cut.SUMMED for x in "qk"}
_MLA = {
    _L + "attention.wq": Cut.OUTPUTS,
    _L + "attention.wq_a": Cut.SUMMED,
    _L + "attention.q_norm": Cut.SUMMED,
    _L + "attention.wq_b": Cut.OUTPUTS,
    _L + "attention.wkv_a": Cut.SUMMED,
    _L + "attention.kv_norm": Cut.SUMMED,
    _L + "attention.wkv_b": Cut.OUTPUTS,
}


def _mlp(name: str) -> dict[str, Cut]:
    return {f"{_L}{name}.w1": Cut.OUTPUTS, f"{_L}{name}.w3": Cut.OUTPUTS, f"{_L}{name}.w2": Cut.INPUTS}


_DENSE = {_L + "feed_forward": Cut.BLOCK, **_mlp("feed_forward")}
_MOE = {
    _L + "moe": Cut.BLOCK,
    _L + "moe.router.gate": Cut.SUMMED,
    _L + "moe.experts": Cut.EXPERTS,
    _L + "moe.shared_expert_gate": Cut.SUMMED,
    **_mlp("moe.shared_experts"),
}


def tensor_plan(args: ModelArgs) -> dict[str, Cut]:
    """Pattern of module names (`*` for a layer) → how it is cut. Every module with parameters has exactly one."""
    attention = _GQA if isinstance(args.attention, GqaArgs) else _MLA
    mlps = (_DENSE if not all(args.sparse) else {}) | (_MOE if any(args.sparse) else {})
    return {**_ENDS, **_LAYER, **attention, **mlps}


def cut_of(plan: Mapping[str, Cut], name: str) -> Cut | None:
    """How a module is cut; None when the plan does not say."""
    return next((cut for pattern, cut in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)


# ------------------------------------------------------------------------------------------------ pipeline stages


def split(layers: int, stages: int, *, first_less: int = 1, last_less: int = 1) -> tuple[Part, ...]:
    """The parts of `stages` pipeline stages, in order.

    The embedding counts as `first_less` layers and the head as `last_less`; what does not divide goes to early stages.
    Raises ConfigError when a stage would have nothing, or fewer than no layers.
    """
    if stages == 1:
        return (Part(0, layers),)
    counted = layers + first_less + last_less
    each, over = divmod(counted, stages)
    sizes = [each + (stage < over) for stage in range(stages)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    problems = Problems()
    for stage, size in enumerate(sizes):
        if size < (0 if stage in (0, stages - 1) else 1):
            problems.add(f"stage {stage}", f"would have {size} layers", "fewer stages, or count the ends as less")
    what = f"{layers} layers (and ends that count as {first_less} and {last_less}) do not make {stages} stages:"
    problems.raise_as(ConfigError, what)
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return tuple(
        Part(end - size, end, stage == 0, stage == stages - 1)
        for stage, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )


def elsewhere(args: ModelArgs, part: Part) -> list[str]:
    """Patterns of the atoms that other stages hold: what `load_into(…, skip=…)` need not find a tensor for."""
    absent = [rf"layers\.{layer}\..*" for layer in range(args.layers) if not part.begin <= layer < part.end]
    if not part.first and not (part.last and args.tied):
        absent.append("embed")
    return absent + ([] if part.last else ["head", "final_norm"])


# ------------------------------------------------------------------------------------------------ families


@dataclass(frozen=True)
class ModelSpec:
    """One family. `name` is its `model_type` and its table in `mappings/`."""

    name: str
    read: Callable[[Config], ModelArgs]

    def args(self, config: Config) -> ModelArgs:
        """From a parsed config.json. Raises ConfigError with every field that cannot be expressed."""
        return self.read(config)

    def build(
        self,
        args: ModelArgs,
        part: Part | None = None,
        *,
        head: Head = "vocabulary",
        router_dtype: torch.dtype | None = torch.float32,
        dtype: torch.dtype = torch.float32,
    ) -> Decoder:
        """The model, or a stage of it, on the meta device; `materialize` and the hub give it memory and values.

        dtype  of parameters; expert biases and rotary frequencies are fp32 whatever it is
        """
        with torch.device("meta"):
            model = Decoder(args, part, head=head, router_dtype=router_dtype)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model


def spec_for(config: Config) -> ModelSpec:
    """The family of a config.json. Raises ConfigError for one that this engine has no model of."""
    kind = str(config.get("model_type", ""))
    if kind not in SPECS:
        raise ConfigError(f"model_type: the archon engine has no model {kind!r}.", hint=nearest(kind, SPECS))
    return SPECS[kind]


def _model(
    fields: Fields,
    attention: GqaArgs | MlaArgs,
    *,
    windows: tuple[int | None, ...] | None = None,
    sparse: tuple[bool, ...] | None = None,
    moe: MoeArgs | None = None,
    theta: float = 10000.0,
    eps: float = 1e-6,
    ignored: tuple[str, ...] = (),
) -> ModelArgs:
    layers = fields.size("num_hidden_layers")
    dim = attention.head_dim if isinstance(attention, GqaArgs) else attention.rope_dim
    sparse = sparse or (False,) * layers
    args = ModelArgs(
        family=str(fields.get("model_type")),
        vocab=fields.size("vocab_size"),
        hidden=fields.size("hidden_size"),
        layers=layers,
        width=fields.size("intermediate_size", None if not all(sparse) else 1),
        eps=fields.number("rms_norm_eps", eps),
        tied=bool(fields.get("tie_word_embeddings", False)),
        attention=attention,
        rope=read_rope(fields, dim, theta),
        windows=windows or (None,) * layers,
        sparse=sparse,
        moe=moe,
        initializer_range=fields.number("initializer_range", 0.02),
        ignored=ignored,
    )
    return finish(fields, args)


def _llama(config: Config) -> ModelArgs:
    fields = begin(config)
    return _model(fields, read_gqa(fields))


def _mistral(config: Config) -> ModelArgs:
    fields = begin(config)
    windows = read_windows(fields, fields.size("num_hidden_layers"), switched=False, usual=4096)
    return _model(fields, read_gqa(fields, qkv_bias=False), windows=windows)


def _qwen2(config: Config) -> ModelArgs:
    fields = begin(config)
    windows = read_windows(fields, fields.size("num_hidden_layers"), switched=True, by_layer=True, usual=4096)
    return _model(fields, read_gqa(fields, qkv_bias=True), windows=windows)


def _qwen3(config: Config) -> ModelArgs:
    fields = begin(config)
    windows = read_windows(fields, fields.size("num_hidden_layers"), switched=True, by_layer=True, usual=4096)
    return _model(fields, read_gqa(fields, qk_norm=True), windows=windows)


def _qwen_experts(fields: Fields, **more: Any) -> MoeArgs:
    return MoeArgs(
        experts=fields.size("num_experts", alias="num_local_experts"),
        top_k=fields.size("num_experts_per_tok"),
        width=fields.size("moe_intermediate_size"),
        normalize=bool(fields.get("norm_topk_prob", False)),
        **more,
    )


def _qwen3_moe(config: Config) -> ModelArgs:
    fields = begin(config)
    layers = fields.size("num_hidden_layers")
    windows = read_windows(fields, layers, switched=True, usual=4096)
    fields.get("max_window_layers")  # transformers' Qwen3-MoE gives all layers the window
    attention = read_gqa(fields, qk_norm=True)
    return _model(fields, attention, windows=windows, sparse=sparse_layers(fields, layers), moe=_qwen_experts(fields))


def _qwen2_moe(config: Config) -> ModelArgs:
    fields = begin(config)
    layers = fields.size("num_hidden_layers")
    fields.only("use_sliding_window", False, "its windows differ by version of transformers")
    for name in ("sliding_window", "max_window_layers", "layer_types"):  # without effect then
        fields.get(name)
    attention = read_gqa(fields, qkv_bias=bool(fields.get("qkv_bias", True)))
    moe = _qwen_experts(fields, shared_width=fields.size("shared_expert_intermediate_size"), shared_gate=True)
    return _model(fields, attention, sparse=sparse_layers(fields, layers), moe=moe)


def _mixtral(config: Config) -> ModelArgs:
    fields = begin(config)
    layers = fields.size("num_hidden_layers")
    fields.only("router_jitter_noise", 0.0, "routers see the activations as they are")
    moe = MoeArgs(
        experts=fields.size("num_local_experts", 8, alias="num_experts"),
        top_k=fields.size("num_experts_per_tok", 2),
        width=fields.size("intermediate_size"),
    )
    return _model(
        fields,
        read_gqa(fields, qkv_bias=False),
        windows=read_windows(fields, layers, switched=False),
        sparse=(True,) * layers,
        moe=moe,
        theta=1e6,
        eps=1e-5,
    )


def _deepseek_v3(config: Config) -> ModelArgs:
    fields = begin(config)
    layers, attention = fields.size("num_hidden_layers"), _latent(fields)
    fields.only("scoring_func", "sigmoid", "routers of this family score by sigmoid")
    fields.only("topk_method", "noaux_tc", "experts are chosen by groups, with a bias")
    fields.only("moe_layer_freq", 1, "all layers from first_k_dense_replace on have experts")
    moe = MoeArgs(
        experts=fields.size("n_routed_experts", alias="num_local_experts"),
        top_k=fields.size("num_experts_per_tok"),
        width=fields.size("moe_intermediate_size"),
        score="sigmoid",
        normalize=bool(fields.get("norm_topk_prob", True)),
        scale=fields.number("routed_scaling_factor", 2.5),
        groups=fields.size("n_group", 8),
        top_groups=fields.size("topk_group", 4),
        bias=True,
        shared_width=fields.size("n_shared_experts", 1) * fields.size("moe_intermediate_size"),
    )
    dense = fields.get("first_k_dense_replace", 3)
    mtp = fields.get("num_nextn_predict_layers", fields.get("num_mtp_layers", 0))
    ignored = (f"num_nextn_predict_layers={mtp}: these layers are not trained",) if mtp else ()
    sparse = tuple(layer >= dense for layer in range(layers))
    return _model(fields, attention, sparse=sparse, moe=moe, ignored=ignored)


def _latent(fields: Fields) -> MlaArgs:
    heads = fields.size("num_attention_heads")
    nope, rope = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    fields.only("num_key_value_heads", heads, "latent attention makes a key and a value for every head")
    fields.only("attention_bias", False, "latent attention has no biases")
    fields.only("head_dim", rope, "it is the rotary part of a head for transformers")
    stated = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    scale, everywhere = (nope + rope) ** -0.5, stated.get("mscale_all_dim") or 0.0
    if stated.get("rope_type", stated.get("type", "default")) != "default" and everywhere:
        scale *= yarn_scale(stated.get("factor") or 1.0, everywhere) ** 2
    return MlaArgs(
        heads=heads,
        q_rank=fields.size("q_lora_rank") if fields.get("q_lora_rank") is not None else None,
        kv_rank=fields.size("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=fields.size("v_head_dim"),
        scale=scale,
        interleaved=bool(fields.get("rope_interleave", True)),
        dropout=fields.number("attention_dropout", 0.0),
    )


SPECS: dict[str, ModelSpec] = {
    name: ModelSpec(name, read)
    for name, read in {
        "llama": _llama,
        "mistral": _mistral,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "mixtral": _mixtral,
        "qwen2_moe": _qwen2_moe,
        "qwen3_moe": _qwen3_moe,
        "deepseek_v3": _deepseek_v3,
    }.items()
}
"""`model_type` → family."""
