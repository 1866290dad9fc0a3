"""The arithmetic of boxes, against literals and against counting every element."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_convert.converter.slots import (
    Box,
    Buffer,
    Slot,
    intersect,
    row_major,
    runs,
    split_range,
    starts,
    tiles,
    whole,
)

Ranges = tuple[tuple[int, int], ...]


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.lo, box.hi, strict=True))))


# ------------------------------------------------------------------------------------------------ boxes


def test_a_box_has_sizes_and_a_volume() -> None:
    box = Box((1, 0, 4), (3, 5, 5))
    assert box.sizes == (2, 5, 1)
    assert box.volume == 10
    assert whole((2, 3)) == Box((0, 0), (2, 3))
    assert whole(()).volume == 1  # a scalar


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        (Box((0, 0), (2, 2)), Box((1, 1), (3, 3)), Box((1, 1), (2, 2))),
        (Box((0, 0), (2, 2)), Box((0, 0), (2, 2)), Box((0, 0), (2, 2))),
        (Box((0, 0), (4, 4)), Box((1, 2), (2, 3)), Box((1, 2), (2, 3))),
        (Box((0, 0), (2, 2)), Box((2, 0), (3, 2)), None),  # they touch
        (Box((0, 0), (2, 2)), Box((0, 5), (2, 6)), None),
        (Box((), ()), Box((), ()), Box((), ())),
    ],
)
def test_what_two_boxes_have_in_common(a: Box, b: Box, common: Box | None) -> None:
    assert intersect(a, b) == common
    assert intersect(b, a) == common


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ranges = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))) for n in shape]
    return Box(tuple(r[0] for r in ranges), tuple(r[1] + 1 for r in ranges))


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(shapes.flatmap(lambda shape: st.tuples(boxes_in(shape), boxes_in(shape))))
def test_intersections_by_counting(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = intersect(a, b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)


# ------------------------------------------------------------------------------------------------ split_range


@pytest.mark.parametrize(
    ("lo", "hi", "axes", "want"),
    [
        # rows of 4: all of them, a whole row, part of one, parts of two, two parts with a whole row between
        (0, 12, ((3, 4), (4, 1)), [((0, 3), (0, 4))]),
        (4, 8, ((3, 4), (4, 1)), [((1, 2), (0, 4))]),
        (5, 7, ((3, 4), (4, 1)), [((1, 2), (1, 3))]),
        (3, 5, ((3, 4), (4, 1)), [((0, 1), (3, 4)), ((1, 2), (0, 1))]),
        (3, 9, ((3, 4), (4, 1)), [((0, 1), (3, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]),
        # beyond both ends
        (-7, 99, ((3, 4), (4, 1)), [((0, 3), (0, 4))]),
        (12, 20, ((3, 4), (4, 1)), []),
        (-5, 0, ((3, 4), (4, 1)), []),
        # k of a QKV matrix, 2 rows in every group of 8: groups 8 apart, rows 1 apart; the caller took k's base off
        (0, 16, ((2, 8), (2, 1)), [((0, 2), (0, 2))]),
        (-4, 4, ((2, 8), (2, 1)), [((0, 1), (0, 2))]),  # rank 0 of 2: rows 0 to 7 of the matrix
        (4, 12, ((2, 8), (2, 1)), [((1, 2), (0, 2))]),  # rank 1
        (-4, 1, ((2, 8), (2, 1)), [((0, 1), (0, 1))]),  # half of k
        (2, 8, ((2, 8), (2, 1)), []),  # between two k's
        # three axes (groups, heads, rows) of a q of 2 × 2 × 2, interleaved with k and v
        (0, 8, ((2, 8), (2, 2), (2, 1)), [((0, 1), (0, 2), (0, 2))]),
        (3, 9, ((2, 8), (2, 2), (2, 1)), [((0, 1), (1, 2), (1, 2)), ((1, 2), (0, 1), (0, 1))]),
        # a dimension without axes has the one index 0
        (0, 1, (), [()]),
        (1, 2, (), []),
    ],
)
def test_split_range_on_paper(lo: int, hi: int, axes: Ranges, want: list[Ranges]) -> None:
    assert list(split_range(lo, hi, axes)) == want


@st.composite
def axes_of_a_dimension(draw: st.DrawFn) -> Ranges:
    """Axes from the outermost to the innermost, with room between neighbours: what else is interleaved there."""
    axes: list[tuple[int, int]] = []
    extent = 1
    for size in draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)):
        stride = extent + draw(st.sampled_from([0, 0, 0, 1, 4]))
        axes.insert(0, (size, stride))
        extent += (size - 1) * stride
    return tuple(axes)


@settings(max_examples=400)
@given(axes_of_a_dimension(), st.data())
def test_split_range_finds_every_element_once_in_few_boxes(axes: Ranges, data: st.DataObject) -> None:
    extent = 1 + sum((n - 1) * s for n, s in axes)
    lo = data.draw(st.integers(-3, extent + 2))
    hi = data.draw(st.integers(lo, extent + 5))
    want = {
        index
        for index in product(*(range(n) for n, _ in axes))
        if lo <= sum(x * s for x, (_, s) in zip(index, axes, strict=True)) < hi
    }
    boxes = split_range(lo, hi, axes)
    have = Counter(index for box in boxes for index in product(*(range(a, b) for a, b in box)))
    assert set(have) == want
    assert all(count == 1 for count in have.values())
    assert len(boxes) <= 2 * len(axes) - 1
    assert all(a < b for box in boxes for a, b in box)


# ------------------------------------------------------------------------------------------------ tiles


@pytest.mark.parametrize(
    ("boxes", "shape", "exact"),
    [
        ([Box((0, 0), (4, 4))], (4, 4), True),
        ([Box((0, 0), (2, 4)), Box((2, 0), (4, 4))], (4, 4), True),
        ([Box((2, 0), (4, 4)), Box((0, 0), (2, 4))], (4, 4), True),  # in any order
        ([Box((0, 0), (4, 3)), Box((0, 3), (1, 4)), Box((1, 3), (4, 4))], (4, 4), True),
        ([Box((0, 0), (2, 4))], (4, 4), False),  # a hole
        ([Box((0, 0), (4, 4)), Box((0, 0), (1, 1))], (4, 4), False),  # an element twice
        ([Box((0, 0), (3, 4)), Box((2, 0), (3, 4))], (4, 4), False),  # as many elements, but not each once
        ([Box((0, 0), (2, 2)), Box((2, 2), (4, 4)), Box((0, 2), (2, 4)), Box((0, 2), (2, 4))], (4, 4), False),
        ([], (4, 4), False),
        ([Box((), ())], (), True),
        ([Box((), ()), Box((), ())], (), False),
        # a pinwheel: no straight cut divides it
        (
            [
                Box((0, 0), (1, 2)),
                Box((0, 2), (2, 3)),
                Box((2, 1), (3, 3)),
                Box((1, 0), (3, 1)),
                Box((1, 1), (2, 2)),
            ],
            (3, 3),
            True,
        ),
    ],
)
def test_tiles_on_paper(boxes: list[Box], shape: tuple[int, ...], exact: bool) -> None:
    assert tiles(boxes, shape) is exact


def test_boxes_that_reach_outside_do_not_cover() -> None:
    """As many elements as the tensor has, none twice, but two of them are not the tensor's."""
    assert not tiles([Box((2,), (6,))], (4,))
    assert not tiles([Box((0, 0), (2, 2)), Box((2, 2), (4, 4)), Box((0, 2), (2, 4)), Box((4, 0), (6, 2))], (4, 4))


