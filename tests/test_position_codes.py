"""Converted tensors against matrices written down by hand: every value names the tensor, row and column it comes from.

1021 is tensor 1 (q), row 2, column 1; the numbers of the tensors are in `handmade.CODES`, layers and experts stand
before them. The numbers at the end of a line count the rows of the expected matrix. torch alone reads the results.
"""

from __future__ import annotations

import argparse
import filecmp
import json
from pathlib import Path
from typing import Any

import pytest

import handmade
from areal_convert.converter.convert import Options, convert
from areal_convert.converter.errors import ConfigError, ConvertError
from areal_convert.converter.mesh import Mesh

ODD = Options(vocab_divisor=2)  # the vocabulary of 5 becomes 6 at TP1, 8 at TP2 and at TP4
LOCAL = Options(vocab_divisor=2, spec="local")

QKV, PROJ = "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"
FC1, FC2 = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"


def rows(tensor: Any) -> list[Any]:
    return tensor.tolist()


def layer(tree: dict[str, Any], name: str, number: int = 0) -> list[Any]:
    return rows(tree[f"decoder.layers.{number}.{name}"])


def and_back(source: Path, target: Path, **opening: Any) -> None:
    """The way back gives the file that safetensors itself wrote, byte for byte."""
    back = target.with_name(target.name + "-back")
    convert(target, back, "hf", **opening)
    assert filecmp.cmp(back / "model.safetensors", source / "model.safetensors", shallow=False)
    assert filecmp.cmp(back / "config.json", source / "config.json", shallow=False)


# ------------------------------------------------------------------------------------------------ QKV

MHA = [  # 2 heads of 2, each with k and v of its own
    [1000, 1001],  # 0  group 0: q head 0
    [1010, 1011],  # 1
    [2000, 2001],  # 2           k
    [2010, 2011],  # 3
    [3000, 3001],  # 4           v
    [3010, 3011],  # 5
    [1020, 1021],  # 6  group 1: q head 1
    [1030, 1031],  # 7
    [2020, 2021],  # 8           k
    [2030, 2031],  # 9
    [3020, 3021],  # 10          v
    [3030, 3031],  # 11
]
GQA = [  # 4 heads of 2 in 2 groups
    [1000, 1001],  # 0  group 0: q head 0
    [1010, 1011],  # 1
    [1020, 1021],  # 2           q head 1
    [1030, 1031],  # 3
    [2000, 2001],  # 4           k
    [2010, 2011],  # 5
    [3000, 3001],  # 6           v
    [3010, 3011],  # 7
    [1040, 1041],  # 8  group 1: q head 2
    [1050, 1051],  # 9
    [1060, 1061],  # 10          q head 3
    [1070, 1071],  # 11
    [2020, 2021],  # 12          k
    [2030, 2031],  # 13
    [3020, 3021],  # 14          v
    [3030, 3031],  # 15
]
MQA = [  # 4 heads of 2, one k and one v for all
    [1000, 1001],  # 0  q head 0
    [1010, 1011],  # 1
    [1020, 1021],  # 2  q head 1
    [1030, 1031],  # 3
    [1040, 1041],  # 4  q head 2
    [1050, 1051],  # 5
    [1060, 1061],  # 6  q head 3
    [1070, 1071],  # 7
    [2000, 2001],  # 8  k
    [2010, 2011],  # 9
    [3000, 3001],  # 10 v
    [3010, 3011],  # 11
]
HEADS = {"mha": (2, 2, MHA), "gqa": (4, 2, GQA), "mqa": (4, 1, MQA)}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("tp", [1, 2])
def test_qkv_of_one_rank_is_its_rows_of_the_interleaved_matrix(kind: str, tp: int, tmp_path: Path) -> None:
    n, g, want = HEADS[kind]
    source = handmade.llama(tmp_path / "hf", n=n, g=g)
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=tp), ODD)
    have = [layer(handmade.mp_rank(tmp_path / "mp", f"mp_rank_{rank:02d}"), QKV) for rank in range(tp)]
    step = len(want) // tp
    assert have == [want[rank * step : (rank + 1) * step] for rank in range(tp)]
    and_back(source, tmp_path / "mp")


@pytest.mark.parametrize("kind", HEADS)
def test_qkv_in_torch_dist_is_whole_and_stacked(kind: str, tmp_path: Path) -> None:
    n, g, want = HEADS[kind]
    source = handmade.llama(tmp_path / "hf", n=n, g=g)
    convert(source, tmp_path / "td", "torch_dist", Mesh(tp=2), ODD)
    assert rows(handmade.whole(tmp_path / "td")[f"decoder.layers.{QKV}"]) == [want]
    and_back(source, tmp_path / "td")


def test_two_kv_heads_over_four_ranks_leave_half_a_group_on_each(tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf", n=4, g=2)
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=4), ODD)
    have = [layer(handmade.mp_rank(tmp_path / "mp", f"mp_rank_{rank:02d}"), QKV) for rank in range(4)]
    assert have == [
        [[1000, 1001], [1010, 1011], [1020, 1021], [1030, 1031]],  # rank 0: q heads 0 and 1
        [[2000, 2001], [2010, 2011], [3000, 3001], [3010, 3011]],  # rank 1: k and v of group 0
        [[1040, 1041], [1050, 1051], [1060, 1061], [1070, 1071]],  # rank 2: q heads 2 and 3
        [[2020, 2021], [2030, 2031], [3020, 3021], [3030, 3031]],  # rank 3: k and v of group 1
    ]
    and_back(source, tmp_path / "mp")


def test_one_kv_head_over_four_ranks_cuts_where_the_rows_divide(tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf", n=4, g=1)
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=4), ODD)
    have = [layer(handmade.mp_rank(tmp_path / "mp", f"mp_rank_{rank:02d}"), QKV) for rank in range(4)]
    assert have == [
        [[1000, 1001], [1010, 1011], [1020, 1021]],  # rank 0: q head 0, half of q head 1
        [[1030, 1031], [1040, 1041], [1050, 1051]],  # rank 1: the other half, q head 2
        [[1060, 1061], [1070, 1071], [2000, 2001]],  # rank 2: q head 3, half of k
        [[2010, 2011], [3000, 3001], [3010, 3011]],  # rank 3: the other half, v
    ]
    and_back(source, tmp_path / "mp")


def _qwen2(path: Path) -> Path:
    shapes = handmade.dense_layer(2, 4, 2, 2, 4) | {
        "self_attn.q_proj.bias": (8,),
        "self_attn.k_proj.bias": (4,),
        "self_attn.v_proj.bias": (4,),
    }
    return handmade.save_hf(path, handmade.sizes("qwen2", 2, 4, 2, 2, 4, 5, 1), handmade.tensors_of([shapes], 2, 5))


