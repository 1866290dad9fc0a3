"""Our placements against what Megatron-Core 0.16.1 itself prints, family by family and mesh by mesh.

The goldens hold, for real models built by Megatron on every rank: names and shapes of the `state_dict` of each rank and
chunk, and global shapes, boxes and objects of the `torch_dist` checkpoint that the same ranks would save.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from areal_convert.converter.layout import View
from areal_convert.converter.mesh import Mesh, Pipeline, pipeline, rank_at
from areal_convert.converter.placement import MegatronPlacement, padded_vocab
from areal_convert.mappings import FAMILIES, table
from areal_convert.mappings.schema import Table
from areal_convert.mappings.torch_dist import always_indexed, extra_states, global_rows

GOLDENS = Path(__file__).parent / "goldens" / "mcore-0.16.1"
NAMES = sorted(path.stem for path in GOLDENS.glob("*.json"))

FOR_THE_OTHER_SPEC = re.compile(
    r".*\.(linear_fc1|linear_q_up_proj|linear_kv_up_proj)\.layer_norm_weight|.*\.pre_mlp_layernorm\.weight"
)
"""Norms that Transformer Engine's spec calls differently: stored as well, so that either spec loads the file."""


@cache
def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))


CASES = [pytest.param(name, mesh, id=f"{name}-{mesh}") for name in NAMES for mesh in golden(name)["meshes"]]


class Placed:
    """One model on one mesh, as we see it."""

    def __init__(self, name: str, mesh: str) -> None:
        whole = golden(name)
        self.golden: dict[str, Any] = whole["meshes"][mesh]
        self.mesh = Mesh(**self.golden["mesh"])
        self.table: Table = table(whole["config"]["model_type"])
        self.dims = self.table.dims(whole["config"] | {"num_nextn_predict_layers": whole["mtp"]})
        self.pipe: Pipeline = pipeline(self.mesh, self.dims["layers"], self.dims["mtp"])
        self.vocab = padded_vocab(self.dims["v"], 128, self.mesh.tp)
        self.stacked = not always_indexed(self.table.megatron, self.dims)


def test_every_family_has_a_golden() -> None:
    assert {golden(name)["config"]["model_type"] for name in NAMES} == set(FAMILIES)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_tensors_of_every_rank_and_chunk(name: str, mesh: str) -> None:
    ours = Placed(name, mesh)
    view = View(ours.table.megatron, ours.dims)
    placement = MegatronPlacement(view, ours.mesh, ours.pipe, ours.vocab, per_rank=True)
    have: dict[str, dict[str, dict[str, list[int]]]] = {}
    for local in placement.locals(lambda row: row.form in ("", "local", "sequential")):
        rank = rank_at(ours.mesh, local.rank)
        key = f"tp{rank.tp} pp{rank.pp} ep{rank.ep} etp{rank.etp}"
        chunk = "model" if ours.mesh.vpp == 1 else f"model{local.chunk}"
        tensors = have.setdefault(key, {}).setdefault(chunk, {})
        assert local.name not in tensors
        tensors[local.name] = list(local.shape)
    want = {
        rank: {
            chunk: {tensor: json.loads(text.partition(" ")[2]) for tensor, text in tensors.items()}
            for chunk, tensors in group["chunks"].items()
            if tensors
        }
        for group in ours.golden["state_dict"]
        for rank in group["ranks"]
    }
    assert have == want


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_boxes_in_torch_dist(name: str, mesh: str) -> None:
    ours = Placed(name, mesh)
    view = View(global_rows(ours.table.megatron, stacked=ours.stacked), ours.dims)
    have: dict[str, dict[str, Any]] = {}
    for local in MegatronPlacement(view, ours.mesh, ours.pipe, ours.vocab).locals(lambda row: True):
        entry = have.setdefault(local.name, {"shape": list(local.total), "chunks": []})
        entry["chunks"] += [[list(p.lo), [b - a for a, b in zip(p.lo, p.hi, strict=True)]] for p in local.pieces]
    for entry in have.values():
        entry["chunks"].sort()
    want = {tensor: entry | {"chunks": sorted(entry["chunks"])} for tensor, entry in ours.golden["torch_dist"].items()}
    extra = have.keys() - want.keys()
    assert [tensor for tensor in extra if not FOR_THE_OTHER_SPEC.fullmatch(tensor)] == []
    assert {tensor: entry for tensor, entry in have.items() if tensor not in extra} == want


@pytest.mark.parametrize("name", NAMES)
def test_objects_in_torch_dist(name: str) -> None:
    """Megatron's loader asks for these on any mesh, whatever is in them; further ones are Transformer Engine's."""
    ours = Placed(name, "tp1")
    have = list(extra_states(ours.table.megatron, ours.dims, stacked=ours.stacked))
    assert len(have) == len(set(have))
    assert golden(name)["objects"]
    assert sorted(set(golden(name)["objects"]) - set(have)) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_under_two_names_has_the_same_boxes(name: str) -> None:
    """What is stored for the other spec is the same norm, in the same place."""
    ours = Placed(name, "tp2")
    view = View(global_rows(ours.table.megatron, stacked=ours.stacked), ours.dims)
    homes: dict[str, list[Any]] = {}
    for local in MegatronPlacement(view, ours.mesh, ours.pipe, ours.vocab).locals(lambda row: True):
        (atom, *rest) = local.named.row.atoms
        if not rest and "norm" in atom.name:
            key = f"{atom.name.format(i=local.named.layer, e=-1)} {local.pieces}"
            homes.setdefault(key, []).append((local.name, local.rank, local.shape))
    twice = [found for found in homes.values() if len(found) > 1]
    for found in twice:
        assert len({(rank, shape) for _, rank, shape in found}) == 1
    has_twice = ours.dims["e"] > 0  # dense models of the GQA kind have one name for each norm
    assert bool(twice) == has_twice
