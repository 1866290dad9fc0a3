"""Archon checkpoints against goldens written by hand: names, shapes and which rank stores which box.

What we write is read by torch's own `FileSystemReader`. A golden's mesh that says `only: experts` lists experts alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import handmade
from areal_convert.converter.convert import convert
from areal_convert.converter.mesh import Mesh

GOLDENS = Path(__file__).parent / "goldens" / "archon"
FILES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(GOLDENS.glob("*.json"))}
CASES = [pytest.param(name, mesh, id=f"{name}-{mesh}") for name, golden in FILES.items() for mesh in golden["meshes"]]


def source(path: Path, config: dict[str, Any]) -> Path:
    """A Hugging Face model of the golden's config."""
    c = config
    if config["model_type"] == "qwen3_moe":
        shapes = {"h": c["hidden_size"], "m": c["moe_intermediate_size"], "e": c["num_experts"]}
        return handmade.moe(path, layers=c["num_hidden_layers"], **shapes, **config)
    norms = {f"self_attn.{x}_norm.weight": (c["head_dim"],) for x in "qk"}
    heads = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    layer = handmade.dense_layer(c["hidden_size"], *heads, c["intermediate_size"]) | norms
    layers = [layer] * c["num_hidden_layers"]
    return handmade.save_hf(path, config, handmade.tensors_of(layers, c["hidden_size"], c["vocab_size"]))


def of_every_layer(tensors: dict[str, Any], layers: int) -> dict[str, Any]:
    return {
        name.replace(".N.", f".{layer}."): entry
        for name, entry in tensors.items()
        for layer in (range(layers) if ".N." in name else [0])
    }


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_what_we_write_is_what_archon_saves(family: str, mesh: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    golden = FILES[family]["meshes"][mesh]
    config = FILES[family]["config"]
    convert(source(tmp_path / "hf", config), tmp_path / "archon", "archon", Mesh(**golden["mesh"]))
    metadata = FileSystemReader(tmp_path / "archon").read_metadata()
    have: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if golden.get("only") == "experts" and ".experts." not in name:
            continue
        assert isinstance(entry, TensorStorageMetadata)
        have[name] = {"shape": list(entry.size)}
        for chunk in entry.chunks:
            file = metadata.storage_data[MetadataIndex(name, chunk.offsets)].relative_path
            rank = file.removeprefix("__").removesuffix("_0.distcp")
            assert rank not in have[name], f"{name}: two boxes on rank {rank}"
            have[name][rank] = [list(chunk.offsets), list(chunk.sizes)]
    want = of_every_layer(golden["tensors"], config["num_hidden_layers"])
    assert have == {name: {k: v for k, v in entry.items() if k != "placements"} for name, entry in want.items()}


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_the_golden_itself_covers_every_tensor_once(family: str, mesh: str) -> None:
    """A slip of the hand shows here: every element of every tensor is in one box."""
    import numpy as np

    for name, entry in FILES[family]["meshes"][mesh]["tensors"].items():
        count = np.zeros(entry["shape"], int)
        for rank, box in entry.items():
            if rank.isdigit():
                count[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] += 1
        assert (count == 1).all(), name


def test_the_values_are_where_the_golden_says(tmp_path: Path) -> None:
    """Rank 3 of TP2 × EP2 × ETP2: experts 2 and 3, the second row of w1, the second column of w2."""
    config = FILES["qwen3_moe"]["config"]
    convert(source(tmp_path / "hf", config), tmp_path / "a", "archon", Mesh(dp_shard=2, tp=2, ep=2, etp=2))
    stored = handmade.chunks(tmp_path / "a")
    (w1,) = (c.values for c in stored["layers.1.moe.experts.w1"] if c.rank == 3)
    (w2,) = (c.values for c in stored["layers.1.moe.experts.w2"] if c.rank == 3)
    assert w1.tolist() == [  # expert, layer, tensor 05 (gate), row 1, column
        [[2105010, 2105011, 2105012, 2105013]],
        [[3105010, 3105011, 3105012, 3105013]],
    ]
    assert w2.tolist() == [
        [[2107001], [2107011], [2107021], [2107031]],
        [[3107001], [3107011], [3107021], [3107031]],
    ]
