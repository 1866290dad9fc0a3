"""The words in which a family's table is written: atoms, rows and the axes notation.

An **atom** is the finest tensor that any format stores under a name of its own. Its axes are factored to the
finest cut that anyone makes: the query weight of one layer is `g r d h`, KV group, query heads per group, head
dimension, hidden size.

A **row** says how one named tensor of one format is put together from atoms. Its pattern has one entry for each
dimension of the tensor:

    h                        an axis
    (g r d)                  several axes flattened into one dimension, outermost first
    (g [q:r k:1 v:1] d)      a concatenation inside it: for every g, first q's r heads, then one of k, one of v
    ([gate:1 up:1] f)        gate's f rows, then up's f rows
    {e}                      one index for each expert; each index is an atom of its own

`cut` names the axis that tensor parallelism divides, `pad` the axis that may be longer on disk than in the model.
Names hold `{i}` (layer), `{j}` (layer counted from the first MTP layer) and `{e}` (expert).

This module is data about notation: it imports nothing of ours, no torch, and does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

Dims = Mapping[str, int]
"""Sizes of the axes and the counts and switches of one model: `h`, `g`, …, `layers`, `mtp`, `experts`, `tied`."""

When = Callable[[Dims, int], bool]
"""Whether something exists in this model at this layer (`-1` for what stands outside the layers)."""


def always(dims: Dims, layer: int) -> bool:
    """The condition of what every model of the family has."""
    return True


@dataclass(frozen=True, slots=True)
class Atom:
    """`name` is a template over `{i}` and `{e}`; `axes` are separated by spaces; `exact` is the dtype that this
    tensor keeps whatever the output dtype ("F32" for a router's selection bias), or "" for none."""

    name: str
    axes: str
    when: When = always
    exact: str = ""

    @property
    def alias(self) -> str:
        """The short name by which patterns call it: the last word of `name`."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def per_layer(self) -> bool:
        return "{i}" in self.name

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.name


@dataclass(frozen=True, slots=True)
class Axis:
    """One factor of a dimension."""

    name: str


@dataclass(frozen=True, slots=True)
class Concat:
    """A concatenation of atoms inside a dimension; `parts` are (alias, axis name or "1")."""

    parts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Index:
    """A whole dimension (or factor) that counts atoms: `i` layers, `e` experts."""

    name: str


Factor = Axis | Concat | Index
Pattern = tuple[tuple[Factor, ...], ...]

_TOKEN = re.compile(r"\(|\)|\[[^\]]*\]|\{\w+\}|\w+|\S")


def parse_pattern(text: str) -> Pattern:
    """Read the axes notation above. Raises ValueError that points at what it does not understand."""
    dims: list[tuple[Factor, ...]] = []
    group: list[Factor] | None = None
    for token in _TOKEN.findall(text):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            dims.append(tuple(group))
            group = None
        else:
            factor = _factor(token, text)
            if group is None:
                dims.append((factor,))
            else:
                group.append(factor)
    if group is not None:
        raise ValueError(f"pattern {text!r}: a '(' is not closed")
    return tuple(dims)


def _factor(token: str, text: str) -> Factor:
    if token.startswith("["):
        parts = tuple((p.partition(":")[0], p.partition(":")[2] or "1") for p in token[1:-1].split())
        if not parts:
            raise ValueError(f"pattern {text!r}: an empty concatenation")
        return Concat(parts)
    if token.startswith("{"):
        return Index(token[1:-1])
    if re.fullmatch(r"[a-z]\w*", token):
        return Axis(token)
    raise ValueError(f"pattern {text!r}: {token!r} is not an axis")


PLACES = ("layer", "first", "last", "last_copy", "mtp", "mtp_first")
"""Where in a pipeline a tensor lives; see `Row`."""


@dataclass(frozen=True)
class Row:
    """One tensor name of one format. See the module's docstring for `pattern`, `cut` and `pad`.

    soft     the cut is one spec's habit; where it does not divide, whole tensors will do (in formats that store those)
    form     which of several ways to store the same atoms this row belongs to ("" = all of them): a format's
             writer picks one, a reader takes what it finds
    expert   the tensor is cut by the expert mesh (EP, ETP), not by TP
    flat     the shape in which the bytes are stored, where it is another: "1 02" has the pattern's dimension 1, then
             dimensions 0 and 2 as one
    place    where in a pipeline it lives: "layer", "first", "last", "last_copy" (last stage, only when that is not
             the first), "mtp" (with the last stage's MTP block), "mtp_first" (the MTP block's copy, only when not
             on the first stage)
    """

    name: str
    pattern: str
    atoms: tuple[Atom, ...]
    cut: str = ""
    pad: str = ""
    soft: bool = False
    form: str = ""
    when: When = always
    expert: bool = False
    flat: str = ""
    place: str = "layer"
    dims: Pattern = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", parse_pattern(self.pattern))
        _check_row(self)

    @cached_property
    def key(self) -> str:
        """The name with every index replaced by `{}`: what `skeleton` makes of a concrete name."""
        return re.sub(r"\{\w+\}", "{}", self.name)

    @cached_property
    def indices(self) -> tuple[str, ...]:
        """The index variables of `name`, in order."""
        return tuple(re.findall(r"\{(\w+)\}", self.name))


def stored_shape(row: Row, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape under which a tensor of the pattern's `shape` is stored."""
    if not row.flat:
        return shape
    return tuple(prod(shape[int(d)] for d in group) for group in row.flat.split())


def row(name: str, pattern: str, *atoms: Atom, **options: Any) -> Row:
    """`Row` with the atoms as plain arguments."""
    return Row(name, pattern, atoms, **options)


def _check_row(r: Row) -> None:
    """A row must use every axis of every atom exactly once; a slip in a table fails at import."""
    plain = {f.name for dim in r.dims for f in dim if isinstance(f, Axis)}
    for option in ("cut", "pad"):
        axis = getattr(r, option)
        if axis and axis not in plain:
            raise ValueError(f"row {r.name!r}: {option}={axis!r} is no axis of its pattern {r.pattern!r}")
    if r.place not in PLACES:
        raise ValueError(f"row {r.name!r}: place={r.place!r} is none of {', '.join(PLACES)}")
    aliases = {a.alias: a for a in r.atoms}
    if len(aliases) != len(r.atoms):
        raise ValueError(f"row {r.name!r}: two atoms share an alias")
    used: dict[str, list[str]] = {alias: [] for alias in aliases}
    named: set[str] = set()
    for dim in r.dims:
        for factor in dim:
            if isinstance(factor, Axis):
                for axes in used.values():
                    axes.append(factor.name)
            elif isinstance(factor, Concat):
                for alias, axis in factor.parts:
                    if alias not in used:
                        raise ValueError(f"row {r.name!r}: [{alias}] is none of its atoms")
                    named.add(alias)
                    if axis != "1":
                        used[alias].append(axis)
    if len(aliases) > 1 and named != set(aliases):
        raise ValueError(f"row {r.name!r}: several atoms, but not all stand in a concatenation")
    for alias, axes in used.items():
        if sorted(axes) != sorted(aliases[alias].axes.split()):
            raise ValueError(f"row {r.name!r}: {alias} has axes {aliases[alias].axes!r}, the pattern gives {axes}")


_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,8})(?=\.|$)")

