"""The global tensors of a Megatron `torch_dist` checkpoint, made from a family's live Megatron rows.

Megatron-Core stores every tensor whole, cut into chunks (megatron/core/dist_checkpointing/mapping.py). What differs
from the live names:

    stacked layers   `decoder.layers.<rest>`, layers on a first axis, or, where `moe_layer_freq` is a list, each layer
                     under its own name ("indexed"; transformer_block.py, `non_homogeneous_layers`)
    experts          `mlp.experts.experts.<rest>` with an expert axis, sequential and grouped ones alike
    norms            the local spec stores its norms under Transformer Engine's names, in front of experts too, but not
                     with MLA (gpt_layer_specs.py, `sharded_state_dict_keys_map`); what the two specs call differently
                     is written under both names, so that either loads the file
    extra states     objects that Megatron-Core's loader demands of every linear layer (and Transformer Engine's of
                     every norm too); see `extra_states`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .blocks import MEGATRON_LAYER
from .schema import Dims, Row
from .sizes import dense

_SEQUENTIAL, _STORED = "experts.local_experts.{e}.", "experts.experts."
_TE_NORM = "mlp.linear_fc1.layer_norm_weight"
_LOCAL_NORM = "pre_mlp_layernorm.weight"
_FUSED_INPUT_NORM = "linear_qkv.layer_norm_weight"


def global_rows(rows: Sequence[Row], *, stacked: bool) -> list[Row]:
    """The rows of `torch_dist` from the rows of the live model. `stacked` chooses how layers are stored."""
    plain = any(r.name.endswith(_FUSED_INPUT_NORM) for r in rows)  # not MLA
    found: dict[tuple[str, str], Row] = {}
    for r in rows:
        for stored in _stored(r, plain):
            if stacked and stored.name.startswith(MEGATRON_LAYER):
                name = stored.name.replace("layers.{i}.", "layers.", 1)
                stored = replace(stored, name=name, pattern="{i} " + stored.pattern)
            found.setdefault((stored.name, stored.place), stored)
    return list(found.values())


def _stored(r: Row, plain: bool) -> Iterator[Row]:
    if r.form in ("grouped", "legacy") or (plain and r.form == "local" and r.name.endswith(".input_layernorm.weight")):
        return
    if _SEQUENTIAL in r.name:
        yield replace(r, name=r.name.replace(_SEQUENTIAL, _STORED), pattern="{e} " + r.pattern, form="")
    elif plain and r.form == "local" and r.name.endswith(_LOCAL_NORM):
        yield replace(r, name=r.name.replace(_LOCAL_NORM, _TE_NORM), form="")
    else:
        yield replace(r, form="")


def extra_states(rows: Sequence[Row], dims: Dims, *, stacked: bool) -> Iterator[str]:
    """Keys of the `_extra_state` objects that a model of either spec asks for.

    One for each module and layer (and expert): `<module>._extra_state/shard_{offsets}_{counts}`. Without them a load
    with Megatron-LM's default strictness fails, though they hold nothing but `[None]`.
    """
    layers, experts = dims["layers"], dims.get("e", 0)
    for layer in range(layers + dims["mtp"]):
        for module in _modules(rows, dims, layer):
            inside = layer < layers
            stored = module.replace(_SEQUENTIAL, _STORED)
            if stacked and inside:
                stored = stored.replace("layers.{i}.", "layers.", 1)
            name = stored.format(i=layer, j=layer - layers)
            at, counts = ([layer], [layers]) if stacked and inside else ([0], [1])
            for expert in range(experts) if _SEQUENTIAL in module else (-1,):
                here, of = _shard(at, counts, expert, experts, stacked and inside)
                yield f"{name}._extra_state/shard_{here}_{of}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def _shard(at: list[int], counts: list[int], expert: int, experts: int, stacked: bool) -> tuple[str, str]:
    if expert < 0:
        return ".".join(map(str, at)), ".".join(map(str, counts))
    if stacked:
        return f"{at[0]}.{expert}", f"{counts[0]}.{experts}"
    return str(expert), str(experts)


def _modules(rows: Sequence[Row], dims: Dims, layer: int) -> list[str]:
    """Modules of a layer that keep an extra state, as name templates."""
    found: dict[str, None] = {}
    for r in rows:
        if r.form in ("grouped", "legacy") or not re.search(r"\{[ij]\}", r.name):
            continue
        if not r.when(dims, layer) or not all(a.when(dims, layer) for a in r.atoms):
            continue
        module = re.sub(r"\.(weight|bias|layer_norm_weight)$", "", r.name)
        if re.search(r"(\.linear_\w+|\.eh_proj|norm)$", module):
            found[module] = None
        if ".self_attention.linear_proj" in module:
            found[module.replace("linear_proj", "core_attention")] = None
    return list(found)


INDEXED = "decoder.layers.{}."
"""How names begin, numbers aside, where layers are not stacked."""


def always_indexed(rows: Sequence[Row], dims: Dims) -> bool:
    """Whether Megatron gets `moe_layer_freq` as a list for this model, and so never stacks its layers: families with
    `first_k_dense_replace`, and any model whose layers are not all of one kind."""
    if "moe_first" in dims:
        return True
    return len({dense(dims, layer) for layer in range(dims["layers"])}) > 1
