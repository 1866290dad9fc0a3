"""Rows that families share: attention, MLPs, experts, embeddings.

A block is a `Block`: the rows of each naming for one part of a model. A family adds blocks together and changes what
differs. Legend of the axes:

    h hidden · g KV groups · r query heads per group · d head dim · n query heads · f dense FFN · m expert FFN
    s shared-expert FFN · e experts · v vocabulary · u 1 · o, x the output (h) and input (2h) of the MTP projection
    MLA: k query head dim (nope + rope) · w value head dim · y nope + value head dim · a q-LoRA rank · c KV-LoRA rank
    j KV-LoRA rank + rope dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .schema import Atom, Row, row
from .sizes import body, both, dense, has, lacks, moe, mtp

HF_LAYER = "model.layers.{i}."
MEGATRON_LAYER = "decoder.layers.{i}."
MEGATRON_MTP = "mtp.layers.{j}.transformer_layer."
ARCHON_LAYER = "layers.{i}."
MEGATRON_ENDS = frozenset({"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"})
"""What the first and the last pipeline stage hold: a rank with both has the whole pipeline."""


@dataclass(frozen=True)
class Block:
    """The rows of one part of a model in each naming."""

    hf: Sequence[Row] = ()
    megatron: Sequence[Row] = ()
    archon: Sequence[Row] = ()

    def __add__(self, other: Block) -> Block:
        return Block([*self.hf, *other.hf], [*self.megatron, *other.megatron], [*self.archon, *other.archon])


# ---------------------------------------------------------------------------------------------- embeddings and head

EMBED = Atom("embed", "v h")
HEAD = Atom("head", "v h", when=lacks("tied"))
FINAL_NORM = Atom("final_norm", "h")


def embeddings() -> Block:
    """Token embedding, final norm, output head. A tied head is the embedding's second home, not an atom of its own."""
    return Block(
        hf=[
            row("model.embed_tokens.weight", "v h", EMBED, cut="v", pad="v", place="first"),
            row("model.norm.weight", "h", FINAL_NORM, place="last"),
            row("lm_head.weight", "v h", HEAD, cut="v", pad="v", place="last"),
            # Some tied checkpoints store the head all the same; it is read and compared, never written.
            row("lm_head.weight", "v h", EMBED, cut="v", pad="v", place="last", when=has("tied"), form="stored_tie"),
        ],
        megatron=[
            row("embedding.word_embeddings.weight", "v h", EMBED, cut="v", pad="v", place="first"),
            # The MTP block embeds tokens itself; Megatron keeps a copy where the first stage is another one.
            row("embedding.word_embeddings.weight", "v h", EMBED, cut="v", pad="v", place="mtp_first", when=has("mtp")),
            row("decoder.final_layernorm.weight", "h", FINAL_NORM, place="last"),
            row("output_layer.weight", "v h", HEAD, cut="v", pad="v", place="last"),
            row("output_layer.weight", "v h", EMBED, cut="v", pad="v", place="last_copy", when=has("tied")),
        ],
        archon=[
            row("tok_embeddings.weight", "v h", EMBED, cut="v", pad="v"),
            row("norm.weight", "h", FINAL_NORM),
            row("output.weight", "v h", HEAD, cut="v", pad="v"),
            row("output.weight", "v h", EMBED, cut="v", pad="v", when=has("tied"), form="stored_tie"),
        ],
    )


# ---------------------------------------------------------------------------------------------- attention

_Q = Atom("layers.{i}.attn.q", "g r d h")
_K = Atom("layers.{i}.attn.k", "g d h")
_V = Atom("layers.{i}.attn.v", "g d h")
_O = Atom("layers.{i}.attn.o", "h g r d")
_QB = Atom("layers.{i}.attn.q_bias", "g r d", when=has("qkv_bias"))
_KB = Atom("layers.{i}.attn.k_bias", "g d", when=has("qkv_bias"))
_VB = Atom("layers.{i}.attn.v_bias", "g d", when=has("qkv_bias"))
_OB = Atom("layers.{i}.attn.o_bias", "h", when=has("o_bias"))
_QN = Atom("layers.{i}.attn.q_norm", "d")
_KN = Atom("layers.{i}.attn.k_norm", "d")


