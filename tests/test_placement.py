"""Which rank holds which box: literals for what is uneven, torch's own DTensor for FSDP2, TP and EP, and refusals that
say what would fit. Megatron's side is in `test_megatron_goldens`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest

from areal_convert.converter.errors import MeshError
from areal_convert.converter.layout import View
from areal_convert.converter.mesh import Mesh, pipeline
from areal_convert.converter.placement import (
    FsdpPlacement,
    Local,
    MegatronPlacement,
    Piece,
    padded_vocab,
    undivided,
)
from areal_convert.converter.slots import Box, tiles
from areal_convert.mappings import table
from areal_convert.mappings.schema import Atom, Row, row

EMBED = row("embed", "v h", Atom("embed", "v h"), cut="v", pad="v")
ROW = row("row", "u h", Atom("row", "u h"))
NORM = row("norm", "f", Atom("norm", "f"))
Q = row("q", "(g d) h", Atom("q", "g d h"), cut="g")
O = row("o", "h (g d)", Atom("o", "h g d"), cut="g")  # noqa: E741
GATE_UP = row("gate_up", "([gate up] f) h", Atom("gate", "f h"), Atom("up", "f h"), cut="f")

MODEL = {
    "hidden_size": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 8,
    "vocab_size": 11,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "moe_intermediate_size": 8,
}


def fsdp(rows: list[Row], dims: dict[str, int], **mesh: Any) -> dict[str, list[tuple[int, tuple[int, ...], Any]]]:
    """Of every tensor: (rank, local shape, boxes)."""
    found: dict[str, list[tuple[int, tuple[int, ...], Any]]] = {}
    for local in FsdpPlacement(View(rows, dims | {"layers": 1}), Mesh(**mesh)).locals(lambda r: True):
        found.setdefault(local.name, []).append((local.rank, local.shape, [(p.lo, p.hi) for p in local.pieces]))
    return found


# ------------------------------------------------------------------------------------------------ uneven FSDP shards


def test_1003_rows_on_two_ranks_are_502_and_501() -> None:
    assert fsdp([EMBED], {"v": 1003, "h": 64}, dp_shard=2) == {
        "embed": [
            (0, (502, 64), [((0, 0), (502, 64))]),
            (1, (501, 64), [((502, 0), (1003, 64))]),
        ]
    }


def test_one_row_on_two_ranks_is_on_the_first() -> None:
    """Measured: a [1, 8] weight gives 1 and 0 rows. The second rank holds nothing, and stores nothing."""
    assert fsdp([ROW], {"u": 1, "h": 8}, dp_shard=2) == {"row": [(0, (1, 8), [((0, 0), (1, 8))])]}


def test_a_norm_of_seven_on_two_ranks_is_4_and_3() -> None:
    assert fsdp([NORM], {"f": 7}, dp_shard=2) == {
        "norm": [(0, (4,), [((0,), (4,))]), (1, (3,), [((4,), (7,))])],
    }


def test_a_norm_of_seven_on_five_ranks_leaves_one_empty() -> None:
    ranks = [(rank, shape) for rank, shape, _ in fsdp([NORM], {"f": 7}, dp_shard=5)["norm"]]
    assert ranks == [(0, (2,)), (1, (2,)), (2, (2,)), (3, (1,))]  # the fifth has none


# ------------------------------------------------------------------------------------------------ FSDP × TP


def test_tensor_parallelism_cuts_first_and_fsdp_what_is_left() -> None:
    """8 rows, TP2 × 2 shards: ranks 0 and 1 are one shard's; TP rank 1 has rows 4 to 7."""
    assert fsdp([Q], {"g": 4, "d": 2, "h": 3}, tp=2, dp_shard=2)["q"] == [
        (0, (2, 3), [((0, 0), (2, 3))]),  # shard 0, TP 0
        (2, (2, 3), [((2, 0), (4, 3))]),  # shard 1, TP 0
        (1, (2, 3), [((4, 0), (6, 3))]),  # shard 0, TP 1
        (3, (2, 3), [((6, 0), (8, 3))]),  # shard 1, TP 1
    ]


