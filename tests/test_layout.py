"""The axes notation, the geometry made from it, and the tables of all families checked against themselves.

Where a tensor's elements come from is worked out a second time here, element by element and straight from the text of
the pattern, and compared with the slots.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from areal_convert.converter.layout import Named, View, contiguous, geometry, slots_in
from areal_convert.converter.slots import Buffer, row_major, tiles
from areal_convert.mappings import FAMILIES, table
from areal_convert.mappings.schema import Atom, Axis, Concat, Index, Row, Table, parse_pattern, row, skeleton, under
from areal_convert.mappings.torch_dist import always_indexed, global_rows

SIZES = {"h": 3, "u": 1, "o": 3, "x": 6, "n": 2, "g": 2, "r": 3, "d": 2, "f": 5, "m": 4, "s": 3, "e": 2, "v": 7}
SIZES |= {"k": 3, "w": 2, "y": 4, "a": 2, "c": 3, "j": 5, "layers": 3, "mtp": 1}

GOLDENS = sorted((Path(__file__).parent / "goldens" / "mcore-0.16.1").glob("*.json"))


def dims_of(path: Path) -> tuple[Table, dict[str, int]]:
    golden = json.loads(path.read_text())
    family = table(golden["config"]["model_type"])
    return family, family.dims(golden["config"] | {"num_nextn_predict_layers": golden["mtp"]})


every_model = pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.stem)


# ------------------------------------------------------------------------------------------------ the notation


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("h", ((Axis("h"),),)),
        ("v h", ((Axis("v"),), (Axis("h"),))),
        ("(g r d) h", ((Axis("g"), Axis("r"), Axis("d")), (Axis("h"),))),
        (
            "(g [q:r k v] d) h",
            ((Axis("g"), Concat((("q", "r"), ("k", "1"), ("v", "1"))), Axis("d")), (Axis("h"),)),
        ),
        ("{i} {e} ([gate up] m) h", None),
    ],
)
def test_patterns(text: str, want: Any) -> None:
    if want is None:
        want = ((Index("i"),), (Index("e"),), (Concat((("gate", "1"), ("up", "1"))), Axis("m")), (Axis("h"),))
    assert parse_pattern(text) == want


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(g r d h", "a '(' is not closed"),
        ("g) h", "')' is not an axis"),
        ("((g r) d) h", "'(' is not an axis"),
        ("g , h", "',' is not an axis"),
        ("(g [q:r k d) h", "pattern '(g [q:r k d) h'"),
        ("([] m) h", "an empty concatenation"),
        ("3 h", "'3' is not an axis"),
    ],
)
def test_patterns_that_mean_nothing(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        parse_pattern(text)
    assert repr(text) in str(caught.value)


Q, K, V = Atom("layers.{i}.q", "g r d h"), Atom("layers.{i}.k", "g d h"), Atom("layers.{i}.v", "g d h")
GATE = Atom("layers.{i}.gate", "m h")


@pytest.mark.parametrize(
    ("pattern", "atoms", "says"),
    [
        ("(g d) h", (Q,), "q has axes 'g r d h'"),  # an axis forgotten
        ("(g r r d) h", (Q,), "q has axes"),  # an axis twice
        ("(g [q:r k] d) h", (Q, K, V), "several atoms, but not all stand in a concatenation"),
        ("(g [q:r k z] d) h", (Q, K), "[z] is none of its atoms"),
        ("(g r d) h", (Q, Q), "two atoms share an alias"),
        ("(g [q k v] d) h", (Q, K, V), "q has axes"),  # q without its r
    ],
)
def test_a_slip_in_a_row_shows_at_import(pattern: str, atoms: tuple[Atom, ...], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        row("name.{i}", pattern, *atoms)


@pytest.mark.parametrize(("option", "value"), [("cut", "z"), ("pad", "z"), ("place", "frist")])
def test_a_slip_in_an_option_of_a_row_shows_at_import(option: str, value: str) -> None:
    with pytest.raises(ValueError, match=value):
        row("name.{i}", "m h", GATE, **{option: value})


def test_two_atoms_of_one_name_show_at_import() -> None:
    other = Atom("layers.{i}.gate", "h m")
    broken = Table("x", lambda config: {}, [row("a.{i}", "m h", GATE)], [row("b.{i}", "h m", other)])
    with pytest.raises(ValueError, match=re.escape("two different atoms are called 'layers.{i}.gate'")):
        _ = broken.atoms


@pytest.mark.parametrize(
    ("name", "key", "numbers"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.{}.mlp.up_proj.weight", (3,)),
        ("model.layers.12.mlp.experts.7.w1.weight", "model.layers.{}.mlp.experts.{}.w1.weight", (12, 7)),
        (
            "decoder.layers.0.mlp.experts.linear_fc1.weight13",
            "decoder.layers.{}.mlp.experts.linear_fc1.weight{}",
            (0, 13),
        ),
        ("layers.0.feed_forward.w1.weight", "layers.{}.feed_forward.w1.weight", (0,)),
        ("layers.0.moe.experts.w1", "layers.{}.moe.experts.w1", (0,)),  # w1 is a name, not a count
        ("model.norm.weight", "model.norm.weight", ()),
        ("mlp.experts.linear_fc1.bias2", "mlp.experts.linear_fc1.bias{}", (2,)),
        ("module.7", "module.{}", (7,)),
    ],
)
def test_numbers_of_a_name(name: str, key: str, numbers: tuple[int, ...]) -> None:
    assert skeleton(name) == (key, numbers)


def test_rows_under_a_prefix() -> None:
    inner = row("a.{i}.weight", "m h", GATE, cut="m")
    (outer,) = under([inner], "mtp.", place="mtp")
    assert (outer.name, outer.place, outer.cut) == ("mtp.a.{i}.weight", "mtp", "m")
    assert inner.place == "layer"


# ------------------------------------------------------------------------------------------------ geometry

QKV = row("qkv.{i}", "(g [q:r k v] d) h", Q, K, V, cut="g")


def test_the_geometry_of_a_qkv_matrix() -> None:
    """2 groups of 2 query heads of 2, hidden 2: groups of 8 rows; k begins at row 4 of a group, v at row 6."""
    geo = geometry(QKV, {"g": 2, "r": 2, "d": 2, "h": 2, "layers": 1})
    assert geo.shape == (16, 2)
    q, k, v = geo.places
    assert (q.dim, q.stride, q.base) == ((0, 0, 0, 1), (8, 2, 1, 1), (0, 0))
    assert (k.dim, k.stride, k.base) == ((0, 0, 1), (8, 1, 1), (4, 0))
    assert (v.dim, v.stride, v.base) == ((0, 0, 1), (8, 1, 1), (6, 0))


def test_the_slots_of_one_tensor_parallel_rank() -> None:
    """Rows 8 to 15 of the same matrix, as rank 1 of 2 holds them: all of group 1, in bytes of bf16."""
    geo = geometry(QKV, {"g": 2, "r": 2, "d": 2, "h": 2, "layers": 1})
    named = Named("qkv.0", QKV, 0, -1, geo)
    found = dict(slots_in(named, (8, 0), (16, 2), Buffer("file", 0, 64, "qkv"), 0, (4, 2), "BF16"))
    assert list(found) == ["layers.0.q", "layers.0.k", "layers.0.v"]
    q, k, v = found.values()
    assert (q.box, q.offset, q.strides) == (((1, 0, 0, 0), (2, 2, 2, 2)), 0, (32, 8, 4, 2))
    assert (k.box, k.offset, k.strides) == (((1, 0, 0), (2, 2, 2)), 16, (32, 4, 2))
    assert (v.box, v.offset, v.strides) == (((1, 0, 0), (2, 2, 2)), 24, (32, 4, 2))


def test_padding_is_no_slot() -> None:
    embed = Atom("embed", "v h")
    named = Named("embed", r := row("embed", "v h", embed, pad="v"), -1, -1, geometry(r, {"v": 5, "h": 2}))
    ((_, slot),) = contiguous(named, (8, 2), Buffer("file", 0, 64, "embed"), 4, "F32")
    assert slot.box.hi == (5, 2)
    assert slot.strides == (8, 4)


def by_counting(r: Row, named: Named) -> Iterator[tuple[tuple[int, ...], str, tuple[int, ...]]]:
    """(element of the tensor, atom, element of the atom), from the pattern's text and nothing else."""
    dimensions = []
    for text in re.findall(r"\(.*?\)|\S+", r.pattern):
        options: list[tuple[dict[str, int], str]] = [({}, "")]
        for token in re.findall(r"\[.*?\]|\{\w\}|\w+", text):
            options = [
                (before | after, alias or other) for before, alias in options for after, other in _choices(token)
            ]
        dimensions.append(options)
    for element, choice in zip(
        product(*(range(len(options)) for options in dimensions)), product(*dimensions), strict=True
    ):
        values: dict[str, int] = {}
        alias = ""
        for assigned, name in choice:
            values |= assigned
            alias = alias or name
        atom = next(a for a in r.atoms if a.alias == alias) if alias else r.atoms[0]
        full = atom.name.format(i=values.get("{i}", named.layer), e=values.get("{e}", named.expert))
        yield element, full, tuple(values[axis] for axis in atom.axes.split())