def test_qkv_bias_is_interleaved_like_the_weight(tmp_path: Path) -> None:
    source = _qwen2(tmp_path / "hf")
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=2), ODD)
    convert(source, tmp_path / "td", "torch_dist", Mesh(tp=2), ODD)
    bias = "self_attention.linear_qkv.bias"
    have = [layer(handmade.mp_rank(tmp_path / "mp", f"mp_rank_{rank:02d}"), bias) for rank in range(2)]
    # 31, 32 and 33 are the biases of q, k and v; a vector has rows only
    first = [31000, 31010, 31020, 31030, 32000, 32010, 33000, 33010]  # q heads 0 and 1, k, v of group 0
    second = [31040, 31050, 31060, 31070, 32020, 32030, 33020, 33030]  # q heads 2 and 3, k, v of group 1
    assert have == [first, second]
    assert rows(handmade.whole(tmp_path / "td")[f"decoder.layers.{bias}"]) == [first + second]
    assert [k for k in handmade.whole(tmp_path / "td") if k.endswith("bias")] == [f"decoder.layers.{bias}"]
    and_back(source, tmp_path / "mp")
    and_back(source, tmp_path / "td")


def test_square_projections_are_not_turned(tmp_path: Path) -> None:
    """Hidden size, query rows and intermediate size are all 4: no shape tells a matrix from its transpose."""
    source = handmade.llama(tmp_path / "hf", h=4, n=2, g=2, d=2, f=4)
    convert(source, tmp_path / "mp", "mp_rank", Mesh(), ODD)
    tree = handmade.mp_rank(tmp_path / "mp")
    assert layer(tree, PROJ) == [
        [4000, 4001, 4002, 4003],
        [4010, 4011, 4012, 4013],
        [4020, 4021, 4022, 4023],
        [4030, 4031, 4032, 4033],
    ]
    assert layer(tree, FC2) == [
        [7000, 7001, 7002, 7003],
        [7010, 7011, 7012, 7013],
        [7020, 7021, 7022, 7023],
        [7030, 7031, 7032, 7033],
    ]
    assert layer(tree, QKV)[:3] == [[1000, 1001, 1002, 1003], [1010, 1011, 1012, 1013], [2000, 2001, 2002, 2003]]
    and_back(source, tmp_path / "mp")


# ------------------------------------------------------------------------------------------------ MLP, row-parallel

GATE_UP = [
    [5000, 5001],  # 0 gate
    [5010, 5011],  # 1
    [5020, 5021],  # 2
    [5030, 5031],  # 3
    [6000, 6001],  # 4 up
    [6010, 6011],  # 5
    [6020, 6021],  # 6
    [6030, 6031],  # 7
]
GATE_UP_OF_RANK = [
    [
        [5000, 5001],  # 0 gate, its first half
        [5010, 5011],  # 1
        [6000, 6001],  # 2 up, its first half
        [6010, 6011],  # 3
    ],
    [
        [5020, 5021],  # 0 gate, its second half
        [5030, 5031],  # 1
        [6020, 6021],  # 2 up, its second half
        [6030, 6031],  # 3
    ],
]


def test_fused_gate_and_up(tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf")
    convert(source, tmp_path / "tp1", "mp_rank", Mesh(), ODD)
    assert layer(handmade.mp_rank(tmp_path / "tp1"), FC1) == GATE_UP
    convert(source, tmp_path / "tp2", "mp_rank", Mesh(tp=2), ODD)
    for rank in range(2):
        assert layer(handmade.mp_rank(tmp_path / "tp2", f"mp_rank_{rank:02d}"), FC1) == GATE_UP_OF_RANK[rank]
    and_back(source, tmp_path / "tp1")
    and_back(source, tmp_path / "tp2")


def test_fused_gate_and_up_in_torch_dist(tmp_path: Path) -> None:
    """The whole is [gate; up]; every rank stores its part of gate and its part of up as two boxes."""
    source = handmade.llama(tmp_path / "hf")
    convert(source, tmp_path / "td", "torch_dist", Mesh(tp=2), ODD)
    assert rows(handmade.whole(tmp_path / "td")[f"decoder.layers.{FC1}"]) == [GATE_UP]
    stored = handmade.chunks(tmp_path / "td")[f"decoder.layers.{FC1}"]
    assert [(c.rank, c.offsets, rows(c.values)) for c in stored] == [
        (0, (0, 0, 0), [[[5000, 5001], [5010, 5011]]]),  # rank 0: gate 0, 1
        (0, (0, 4, 0), [[[6000, 6001], [6010, 6011]]]),  # rank 0: up 0, 1
        (1, (0, 2, 0), [[[5020, 5021], [5030, 5031]]]),  # rank 1: gate 2, 3
        (1, (0, 6, 0), [[[6020, 6021], [6030, 6031]]]),  # rank 1: up 2, 3
    ]
    and_back(source, tmp_path / "td")


def test_row_parallel_matrices_are_cut_by_column(tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf")
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=2), ODD)
    first, second = (handmade.mp_rank(tmp_path / "mp", f"mp_rank_{rank:02d}") for rank in range(2))
    assert layer(first, PROJ) == [[4000, 4001, 4002, 4003], [4010, 4011, 4012, 4013]]  # heads 0 and 1
    assert layer(second, PROJ) == [[4004, 4005, 4006, 4007], [4014, 4015, 4016, 4017]]  # heads 2 and 3
    assert layer(first, FC2) == [[7000, 7001], [7010, 7011]]
    assert layer(second, FC2) == [[7002, 7003], [7012, 7013]]
    convert(source, tmp_path / "td", "torch_dist", Mesh(tp=2), ODD)
    stored = handmade.chunks(tmp_path / "td")
    assert [(c.rank, c.offsets, rows(c.values)) for c in stored[f"decoder.layers.{PROJ}"]] == [
        (0, (0, 0, 0), [[[4000, 4001, 4002, 4003], [4010, 4011, 4012, 4013]]]),
        (1, (0, 0, 4), [[[4004, 4005, 4006, 4007], [4014, 4015, 4016, 4017]]]),
    ]
    assert [(c.rank, c.offsets, rows(c.values)) for c in stored[f"decoder.layers.{FC2}"]] == [
        (0, (0, 0, 0), [[[7000, 7001], [7010, 7011]]]),
        (1, (0, 0, 2), [[[7002, 7003], [7012, 7013]]]),
    ]


# ------------------------------------------------------------------------------------------------ experts