def test_columns_by_tensor_parallelism_and_rows_by_fsdp() -> None:
    assert fsdp([O], {"g": 2, "d": 2, "h": 3}, tp=2, dp_shard=2)["o"] == [
        (0, (2, 2), [((0, 0), (2, 2))]),
        (2, (1, 2), [((2, 0), (3, 2))]),
        (1, (2, 2), [((0, 2), (2, 4))]),
        (3, (1, 2), [((2, 2), (3, 4))]),
    ]


def test_a_fused_matrix_is_cut_in_both_of_its_halves() -> None:
    """gate 0-3 and up 4-7; TP rank 1 has rows 2, 3, 6, 7; of these, three shards take 2, 2 and 0 rows."""
    assert fsdp([GATE_UP], {"f": 4, "h": 1}, tp=2, dp_shard=3)["gate_up"] == [
        (0, (2, 1), [((0, 0), (2, 1))]),
        (2, (2, 1), [((4, 0), (6, 1))]),
        (1, (2, 1), [((2, 0), (4, 1))]),
        (3, (2, 1), [((6, 0), (8, 1))]),
    ]
    assert fsdp([GATE_UP], {"f": 6, "h": 1}, tp=2, dp_shard=2)["gate_up"][2:] == [
        (1, (3, 1), [((3, 0), (6, 1))]),
        (3, (3, 1), [((9, 0), (12, 1))]),
    ]
    assert fsdp([GATE_UP], {"f": 6, "h": 1}, tp=2, dp_shard=4)["gate_up"][:3] == [
        (0, (2, 1), [((0, 0), (2, 1))]),  # gate 0, 1
        (2, (2, 1), [((2, 0), (3, 1)), ((6, 0), (7, 1))]),  # gate 2 and up 0: one local tensor, two boxes
        (4, (2, 1), [((7, 0), (9, 1))]),  # up 1, 2
    ]