def gqa(*, qk_norm: bool = False, bias: bool = False) -> Block:
    """Grouped-query attention (MHA and MQA are its ends). Megatron interleaves q, k and v by KV group:
    `[q…, k, v]` for each (megatron/core/transformer/attention.py, SelfAttention.get_query_key_value_tensors)."""
    hf, meg, arc = HF_LAYER + "self_attn.", MEGATRON_LAYER + "self_attention.", ARCHON_LAYER + "attention."
    block = Block(
        hf=[
            row(hf + "q_proj.weight", "(g r d) h", _Q, cut="g"),
            row(hf + "k_proj.weight", "(g d) h", _K, cut="g"),
            row(hf + "v_proj.weight", "(g d) h", _V, cut="g"),
            row(hf + "o_proj.weight", "h (g r d)", _O, cut="g"),
        ],
        megatron=[
            row(meg + "linear_qkv.weight", "(g [q:r k v] d) h", _Q, _K, _V, cut="g"),
            row(meg + "linear_proj.weight", "h (g r d)", _O, cut="g"),
        ],
        archon=[
            row(arc + "wq.weight", "(g r d) h", _Q, cut="g"),
            row(arc + "wk.weight", "(g d) h", _K, cut="g"),
            row(arc + "wv.weight", "(g d) h", _V, cut="g"),
            row(arc + "wo.weight", "h (g r d)", _O, cut="g"),
        ],
    )
    if bias:
        block += Block(
            hf=[
                row(hf + "q_proj.bias", "(g r d)", _QB, cut="g"),
                row(hf + "k_proj.bias", "(g d)", _KB, cut="g"),
                row(hf + "v_proj.bias", "(g d)", _VB, cut="g"),
                row(hf + "o_proj.bias", "h", _OB),
            ],
            megatron=[
                row(meg + "linear_qkv.bias", "(g [q_bias:r k_bias v_bias] d)", _QB, _KB, _VB, cut="g"),
                row(meg + "linear_proj.bias", "h", _OB),
            ],
            archon=[
                row(arc + "wq.bias", "(g r d)", _QB, cut="g"),
                row(arc + "wk.bias", "(g d)", _KB, cut="g"),
                row(arc + "wv.bias", "(g d)", _VB, cut="g"),
                row(arc + "wo.bias", "h", _OB),
            ],
        )
    if qk_norm:
        block += Block(
            hf=[row(hf + "q_norm.weight", "d", _QN), row(hf + "k_norm.weight", "d", _KN)],
            megatron=[row(meg + "q_layernorm.weight", "d", _QN), row(meg + "k_layernorm.weight", "d", _KN)],
            archon=[row(arc + "q_norm.weight", "d", _QN), row(arc + "k_norm.weight", "d", _KN)],
        )
    return block