EXPERT_2 = [  # of 4; its matrices are square, 2 × 2
    [2005000, 2005001],  # 0 gate
    [2005010, 2005011],  # 1
    [2006000, 2006001],  # 2 up
    [2006010, 2006011],  # 3
]
GATE_UP_OF_ALL = [
    [[5000, 5001], [5010, 5011], [6000, 6001], [6010, 6011]],  # expert 0: gate, gate, up, up
    [[1005000, 1005001], [1005010, 1005011], [1006000, 1006001], [1006010, 1006011]],  # expert 1
    EXPERT_2,
    [[3005000, 3005001], [3005010, 3005011], [3006000, 3006001], [3006010, 3006011]],  # expert 3
]
DOWN_OF_ALL = [
    [[7000, 7001], [7010, 7011]],  # expert 0
    [[1007000, 1007001], [1007010, 1007011]],  # expert 1
    [[2007000, 2007001], [2007010, 2007011]],  # expert 2
    [[3007000, 3007001], [3007010, 3007011]],  # expert 3
]


def in_layer(values: Any, number: int) -> Any:
    """The same literal for another layer: its number stands before the tensor's."""
    return [in_layer(v, number) for v in values] if isinstance(values, list) else values + 100_000 * number


def test_experts_fused_on_hugging_faces_side(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source = handmade.moe(tmp_path / "hf")
    convert(source, tmp_path / "fused", "hf", options=Options(experts="fused"))
    have = load_file(tmp_path / "fused" / "model.safetensors")
    assert rows(have["model.layers.0.mlp.experts.gate_up_proj"]) == GATE_UP_OF_ALL
    assert rows(have["model.layers.0.mlp.experts.down_proj"]) == DOWN_OF_ALL
    assert not [name for name in have if "experts.0" in name]
    convert(tmp_path / "fused", tmp_path / "back", "hf", options=Options(experts="per_expert"))
    assert filecmp.cmp(tmp_path / "back" / "model.safetensors", source / "model.safetensors", shallow=False)


def test_experts_in_torch_dist_are_stacked_by_layer_and_expert(tmp_path: Path) -> None:
    source = handmade.moe(tmp_path / "hf", layers=2)
    convert(source, tmp_path / "td", "torch_dist", Mesh(ep=2), ODD)
    have = handmade.whole(tmp_path / "td")
    assert rows(have["decoder.layers.mlp.experts.experts.linear_fc1.weight"]) == [
        GATE_UP_OF_ALL,
        in_layer(GATE_UP_OF_ALL, 1),
    ]
    assert rows(have["decoder.layers.mlp.experts.experts.linear_fc2.weight"]) == [
        DOWN_OF_ALL,
        in_layer(DOWN_OF_ALL, 1),
    ]
    and_back(source, tmp_path / "td")


def test_experts_in_torch_dist_cut_by_expert_and_expert_tp(tmp_path: Path) -> None:
    """EP2 × ETP2: ranks 0 and 1 hold experts 0 and 1, ranks 2 and 3 experts 2 and 3; odd ranks the second halves."""
    source = handmade.moe(tmp_path / "hf")
    convert(source, tmp_path / "td", "torch_dist", Mesh(tp=2, ep=2, etp=2), ODD)
    stored = handmade.chunks(tmp_path / "td")
    fc1 = stored["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert [(c.rank, c.offsets, rows(c.values)) for c in fc1] == [
        (0, (0, 0, 0, 0), [[[[5000, 5001]]]]),  # expert 0, gate row 0
        (0, (0, 0, 2, 0), [[[[6000, 6001]]]]),  # expert 0, up row 0
        (0, (0, 1, 0, 0), [[[[1005000, 1005001]]]]),
        (0, (0, 1, 2, 0), [[[[1006000, 1006001]]]]),
        (1, (0, 0, 1, 0), [[[[5010, 5011]]]]),  # expert 0, gate row 1
        (1, (0, 0, 3, 0), [[[[6010, 6011]]]]),
        (1, (0, 1, 1, 0), [[[[1005010, 1005011]]]]),
        (1, (0, 1, 3, 0), [[[[1006010, 1006011]]]]),
        (2, (0, 2, 0, 0), [[[[2005000, 2005001]]]]),
        (2, (0, 2, 2, 0), [[[[2006000, 2006001]]]]),
        (2, (0, 3, 0, 0), [[[[3005000, 3005001]]]]),
        (2, (0, 3, 2, 0), [[[[3006000, 3006001]]]]),
        (3, (0, 2, 1, 0), [[[[2005010, 2005011]]]]),
        (3, (0, 2, 3, 0), [[[[2006010, 2006011]]]]),
        (3, (0, 3, 1, 0), [[[[3005010, 3005011]]]]),
        (3, (0, 3, 3, 0), [[[[3006010, 3006011]]]]),
    ]
    fc2 = stored["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    assert [(c.rank, c.offsets, rows(c.values)) for c in fc2[:3]] == [
        (0, (0, 0, 0, 0), [[[[7000], [7010]]]]),  # expert 0, column 0
        (0, (0, 1, 0, 0), [[[[1007000], [1007010]]]]),
        (1, (0, 0, 0, 1), [[[[7001], [7011]]]]),  # expert 0, column 1
    ]
    and_back(source, tmp_path / "td")


def test_sequential_experts_of_every_rank_at_ep2(tmp_path: Path) -> None:
    source = handmade.moe(tmp_path / "hf")
    convert(source, tmp_path / "mp", "mp_rank", Mesh(ep=2), LOCAL)
    for ep in range(2):
        tree = handmade.mp_rank(tmp_path / "mp", f"mp_rank_00_{ep:03d}")
        for local in range(2):
            name = f"mlp.experts.local_experts.{local}.linear_fc"
            assert layer(tree, f"{name}1.weight") == GATE_UP_OF_ALL[2 * ep + local]
            assert layer(tree, f"{name}2.weight") == DOWN_OF_ALL[2 * ep + local]
        assert layer(tree, "mlp.router.weight")[3] == [15030, 15031]  # the router knows all four experts everywhere
    and_back(source, tmp_path / "mp")


def test_sequential_experts_of_every_rank_at_ep2_etp2(tmp_path: Path) -> None:
    source = handmade.moe(tmp_path / "hf")
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=2, ep=2, etp=2), LOCAL)
    # tensor rank 1, expert rank 1: the second halves of experts 2 and 3
    tree = handmade.mp_rank(tmp_path / "mp", "mp_rank_01_001")
    name = "mlp.experts.local_experts."
    assert layer(tree, name + "0.linear_fc1.weight") == [[2005010, 2005011], [2006010, 2006011]]
    assert layer(tree, name + "1.linear_fc1.weight") == [[3005010, 3005011], [3006010, 3006011]]
    assert layer(tree, name + "0.linear_fc2.weight") == [[2007001], [2007011]]
    assert layer(tree, QKV) == GQA[8:]
    tree = handmade.mp_rank(tmp_path / "mp", "mp_rank_00_000")
    assert layer(tree, name + "1.linear_fc1.weight") == [[1005000, 1005001], [1006000, 1006001]]
    assert layer(tree, name + "1.linear_fc2.weight") == [[1007000], [1007010]]
    assert layer(tree, QKV) == GQA[:8]
    and_back(source, tmp_path / "mp")


