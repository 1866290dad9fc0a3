"""Archon's parallel dimensions: every combination checked, every group made of the right ranks, up to 512 of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_convert.converter.errors import MeshError
from areal_convert.engines.api.parallel import ParallelStrategy
from areal_convert.engines.archon.dims import ArchonParallelDims

SMALL = st.sampled_from([1, 2, 3, 4])


@st.composite
def fitting(draw: st.DrawFn, sizes: st.SearchStrategy[int] = SMALL) -> ArchonParallelDims:
    """Dimensions that fit together; experts dealt out in every way that there is."""
    replicate, shard, cp, tp, pp = (draw(sizes) for _ in range(5))
    etp = draw(st.sampled_from([1, tp]))
    inner = cp if etp == tp else cp * tp
    ep = draw(st.sampled_from([1, *(inner * n for n in range(1, shard + 1) if shard % n == 0)]))
    world = replicate * shard * cp * tp * pp
    given_shard = draw(st.sampled_from([shard, -1]))
    return ArchonParallelDims(replicate, given_shard, cp, tp, pp, ep, etp, world_size=world)


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """One process that is one rank of many; no rank hears of another."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@given(fitting())
@settings(max_examples=60, deadline=None)
def test_every_rank_is_in_exactly_one_group_of_each_kind(dims: ArchonParallelDims) -> None:
    assert math.prod(dims.grid.values()) == dims.world_size
    for kind in dims.kinds:
        groups = dims.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(dims.world_size)), kind
        assert {len(group) for group in groups} == {dims.size(kind)}, kind
        assert all(list(group) == sorted(group) for group in groups), kind


@given(fitting())
@settings(max_examples=60, deadline=None)
def test_kinds_that_belong_together_make_up_the_world(dims: ArchonParallelDims) -> None:
    assert dims.size("dp") * dims.size("pp_cp_tp") == dims.world_size
    assert dims.size("dp_cp") * dims.tp * dims.pp == dims.world_size
    assert dims.size("dp_shard_cp") * dims.dp_replicate * dims.tp * dims.pp == dims.world_size
    if dims.ep > 1:
        assert dims.size("ep") == dims.ep
        held = dims.size("ep") * dims.size("dp_shard_mod_ep") * dims.dp_replicate * dims.pp
        assert held * dims.expert_tp == dims.world_size
        assert dims.size("dp_shard") == dims.dp_shard
        for batch in dims.groups("cp"):  # the ranks of a sequence are in one expert group
            assert any(set(batch) <= set(group) for group in dims.groups("ep"))


