"""The proof that a plan is total: what is missing, doubled or incomplete is named, all of it at once."""

from __future__ import annotations

import pytest

from areal_convert.converter.errors import PlanError
from areal_convert.converter.plan import Plan, copies_of, join
from areal_convert.converter.slots import Box, Buffer, Slot, row_major, whole
from areal_convert.mappings.schema import Atom

ATOMS = {
    "embed": (Atom("embed", "v h"), (6, 2)),
    "norm": (Atom("norm", "h"), (2,)),
}


def slot(
    box: Box, file: str, begin: int = 0, *, name: str = "", copy: int = 0, dtype: str = "F32", size: int = 4
) -> Slot:
    """A box, alone and row-major in a buffer."""
    return Slot(box, Buffer(file, begin, box.volume * size, name or file), 0, row_major(box.sizes, size), dtype, copy)


def rows(lo: int, hi: int) -> Box:
    return Box((lo, 0), (hi, 2))


NORM = Box((0,), (2,))
SOURCE = {"embed": [slot(whole((6, 2)), "a", 8, name="emb")], "norm": [slot(NORM, "a", 0, name="nrm")]}
TARGET = {
    "embed": [slot(rows(0, 3), "r0", name="emb"), slot(rows(3, 6), "r1", name="emb")],
    "norm": [slot(NORM, "r0", 99, name="nrm"), slot(NORM, "r1", 99, name="nrm", copy=1)],
}


def test_a_total_join_is_ordered_as_the_source_is_read() -> None:
    plans = join(ATOMS, SOURCE, TARGET)
    assert [p.name for p in plans] == ["norm", "embed"]  # byte 0 of file a, then byte 8
    norm, embed = plans
    assert embed.source == tuple(SOURCE["embed"])
    assert embed.target == tuple(TARGET["embed"])
    assert norm.replicas == ()
    assert len(norm.target) == 2  # both replicas are written


def test_swapping_the_arguments_gives_the_inverse() -> None:
    there, back = join(ATOMS, SOURCE, TARGET), join(ATOMS, TARGET, SOURCE)
    assert {p.name for p in there} == {p.name for p in back}
    embed = next(p for p in back if p.name == "embed")
    assert (embed.source, embed.target) == (tuple(TARGET["embed"]), tuple(SOURCE["embed"]))
    norm = next(p for p in back if p.name == "norm")
    assert norm.source == (TARGET["norm"][0],)
    assert norm.replicas == ((TARGET["norm"][1],),)  # to be compared while it is read


def _problems(source: dict[str, list[Slot]], target: dict[str, list[Slot]]) -> dict[str, list[str]]:
    with pytest.raises(PlanError) as caught:
        join(ATOMS, source, target)
    found: dict[str, list[str]] = {}
    for problem in caught.value.problems:
        assert problem.about in str(caught.value)
        found.setdefault(problem.about, []).append(problem.what)
    return found


def test_what_the_source_lacks_is_named() -> None:
    found = _problems({"norm": SOURCE["norm"]}, TARGET)
    assert found == {"embed": ["the source has nothing for it"]}


def test_what_the_target_lacks_is_named() -> None:
    found = _problems(SOURCE, {"embed": TARGET["embed"]})
    assert found == {"norm": ["the target has no place for it"]}


def test_what_no_model_has_is_named() -> None:
    found = _problems(SOURCE, TARGET | {"bias": [slot(NORM, "r0")]})
    assert found == {"bias": ["the target wants it, the model does not have it"]}


def test_a_hole_in_the_source_is_measured() -> None:
    found = _problems(SOURCE | {"embed": [slot(rows(0, 4), "a", name="emb.weight")]}, TARGET)
    assert found == {"embed": ["the source holds 8 of its 12 elements (emb.weight)"]}


def test_an_element_that_the_source_holds_twice() -> None:
    twice = [slot(rows(0, 4), "a", name="x"), slot(rows(2, 6), "b", name="y")]
    found = _problems(SOURCE | {"embed": twice}, TARGET)
    assert found == {"embed": ["the source holds some of its 12 elements more than once (x, y)"]}


def test_a_hole_and_a_repeat_of_one_size_do_not_cancel() -> None:
    """6 rows in all, but row 2 twice and row 5 not at all."""
    found = _problems(SOURCE | {"embed": [slot(rows(0, 3), "a"), slot(rows(2, 5), "b")]}, TARGET)
    assert list(found) == ["embed"]