def test_sequential_experts_at_etp2_alone(tmp_path: Path) -> None:
    source = handmade.moe(tmp_path / "hf")
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=2, etp=2), LOCAL)
    tree = handmade.mp_rank(tmp_path / "mp", "mp_rank_01")
    name = "mlp.experts.local_experts."
    assert layer(tree, name + "2.linear_fc1.weight") == [EXPERT_2[1], EXPERT_2[3]]
    assert layer(tree, name + "2.linear_fc2.weight") == [[2007001], [2007011]]
    and_back(source, tmp_path / "mp")


def test_grouped_experts_count_from_nought_on_every_expert_rank(tmp_path: Path) -> None:
    source = handmade.moe(tmp_path / "hf")
    convert(source, tmp_path / "mp", "mp_rank", Mesh(ep=2), ODD)
    tree = handmade.mp_rank(tmp_path / "mp", "mp_rank_00_001")
    assert layer(tree, "mlp.experts.linear_fc1.weight0") == EXPERT_2
    assert layer(tree, "mlp.experts.linear_fc2.weight1") == DOWN_OF_ALL[3]
    and_back(source, tmp_path / "mp")


def test_legacy_grouped_experts_are_one_flat_matrix_transposed(tmp_path: Path) -> None:
    """`weight1` is declared [hidden, experts · 2m] and viewed as [experts, hidden, 2m] (megatron/core/transformer/moe/
    experts.py, `GroupedMLP.forward`); `weight2` is viewed as [experts, m, hidden]."""
    source = handmade.moe(tmp_path / "hf")
    options = Options(vocab_divisor=2, megatron_experts="legacy")
    convert(source, tmp_path / "mp", "mp_rank", Mesh(ep=2), options)
    tree = handmade.mp_rank(tmp_path / "mp", "mp_rank_00_001")
    weight1, weight2 = (tree[f"decoder.layers.0.mlp.experts.weight{n}"] for n in (1, 2))
    assert (tuple(weight1.shape), tuple(weight2.shape)) == ((2, 8), (4, 2))
    assert rows(weight1.view(2, 2, 4)) == [
        [
            [2005000, 2005010, 2006000, 2006010],  # expert 2, hidden 0: gate, gate, up, up
            [2005001, 2005011, 2006001, 2006011],  # expert 2, hidden 1
        ],
        [
            [3005000, 3005010, 3006000, 3006010],  # expert 3
            [3005001, 3005011, 3006001, 3006011],
        ],
    ]
    assert rows(weight2.view(2, 2, 2)) == [
        [[2007000, 2007010], [2007001, 2007011]],  # expert 2: m 0, m 1; each a column of down
        [[3007000, 3007010], [3007001, 3007011]],  # expert 3
    ]
    and_back(source, tmp_path / "mp")


def test_legacy_grouped_experts_cut_by_expert_tp(tmp_path: Path) -> None:
    source = handmade.moe(tmp_path / "hf")
    options = Options(vocab_divisor=2, megatron_experts="legacy")
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=2, ep=2, etp=2), options)
    tree = handmade.mp_rank(tmp_path / "mp", "mp_rank_01_001")
    weight1, weight2 = (tree[f"decoder.layers.0.mlp.experts.weight{n}"] for n in (1, 2))
    assert rows(weight1.view(2, 2, 2)) == [
        [[2005010, 2006010], [2005011, 2006011]],  # expert 2: second row of gate and of up
        [[3005010, 3006010], [3005011, 3006011]],  # expert 3
    ]
    assert rows(weight2.view(2, 1, 2)) == [[[2007001, 2007011]], [[3007001, 3007011]]]
    and_back(source, tmp_path / "mp")


# ------------------------------------------------------------------------------------------------ MLA

MLA_LAYER: dict[str, tuple[int, ...]] = {  # 2 heads; nope 2, rope 1, value 1; ranks 2 (q) and 2 (kv)
    "self_attn.q_a_proj.weight": (2, 2),
    "self_attn.q_a_layernorm.weight": (2,),
    "self_attn.q_b_proj.weight": (6, 2),  # for each head: nope, nope, rope
    "self_attn.kv_a_proj_with_mqa.weight": (3, 2),  # kv, kv, rope
    "self_attn.kv_a_layernorm.weight": (2,),
    "self_attn.kv_b_proj.weight": (6, 2),  # for each head: nope, nope, value
    "self_attn.o_proj.weight": (2, 2),
    "mlp.gate_proj.weight": (4, 2),
    "mlp.up_proj.weight": (4, 2),
    "mlp.down_proj.weight": (2, 4),
    "input_layernorm.weight": (2,),
    "post_attention_layernorm.weight": (2,),
}


def _mla(path: Path, *, q_lora: bool = True, rope: int = 1) -> Path:
    shapes = MLA_LAYER | {"self_attn.kv_a_proj_with_mqa.weight": (2 + rope, 2)}
    if not q_lora:
        for name in ("q_a_proj", "q_a_layernorm", "q_b_proj"):
            del shapes[f"self_attn.{name}.weight"]
        shapes["self_attn.q_proj.weight"] = (2 * (2 + rope), 2)
    config = handmade.sizes("deepseek_v3", 2, 2, 2, 2, 4, 5, 1) | {
        "q_lora_rank": 2 if q_lora else None,
        "kv_lora_rank": 2,
        "qk_nope_head_dim": 2,
        "qk_rope_head_dim": rope,
        "v_head_dim": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    }
    return handmade.save_hf(path, config, handmade.tensors_of([shapes], 2, 5))


