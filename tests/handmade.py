"""Models so small that a person can write their tensors down: every value names the place that it comes from.

The shapes are spelled here by hand, from Hugging Face's own code, and results are read by torch alone: nothing in this
module knows how we lay out or read anything.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

CODES = {
    "self_attn.q_proj": 1,
    "self_attn.k_proj": 2,
    "self_attn.v_proj": 3,
    "self_attn.o_proj": 4,
    "mlp.gate_proj": 5,
    "mlp.up_proj": 6,
    "mlp.down_proj": 7,
    "embed_tokens": 8,
    "lm_head": 9,
    "model.norm": 10,
    "input_layernorm": 11,
    "post_attention_layernorm": 12,
    "self_attn.q_norm": 13,
    "self_attn.k_norm": 14,
    "mlp.gate": 15,
    "self_attn.q_a_proj": 16,
    "self_attn.q_a_layernorm": 17,
    "self_attn.q_b_proj": 18,
    "self_attn.kv_a_proj_with_mqa": 19,
    "self_attn.kv_a_layernorm": 20,
    "self_attn.kv_b_proj": 21,
}
"""The number of a tensor, by the end of its Hugging Face name."""


def coded(code: int, *shape: int, layer: int = 0, expert: int = 0) -> Any:
    """A tensor whose values are `expert layer code row column`: expert 3, layer 2, code 6, row 14, column 1 is
    3 2 06 14 1 = 3206141. Exact in fp32."""
    import torch

    rows = torch.arange(shape[0]) * 10
    values = rows if len(shape) == 1 else rows[:, None] + torch.arange(shape[1])
    return (values + code * 1000 + layer * 100_000 + expert * 1_000_000).to(torch.float32)


def dense_layer(h: int, n: int, g: int, d: int, f: int) -> dict[str, tuple[int, ...]]:
    """A decoder layer of Llama: hidden size, query heads, KV heads, head dim, intermediate size."""
    return attention(h, n, g, d) | {
        "mlp.gate_proj.weight": (f, h),
        "mlp.up_proj.weight": (f, h),
        "mlp.down_proj.weight": (h, f),
    }


def attention(h: int, n: int, g: int, d: int) -> dict[str, tuple[int, ...]]:
    """Attention and norms of a decoder layer of Llama."""
    return {
        "self_attn.q_proj.weight": (n * d, h),
        "self_attn.k_proj.weight": (g * d, h),
        "self_attn.v_proj.weight": (g * d, h),
        "self_attn.o_proj.weight": (h, n * d),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
    }


def tensors_of(layers: list[dict[str, tuple[int, ...]]], h: int, v: int) -> dict[str, Any]:
    """All tensors of an untied model, position-coded, by their Hugging Face names."""
    made = {
        "model.embed_tokens.weight": coded(8, v, h),
        "model.norm.weight": coded(10, h),
        "lm_head.weight": coded(9, v, h),
    }
    for layer, shapes in enumerate(layers):
        for name, shape in shapes.items():
            made[f"model.layers.{layer}.{name}"] = _coded_by_name(name, shape, layer)
    return made


def _coded_by_name(name: str, shape: tuple[int, ...], layer: int) -> Any:
    before, _, after = name.partition("mlp.experts.")
    expert = 0
    if after:
        number, _, rest = after.partition(".")
        expert, name = int(number), f"{before}mlp.{rest}"
    stem, _, kind = name.rpartition(".")
    code = CODES[stem] + (30 if kind == "bias" else 0)  # q_proj.bias is 31
    return coded(code, *shape, layer=layer, expert=expert)


def save_hf(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """A Hugging Face directory with one file, as safetensors writes it."""
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    return path


def llama(
    path: Path,
    *,
    h: int = 2,
    n: int = 4,
    g: int = 2,
    d: int = 2,
    f: int = 4,
    v: int = 5,
    layers: int = 1,
    **config: Any,
) -> Path:
    """A Llama whose sizes can be told apart: hidden 2, 4 query heads of 2, 2 KV heads, intermediate 4, vocabulary 5."""
    full = sizes("llama", h, n, g, d, f, v, layers) | config
    return save_hf(path, full, tensors_of([dense_layer(h, n, g, d, f)] * layers, h, v))


def sizes(family: str, h: int, n: int, g: int, d: int, f: int, v: int, layers: int) -> dict[str, Any]:
    """A `config.json` of that size."""
    return {
        "model_type": family,
        "hidden_size": h,
        "num_attention_heads": n,
        "num_key_value_heads": g,
        "head_dim": d,
        "intermediate_size": f,
        "vocab_size": v,
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
    }


def moe(path: Path, *, h: int = 2, m: int = 2, e: int = 4, layers: int = 1, **config: Any) -> Path:
    """A Qwen3-MoE with one KV head. Hidden size and expert size are equal: every expert matrix is square."""
    attn = attention(h, 4, 2, 2) | {"self_attn.q_norm.weight": (2,), "self_attn.k_norm.weight": (2,)}
    layer: dict[str, tuple[int, ...]] = attn | {"mlp.gate.weight": (e, h)}
    for n in range(e):
        layer[f"mlp.experts.{n}.gate_proj.weight"] = (m, h)
        layer[f"mlp.experts.{n}.up_proj.weight"] = (m, h)
        layer[f"mlp.experts.{n}.down_proj.weight"] = (h, m)
    full = sizes("qwen3_moe", h, 4, 2, 2, 4, 5, layers) | config
    full |= {"num_experts": e, "num_experts_per_tok": 2, "moe_intermediate_size": m}
    return save_hf(path, full, tensors_of([layer] * layers, h, 5))


# ---------------------------------------------------------------------------------------------------------------------


def mp_rank(path: Path, name: str = "mp_rank_00", model: str = "model") -> dict[str, Any]:
    """The tensors in one rank's file, by torch.load."""
    import argparse

    import torch

    with torch.serialization.safe_globals([argparse.Namespace]):
        tree = torch.load(path / "release" / name / "model_optim_rng.pt", weights_only=True)
    return {key: value for key, value in tree[model].items() if isinstance(value, torch.Tensor)}


def whole(path: Path, *names: str) -> dict[str, Any]:
    """Tensors of a DCP directory as torch's own loader puts them together; all of them when none is named."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    where = path / "release" if (path / "release").is_dir() else path
    reader = FileSystemReader(where)
    state: dict[str, Any] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and (not names or name in names):
            state[name] = torch.full(entry.size, float("nan"), dtype=entry.properties.dtype)
    _load_state_dict(state, FileSystemReader(where), planner=DefaultLoadPlanner(), no_dist=True)
    return state


class StoredChunk(NamedTuple):
    """A box of a tensor as one rank's file holds it."""

    rank: int
    offsets: tuple[int, ...]
    values: Any


def chunks(path: Path) -> dict[str, list[StoredChunk]]:
    """Every stored chunk of a DCP directory, by torch's metadata and torch.load; by rank, then offsets."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    where = path / "release" if (path / "release").is_dir() else path
    metadata = FileSystemReader(where).read_metadata()
    found: dict[str, list[StoredChunk]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        for chunk in entry.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            raw = (where / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            values = torch.load(io.BytesIO(raw), weights_only=True)
            assert values.shape == chunk.sizes, name
            rank = int(place.relative_path.removeprefix("__").partition("_")[0])
            found.setdefault(name, []).append(StoredChunk(rank, tuple(chunk.offsets), values))
        found[name].sort(key=lambda c: c[:2])
    return found