def test_the_groups_of_eight_ranks_by_hand() -> None:
    dims = ArchonParallelDims(dp_shard=2, cp=2, tp=2, ep=4, etp=2, world_size=8)
    assert dims.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert dims.groups("cp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert dims.groups("dp_shard_cp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert dims.groups("ep") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert dims.groups("ep_tp") == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert dims.groups("dp_shard_mod_ep") == tuple((rank,) for rank in range(8))
    uncut = ArchonParallelDims(dp_shard=2, cp=2, tp=2, ep=4, etp=1, world_size=8)
    assert uncut.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert uncut.groups("dp_shard_mod_ep") == ((0, 4), (1, 5), (2, 6), (3, 7))
    piped = ArchonParallelDims(pp=2, dp_shard=2, tp=2, world_size=8)
    assert piped.groups("pp_cp_tp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    hybrid = ArchonParallelDims(pp=2, dp_replicate=2, dp_shard=2, world_size=8)
    assert hybrid.groups("dp_replicate") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert hybrid.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


BIG: list[dict[str, Any]] = [
    {"world_size": 8, "tp": 2, "pp": 2},
    {"world_size": 8, "ep": 8},
    {"world_size": 16, "cp": 2, "tp": 2, "ep": 4, "etp": 2},
    {"world_size": 24, "dp_replicate": 3, "cp": 2, "tp": 2, "ep": 4},
    {"world_size": 64, "dp_replicate": 2, "pp": 2, "cp": 2, "tp": 2, "ep": 8, "etp": 2},
    {"world_size": 128, "pp": 4, "tp": 8, "dp_shard": 4, "ep": 16},
    {"world_size": 512, "dp_replicate": 2, "pp": 4, "cp": 2, "tp": 4, "ep": 16, "etp": 4},
]


@pytest.mark.parametrize("sizes", BIG, ids=lambda s: f"{s['world_size']}-{len(s)}")
def test_meshes_are_the_groups(sizes: dict[str, Any]) -> None:
    """What torch makes of the grid, seen from several ranks, is what `groups` says without it."""
    for rank in {0, sizes["world_size"] // 3, sizes["world_size"] - 1}:
        with fake_world(sizes["world_size"], rank):
            _compare(ArchonParallelDims(**sizes).build(), rank)


@given(fitting(st.sampled_from([1, 2, 4])), st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_meshes_are_the_groups_of_any_dimensions(dims: ArchonParallelDims, seed: int) -> None:
    rank = seed % dims.world_size
    with fake_world(dims.world_size, rank):
        _compare(dims.build(), rank)


def _compare(dims: ArchonParallelDims, rank: int) -> None:
    import torch.distributed as dist

    for kind in dims.kinds:
        mine = next(group for group in dims.groups(kind) if rank in group)
        mesh = dims.mesh(kind)
        assert tuple(sorted(mesh.mesh.flatten().tolist())) == mine, kind
        if kind == "ep_tp":
            assert tuple(mesh.shape) == (dims.ep, dims.tp)
            continue
        assert tuple(dist.get_process_group_ranks(dims.group(kind))) == mine, kind
        assert dims.rank(kind) == mine.index(rank), kind
    shards = dims.size("dp_shard_cp")
    assert tuple(dims.mesh("fsdp").shape) == ((shards,) if dims.dp_replicate == 1 else (dims.dp_replicate, shards))
    assert dims.build().mesh("world") is dims.mesh("world")
    if dims.ep > 1:
        assert dims.mesh("expert_fsdp").shape[-1] == dims.size("dp_shard_mod_ep")
        assert dims.mesh("expert_fsdp").ndim == (1 if dims.dp_replicate == 1 else 2)


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"world_size": 8, "tp": 3}, ["8 is no multiple of", "6 or 9 ranks do"]),
    ({"world_size": 2, "tp": 4}, ["2 is no multiple of", "4 ranks would do"]),
    ({"world_size": 8, "dp_shard": 2, "tp": 2}, ["that makes 4 ranks of 8", "dp_shard=4 would do"]),
    ({"world_size": 9, "dp_shard": 2, "tp": 2}, ["that makes 4 ranks of 9", "4 ranks do"]),
    ({"world_size": 8, "tp": 4, "etp": 2}, ["etp: 2, expected 1 or tp=4"]),
    ({"world_size": 8, "cp": 2, "ep": 3}, ["ep: 3, expected a multiple of cp = 2", "these do: 2, 4, 8"]),
    ({"world_size": 8, "tp": 2, "ep": 2, "dp_shard": 4}, []),
    ({"world_size": 8, "cp": 2, "tp": 2, "ep": 2}, ["multiple of cp·tp = 4", "with etp=1 these do: 4, 8"]),
    ({"world_size": 0}, ["world_size: 0, expected at least 1"]),
    ({"world_size": 4, "dp_shard": 0, "cp": -1}, ["dp_shard: 0, expected -1", "cp: -1, expected at least 1"]),
    # everything at once
    ({"world_size": 10, "tp": 4, "etp": 2, "ep": 3}, ["world_size: 10", "etp: 2", "ep: 3"]),
]


@pytest.mark.parametrize(("sizes", "said"), REFUSED, ids=lambda x: str(x)[:40] if isinstance(x, dict) else "")
def test_what_does_not_fit_is_said_with_what_would(sizes: dict[str, Any], said: list[str]) -> None:
    if not said:
        ArchonParallelDims(**sizes)
        return
    with pytest.raises(MeshError) as caught:
        ArchonParallelDims(**sizes)
    for words in said:
        assert words in str(caught.value)


@given(*(st.integers(1, 6) for _ in range(7)), st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_the_sizes_that_a_refusal_proposes_do_fit(
    replicate: int, shard: int, cp: int, tp: int, pp: int, ep: int, etp: int, world: int
) -> None:
    """Whatever is given: it fits, or what the message names as fitting does."""
    sizes: dict[str, Any] = {
        "dp_replicate": replicate,
        "dp_shard": shard,
        "cp": cp,
        "tp": tp,
        "pp": pp,
        "ep": ep,
        "etp": etp,
    }
    try:
        ArchonParallelDims(**sizes, world_size=world)
    except MeshError as error:
        sizes["etp"] = etp if etp in (1, tp) else 1
        for problem in error.problems:
            if problem.about == "dp_shard" and "dp_shard=" in problem.hint:
                sizes["dp_shard"] = int(problem.hint.split("=")[1].split()[0])
            elif problem.about == "dp_shard":
                world = int(problem.hint.split()[0])
        try:
            ArchonParallelDims(**sizes, world_size=world)
        except MeshError as second:
            assert [problem.about for problem in second.problems] == ["ep"]
            for proposed in second.problems[0].hint.split(": ")[1].split(", "):
                ArchonParallelDims(**{**sizes, "ep": int(proposed)}, world_size=world)


def test_dims_of_a_strategy() -> None:
    strategy = ParallelStrategy(
        data_parallel_size=4,
        data_parallel_replicate_size=2,
        tensor_parallel_size=2,
        expert_parallel_size=2,
        expert_tensor_parallel_size=2,
    )
    dims = ArchonParallelDims.of(strategy, 8)
    assert (dims.dp_replicate, dims.dp_shard, dims.tp, dims.ep, dims.etp) == (2, 2, 2, 2, 2)
    assert dims.gradient_divisor == 4
    assert dims.expert_tp == 2
    assert ArchonParallelDims(tp=2, world_size=2).expert_tp == 2


def test_kinds_that_are_not_there_are_named() -> None:
    plain = ArchonParallelDims(world_size=4)
    with pytest.raises(MeshError, match="no expert parallelism"):
        plain.groups("ep")
    with pytest.raises(MeshError, match="experts are not cut"):
        ArchonParallelDims(tp=2, ep=2, world_size=4).groups("ep_tp")
    with pytest.raises(MeshError, match="unknown"):
        plain.size("qp")
    with pytest.raises(MeshError, match=r"build\(\)"):
        plain.mesh("dp")


def test_a_world_of_another_size_is_refused() -> None:
    with fake_world(4, 0), pytest.raises(MeshError, match="has 4 ranks"):
        ArchonParallelDims(world_size=8).build()