def test_mla_up_projections_are_cut_by_head(tmp_path: Path) -> None:
    source = _mla(tmp_path / "hf")
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=2), ODD)
    first, second = (handmade.mp_rank(tmp_path / "mp", f"mp_rank_{rank:02d}") for rank in range(2))
    up = "self_attention.linear_q_up_proj.weight"
    assert layer(first, up) == [[18000, 18001], [18010, 18011], [18020, 18021]]  # head 0: nope, nope, rope
    assert layer(second, up) == [[18030, 18031], [18040, 18041], [18050, 18051]]  # head 1
    up = "self_attention.linear_kv_up_proj.weight"
    assert layer(first, up) == [[21000, 21001], [21010, 21011], [21020, 21021]]  # head 0: nope, nope, value
    assert layer(second, up) == [[21030, 21031], [21040, 21041], [21050, 21051]]  # head 1
    assert layer(first, PROJ) == [[4000], [4010]]
    assert layer(second, PROJ) == [[4001], [4011]]
    for tree in (first, second):  # what leads down is on every rank, with Transformer Engine
        assert layer(tree, "self_attention.linear_q_down_proj.weight") == [[16000, 16001], [16010, 16011]]
        assert layer(tree, "self_attention.linear_kv_down_proj.weight") == [
            [19000, 19001],  # 0 latent
            [19010, 19011],  # 1 latent
            [19020, 19021],  # 2 rope
        ]
        assert layer(tree, "self_attention.linear_q_up_proj.layer_norm_weight") == [17000, 17010]
        assert layer(tree, "self_attention.linear_kv_up_proj.layer_norm_weight") == [20000, 20010]
        assert layer(tree, "input_layernorm.weight") == [11000, 11010]
    and_back(source, tmp_path / "mp")


def test_mla_down_projections_are_cut_under_the_local_spec(tmp_path: Path) -> None:
    """The rows of the latent and the rope share one matrix of 3 rows: it does not divide by 2, but by 3."""
    shapes = {name: shape for name, shape in MLA_LAYER.items() if "q_a" not in name and "q_b" not in name}
    shapes |= {
        "self_attn.q_proj.weight": (9, 2),  # 3 heads
        "self_attn.kv_b_proj.weight": (9, 2),
        "self_attn.o_proj.weight": (2, 3),
        "mlp.gate_proj.weight": (6, 2),
        "mlp.up_proj.weight": (6, 2),
        "mlp.down_proj.weight": (2, 6),
    }
    config = handmade.sizes("deepseek_v3", 2, 3, 3, 2, 6, 6, 1) | {
        "q_lora_rank": None,
        "kv_lora_rank": 2,
        "qk_nope_head_dim": 2,
        "qk_rope_head_dim": 1,
        "v_head_dim": 1,
        "n_routed_experts": 3,
        "num_experts_per_tok": 1,
        "n_shared_experts": 0,
        "moe_intermediate_size": 3,
        "first_k_dense_replace": 1,
    }
    source = handmade.save_hf(tmp_path / "hf", config, handmade.tensors_of([shapes], 2, 6))
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=3), LOCAL)
    trees = [handmade.mp_rank(tmp_path / "mp", f"mp_rank_{rank:02d}") for rank in range(3)]
    down = [layer(tree, "self_attention.linear_kv_down_proj.weight") for tree in trees]
    assert down == [[[19000, 19001]], [[19010, 19011]], [[19020, 19021]]]  # latent, latent, rope
    q = [layer(tree, "self_attention.linear_q_proj.weight") for tree in trees]
    assert q[1] == [[1030, 1031], [1040, 1041], [1050, 1051]]  # head 1
    assert [layer(tree, "self_attention.kv_layernorm.weight") for tree in trees] == [[20000, 20010]] * 3
    and_back(source, tmp_path / "mp")


def test_mla_in_torch_dist(tmp_path: Path) -> None:
    source = _mla(tmp_path / "hf", q_lora=False, rope=2)
    convert(source, tmp_path / "td", "torch_dist", Mesh(tp=2), ODD)
    have = handmade.whole(tmp_path / "td")
    attention = "decoder.layers.0.self_attention."
    assert rows(have[attention + "linear_q_proj.weight"]) == [
        [1000, 1001],  # 0 head 0: nope
        [1010, 1011],  # 1         nope
        [1020, 1021],  # 2         rope
        [1030, 1031],  # 3         rope
        [1040, 1041],  # 4 head 1: nope
        [1050, 1051],  # 5         nope
        [1060, 1061],  # 6         rope
        [1070, 1071],  # 7         rope
    ]
    assert rows(have[attention + "linear_kv_up_proj.weight"]) == [
        [21000, 21001],  # 0 head 0: nope
        [21010, 21011],  # 1         nope
        [21020, 21021],  # 2         value
        [21030, 21031],  # 3 head 1: nope
        [21040, 21041],  # 4
        [21050, 21051],  # 5
    ]
    assert rows(have[attention + "linear_kv_down_proj.weight"]) == [
        [19000, 19001],  # 0 latent
        [19010, 19011],  # 1 latent
        [19020, 19021],  # 2 rope
        [19030, 19031],  # 3 rope
    ]
    and_back(source, tmp_path / "td")


def test_mla_in_torch_dist_with_rows_that_do_not_divide(tmp_path: Path) -> None:
    """A latent of 3 rows at TP2: Transformer Engine keeps it whole on every rank, so there is no reason to refuse."""
    source = _mla(tmp_path / "hf")
    convert(source, tmp_path / "td", "torch_dist", Mesh(tp=2), ODD)
    have = handmade.whole(tmp_path / "td")
    down = rows(have["decoder.layers.0.self_attention.linear_kv_down_proj.weight"])
    assert down == [[19000, 19001], [19010, 19011], [19020, 19021]]
    and_back(source, tmp_path / "td")


# ------------------------------------------------------------------------------------------------ vocabulary


@pytest.mark.parametrize("name", ["embedding.word_embeddings.weight", "output_layer.weight"])
def test_vocabulary_is_padded_with_zeros_and_trimmed_on_the_way_back(name: str, tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf")  # 5 words
    code = 8000 if name.startswith("embedding") else 9000
    want = [
        [code + 0, code + 1],  # 0
        [code + 10, code + 11],  # 1
        [code + 20, code + 21],  # 2
        [code + 30, code + 31],  # 3 the last row of rank 0
        [code + 40, code + 41],  # 4 the first of rank 1, the last true word
        [0, 0],  # 5 padding to a multiple of 2 × TP
        [0, 0],  # 6
        [0, 0],  # 7
    ]
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=2), ODD)
    assert [rows(handmade.mp_rank(tmp_path / "mp", f"mp_rank_{rank:02d}")[name]) for rank in range(2)] == [
        want[:4],
        want[4:],
    ]
    convert(source, tmp_path / "td", "torch_dist", Mesh(tp=2), ODD)
    assert rows(handmade.whole(tmp_path / "td")[name]) == want
    and_back(source, tmp_path / "mp")
    and_back(source, tmp_path / "td")