def _choices(token: str) -> list[tuple[dict[str, int], str]]:
    if token.startswith("["):
        found = []
        for part in token[1:-1].split():
            alias, _, axis = part.partition(":")
            found += [({axis: n} if axis else {}, alias) for n in range(SIZES[axis] if axis else 1)]
        return found
    size = SIZES["layers"] if token == "{i}" else SIZES[token.strip("{}")]
    return [({token: n}, "") for n in range(size)]


def every_row() -> Iterator[Any]:
    for family in FAMILIES:
        t = table(family)
        for naming, rows in (
            ("hf", t.hf),
            ("megatron", t.megatron),
            ("archon", t.archon),
            ("stacked", global_rows(t.megatron, stacked=True)),
            ("indexed", global_rows(t.megatron, stacked=False)),
        ):
            yield pytest.param(rows, id=f"{family}-{naming}")


@pytest.mark.parametrize("rows", list(every_row()))
def test_every_element_of_every_row_comes_from_where_its_pattern_says(rows: list[Row]) -> None:
    rng = random.Random(0)
    for r in rows:
        named = Named(r.name, r, 1, 0, geometry(r, SIZES))
        shape = named.geometry.shape
        want = {element: (atom, index) for element, atom, index in by_counting(r, named)}
        assert len(want) == len(list(product(*map(range, shape))))
        for lo, hi in [((0,) * len(shape), shape), *(_some_box(shape, rng) for _ in range(3))]:
            inside = tuple(b - a for a, b in zip(lo, hi, strict=True))
            have: dict[int, tuple[str, tuple[int, ...]]] = {}
            for atom, slot in slots_in(named, lo, hi, Buffer("", 0, 0, ""), 0, row_major(inside, 1), "U8"):
                for index in product(*(range(a, b) for a, b in zip(*slot.box, strict=True))):
                    assert slot.at(index) not in have, r.name
                    have[slot.at(index)] = (atom, index)
            elements = product(*(range(a, b) for a, b in zip(lo, hi, strict=True)))
            assert have == {n: want[element] for n, element in enumerate(elements)}, (r.name, lo, hi)