# ------------------------------------------------------------------------------------------------ against torch


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    """torch.distributed as one rank of many sees it, without the others: nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


COLUMNS = ("wo.weight", "w2.weight")  # row-parallel: cut along their columns
REPLICATED = ("norm.weight", "gate.weight")


def torch_locals(shapes: dict[str, tuple[int, ...]], mesh: Mesh) -> dict[int, dict[str, Any]]:
    """Local tensors of every rank as torch's DTensor, a TP plan and `fully_shard` make them (as torchtitan does).

    Every whole tensor counts its elements, so that a local one says which it holds.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    found: dict[int, dict[str, Any]] = {}
    inside = mesh.ep // (mesh.tp if mesh.expert_tp == 1 else 1) or 1
    sizes = (mesh.dp_shard // inside, inside, mesh.tp)
    for rank in range(prod(sizes)):
        with fake_rank(rank, prod(sizes)):
            grid = init_device_mesh("cpu", sizes, mesh_dim_names=("mod", "in", "tp"))
            dense, experts = torch.nn.Module(), torch.nn.Module()
            value: Any
            for name, shape in shapes.items():
                value = torch.arange(prod(shape), dtype=torch.float64).reshape(shape)
                column = name.endswith((*COLUMNS, "experts.w2"))
                target = dense
                if ".experts." in name and mesh.ep > 1:
                    target = experts
                    if mesh.expert_tp == 1:
                        value = distribute_tensor(
                            value, grid["in", "tp"]._flatten("ep"), [Shard(0)], src_data_rank=None
                        )
                    else:
                        places = [Shard(0), Shard(2 if column else 1)]
                        value = distribute_tensor(value, grid["in", "tp"], places, src_data_rank=None)
                elif mesh.tp > 1 and not name.endswith(REPLICATED):
                    place = Shard((1 if column else 0) + (".experts." in name))
                    value = distribute_tensor(value, grid["tp"], [place], src_data_rank=None)
                target.register_parameter(name.replace(".", "/"), torch.nn.Parameter(value))
            fully_shard(dense, mesh=grid["mod", "in"]._flatten("dp_shard"))
            if list(experts.parameters()):
                count = next(shape for name, shape in shapes.items() if ".experts." in name)[0]
                crowded = sizes[0] * mesh.ep > count
                fully_shard(experts, mesh=grid["mod"], shard_placement_fn=(lambda p: Shard(1)) if crowded else None)
            sharded: dict[str, Any] = {**dict(dense.named_parameters()), **dict(experts.named_parameters())}
            found[rank] = {n.replace("/", "."): p.to_local().detach().clone() for n, p in sharded.items()}
    return found


def our_local(local: Local) -> Any:
    """The same from our boxes."""
    import torch

    whole = torch.arange(prod(local.total), dtype=torch.float64).reshape(local.total)
    out = torch.full(local.shape, -1.0, dtype=torch.float64)
    for lo, hi, at in local.pieces:
        sizes = [b - a for a, b in zip(lo, hi, strict=True)]
        inside = tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))
        out[inside] = whole[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
    return out


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen3", {"dp_shard": 3}),
        ("qwen3", {"tp": 2}),
        ("qwen3", {"tp": 2, "dp_shard": 2}),
        ("qwen3", {"tp": 2, "dp_shard": 3}),
        ("qwen3", {"tp": 4, "dp_shard": 3}),  # rows of 2, over 3
        ("qwen3_moe", {"dp_shard": 3}),
        ("qwen3_moe", {"tp": 2, "dp_shard": 2}),
        ("qwen3_moe", {"ep": 2, "dp_shard": 2}),
        ("qwen3_moe", {"ep": 2, "dp_shard": 4}),
        ("qwen3_moe", {"ep": 2, "dp_shard": 8}),  # more ranks than experts: cut along their rows
        ("qwen3_moe", {"ep": 4, "dp_shard": 4}),
        ("qwen3_moe", {"ep": 2, "tp": 2, "etp": 1, "dp_shard": 2}),
        ("qwen3_moe", {"ep": 4, "tp": 2, "etp": 1, "dp_shard": 2}),
        ("qwen3_moe", {"ep": 2, "tp": 2, "etp": 2, "dp_shard": 2}),
        ("qwen3_moe", {"ep": 2, "tp": 2, "etp": 2, "dp_shard": 4}),
        ("qwen3_moe", {"ep": 4, "tp": 2, "etp": 2, "dp_shard": 8}),
    ],
    ids=str,
)
def test_archon_lies_as_torch_shards_it(family: str, mesh: dict[str, Any]) -> None:
    t = table(family)
    view = View(t.archon, t.dims(MODEL))
    placed = FsdpPlacement(view, Mesh(**mesh)).locals(lambda r: r.form == "")
    shapes = {local.name: local.total for local in placed}
    want = torch_locals(shapes, Mesh(**mesh))
    have: dict[int, dict[str, Any]] = {rank: {} for rank in want}
    for local in placed:
        assert local.name not in have[local.rank]
        have[local.rank][local.name] = our_local(local)
    for rank, tensors in want.items():
        for name, value in tensors.items():
            tp = rank % mesh.get("tp", 1)
            if value.numel() == 0 or (name.endswith(REPLICATED) and tp):
                assert name not in have[rank], (rank, name)  # empty, or the replica of TP rank 0's
            else:
                assert have[rank][name].tolist() == value.tolist(), (rank, name)
        assert have[rank].keys() <= tensors.keys()