def test_an_incomplete_replica_is_named_by_its_number() -> None:
    replicas = [*SOURCE["embed"], slot(rows(0, 5), "b", copy=3, name="tied")]
    found = _problems(SOURCE | {"embed": replicas}, TARGET)
    assert found == {"embed": ["copy 3 in the source holds 10 of its 12 elements (tied)"]}


def test_a_hole_in_the_target_and_a_place_written_twice() -> None:
    found = _problems(SOURCE, TARGET | {"embed": [slot(rows(0, 3), "r0"), slot(rows(4, 6), "r1")]})
    assert found == {"embed": ["the target holds 10 of its 12 elements (r0, r1)"]}
    found = _problems(SOURCE, TARGET | {"norm": [slot(NORM, "r0"), slot(NORM, "r1")]})
    assert found == {"norm": ["the target holds some of its 2 elements more than once (r0, r1)"]}


def test_every_replica_of_the_target_must_be_whole() -> None:
    homes = [*TARGET["norm"], slot(Box((0,), (1,)), "r2", copy=2)]
    assert list(_problems(SOURCE, TARGET | {"norm": homes})) == ["norm"]


def test_all_that_is_wrong_is_said_together() -> None:
    source = {"embed": [slot(rows(0, 4), "a")]}
    target = {"embed": [slot(rows(0, 3), "r0"), slot(rows(3, 7), "r1")], "extra": [slot(NORM, "r0")]}
    found = _problems(source, target)
    assert list(found) == ["embed", "norm", "extra"]
    assert len(found["embed"]) == 2 and len(found["norm"]) == 2


def test_a_place_outside_of_the_tensor_is_no_cover() -> None:
    """The bytes of rows 1 to 6 where rows 0 to 5 belong: as many, none twice."""
    found = _problems(SOURCE, TARGET | {"embed": [slot(rows(1, 4), "r0"), slot(rows(4, 7), "r1")]})
    assert list(found) == ["embed"]


@pytest.mark.parametrize("end", ["source", "target"])
def test_one_tensor_in_two_element_types_is_refused(end: str) -> None:
    """Read with the first one's size, the second's bytes would be garbage that nobody notices."""
    mixed = {"embed": [slot(rows(0, 3), "r0"), slot(rows(3, 6), "r1", dtype="BF16", size=2)]}
    ends = {"source": SOURCE, "target": TARGET}
    ends[end] = ends[end] | mixed
    found = _problems(ends["source"], ends["target"])
    assert list(found) == ["embed"]


def test_copies_lowest_first() -> None:
    slots = [slot(NORM, "b", copy=2), slot(NORM, "a"), slot(NORM, "c", copy=2)]
    assert {copy: [s.buffer.file for s in held] for copy, held in copies_of(slots).items()} == {0: ["a"], 2: ["b", "c"]}
    assert list(copies_of(slots)) == [0, 2]


def test_totals_of_a_plan() -> None:
    narrow = [slot(rows(0, 6), "r0", dtype="BF16", size=2)]
    plan = Plan(join(ATOMS, SOURCE, TARGET | {"embed": narrow}), {"x": "asked for"}, filled=40)
    assert plan.totals() == {
        "atoms": 2,
        "parameters": 14,
        "copies": 1 + 2,
        "bytes_read": 14 * 4,
        "bytes_written": 12 * 2 + 2 * (2 * 4),
        "bytes_filled": 40,
        "casts": {"F32 → BF16": 1},
        "drops": 1,
    }


def test_the_digest_of_a_plan_changes_with_every_move_and_with_nothing_else() -> None:
    base = Plan(join(ATOMS, SOURCE, TARGET)).digest
    assert Plan(join(dict(reversed(ATOMS.items())), SOURCE, TARGET)).digest == base
    others = [
        SOURCE | {"norm": [slot(NORM, "b", 0, name="nrm")]},  # another file
        SOURCE | {"norm": [slot(NORM, "a", 4, name="nrm")]},  # another place
        SOURCE | {"norm": [slot(NORM, "a", 0, name="nrm", dtype="BF16")]},  # another type
    ]
    digests = {Plan(join(ATOMS, other, TARGET)).digest for other in others}
    swapped = TARGET | {"embed": [slot(rows(0, 2), "r0"), slot(rows(2, 6), "r1")]}
    digests.add(Plan(join(ATOMS, SOURCE, swapped)).digest)
    assert len(digests | {base}) == 5
