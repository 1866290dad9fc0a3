"""Ranks and pipeline stages: numbers written down by hand, then the same against Megatron-Core's own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_convert.converter.errors import MeshError
from areal_convert.converter.mesh import (
    Mesh,
    Rank,
    expand_layout,
    from_counts,
    pipeline,
    rank_at,
    ranks,
    shares,
)


def stages(mesh: Mesh, layers: int, mtp: int = 0) -> list[list[list[int]]]:
    """Layer ids of every stage and chunk."""
    return [[list(chunk.layers) for chunk in stage] for stage in pipeline(mesh, layers, mtp).chunks]


# ------------------------------------------------------------------------------------------------ ranks


def test_tensor_parallel_ranks_are_neighbours_and_stages_lie_apart() -> None:
    assert list(ranks(Mesh(tp=2, pp=2))) == [
        Rank(number=0, tp=0, pp=0, dp=0, ep=0, etp=0, edp=0),
        Rank(number=1, tp=1, pp=0, dp=0, ep=0, etp=1, edp=0),
        Rank(number=2, tp=0, pp=1, dp=0, ep=0, etp=0, edp=0),
        Rank(number=3, tp=1, pp=1, dp=0, ep=0, etp=1, edp=0),
    ]


def test_experts_cut_like_the_rest_spread_over_data_parallel_ranks() -> None:
    """TP2 EP2, ETP as TP: four ranks a stage, two dense replicas."""
    assert list(ranks(Mesh(tp=2, ep=2))) == [
        Rank(number=0, tp=0, pp=0, dp=0, ep=0, etp=0, edp=0),
        Rank(number=1, tp=1, pp=0, dp=0, ep=0, etp=1, edp=0),
        Rank(number=2, tp=0, pp=0, dp=1, ep=1, etp=0, edp=0),
        Rank(number=3, tp=1, pp=0, dp=1, ep=1, etp=1, edp=0),
    ]


def test_whole_experts_spread_over_tensor_parallel_ranks() -> None:
    """TP2 EP4 ETP1: the expert ranks count straight through."""
    found = list(ranks(Mesh(tp=2, ep=4, etp=1)))
    assert [(r.tp, r.dp, r.ep, r.etp, r.edp) for r in found] == [
        (0, 0, 0, 0, 0),
        (1, 0, 1, 0, 0),
        (0, 1, 2, 0, 0),
        (1, 1, 3, 0, 0),
    ]


def test_more_tensor_parallel_ranks_than_the_experts_need() -> None:
    """TP4 EP1 ETP2: two replicas of the experts."""
    found = list(ranks(Mesh(tp=4, etp=2)))
    assert [(r.tp, r.etp, r.edp) for r in found] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]


def test_a_stage_has_as_many_ranks_as_both_grids_need() -> None:
    assert Mesh(tp=2, ep=3, etp=1).stage_ranks == 6
    assert Mesh(tp=4, ep=2, etp=2).stage_ranks == 4
    assert Mesh(tp=2, ep=2, etp=4).stage_ranks == 8
    assert Mesh(tp=2, ep=3, etp=1, pp=5).world == 30
    assert rank_at(Mesh(tp=2, ep=3, etp=1, pp=5), 29) == Rank(29, tp=1, pp=4, dp=2, ep=2, etp=0, edp=1)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(),
        Mesh(tp=4),
        Mesh(tp=2, pp=3),
        Mesh(tp=2, pp=2, ep=2),
        Mesh(tp=2, ep=4, etp=1),
        Mesh(tp=4, ep=2, etp=2, pp=2),
        Mesh(tp=1, ep=2, etp=2),
        Mesh(tp=2, ep=3, etp=1, pp=2),
        Mesh(tp=4, etp=1),
        Mesh(tp=8, pp=16, ep=64, etp=1),
    ],
    ids=str,
)
def test_ranks_are_megatrons(mesh: Mesh) -> None:
    """Against megatron.core.parallel_state, as `initialize_model_parallel` calls it."""
    generator = pytest.importorskip("megatron.core.parallel_state").RankGenerator
    order = "tp-cp-ep-dp-pp"
    dense = generator(tp=mesh.tp, ep=1, dp=mesh.stage_ranks // mesh.tp, pp=mesh.pp, cp=1, order=order)
    expert_dp = mesh.stage_ranks // (mesh.expert_tp * mesh.ep)
    expert = generator(tp=mesh.expert_tp, ep=mesh.ep, dp=expert_dp, pp=mesh.pp, cp=1, order=order)
    want: dict[int, dict[str, int]] = {number: {} for number in range(mesh.world)}
    for ours, grid, theirs in (
        ("tp", dense, "tp"),
        ("pp", dense, "pp"),
        ("dp", dense, "dp"),
        ("ep", expert, "ep"),
        ("etp", expert, "tp"),
        ("edp", expert, "dp"),
    ):
        for group in grid.get_ranks(theirs):
            for index, number in enumerate(group):
                want[number][ours] = index
    assert list(ranks(mesh)) == [Rank(number, **coordinates) for number, coordinates in want.items()]


# ------------------------------------------------------------------------------------------------ stages


@pytest.mark.parametrize(
    ("mesh", "layers", "want"),
    [
        (Mesh(), 3, [[[0, 1, 2]]]),
        (Mesh(pp=2), 4, [[[0, 1]], [[2, 3]]]),
        (Mesh(pp=2, vpp=2), 4, [[[0], [2]], [[1], [3]]]),
        (Mesh(pp=2, vpp=2), 8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (Mesh(pp=2, vpp=4), 8, [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]),
        (Mesh(pp=2, first=2), 5, [[[0, 1]], [[2, 3, 4]]]),
        (Mesh(pp=2, last=2), 5, [[[0, 1, 2]], [[3, 4]]]),
        (Mesh(pp=4, first=1), 7, [[[0]], [[1, 2]], [[3, 4]], [[5, 6]]]),
        (Mesh(pp=4, first=2, last=1), 7, [[[0, 1]], [[2, 3]], [[4, 5]], [[6]]]),
        (Mesh(pp=2, first=1, last=4), 5, [[[0]], [[1, 2, 3, 4]]]),
        (Mesh(pp=3, first=1, last=1), 2, [[[0]], [[]], [[1]]]),
        (Mesh(pp=2, vpp=2, first=2), 6, [[[0], [3]], [[1, 2], [4, 5]]]),
        (Mesh(pp=4, layout="E|t*2|t*2|L"), 4, [[[]], [[0, 1]], [[2, 3]], [[]]]),
        (Mesh(pp=2, vpp=2, layout="E|t*2|t*2|L"), 4, [[[], [2, 3]], [[0, 1], []]]),
        (Mesh(pp=3, layout="Ett|t,t|tL"), 5, [[[0, 1]], [[2, 3]], [[4]]]),
        (Mesh(pp=3, layout="Et||tL"), 2, [[[0]], [[]], [[1]]]),
    ],
    ids=str,
)
def test_layers_of_every_stage_and_chunk(mesh: Mesh, layers: int, want: list[list[list[int]]]) -> None:
    assert stages(mesh, layers) == want


def test_the_ends_of_the_model() -> None:
    pipe = pipeline(Mesh(pp=2, vpp=2), 4, mtp=1)
    assert pipe.find("embedding") == (0, 0)
    assert pipe.find("loss") == (1, 1)
    assert pipe.find("mtp") == (1, 1)
    assert pipe.where() == {0: (0, 0, 0), 2: (0, 1, 0), 1: (1, 0, 0), 3: (1, 1, 0)}
    pipe = pipeline(Mesh(pp=4, layout="E|t*2|t*2m|L"), 4, mtp=1)
    assert pipe.find("mtp") == (2, 0)
    assert pipe.find("loss") == (3, 0)
    with pytest.raises(MeshError, match="no stage for the mtp"):
        pipeline(Mesh(pp=2), 4).find("mtp")


def test_a_pipeline_from_what_files_hold() -> None:
    pipe = from_counts([[1, 2], [0, 1]], mtp=True, mtp_at=(0, 1))
    assert [[list(c.layers) for c in stage] for stage in pipe.chunks] == [[[0], [1, 2]], [[], [3]]]
    assert (pipe.pp, pipe.vpp, pipe.find("mtp")) == (2, 2, (0, 1))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("E|t*2|t*2|L", ["E", "tt", "tt", "L"]),
        ("Ettt|(tt|)*3m|L", ["Ettt", "tt", "tt", "tt", "m", "L"]),
        ("E,t*3 | (t|)*2 tL", ["Ettt", "t", "t", "tL"]),
        ("(Et|)*1tL", ["Et", "tL"]),
        ("Et||tL", ["Et", "", "tL"]),
        ("E(tt|t)*2L", ["Ett", "ttt", "tL"]),
    ],
)
def test_a_layout_string_as_stages(text: str, want: list[str]) -> None:
    assert expand_layout(text) == want


LETTERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}


@pytest.mark.parametrize(
    "text",
    ["E|t*2|t*2|L", "Ettt|(tt|)*29,m|L", "Et*3|(tt|)*4,t*2mL", "E(tt|t)*2L", "Et||tL", "E|(t|)*12|t*10,L", "(Et|)*1tL"],
)
def test_layouts_are_expanded_as_megatron_expands_them(text: str) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    theirs = layouts.PipelineParallelLayerLayout.parse_str_to_list(text)
    assert [[LETTERS[letter] for letter in stage] for stage in expand_layout(text)] == [
        [kind.name for kind in stage] for stage in theirs
    ]


@st.composite
def layout_strings(draw: st.DrawFn) -> tuple[int, int, str]:
    """PP, VPP and a layout of that many stages: layers, then perhaps MTP layers on a stage or two, then nothing."""
    pp, vpp = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    parts = [draw(st.sampled_from(["", "t", "tt"])) for _ in range(pp * vpp)]
    if draw(st.booleans()):
        at = draw(st.integers(0, pp * vpp - 1))
        parts[at] += draw(st.sampled_from(["m", "mm"]))
        parts[at + 1 :] = [draw(st.sampled_from(["", "", "", "m", "t"])) for _ in parts[at + 1 :]]
    ends = draw(st.sampled_from(["EL", "EL", "EL", "EL", "E", "L"]))
    text = "E" * ("E" in ends) + "|".join(parts) + "L" * ("L" in ends)
    return pp, vpp, text


@settings(max_examples=400, deadline=None)
@given(layout_strings())
def test_megatron_takes_the_layouts_that_we_take(case: tuple[int, int, str]) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    pp, vpp, text = case
    layers, mtp = text.count("t"), text.count("m")
    if not layers:
        return
    theirs: Any = layouts.PipelineParallelLayerLayout(text, pp)
    try:
        theirs.validate_layer_layout(layers, mtp)
    except (AssertionError, IndexError):
        theirs = None
    try:
        ours = pipeline(Mesh(pp=pp, vpp=vpp, layout=text), layers, mtp)
    except MeshError:
        ours = None
    assert (ours is None) == (theirs is None), text
    if ours is None or theirs is None:
        return
    offset = 0
    for v in range(vpp):
        for p in range(pp):
            count = [kind.name for kind in theirs.layout[p][v]].count("decoder")
            assert list(ours.chunks[p][v].layers) == list(range(offset, offset + count))
            offset += count


SIZES = [
    (layers, pp, vpp, first, last)
    for layers in range(1, 13)
    for pp in range(1, 5)
    for vpp in (1, 2, 3)
    for first in (None, 1, 2, 3)
    for last in (None, 1, 2)
    if not (pp == 1 and (vpp > 1 or first or last))
]


def test_stages_are_megatrons() -> None:
    """Against `get_num_layers_to_build` and `get_transformer_layer_offset` for every small pipeline; where Megatron
    refuses, or loses layers without a word, we refuse."""
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    layer = pytest.importorskip("megatron.core.transformer.transformer_layer")
    refused = 0
    for layers, pp, vpp, first, last in SIZES:
        config = SimpleNamespace(
            num_layers=layers,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            pipeline_model_parallel_layout=None,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
        )
        mesh = Mesh(pp=pp, vpp=vpp, first=first, last=last)
        try:
            theirs = [
                [_theirs(block, layer, config, stage, chunk if vpp > 1 else None) for chunk in range(vpp)]
                for stage in range(pp)
            ]
        except AssertionError:
            theirs = []
        except ZeroDivisionError:
            continue  # counts for both of two interleaved stages: Megatron has no answer
        if sorted(i for stage in theirs for chunk in stage for i in chunk) == list(range(layers)):
            assert stages(mesh, layers) == theirs, (layers, mesh, first, last)
        else:
            refused += 1
            with pytest.raises(MeshError):
                pipeline(mesh, layers)
    assert 0 < refused < len(SIZES)


def _theirs(block: Any, layer: Any, config: Any, stage: int, chunk: int | None) -> list[int]:
    count = block.get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
    offset = layer.get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
    return list(range(offset, offset + count))


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("mesh", "layers", "mtp", "says"),
    [
        (Mesh(pp=4), 6, 0, ["6 layers do not divide over 4 stages", "pp 1, 2, 3, 6", "--pipeline-layout"]),
        (Mesh(pp=4), 2, 0, ["2 layers do not divide over 4 stages", "pp 1, 2"]),
        (Mesh(pp=4, first=2), 7, 0, ["5 layers do not divide over 3 stages"]),
        (Mesh(pp=2, first=3, last=3), 5, 0, ["6 layers are placed by hand, the model has 5"]),
        (Mesh(pp=2, first=1, last=1), 5, 0, ["2 layers are placed by hand, the model has 5"]),
        (Mesh(pp=2, first=9), 5, 0, ["9 layers are placed by hand, the model has 5"]),
        (Mesh(pp=2, vpp=3), 4, 0, ["stage 0 has 2 layers, which 3 chunks do not divide", "stage 1"]),
        (Mesh(vpp=2), 4, 0, ["virtual stages need at least two pipeline stages", "drop --vpp"]),
        (Mesh(pp=2, layout="E|t*2|t*2|L"), 4, 0, ["has 4 stages, the mesh pp 2 × vpp 1 = 2"]),
        (Mesh(pp=2, layout="Ett|tL"), 4, 0, ["names 3 decoder layers, the model has 4"]),
        (Mesh(pp=2, layout="Ett|ttmL"), 4, 0, ["names 1 MTP layers, the model has 0"]),
        (Mesh(pp=2, layout="Ett|ttL"), 4, 1, ["names 0 MTP layers, the model has 1"]),
        (Mesh(pp=2, layout="ttE|ttL"), 4, 0, ["must begin with E and end with L"]),
        (Mesh(pp=2, layout="EEtt|ttL"), 4, 0, ["names 2 E, the model has 1"]),
        (Mesh(pp=2, layout="Ettm|ttL"), 4, 1, ["a decoder layer after an MTP layer"]),
        (Mesh(pp=3, layout="Ett|ttm|mL"), 4, 2, ["spreads the MTP layers over several stages"]),
        (Mesh(pp=2, layout="Etx|ttL"), 4, 0, ["'x' means nothing here", "E (embedding)"]),
        (Mesh(pp=2, layout="E(tt|ttL"), 4, 0, ["'(' means nothing here"]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_what_would(mesh: Mesh, layers: int, mtp: int, says: list[str]) -> None:
    with pytest.raises(MeshError) as caught:
        pipeline(mesh, layers, mtp)
    for words in says:
        assert words in str(caught.value)


def test_all_that_is_wrong_with_a_layout_is_said_at_once() -> None:
    with pytest.raises(MeshError) as caught:
        pipeline(Mesh(pp=2, layout="tt|m"), 4)
    assert len(caught.value.problems) == 5  # layers, MTP layers, E, L, order


@pytest.mark.parametrize("field", ["tp", "pp", "vpp", "ep", "etp", "dp_shard"])
@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_sizes_are_whole_numbers(field: str, size: Any) -> None:
    with pytest.raises(MeshError, match=f"{field}: must be a whole number from 1 to"):
        Mesh(**{field: size})


def test_the_mtp_layers_are_in_the_last_chunk_of_their_stage() -> None:
    """Megatron (`validate_layer_layout`): "MTP should be always in the last virtual pipeline stage of that rank"."""
    assert pipeline(Mesh(pp=2, vpp=2, layout="Et|t|tm|L"), 3, mtp=1).find("mtp") == (0, 1)
    with pytest.raises(MeshError):
        pipeline(Mesh(pp=2, vpp=2, layout="Ett|tm||L"), 3, mtp=1)


def test_chunks_need_two_stages_in_a_layout_too() -> None:
    """Megatron (`initialize_model_parallel`): PP must be greater than 1 with the interleaved schedule."""
    with pytest.raises(MeshError, match="virtual stages need at least two pipeline stages"):
        pipeline(Mesh(vpp=2, layout="Ett|tL"), 3)


@pytest.mark.parametrize("field", ["first", "last"])
@pytest.mark.parametrize("count", [0, -1])
def test_a_count_for_an_end_stage_is_at_least_one(field: str, count: int) -> None:
    """As Megatron says (`TransformerConfig.__post_init__`); a stage without layers takes a layout."""
    counts: dict[str, Any] = {field: count}
    with pytest.raises(MeshError):
        pipeline(Mesh(pp=2, **counts), 4)


def test_a_layout_excludes_counts_for_the_ends() -> None:
    with pytest.raises(MeshError, match="the layout says it all"):
        Mesh(pp=2, first=1, layout="Et|tL")


def test_a_mesh_names_itself() -> None:
    assert str(Mesh()) == "one rank"
    assert str(Mesh(tp=2, pp=4, ep=2)) == "tp2 pp4 ep2"
    assert str(Mesh(tp=2, etp=1, ep=2)) == "tp2 ep2 etp1"
    assert str(Mesh(dp_shard=3)) == "dp_shard3"


# ------------------------------------------------------------------------------------------------ shares


@pytest.mark.parametrize(
    ("size", "parts", "want"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (1003, 2, [(0, 502), (502, 1003)]),
        (1, 2, [(0, 1), (1, 1)]),
        (7, 2, [(0, 4), (4, 7)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),  # not 2, 1, 1, 1: torch.chunk's pieces are equal while they last
    ],
)
def test_shares_on_paper(size: int, parts: int, want: list[tuple[int, int]]) -> None:
    assert shares(size, parts) == want


@given(st.integers(1, 40), st.integers(1, 12))
def test_shares_are_torchs_chunks(size: int, parts: int) -> None:
    import torch

    theirs = [chunk.tolist() for chunk in torch.chunk(torch.arange(size), parts)]
    assert [list(range(lo, hi)) for lo, hi in shares(size, parts) if lo < hi] == theirs
