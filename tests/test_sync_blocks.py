"""The blocks of a manifest: both sides cut alike, a number is enough to name one."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_convert.converter.errors import PlanError
from areal_convert.converter.execute import parts_of
from areal_convert.converter.slots import Box
from areal_convert.converter.sync.blocks import LONG, NUMBER_BYTES, Blocks, by_bucket, check_tiling, whole_boxes
from areal_convert.converter.sync.blocks import parts_of as cut_for_the_wire
from areal_convert.converter.sync.wire import Atom, Manifest, ProtocolError

SIZES = {"BF16": 2, "F32": 4, "U8": 1}


def manifest(atoms: list[Atom], senders: list[list], block: int = 64, bucket: int = 256) -> Manifest:
    return Manifest("run", 1, 1, "full", atoms, senders, block, bucket, model={"family": "qwen3", "sizes": {"h": 4}})


shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)
atoms = st.lists(st.tuples(shapes, st.sampled_from(sorted(SIZES))), min_size=1, max_size=5)


@given(atoms, st.integers(1, 200))
def test_blocks_are_the_chunks_of_every_box_in_order(found: list, limit: int) -> None:
    """Each is what `execute` would cut, and knows its bytes, whether it is asked alone or with others."""
    listed = [Atom(f"a{n}", shape, dtype) for n, (shape, dtype) in enumerate(found)]
    blocks = Blocks(manifest(listed, [whole_boxes([a.shape for a in listed])], limit))
    expected = [
        (n, *box)
        for n, a in enumerate(listed)
        for box in parts_of(Box((0,) * len(a.shape), a.shape), SIZES[a.dtype], limit)
    ]
    assert [blocks.box(n) for n in range(blocks.count)] == expected
    sizes = [prod(b - a for a, b in zip(lo, hi, strict=True)) * SIZES[listed[n].dtype] for n, lo, hi in expected]
    assert [blocks.nbytes(n) for n in range(blocks.count)] == sizes
    assert blocks.lengths(range(blocks.count)).tolist() == sizes
    assert (blocks.total, blocks.largest) == (sum(sizes), max(sizes))


def test_boxes_that_are_cut_lie_where_the_atom_has_them() -> None:
    atom = Atom("a", (4, 6), "BF16")
    blocks = Blocks(manifest([atom], [[(0, (0, 0), (4, 3))], [(0, (0, 3), (2, 6)), (0, (2, 3), (4, 6))]], block=12))
    assert (list(blocks.of_sender(0)), list(blocks.of_sender(1))) == ([0, 1], [2, 3])
    covered = np.zeros(atom.shape, int)
    for n in range(blocks.count):
        _, lo, hi = blocks.box(n)
        covered[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))] += 1
    assert (covered == 1).all()
    with pytest.raises(IndexError):
        blocks.box(4)
    with pytest.raises(IndexError):
        blocks.box(-1)


def test_a_large_model_costs_no_entry_for_each_block() -> None:
    """A terabyte in blocks of 256 KiB: four million of them, from one box an atom."""
    listed = [Atom(f"a{n}", (1 << 16, 1 << 13), "BF16") for n in range(1000)]
    blocks = Blocks(manifest(listed, [whole_boxes([a.shape for a in listed])], 256 << 10))
    assert blocks.count == 4096 * 1000
    assert blocks.box(blocks.count - 1) == (999, (65520, 0), (65536, 8192))


@given(atoms, st.integers(8, 300), st.data())
def test_buckets_hold_every_number_once_and_no_more_than_they_may(found: list, limit: int, data: st.DataObject) -> None:
    listed = [Atom(f"a{n}", shape, dtype) for n, (shape, dtype) in enumerate(found)]
    blocks = Blocks(manifest(listed, [whole_boxes([a.shape for a in listed])], max(1, limit - NUMBER_BYTES)))
    wanted = sorted(data.draw(st.sets(st.integers(0, blocks.count - 1))))
    buckets = list(by_bucket(blocks, wanted, limit))
    assert [n for numbers, _ in buckets for n in numbers] == wanted
    for numbers, size in buckets:
        assert size == sum(blocks.nbytes(n) + NUMBER_BYTES for n in numbers)
        assert size <= limit or len(numbers) == 1


@given(atoms, st.integers(1, 60), st.data())
def test_runs_are_parts_of_their_boxes_memory(found: list, limit: int, data: st.DataObject) -> None:
    """Whatever blocks a bucket has: the bytes of a run, taken out of its box's in one piece, are those of its blocks
    one after the other; and the parts in which they travel keep long runs alone, and everything in order."""
    listed = [Atom(f"a{n}", shape, dtype) for n, (shape, dtype) in enumerate(found)]
    blocks = Blocks(manifest(listed, [whole_boxes([a.shape for a in listed])], limit))
    values = [np.arange(prod(a.shape) * SIZES[a.dtype], dtype=np.uint32) for a in listed]
    numbers = np.array(data.draw(st.lists(st.integers(0, blocks.count - 1), max_size=12)), np.int64)
    runs = blocks.runs(numbers, blocks.lengths(numbers))
    assert [n for run in runs for n in range(run.at, run.at + run.blocks)] == list(range(len(numbers)))
    for run in runs:
        expected = []
        for n in numbers[run.at : run.at + run.blocks].tolist():
            atom, lo, hi = blocks.box(n)
            assert atom == run.atom
            box = values[atom].reshape(*listed[atom].shape, -1)[tuple(map(slice, lo, hi))]
            expected += box.reshape(-1).tolist()
        assert values[run.atom][run.begin : run.begin + run.nbytes].tolist() == expected
    parts = cut_for_the_wire(runs)
    assert [run for part in parts for run in part] == runs
    assert all(len(part) == 1 or all(run.nbytes < LONG for run in part) for part in parts)


def test_a_bucket_has_no_more_numbers_than_a_head_has_room_for() -> None:
    blocks = Blocks(manifest([Atom("a", (3000,), "U8")], [whole_boxes([(3000,)])], block=1))
    assert [len(numbers) for numbers, _ in by_bucket(blocks, range(3000), 1 << 20)] == [1008, 1008, 984]


def test_what_is_missing_doubled_or_beside_is_told_all_at_once() -> None:
    listed = [Atom(name, (4, 4), "F32") for name in ("whole", "half", "twice", "nobody", "beside", "whole")]
    boxes = [[(0, (0, 0), (4, 4)), (1, (0, 0), (2, 4)), (2, (0, 0), (4, 4)), (5, (0, 0), (4, 4))]]
    boxes.append([(2, (1, 0), (2, 4)), (4, (0, 0), (2, 4)), (4, (3, 0), (5, 4))])
    with pytest.raises(PlanError) as caught:
        check_tiling(manifest(listed, boxes), PlanError, "The push is not total:")
    assert {p.about for p in caught.value.problems} == {"whole", "half", "twice", "nobody", "beside"}
    assert "8 of its 16 elements would be sent, the others are missing" in str(caught.value)
    assert "20 of its 16 elements would be sent, some more than once" in str(caught.value)
    check_tiling(manifest(listed[:2], [[(0, (0, 0), (4, 4)), (1, (0, 0), (4, 4))]]), PlanError, "")


def test_a_manifest_travels_as_json() -> None:
    m = manifest(
        [Atom("a", (4, 4), "BF16"), Atom("s", (), "F32")],
        [[(0, (0, 0), (4, 2)), (1, (), ())], [(0, (0, 2), (4, 4))]],
    )
    m.base, m.lora = (3, "ab"), {"name": "x", "r": 8}
    assert Manifest.from_json(json.loads(json.dumps(m.to_json()))) == m


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("protocol", 1, "version 1 of the protocol"),
        ("mode", "half", "mode: 'half' is none of"),
        ("epoch", True, "epoch"),
        ("version", -1, "version"),
        ("run", None, "run"),
        ("atoms", [["a", [4, 4], "BF17"], ["s", [], "F32"]], "no element type 'BF17'"),
        ("atoms", [["a", [4, -4], "BF16"], ["s", [], "F32"]], "no list of sizes"),
        ("atoms", [["a", "BF16"]], "is no [name, shape, dtype]"),
        ("senders", [[2]], "is no box of one of the 2 atoms"),
        ("senders", [[[0, [0, 0], [4]]]], "is no box of a [4, 4]"),
        ("senders", [[[0, [2, 0], [2, 4]]]], "is no box of a [4, 4]"),
        ("senders", [3], "senders[0]: '3' is no list"),
        ("block", 0, "more than 0 bytes"),
        ("base", [1], "base: [1] is no [version, root]"),
        ("model", [], "model"),
        ("lora", 3, "lora"),
    ],
)
def test_what_is_no_manifest_is_told_by_its_field(field: str, value: object, said: str) -> None:
    m = manifest([Atom("a", (4, 4), "BF16"), Atom("s", (), "F32")], [whole_boxes([(4, 4), ()])]).to_json()
    with pytest.raises(ProtocolError) as caught:
        Manifest.from_json({**m, field: value})
    assert said in str(caught.value)


def test_what_is_no_json_object_is_no_manifest() -> None:
    with pytest.raises(ProtocolError):
        Manifest.from_json([])