def mla() -> Block:
    """Multi-head latent attention of DeepSeek V2 and V3, with and without the query's low-rank pair.

    The down-projections are cut by TP under Megatron's local spec and replicated under Transformer Engine's
    (megatron/core/transformer/multi_latent_attention.py builds them as `linear_q_down_proj` of the spec).
    """
    hf, meg, arc = HF_LAYER + "self_attn.", MEGATRON_LAYER + "self_attention.", ARCHON_LAYER + "attention."
    lora, plain = has("q_lora"), lacks("q_lora")
    q = Atom("layers.{i}.attn.q", "n k h", when=plain)
    q_a = Atom("layers.{i}.attn.q_a", "a h", when=lora)
    q_a_norm = Atom("layers.{i}.attn.q_a_norm", "a", when=lora)
    q_b = Atom("layers.{i}.attn.q_b", "n k a", when=lora)
    kv_a = Atom("layers.{i}.attn.kv_a", "j h")
    kv_a_norm = Atom("layers.{i}.attn.kv_a_norm", "c")
    kv_b = Atom("layers.{i}.attn.kv_b", "n y c")
    o = Atom("layers.{i}.attn.o", "h n w")
    return Block(
        hf=[
            row(hf + "q_proj.weight", "(n k) h", q, cut="n"),
            row(hf + "q_a_proj.weight", "a h", q_a),
            row(hf + "q_a_layernorm.weight", "a", q_a_norm),
            row(hf + "q_b_proj.weight", "(n k) a", q_b, cut="n"),
            row(hf + "kv_a_proj_with_mqa.weight", "j h", kv_a),
            row(hf + "kv_a_layernorm.weight", "c", kv_a_norm),
            row(hf + "kv_b_proj.weight", "(n y) c", kv_b, cut="n"),
            row(hf + "o_proj.weight", "h (n w)", o, cut="n"),
        ],
        megatron=[
            row(meg + "linear_q_proj.weight", "(n k) h", q, cut="n"),
            row(meg + "linear_q_down_proj.weight", "a h", q_a, cut="a", soft=True, form="local"),
            row(meg + "linear_q_down_proj.weight", "a h", q_a, form="te"),
            row(meg + "q_layernorm.weight", "a", q_a_norm, form="local"),
            row(meg + "linear_q_up_proj.layer_norm_weight", "a", q_a_norm, form="te"),
            row(meg + "linear_q_up_proj.weight", "(n k) a", q_b, cut="n"),
            row(meg + "linear_kv_down_proj.weight", "j h", kv_a, cut="j", soft=True, form="local"),
            row(meg + "linear_kv_down_proj.weight", "j h", kv_a, form="te"),
            row(meg + "kv_layernorm.weight", "c", kv_a_norm, form="local"),
            row(meg + "linear_kv_up_proj.layer_norm_weight", "c", kv_a_norm, form="te"),
            row(meg + "linear_kv_up_proj.weight", "(n y) c", kv_b, cut="n"),
            row(meg + "linear_proj.weight", "h (n w)", o, cut="n"),
        ],
        archon=[
            row(arc + "wq.weight", "(n k) h", q, cut="n"),
            row(arc + "wq_a.weight", "a h", q_a),
            row(arc + "q_norm.weight", "a", q_a_norm),
            row(arc + "wq_b.weight", "(n k) a", q_b, cut="n"),
            row(arc + "wkv_a.weight", "j h", kv_a),
            row(arc + "kv_norm.weight", "c", kv_a_norm),
            row(arc + "wkv_b.weight", "(n y) c", kv_b, cut="n"),
            row(arc + "wo.weight", "h (n w)", o, cut="n"),
        ],
    )


# ---------------------------------------------------------------------------------------------- norms

_NORM1 = Atom("layers.{i}.input_norm", "h")
_NORM2 = Atom("layers.{i}.post_norm", "h")


def norms(*, mla: bool = False) -> Block:
    """The two norms of a layer. Transformer Engine fuses a norm into the linear layer behind it and names it after that
    layer; Megatron's local spec keeps `input_layernorm` and `pre_mlp_layernorm` (and so does TE in front of MLA and of
    experts, whose first layer is not one linear)."""
    meg = MEGATRON_LAYER
    fused = [row(meg + "self_attention.linear_qkv.layer_norm_weight", "h", _NORM1, form="te")]
    return Block(
        hf=[
            row(HF_LAYER + "input_layernorm.weight", "h", _NORM1),
            row(HF_LAYER + "post_attention_layernorm.weight", "h", _NORM2),
        ],
        megatron=[
            row(meg + "input_layernorm.weight", "h", _NORM1, form="" if mla else "local"),
            *([] if mla else fused),
            row(meg + "pre_mlp_layernorm.weight", "h", _NORM2, form="local"),
            row(meg + "pre_mlp_layernorm.weight", "h", _NORM2, form="te", when=moe),
            row(meg + "mlp.linear_fc1.layer_norm_weight", "h", _NORM2, form="te", when=dense),
        ],
        archon=[
            row(ARCHON_LAYER + "attention_norm.weight", "h", _NORM1),
            row(ARCHON_LAYER + "ffn_norm.weight", "h", _NORM2),
        ],
    )


# ---------------------------------------------------------------------------------------------- MLPs and experts

_GATE = Atom("layers.{i}.mlp.gate", "f h", when=dense)
_UP = Atom("layers.{i}.mlp.up", "f h", when=dense)
_DOWN = Atom("layers.{i}.mlp.down", "h f", when=dense)