@st.composite
def almost_tilings(draw: st.DrawFn) -> tuple[list[Box], tuple[int, ...]]:
    """A tensor cut up at random, then left alone or spoilt."""
    shape = draw(shapes)
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        if box.hi[axis] - box.lo[axis] < 2:
            boxes.append(box)
            continue
        at = draw(st.integers(box.lo[axis] + 1, box.hi[axis] - 1))
        boxes.append(Box(box.lo, tuple(at if a == axis else x for a, x in enumerate(box.hi))))
        boxes.append(Box(tuple(at if a == axis else x for a, x in enumerate(box.lo)), box.hi))
    spoil = draw(st.sampled_from(["no", "no", "drop", "double", "replace"]))
    victim = draw(st.integers(0, len(boxes) - 1))
    if spoil == "drop":
        boxes.pop(victim)
    elif spoil == "double":
        boxes.append(boxes[victim])
    elif spoil == "replace":
        boxes[victim] = draw(boxes_in(shape))
    return draw(st.permutations(boxes)), shape


@settings(max_examples=400)
@given(almost_tilings())
def test_tiles_by_counting(case: tuple[list[Box], tuple[int, ...]]) -> None:
    boxes, shape = case
    count = Counter(index for box in boxes for index in elements(box))
    assert tiles(boxes, shape) is (len(count) == prod(shape) and all(n == 1 for n in count.values()))


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, n * 8), (512, n * 8 + 8)) for n in range(512)],  # o_proj over 512 ranks
        [Box((r * 8, c * 8), (r * 8 + 8, c * 8 + 8)) for r in range(64) for c in range(64)],  # FSDP × TP
    ],
    ids=["columns", "grid"],
)
def test_many_boxes_take_no_time(boxes: list[Box], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts that meshes make are never compared pair by pair."""
    from areal_convert.converter import slots

    compared = 0

    def counted(a: Box, b: Box) -> Box | None:
        nonlocal compared
        compared += 1
        return intersect(a, b)

    monkeypatch.setattr(slots, "intersect", counted)
    shape = tuple(max(box.hi[axis] for box in boxes) for axis in range(2))
    assert tiles(boxes, shape)
    assert compared <= 10 * len(boxes)


# ------------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize(
    ("sizes", "strides", "itemsize", "block", "loops"),
    [
        ((3, 4), (16, 4), 4, 48, ()),  # contiguous
        ((3, 2), (16, 4), 4, 8, ((3, 16),)),  # half of every row
        ((3, 1), (16, 4), 4, 4, ((3, 16),)),  # a column
        ((1, 4), (999, 4), 4, 16, ()),  # one row: its stride does not matter
        ((2, 3, 4), (48, 16, 4), 4, 96, ()),
        ((2, 3, 4), (96, 16, 4), 4, 48, ((2, 96),)),
        ((2, 3, 2), (48, 16, 4), 4, 8, ((6, 16),)),  # two loops that continue each other are one
        ((2, 3, 2), (64, 16, 4), 4, 8, ((2, 64), (3, 16))),
        ((4, 3), (4, 16), 4, 4, ((4, 4), (3, 16))),  # transposed
        ((), (), 8, 8, ()),
    ],
)
def test_runs_on_paper(
    sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int, block: int, loops: Ranges
) -> None:
    assert runs(sizes, strides, itemsize) == (block, loops)


def test_a_run_spans_from_its_first_to_its_last_byte() -> None:
    run = runs((2, 3, 2), (64, 16, 4), 4)
    assert run.span == 64 + 2 * 16 + 8
    assert run.pieces == 6
    assert list(starts(run)) == [0, 16, 32, 64, 80, 96]


@settings(max_examples=300)
@given(axes_of_a_dimension(), st.sampled_from([1, 2, 4]), st.booleans())
def test_runs_visit_the_same_bytes_in_the_same_order(axes: Ranges, itemsize: int, turned: bool) -> None:
    ordered = tuple(reversed(axes)) if turned else axes
    sizes, strides = tuple(n for n, _ in ordered), tuple(s * itemsize for _, s in ordered)
    want = [
        sum(x * s for x, s in zip(index, strides, strict=True)) + byte
        for index in product(*(range(n) for n in sizes))
        for byte in range(itemsize)
    ]
    run = runs(sizes, strides, itemsize)
    assert [start + byte for start in starts(run) for byte in range(run.block)] == want
    assert run.span == max(want) + 1
    assert run.block * run.pieces == len(want)


# ------------------------------------------------------------------------------------------------ slots


def test_row_major_strides() -> None:
    assert row_major((2, 3, 4), 2) == (24, 8, 2)
    assert row_major((5,), 4) == (4,)
    assert row_major((), 4) == ()


def test_a_slot_knows_where_an_element_lies_in_its_file() -> None:
    """k of group 1, in a QKV matrix of 16 rows of 2 fp32, whose bytes begin at 100: it is row 12."""
    buffer = Buffer("file", 100, 128, "qkv")
    slot = Slot(Box((1, 0, 0), (2, 2, 2)), buffer, 12 * 8, (64, 8, 4), "F32")
    assert slot.at((1, 0, 0)) == 100 + 12 * 8
    assert slot.at((1, 1, 1)) == 100 + 13 * 8 + 4