def test_a_rank_may_hold_nothing_but_padding(tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf", v=3)
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=4), Options(vocab_divisor=1))
    name = "embedding.word_embeddings.weight"
    have = [rows(handmade.mp_rank(tmp_path / "mp", f"mp_rank_{rank:02d}")[name]) for rank in range(4)]
    assert have == [[[8000, 8001]], [[8010, 8011]], [[8020, 8021]], [[0, 0]]]
    and_back(source, tmp_path / "mp")
    convert(source, tmp_path / "td", "torch_dist", Mesh(tp=4), Options(vocab_divisor=1))
    and_back(source, tmp_path / "td")


def test_a_vocabulary_that_fits_is_not_padded(tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf", v=8)
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=2), ODD)
    assert handmade.mp_rank(tmp_path / "mp", "mp_rank_01")["output_layer.weight"].shape == (4, 2)
    and_back(source, tmp_path / "mp")


def test_dcp_and_archon_have_no_padding(tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf")
    convert(source, tmp_path / "dcp", "dcp", Mesh(tp=2))
    stored = handmade.chunks(tmp_path / "dcp")["model.embed_tokens.weight"]
    assert [(c.rank, c.offsets, rows(c.values)) for c in stored] == [
        (0, (0, 0), [[8000, 8001], [8010, 8011], [8020, 8021]]),
        (1, (3, 0), [[8030, 8031], [8040, 8041]]),
    ]
    and_back(source, tmp_path / "dcp")


def test_a_tied_head_has_no_file_entry_but_on_the_last_stage(tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf", layers=2, tie_word_embeddings=True)
    from safetensors.torch import load_file, save_file

    file = source / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "lm_head.weight"}, file, {"format": "pt"})
    convert(source, tmp_path / "pp1", "mp_rank", Mesh(), ODD)
    assert "output_layer.weight" not in handmade.mp_rank(tmp_path / "pp1")
    convert(source, tmp_path / "pp2", "mp_rank", Mesh(pp=2), ODD)
    first, last = (handmade.mp_rank(tmp_path / "pp2", f"mp_rank_00_{stage:03d}") for stage in range(2))
    assert "output_layer.weight" not in first
    assert "embedding.word_embeddings.weight" not in last
    assert rows(last["output_layer.weight"]) == rows(first["embedding.word_embeddings.weight"])
    assert rows(last["output_layer.weight"])[4:] == [[8040, 8041], [0, 0]]
    convert(source, tmp_path / "td", "torch_dist", Mesh(pp=2), ODD)
    assert "output_layer.weight" not in handmade.whole(tmp_path / "td")
    and_back(source, tmp_path / "pp1")
    and_back(source, tmp_path / "pp2")
    and_back(source, tmp_path / "td")


# ------------------------------------------------------------------------------------------------ pipelines