def swiglu() -> Block:
    """A gated MLP. Megatron stacks gate over up, on every TP rank its own part of both."""
    hf, meg, arc = HF_LAYER + "mlp.", MEGATRON_LAYER + "mlp.", ARCHON_LAYER + "feed_forward."
    return Block(
        hf=[
            row(hf + "gate_proj.weight", "f h", _GATE, cut="f"),
            row(hf + "up_proj.weight", "f h", _UP, cut="f"),
            row(hf + "down_proj.weight", "h f", _DOWN, cut="f"),
        ],
        megatron=[
            row(meg + "linear_fc1.weight", "([gate up] f) h", _GATE, _UP, cut="f"),
            row(meg + "linear_fc2.weight", "h f", _DOWN, cut="f"),
        ],
        archon=[
            row(arc + "w1.weight", "f h", _GATE, cut="f"),
            row(arc + "w3.weight", "f h", _UP, cut="f"),
            row(arc + "w2.weight", "h f", _DOWN, cut="f"),
        ],
    )


ROUTER = Atom("layers.{i}.router", "e h", when=moe)
EXPERT_BIAS = Atom("layers.{i}.expert_bias", "e", when=both(moe, has("expert_bias")), exact="F32")
_EG = Atom("layers.{i}.experts.{e}.gate", "m h", when=moe)
_EU = Atom("layers.{i}.experts.{e}.up", "m h", when=moe)
_ED = Atom("layers.{i}.experts.{e}.down", "h m", when=moe)


@dataclass(frozen=True)
class ExpertNames:
    """How a family's per-expert files spell the router and the three matrices of an expert."""

    block: str = "mlp."
    router: str = "gate.weight"
    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"
    bias: str = "gate.e_score_correction_bias"


def experts(names: ExpertNames = ExpertNames()) -> Block:
    """Routed experts: a file holds a tensor for each expert or, fused, one for all of a layer's (`form="fused"`, the
    names that transformers 5 has in memory). Megatron has a sequential, a grouped (TE) and the older legacy form."""
    hf, meg, arc = HF_LAYER + names.block, MEGATRON_LAYER + "mlp.", ARCHON_LAYER + "moe."
    fused = HF_LAYER + "mlp."
    separate = "" if names.block == "mlp." else "per_expert"
    return Block(
        hf=[
            row(hf + names.router, "e h", ROUTER, form=separate),
            *([row(fused + "gate.weight", "e h", ROUTER, form="fused")] if separate else []),
            row(hf + names.bias, "e", EXPERT_BIAS),
            row(hf + "experts.{e}." + names.gate, "m h", _EG, cut="m", form="per_expert", expert=True),
            row(hf + "experts.{e}." + names.up, "m h", _EU, cut="m", form="per_expert", expert=True),
            row(hf + "experts.{e}." + names.down, "h m", _ED, cut="m", form="per_expert", expert=True),
            row(fused + "experts.gate_up_proj", "{e} ([gate up] m) h", _EG, _EU, cut="m", form="fused", expert=True),
            row(fused + "experts.down_proj", "{e} h m", _ED, cut="m", form="fused", expert=True),
        ],
        megatron=[
            row(meg + "router.weight", "e h", ROUTER),
            row(meg + "router.expert_bias", "e", EXPERT_BIAS),
            *_megatron_experts(meg + "experts."),
        ],
        archon=[
            row(arc + "router.gate.weight", "e h", ROUTER),
            row(arc + "expert_bias", "e", EXPERT_BIAS),
            row(arc + "experts.w1", "{e} m h", _EG, cut="m", expert=True),
            row(arc + "experts.w3", "{e} m h", _EU, cut="m", expert=True),
            row(arc + "experts.w2", "{e} h m", _ED, cut="m", expert=True),
        ],
    )


def _megatron_experts(meg: str) -> list[Row]:
    fc1, fc2 = "([gate up] m) h", "h m"
    return [
        row(meg + "local_experts.{e}.linear_fc1.weight", fc1, _EG, _EU, cut="m", form="sequential", expert=True),
        row(meg + "local_experts.{e}.linear_fc2.weight", fc2, _ED, cut="m", form="sequential", expert=True),
        # The older GroupedMLP: all of a rank's experts in one tensor, transposed, and flattened in an order of its own
        # (megatron/core/transformer/moe/experts.py, `weight1.view(num_local_experts, hidden_size, -1)`).
        row(
            meg + "weight1",
            "{e} h ([gate up] m)",
            _EG,
            _EU,
            cut="m",
            form="legacy",
            expert=True,
            flat="1 02",
        ),
        row(meg + "weight2", "{e} m h", _ED, cut="m", form="legacy", expert=True, flat="01 2"),
        row(meg + "linear_fc1.weight{e}", fc1, _EG, _EU, cut="m", form="grouped", expert=True),
        row(meg + "linear_fc2.weight{e}", fc2, _ED, cut="m", form="grouped", expert=True),
    ]