@pytest.mark.parametrize("experts", ["fused", "per_expert"])
@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 5},
        {"tp": 2, "dp_shard": 3},
        {"ep": 4, "dp_shard": 4, "tp": 2},
        {"ep": 4, "dp_shard": 2, "tp": 2, "etp": 1},
        {"ep": 2, "dp_shard": 8},
    ],
    ids=str,
)
def test_every_element_is_on_one_rank(experts: str, mesh: dict[str, Any]) -> None:
    t = table("qwen3_moe")
    view = View(t.hf, t.dims(MODEL))
    boxes: dict[str, list[Box]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for local in FsdpPlacement(view, Mesh(**mesh)).locals(lambda r: r.form in ("", experts)):
        boxes.setdefault(local.name, []).extend(Box(p.lo, p.hi) for p in local.pieces)
        shapes[local.name] = local.total
        assert sum(prod(b - a for a, b in zip(p.lo, p.hi, strict=True)) for p in local.pieces) == prod(local.shape)
        assert 0 <= local.rank < mesh["dp_shard"] * mesh.get("tp", 1)
    for name, shape in shapes.items():
        assert tiles(boxes[name], shape), name


# ------------------------------------------------------------------------------------------------ Megatron


def megatron(mesh: Mesh, *, per_rank: bool = False, vocab: int | None = None, **config: Any) -> MegatronPlacement:
    t = table("qwen3_moe")
    dims = t.dims(MODEL | config)
    return MegatronPlacement(View(t.megatron, dims), mesh, pipeline(mesh, dims["layers"]), vocab, per_rank)


def test_every_rank_has_its_replicas() -> None:
    """TP2 EP2, whole experts: a norm is on both files, an expert's matrix on the one of its expert rank."""
    placed = megatron(Mesh(tp=2, ep=2, etp=1), per_rank=True, vocab=16).locals(
        lambda r: r.form in ("", "te", "sequential")
    )
    norms = [(x.rank, x.copy) for x in placed if x.name == "decoder.layers.0.self_attention.q_layernorm.weight"]
    assert norms == [(0, 0), (1, 1)]
    fc1 = [
        (x.rank, x.name.rsplit(".", 3)[1], x.named.expert, x.copy)
        for x in placed
        if x.name.startswith("decoder.layers.1.mlp.experts") and x.name.endswith("fc1.weight")
    ]
    assert fc1 == [  # (rank, local number, expert, copy)
        (0, "0", 0, 0),
        (0, "1", 1, 0),
        (1, "0", 2, 0),
        (1, "1", 3, 0),
    ]


def test_a_rank_of_padding_only_is_placed_all_the_same() -> None:
    placed = megatron(Mesh(tp=2), per_rank=True, vocab=32).locals(lambda r: r.form in ("", "te", "sequential"))
    embed = [(x.rank, x.shape, x.pieces) for x in placed if x.name == "embedding.word_embeddings.weight"]
    zero = (0, 0)
    assert embed == [
        (0, (16, 4), (Piece((0, 0), (16, 4), zero),)),
        (1, (16, 4), (Piece((16, 0), (32, 4), zero),)),  # the vocabulary is 11
    ]


@pytest.mark.parametrize(
    ("true", "divisor", "tp", "want"),
    [
        (1003, 128, 1, 1024),
        (1003, 128, 2, 1024),
        (1003, 128, 4, 1024),
        (1003, 128, 8, 1024),
        (1100, 128, 1, 1152),
        (1100, 128, 2, 1280),
        (1100, 128, 4, 1536),
        (1024, 128, 8, 1024),
        (1025, 128, 8, 2048),
        (5, 1, 4, 8),
        (49152, 128, 3, 49152),
    ],
)
def test_the_padded_vocabulary(true: int, divisor: int, tp: int, want: int) -> None:
    assert padded_vocab(true, divisor, tp) == want


def test_hugging_faces_tensors_are_whole() -> None:
    t = table("qwen3_moe")
    view = View(t.hf, t.dims(MODEL))
    for local in undivided(view.all_named(lambda r: r.form in ("", "fused"))):
        assert local.pieces == (Piece((0,) * len(local.shape), local.shape, (0,) * len(local.shape)),)
        assert (local.rank, local.copy, local.total) == (0, 0, local.shape)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("mesh", "config", "says"),
    [
        (Mesh(tp=3), {}, ["tp: 4 attention heads do not divide by 3", "4 divides by 1, 2, 4"]),
        (
            Mesh(tp=4),
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            ["6 KV groups and TP 4: neither divides the other", "6 divides by 1, 2, 3, 6"],
        ),
        (Mesh(ep=3), {}, ["ep: 4 experts do not divide by 3", "4 divides by 1, 2, 4"]),
        (Mesh(tp=4), {"moe_intermediate_size": 6}, ["etp:", "6 rows do not divide by 4", "6 divides by 1, 2, 3, 6"]),
        (Mesh(tp=4, etp=1), {"num_experts": 0, "intermediate_size": 6}, ["tp:", "6 rows do not divide by 4"]),
        (Mesh(ep=2), {"num_experts": 0}, ["this model has no experts to spread over 2 ranks", "drop --ep"]),
    ],
    ids=str,
)
def test_a_mesh_that_cannot_hold_the_model_is_refused(mesh: Mesh, config: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(MeshError) as caught:
        megatron(mesh, vocab=16, **config).locals(lambda r: r.form in ("", "te", "sequential"))
    for words in says:
        assert words in str(caught.value)


def test_all_reasons_are_given_together() -> None:
    with pytest.raises(MeshError) as caught:
        megatron(Mesh(tp=3, ep=3), vocab=11).locals(lambda r: r.form in ("", "te", "sequential"))
    text = str(caught.value)
    assert "attention heads" in text
    assert "experts do not divide" in text
    assert "pad the vocabulary (--make-vocab-size-divisible-by)" in text


def test_two_ranks_cannot_share_a_files_name() -> None:
    """TP2 and ETP4: (TP 0, EP 0) is two ranks with different parts of an expert."""
    with pytest.raises(MeshError, match="two different ranks would share one name") as caught:
        megatron(Mesh(tp=2, ep=2, etp=4), per_rank=True)
    assert "torch_dist" in str(caught.value)
    megatron(Mesh(tp=2, ep=2, etp=4))  # as torch_dist it is fine
    megatron(Mesh(tp=4, ep=1, etp=2), per_rank=True)


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        (Mesh(pp=2), "without stages"),
        (Mesh(ep=3, dp_shard=3), "4 experts do not divide by 3"),
        (Mesh(ep=4, dp_shard=2), "EP 4 does not fit into dp_shard 2 × tp 1"),
        (Mesh(ep=2, dp_shard=3), "EP 2 does not fit into dp_shard 3 × tp 1"),
        (Mesh(ep=2, dp_shard=3, tp=4, etp=1), "does not fit"),
        (Mesh(tp=4, ep=2, etp=2, dp_shard=2), "must be 1 or TP (4), not 2"),
        (Mesh(tp=3), "8 rows do not divide by 3"),
    ],
    ids=str,
)
def test_what_fsdp_cannot_hold_is_refused(mesh: Mesh, says: str) -> None:
    t = table("qwen3_moe")
    with pytest.raises(MeshError) as caught:
        FsdpPlacement(View(t.archon, t.dims(MODEL)), mesh).locals(lambda r: r.form == "")
    assert says in str(caught.value)


def test_rows_that_fsdp_cannot_cut_are_refused() -> None:
    """With more ranks than experts their rows are cut, and torch cuts those evenly only ("FSDP does not support uneven
    sharding on dim 1"): 4 rows of w2 over 3 ranks are no mesh."""
    t = table("qwen3_moe")
    with pytest.raises(MeshError, match="do not divide by 3"):
        FsdpPlacement(View(t.archon, t.dims(MODEL)), Mesh(ep=2, dp_shard=6)).locals(lambda r: r.form == "")