_GROUPED = re.compile(r"(.*\.linear_fc[12]\.(?:weight|bias))(0|[1-9][0-9]{0,8})")


def skeleton(name: str) -> tuple[str, tuple[int, ...]]:
    """A concrete tensor name with its numbers taken out: `("model.layers.{}.mlp…", (3,))`.

    A number glued to the weight of a linear layer (`linear_fc1.weight12`, Megatron's grouped experts) is an index too.
    """
    numbers = tuple(int(n) for n in _NUMBER.findall(name))
    key = _NUMBER.sub("{}", name)
    grouped = _GROUPED.fullmatch(key)
    if grouped:
        return grouped[1] + "{}", (*numbers, int(grouped[2]))
    return key, numbers


Config = Mapping[str, Any]
"""A parsed `config.json`."""

AXES = {
    "h": "hidden_size",
    "n": "num_attention_heads",
    "g": "num_key_value_heads",
    "r": "query heads per KV group",
    "d": "head_dim",
    "f": "intermediate_size",
    "m": "moe_intermediate_size",
    "s": "shared experts' intermediate size",
    "v": "vocab_size",
    "e": "number of experts",
    "a": "q_lora_rank",
    "c": "kv_lora_rank",
    "k": "qk_nope_head_dim + qk_rope_head_dim",
    "w": "v_head_dim",
    "layers": "num_hidden_layers",
    "mtp": "num_nextn_predict_layers",
}
"""What the axes and counts are called in a `config.json`."""

INV_FREQ = (r".*rotary_emb\.inv_freq", "computed from the config")
"""Old files store the rotary frequencies; every reader computes them."""


@dataclass(frozen=True)
class Table:
    """All that is particular to one family.

    name         the family, the `model_type` of its `config.json`
    dims         from the parsed `config.json` to `Dims`; raises KeyError for a field that it needs
    hf, megatron, archon   the rows of each naming
    drops        name patterns (regular expressions) that may be left behind, each for a reason that the row of
                 the report repeats
    """

    name: str
    dims: Callable[[Config], dict[str, int]]
    hf: Sequence[Row]
    megatron: Sequence[Row]
    archon: Sequence[Row] = ()
    drops: Sequence[tuple[str, str]] = ()

    @cached_property
    def atoms(self) -> dict[str, Atom]:
        """Every atom of the family by its template, in the order of the HF rows."""
        found: dict[str, Atom] = {}
        for r in (*self.hf, *self.megatron, *self.archon):
            for atom in r.atoms:
                known = found.setdefault(atom.name, atom)
                if known is not atom and known != atom:
                    raise ValueError(f"table {self.name}: two different atoms are called {atom.name!r}")
        return found


def under(rows: Sequence[Row], prefix: str, **options: Any) -> list[Row]:
    """The same rows with `prefix` before their names (a decoder layer inside an MTP block, say)."""
    return [replace(r, name=prefix + r.name, **options) for r in rows]