def shared_expert(hf_name: str = "shared_experts.", *, gate: bool = False) -> Block:
    """The expert that every token visits: an MLP of its own, cut by TP, with a sigmoid gate in Qwen2-MoE."""
    hf, meg = HF_LAYER + "mlp." + hf_name, MEGATRON_LAYER + "mlp.shared_experts."
    arc = ARCHON_LAYER + "moe.shared_experts."
    present = both(moe, has("s"))
    g = Atom("layers.{i}.shared.gate", "s h", when=present)
    u = Atom("layers.{i}.shared.up", "s h", when=present)
    d = Atom("layers.{i}.shared.down", "h s", when=present)
    block = Block(
        hf=[
            row(hf + "gate_proj.weight", "s h", g, cut="s"),
            row(hf + "up_proj.weight", "s h", u, cut="s"),
            row(hf + "down_proj.weight", "h s", d, cut="s"),
        ],
        megatron=[
            row(meg + "linear_fc1.weight", "([gate up] s) h", g, u, cut="s"),
            row(meg + "linear_fc2.weight", "h s", d, cut="s"),
        ],
        archon=[
            row(arc + "w1.weight", "s h", g, cut="s"),
            row(arc + "w3.weight", "s h", u, cut="s"),
            row(arc + "w2.weight", "h s", d, cut="s"),
        ],
    )
    if gate:
        sg = Atom("layers.{i}.shared.sigmoid", "u h", when=present)
        block += Block(
            hf=[row(HF_LAYER + "mlp.shared_expert_gate.weight", "u h", sg)],
            megatron=[row(meg + "gate_weight", "u h", sg)],
            archon=[row(ARCHON_LAYER + "moe.shared_expert_gate.weight", "u h", sg)],
        )
    return block


def mtp_heads() -> Block:
    """What an MTP layer of DeepSeek-V3 has beside a decoder layer. Its files repeat embedding and head; Megatron shares
    them, so the repeats are further copies of the same atoms."""
    names = ("enorm", "hnorm")
    vectors = {n: Atom("layers.{i}.mtp." + n, "h", when=mtp) for n in names}
    project = Atom("layers.{i}.mtp.project", "o x", when=mtp)
    final = Atom("layers.{i}.mtp.final_norm", "h", when=mtp)
    meg = "mtp.layers.{j}."
    return Block(
        hf=[
            *(row(HF_LAYER + f"{n}.weight", "h", vectors[n]) for n in names),
            row(HF_LAYER + "eh_proj.weight", "o x", project),
            row(HF_LAYER + "shared_head.norm.weight", "h", final),
            row(HF_LAYER + "embed_tokens.weight", "v h", EMBED, pad="v", when=mtp, form="mtp_copy"),
            row(HF_LAYER + "shared_head.head.weight", "v h", HEAD, pad="v", when=mtp, form="mtp_copy"),
        ],
        megatron=[
            *(row(meg + f"{n}.weight", "h", vectors[n], place="mtp") for n in names),
            row(meg + "eh_proj.weight", "o x", project, cut="o", place="mtp"),
            row(meg + "final_layernorm.weight", "h", final, place="mtp"),
        ],
    )


# ---------------------------------------------------------------------------------------------- putting it together


@dataclass(frozen=True)
class Namings:
    """A family's rows once its blocks are added up and the decoder's rows repeated for the MTP block."""

    hf: Sequence[Row] = field(default_factory=list)
    megatron: Sequence[Row] = field(default_factory=list)
    archon: Sequence[Row] = field(default_factory=list)


def namings(*blocks: Block) -> Namings:
    """Add blocks up. Megatron's rows of a decoder layer are given again under the MTP block's names."""
    total = Block()
    for block in blocks:
        total += block
    megatron: list[Row] = []
    for r in total.megatron:
        if not r.name.startswith(MEGATRON_LAYER):
            megatron.append(r)
            continue
        rest = r.name.removeprefix(MEGATRON_LAYER)
        megatron.append(replace(r, when=both(r.when, body)))
        if any("mtp" in other.name for other in total.megatron):
            megatron.append(replace(r, name=MEGATRON_MTP + rest, place="mtp", when=both(r.when, mtp)))
    return Namings(total.hf, megatron, total.archon)