def _some_box(shape: tuple[int, ...], rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ends = [sorted(rng.sample(range(n + 1), 2)) for n in shape]
    return tuple(a for a, _ in ends), tuple(b for _, b in ends)


# ------------------------------------------------------------------------------------------------ the tables


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_table(family: str) -> None:
    t = table(family)
    assert t.name == family
    assert t.atoms  # no two atoms of one name
    for r in (*t.hf, *t.megatron, *t.archon):
        axes = {f.name for dim in r.dims for f in dim if isinstance(f, Axis)}
        assert r.cut in axes | {""}, r.name
        assert r.pad in axes | {""}, r.name
        assert r.place in ("layer", "first", "last", "last_copy", "mtp", "mtp_first"), r.name
        assert r.expert == any(a.per_expert for a in r.atoms), r.name


def namings(t: Table, dims: dict[str, int]) -> Iterator[tuple[str, View, set[str]]]:
    """Every way to write a model down: (what it is called, its rows, the forms to take)."""
    for experts in ("per_expert", "fused") if dims["e"] else ("",):
        yield f"hf {experts}", View(t.hf, dims), {"", experts, "mtp_copy"}
    for spec in ("te", "local"):
        for experts in ("sequential", "grouped") if dims["e"] else ("",):
            yield f"mp_rank {spec} {experts}", View(t.megatron, dims), {"", spec, experts}
    stacked = not always_indexed(t.megatron, dims)
    yield "torch_dist", View(global_rows(t.megatron, stacked=stacked), dims), {""}
    yield "torch_dist indexed", View(global_rows(t.megatron, stacked=False), dims), {""}
    if not dims["mtp"]:  # Archon has no multi-token prediction
        yield "archon", View(t.archon, dims), {""}


@every_model
def test_every_atom_is_in_every_naming_whole(golden: Path) -> None:
    t, dims = dims_of(golden)
    wanted = {name: shape for name, (_, shape) in View(t.hf, dims).atoms().items()}
    assert wanted
    for what, view, forms in namings(t, dims):
        assert {name: shape for name, (_, shape) in view.atoms().items()} == wanted, what
        homes: dict[str, dict[tuple[str, str], list[Any]]] = {}
        for named in view.all_named(lambda r, forms=forms: r.form in forms):
            shape = named.geometry.shape
            for atom, slot in contiguous(named, shape, Buffer("", 0, 0, ""), 1, "U8"):
                homes.setdefault(atom, {}).setdefault((named.name, named.row.place), []).append(slot.box)
        assert homes.keys() == wanted.keys(), what
        for atom, places in homes.items():
            for boxes in places.values():
                assert tiles(boxes, wanted[atom]), (what, atom)


@every_model
def test_an_atom_has_one_home_but_for_declared_repeats(golden: Path) -> None:
    """Repeats: a tied head, the MTP block's embedding and head, and norms that torch_dist stores for either spec."""
    t, dims = dims_of(golden)
    for what, view, forms in namings(t, dims):
        homes: dict[str, list[str]] = {}
        for named in view.all_named(lambda r, forms=forms: r.form in forms):
            for atom, _ in contiguous(named, named.geometry.shape, Buffer("", 0, 0, ""), 1, "U8"):
                if named.name not in homes.setdefault(atom, []):
                    homes[atom].append(named.name)
        for atom, names in homes.items():
            may = 2 if atom in ("embed", "head") or (what.startswith("torch_dist") and "norm" in atom) else 1
            assert len(names) <= may, (what, atom, names)


@every_model
def test_what_a_name_means_is_the_inverse_of_naming(golden: Path) -> None:
    t, dims = dims_of(golden)
    for what, view, _ in namings(t, dims):
        everything = list(view.all_named(lambda r: True))
        assert everything
        for named in everything:
            found, fault = view.resolve(named.name, named.geometry.shape)
            assert found is not None and fault == "", (what, named.name, fault)
            assert (found.name, found.layer, found.expert) == (named.name, named.layer, named.expert), what
            assert found.row.atoms == named.row.atoms, (what, named.name)
            assert found.geometry.shape == named.geometry.shape, (what, named.name)


@every_model
def test_names_beyond_the_model_are_not_its(golden: Path) -> None:
    t, dims = dims_of(golden)
    view = View(t.hf, dims)
    layers = dims["layers"] + dims["mtp"]
    norm = f"model.layers.{layers}.input_layernorm.weight"
    assert view.resolve(norm, (dims["h"],)) == (None, f"the config has {layers} layers")
    assert view.resolve("model.wte.weight", (1,)) == (None, "the family's table has no tensor of this name")
    last = f"model.layers.{layers - 1}.mlp."
    if dims["e"]:
        block = "model.layers.1.block_sparse_moe" if t.name == "mixtral" else "model.layers.1.mlp"
        part = "w1" if t.name == "mixtral" else "gate_proj"
        name = f"{block}.experts.{dims['e']}.{part}.weight"
        assert view.resolve(name, (1, 1)) == (None, f"the config has {dims['e']} experts")
        assert view.resolve(last + "gate_proj.weight", (1, 1))[0] is None  # the layer has experts
    else:
        assert view.resolve(last + "experts.0.gate_proj.weight", (1, 1))[0] is None


def test_a_wrong_shape_is_named_and_padding_is_none() -> None:
    view = View(table("llama").hf, dims_of(GOLDENS[3])[1])
    name = "model.layers.0.mlp.up_proj.weight"
    named, fault = view.resolve(name, (96, 65))
    assert named is not None
    assert fault == "has shape [96, 65], the config makes it [96, 64]"
    assert view.resolve(name, (96,))[1] == "has shape [96], the config makes it [96, 64]"
    assert view.resolve(name, (97, 64))[1]  # only a vocabulary may be longer
    assert view.resolve("model.embed_tokens.weight", (1024, 64))[1] == ""
    assert view.resolve("model.embed_tokens.weight", (1002, 64))[1]
    assert view.resolve("model.embed_tokens.weight", (1003, 128))[1]


def test_a_biased_model_has_its_biases_and_another_has_none() -> None:
    """B20: whether there is a bias is the config's to say; a stray one is no tensor of the model."""
    golden = {path.stem: dims_of(path) for path in GOLDENS}
    t, dims = golden["qwen2"]
    names = [n.name for n in View(t.hf, dims).all_named(lambda r: True)]
    assert len([n for n in names if n.endswith(".bias")]) == 3 * dims["layers"]
    t, dims = golden["llama"]
    assert View(t.hf, dims).resolve("model.layers.0.self_attn.q_proj.bias", (64,))[0] is None
    assert View(t.hf, dims | {"qkv_bias": 1}).resolve("model.layers.0.self_attn.q_proj.bias", (64,))[0] is not None


def test_which_layers_have_experts() -> None:
    """`mlp_only_layers` and `decoder_sparse_step` as transformers reads them (Qwen2MoeDecoderLayer)."""
    t = table("qwen3_moe")
    config = json.loads((GOLDENS[-1]).read_text())["config"] | {"num_hidden_layers": 6}

    def sparse(**fields: Any) -> list[int]:
        view = View(t.hf, t.dims(config | fields))
        routers = [n.layer for n in view.all_named(lambda r: r.name.endswith("mlp.gate.weight"))]
        dense = [n.layer for n in view.all_named(lambda r: r.name.endswith("mlp.gate_proj.weight"))]
        assert sorted(routers + dense) == list(range(6))
        return routers

    assert sparse() == [0, 1, 2, 3, 4, 5]
    assert sparse(decoder_sparse_step=2) == [1, 3, 5]
    assert sparse(mlp_only_layers=[0, 3]) == [1, 2, 4, 5]
    assert sparse(mlp_only_layers=[1], decoder_sparse_step=2) == [3, 5]
    assert sparse(mlp_only_layers=None) == [0, 1, 2, 3, 4, 5]