def _stages(path: Path, stages: int, chunks: int = 1) -> list[list[dict[int, int]]]:
    """Of every stage and chunk: local layer number → the layer that its norm's values name."""
    found = []
    for stage in range(stages):
        found.append([])
        for chunk in range(chunks):
            name, model = f"mp_rank_00_{stage:03d}" if stages > 1 else "mp_rank_00", f"model{chunk}"
            tree = handmade.mp_rank(path, name, "model" if chunks == 1 else model)
            norms = {k: v for k, v in tree.items() if k.endswith("linear_fc1.layer_norm_weight")}
            layers = {int(k.split(".")[2]): (int(v[0]) - 12000) // 100_000 for k, v in norms.items()}
            for local, layer_number in layers.items():  # the rest of the layer is of the same one
                prefix = f"decoder.layers.{local}."
                for value in (v for k, v in tree.items() if k.startswith(prefix)):
                    assert {int(x) // 100_000 for x in value.flatten().tolist()} == {layer_number}
            found[-1].append(layers)
    return found


@pytest.mark.parametrize(
    ("layers", "mesh", "want"),
    [
        (4, Mesh(pp=2), [[{0: 0, 1: 1}], [{0: 2, 1: 3}]]),
        (4, Mesh(pp=4), [[{0: 0}], [{0: 1}], [{0: 2}], [{0: 3}]]),
        (4, Mesh(pp=2, vpp=2), [[{0: 0}, {0: 2}], [{0: 1}, {0: 3}]]),
        (8, Mesh(pp=2, vpp=2), [[{0: 0, 1: 1}, {0: 4, 1: 5}], [{0: 2, 1: 3}, {0: 6, 1: 7}]]),
        (5, Mesh(pp=2, first=2), [[{0: 0, 1: 1}], [{0: 2, 1: 3, 2: 4}]]),
        (5, Mesh(pp=2, last=1), [[{0: 0, 1: 1, 2: 2, 3: 3}], [{0: 4}]]),
        (7, Mesh(pp=4, first=1), [[{0: 0}], [{0: 1, 1: 2}], [{0: 3, 1: 4}], [{0: 5, 1: 6}]]),
        (7, Mesh(pp=4, last=1), [[{0: 0, 1: 1}], [{0: 2, 1: 3}], [{0: 4, 1: 5}], [{0: 6}]]),
        (7, Mesh(pp=4, first=2, last=1), [[{0: 0, 1: 1}], [{0: 2, 1: 3}], [{0: 4, 1: 5}], [{0: 6}]]),
        (4, Mesh(pp=4, layout="E|t*2|t*2|L"), [[{}], [{0: 0, 1: 1}], [{0: 2, 1: 3}], [{}]]),
        (4, Mesh(pp=2, vpp=2, layout="E|t*2|t*2|L"), [[{}, {0: 2, 1: 3}], [{0: 0, 1: 1}, {}]]),
        (5, Mesh(pp=2, layout="Et*2|t*3L"), [[{0: 0, 1: 1}], [{0: 2, 1: 3, 2: 4}]]),
        (3, Mesh(pp=4, layout="Et|t||tL"), [[{0: 0}], [{0: 1}], [{}], [{0: 2}]]),
    ],
    ids=lambda value: str(getattr(value, "layout", None) or value) if isinstance(value, Mesh) else None,
)
def test_layers_on_their_stages(layers: int, mesh: Mesh, want: Any, tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf", layers=layers)
    convert(source, tmp_path / "mp", "mp_rank", mesh, ODD)
    assert _stages(tmp_path / "mp", mesh.pp, mesh.vpp) == want
    and_back(source, tmp_path / "mp")


def test_the_ends_of_the_model_on_their_stages(tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf", layers=4)
    convert(source, tmp_path / "mp", "mp_rank", Mesh(pp=4, layout="E|t*2|t*2|L"), ODD)
    first, _, third, last = (handmade.mp_rank(tmp_path / "mp", f"mp_rank_00_{stage:03d}") for stage in range(4))
    assert list(first) == ["embedding.word_embeddings.weight"]
    assert sorted(last) == ["decoder.final_layernorm.weight", "output_layer.weight"]
    assert rows(last["decoder.final_layernorm.weight"]) == [10000, 10010]
    assert layer(third, QKV, 1)[0] == [301000, 301001]  # its second layer is the model's fourth


def test_pipeline_stages_in_torch_dist_change_files_only(tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf", layers=4)
    convert(source, tmp_path / "td", "torch_dist", Mesh(tp=2, pp=2, vpp=2), ODD)
    stored = handmade.chunks(tmp_path / "td")["decoder.layers.mlp.linear_fc1.layer_norm_weight"]
    # stage 0 is ranks 0 and 1, stage 1 ranks 2 and 3; a norm is stored once, by the first rank of its stage
    assert [(c.rank, c.offsets, rows(c.values)) for c in stored] == [
        (0, (0, 0), [[12000, 12010]]),  # layer 0: stage 0, chunk 0
        (0, (2, 0), [[212000, 212010]]),  # layer 2: stage 0, chunk 1
        (2, (1, 0), [[112000, 112010]]),  # layer 1: stage 1, chunk 0
        (2, (3, 0), [[312000, 312010]]),  # layer 3
    ]
    whole = handmade.whole(tmp_path / "td")["decoder.layers.mlp.linear_fc1.layer_norm_weight"]
    assert rows(whole) == [[12000, 12010], [112000, 112010], [212000, 212010], [312000, 312010]]
    and_back(source, tmp_path / "td")


# ------------------------------------------------------------------------------------------------ Archon


def test_archon_renames_and_stacks_experts(tmp_path: Path) -> None:
    source = handmade.moe(tmp_path / "hf")
    convert(source, tmp_path / "archon", "archon")
    have = {name: rows(value) for name, value in handmade.whole(tmp_path / "archon").items()}
    assert have.pop("layers.0.moe.experts.w1") == [expert[:2] for expert in GATE_UP_OF_ALL]
    assert have.pop("layers.0.moe.experts.w3") == [expert[2:] for expert in GATE_UP_OF_ALL]
    assert have.pop("layers.0.moe.experts.w2") == DOWN_OF_ALL
    first_value = {name: (values[0][0] if isinstance(values[0], list) else values[0]) for name, values in have.items()}
    assert first_value == {
        "tok_embeddings.weight": 8000,
        "layers.0.attention.wq.weight": 1000,
        "layers.0.attention.wk.weight": 2000,
        "layers.0.attention.wv.weight": 3000,
        "layers.0.attention.wo.weight": 4000,
        "layers.0.attention.q_norm.weight": 13000,
        "layers.0.attention.k_norm.weight": 14000,
        "layers.0.attention_norm.weight": 11000,
        "layers.0.ffn_norm.weight": 12000,
        "layers.0.moe.router.gate.weight": 15000,
        "norm.weight": 10000,
        "output.weight": 9000,
    }
    and_back(source, tmp_path / "archon")


def test_archon_names_a_dense_mlp_by_number(tmp_path: Path) -> None:
    source = handmade.llama(tmp_path / "hf")
    convert(source, tmp_path / "archon", "archon")
    have = handmade.whole(tmp_path / "archon")
    assert rows(have["layers.0.feed_forward.w1.weight"]) == GATE_UP[:4]
    assert rows(have["layers.0.feed_forward.w3.weight"]) == GATE_UP[4:]
    assert rows(have["layers.0.feed_forward.w2.weight"]) == [[7000, 7001, 7002, 7003], [7010, 7011, 7012, 7013]]
    and_back(source, tmp_path / "archon")


# ------------------------------------------------------------------------------------------------ the other way
#
# The same matrices as somebody else's files: written by torch.save from the literals, then read.


def _megatron_tree(tp: int, rank: int, qkv: list[list[int]]) -> dict[str, Any]:
    import torch

    def part(values: list[Any]) -> list[Any]:
        step = len(values) // tp
        return values[rank * step : (rank + 1) * step]

    def columns(values: list[list[int]]) -> list[Any]:
        return [part(line) for line in values]

    vocab = [[8000, 8001], [8010, 8011], [8020, 8021], [8030, 8031], [8040, 8041], [-1, -1], [-1, -1], [-1, -1]]
    prefix = "decoder.layers.0."
    tree = {
        "embedding.word_embeddings.weight": part(vocab),
        "decoder.final_layernorm.weight": [10000, 10010],
        "output_layer.weight": part([[x + 1000 if x > 0 else x for x in line] for line in vocab]),
        prefix + "self_attention.linear_qkv.layer_norm_weight": [11000, 11010],
        prefix + "mlp.linear_fc1.layer_norm_weight": [12000, 12010],
        prefix + QKV: part(qkv),
        prefix + PROJ: columns([[4000 + c for c in range(8)], [4010 + c for c in range(8)]]),
        prefix + FC1: part(GATE_UP[:4]) + part(GATE_UP[4:]),
        prefix + FC2: columns([[7000, 7001, 7002, 7003], [7010, 7011, 7012, 7013]]),
    }
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in tree.items()}


@pytest.mark.parametrize("kind", ["gqa", "mqa"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_per_rank_files_written_from_the_literals(kind: str, tp: int, tmp_path: Path) -> None:
    """Whatever stands in the padding (here -1), it is no word."""
    import torch

    n, g, qkv = HEADS[kind]
    for rank in range(tp):
        file = tmp_path / "mp" / "iter_0000007" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        args = argparse.Namespace(tensor_model_parallel_size=tp)
        tree = {"model": _megatron_tree(tp, rank, qkv), "args": args, "iteration": 7, "checkpoint_version": 3.0}
        torch.save(tree, file)
    (tmp_path / "mp" / "latest_checkpointed_iteration.txt").write_text("7")
    source = handmade.llama(tmp_path / "hf", n=n, g=g)
    convert(tmp_path / "mp", tmp_path / "back", "hf", hf_config=source)
    assert filecmp.cmp(tmp_path / "back" / "model.safetensors", source / "model.safetensors", shallow=False)


def test_ranks_that_disagree_on_the_element_type_are_no_model(tmp_path: Path) -> None:
    """Rank 0 holds its half of a matrix in fp32, rank 1 in bf16: refused, and the tensor named."""
    import torch

    for rank in range(2):
        tree = _megatron_tree(2, rank, GQA)
        if rank == 1:
            tree[f"decoder.layers.0.{FC1}"] = tree[f"decoder.layers.0.{FC1}"].to(torch.bfloat16)
        file = tmp_path / "mp" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save({"model": tree, "args": argparse.Namespace(tensor_model_parallel_size=2)}, file)
    source = handmade.llama(tmp_path / "hf")
    with pytest.raises(ConvertError) as caught:
        convert(tmp_path / "mp", tmp_path / "back", "hf", hf_config=source)
    assert "gate" in str(caught.value) or FC1 in str(caught.value)
    assert "F32" in str(caught.value) and "BF16" in str(caught.value)
    assert not (tmp_path / "back").exists()


def test_experts_fused_on_disk_written_from_the_literals(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = handmade.moe(tmp_path / "hf")
    have = {k: v for k, v in load_file(source / "model.safetensors").items() if "mlp.experts." not in k}
    have["model.layers.0.mlp.experts.gate_up_proj"] = torch.tensor(GATE_UP_OF_ALL, dtype=torch.float32)
    have["model.layers.0.mlp.experts.down_proj"] = torch.tensor(DOWN_OF_ALL, dtype=torch.float32)
    fused = tmp_path / "fused"
    fused.mkdir()
    (fused / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(have, fused / "model.safetensors", {"format": "pt"})
    convert(fused, tmp_path / "split", "hf", options=Options(experts="per_expert"))
    assert filecmp.cmp(tmp_path / "split" / "model.safetensors", source / "model.safetensors", shallow=False)
    convert(fused, tmp_path / "mp", "mp_rank", Mesh(ep=4), ODD)
    assert layer(handmade.mp_rank(tmp_path / "mp", "mp_rank_00_002"), "mlp.experts.linear_fc1.weight0") == EXPERT_2
    convert(tmp_path / "mp", tmp_path / "again", "hf")  # as the source had them: fused
    assert filecmp.cmp(tmp_path / "again" / "model.safetensors", fused / "model.safetensors", shallow=False)


# ------------------------------------------------------------------------------------------------ names that mislead


def test_mixtrals_w1_is_gate_and_w3_is_up(tmp_path: Path) -> None:
    shapes = handmade.attention(2, 4, 2, 2)
    config = handmade.sizes("mixtral", 2, 4, 2, 2, 2, 5, 1) | {"num_local_experts": 2, "num_experts_per_tok": 1}
    tensors = handmade.tensors_of([shapes], 2, 5)
    moe = "model.layers.0.block_sparse_moe."
    tensors[moe + "gate.weight"] = handmade.coded(15, 2, 2)
    for expert in range(2):
        for name, code in (("w1", 5), ("w2", 7), ("w3", 6)):
            tensors[f"{moe}experts.{expert}.{name}.weight"] = handmade.coded(code, 2, 2, expert=expert)
    source = handmade.save_hf(tmp_path / "hf", config, tensors)
    convert(source, tmp_path / "mp", "mp_rank", Mesh(), LOCAL)
    tree = handmade.mp_rank(tmp_path / "mp")
    name = "mlp.experts.local_experts."
    assert layer(tree, name + "0.linear_fc1.weight") == GATE_UP_OF_ALL[0]
    assert layer(tree, name + "1.linear_fc1.weight") == GATE_UP_OF_ALL[1]
    assert layer(tree, name + "1.linear_fc2.weight") == DOWN_OF_ALL[1]
    assert layer(tree, "mlp.router.weight") == [[15000, 15001], [15010, 15011]]
    and_back(source, tmp_path / "mp")
    convert(source, tmp_path / "dcp", "dcp", Mesh(dp_shard=2))  # as transformers holds it in memory
    have = handmade.whole(tmp_path / "dcp")
    assert rows(have["model.layers.0.mlp.experts.gate_up_proj"]) == GATE_UP_OF_ALL[:2]
    assert rows(have["model.layers.0.mlp.experts.down_proj"]) == DOWN_OF_ALL[:2]
    assert rows(have["model.layers.0.mlp.gate.weight"]) == [[15000, 15001], [15010, 15011]]
    and_back(source, tmp_path / "dcp")


def test_the_shared_expert_of_qwen2_moe_and_its_gate(tmp_path: Path) -> None:
    shapes = handmade.dense_layer(2, 4, 2, 2, 4) | {
        f"self_attn.{x}_proj.bias": (s,) for x, s in (("q", 8), ("k", 4), ("v", 4))
    }
    tensors = handmade.tensors_of([shapes], 2, 5)
    prefix = "model.layers.0.mlp."
    shared = {
        f"{prefix}shared_expert.{x}_proj.weight": tensors.pop(f"{prefix}{x}_proj.weight")
        for x in ("gate", "up", "down")
    }
    tensors |= shared | {prefix + "gate.weight": handmade.coded(15, 2, 2)}
    tensors[prefix + "shared_expert_gate.weight"] = handmade.coded(22, 1, 2)
    for expert in range(2):
        for x, code in (("gate", 5), ("up", 6), ("down", 7)):
            tensors[f"{prefix}experts.{expert}.{x}_proj.weight"] = handmade.coded(code, 2, 2, expert=expert + 1)
    config = handmade.sizes("qwen2_moe", 2, 4, 2, 2, 4, 5, 1) | {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 2,
        "shared_expert_intermediate_size": 4,
    }
    source = handmade.save_hf(tmp_path / "hf", config, tensors)
    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=2, etp=1), LOCAL)
    tree = handmade.mp_rank(tmp_path / "mp", "mp_rank_01")
    assert layer(tree, "mlp.shared_experts.linear_fc1.weight") == GATE_UP_OF_RANK[1]  # cut by TP
    assert layer(tree, "mlp.shared_experts.linear_fc2.weight") == [[7002, 7003], [7012, 7013]]
    assert layer(tree, "mlp.shared_experts.gate_weight") == [[22000, 22001]]
    assert layer(tree, "mlp.experts.local_experts.1.linear_fc1.weight") == EXPERT_2  # not cut: ETP is 1
    assert layer(tree, "mlp.router.weight") == [[15000, 15001], [15010, 15011]]
    and_back(source, tmp_path / "mp")


@pytest.mark.parametrize("to", ["mp_rank", "torch_dist"])
def test_a_field_that_megatron_needs_and_the_config_lacks_is_named(to: str, tmp_path: Path) -> None:
    source = handmade.moe(tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    del config["num_experts_per_tok"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        convert(source, tmp_path / "out", to, Mesh(), ODD)
    assert not (tmp_path / "out").exists()
