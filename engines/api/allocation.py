"""Allocation strings: which backend, with how many ranks of every kind.

    fsdp:d4t2                                 backend, then d(ata) t(ensor) p(ipeline) c(ontext) e(xpert) sizes
    megatron[actor]:d4p2t2                    with a name
    megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)     experts on a grid of their own; their d may be left out
    fsdp:d8r2                                 ours: r replicas of the shards (HSDP), dividing d
    sglang[gen]:d2t4 + fsdp[actor]:d8|fsdp[critic]:d8     parts, and parts on the same ranks

The language is AReaL's. Stricter here: a size that is given twice is an error, and not the last one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...converter.errors import ConfigError, Problem, Problems
from .fields import nearest
from .parallel import ParallelStrategy

__all__ = ["INFERENCE", "TRAINING", "ModelAllocation", "parse_allocations"]

TRAINING = ("fsdp", "megatron", "archon")
INFERENCE = ("sglang", "vllm")

SIZES = {
    "d": "data_parallel_size",
    "p": "pipeline_parallel_size",
    "t": "tensor_parallel_size",
    "c": "context_parallel_size",
    "e": "expert_parallel_size",
    "r": "data_parallel_replicate_size",
}

_ALLOWED: dict[str, tuple[str, str]] = {
    "fsdp": ("dtcr", "expert and pipeline parallelism are megatron's and archon's"),
    "megatron": ("dptce", "replicas of shards (r) are fsdp's and archon's"),
    "archon": ("dptcer", ""),
    "sglang": ("dtp", "inference has data, tensor and pipeline sizes"),
    "vllm": ("dtp", "inference has data, tensor and pipeline sizes"),
    "attn": ("dptcr", "e belongs to ffn"),
    "ffn": ("dpte", "c belongs to attn"),
}

_HEAD = re.compile(r"(?P<backend>[A-Za-z_]\w*)?(\[(?P<name>[A-Za-z_]\w*)\])?(?P<colon>:)?(?P<rest>.*)", re.ASCII)
_SIZE = re.compile(r"([A-Za-z])([0-9]{1,9})")
_HYBRID = re.compile(r"attn:(?P<attn>[^|()]*)\|ffn:(?P<ffn>[^|()]*)")


@dataclass(frozen=True, slots=True)
class ModelAllocation:
    """One part of an allocation. `colocated_with` names the part whose ranks it shares."""

    backend: str
    parallel: ParallelStrategy
    name: str | None = None
    colocated_with: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in TRAINING + INFERENCE:
            raise _error(self.backend, "is no backend", nearest(self.backend, TRAINING + INFERENCE))
        allowed, hint = _ALLOWED[self.backend]
        problems = Problems()
        for letter, field in SIZES.items():
            if letter not in allowed and getattr(self.parallel, field) > 1:
                problems.add(f"{self.backend}: {field}", "is more than 1, and this backend has none", hint)
        if self.parallel.etp_size > 1 and "e" not in allowed:
            problems.add(f"{self.backend}: expert_tensor_parallel_size", "this backend has none", hint)
        problems.raise_as(ConfigError, "The allocation is not possible.")

    @classmethod
    def from_str(cls, text: str, name: str | None = None) -> ModelAllocation:
        """Read a single part. Raises ConfigError saying what is wrong with it, and for several parts."""
        found = parse_allocations(text)
        if len(found) > 1:
            raise _error(text, f"{len(found)} parts, expected one", "give each engine a backend of its own")
        return replace(found[0], name=name or found[0].name)

    @property
    def world_size(self) -> int:
        """Ranks of its own: none when it shares another's."""
        return 0 if self.colocated_with else self.parallel.world_size

    def __str__(self) -> str:
        """What `from_str` reads."""
        sizes = self.parallel
        head = f"{self.backend}[{self.name}]" if self.name else self.backend
        if sizes.etp_size == 1:
            return f"{head}:{_letters(sizes, 'dptcer')}"
        experts = {
            "d": sizes.expert_data_parallel_size, "p": sizes.pp_size, "t": sizes.etp_size, "e": sizes.ep_size
        }  # fmt: skip
        ffn = "".join(f"{letter}{size}" for letter, size in experts.items() if size > 1)
        return f"{head}:(attn:{_letters(sizes, 'dptcr')}|ffn:{ffn})"


def _letters(sizes: ParallelStrategy, letters: str) -> str:
    """Sizes above 1, `d1` when there is none."""
    given = ((letter, getattr(sizes, SIZES[letter])) for letter in letters)
    return "".join(f"{letter}{size}" for letter, size in given if size > 1) or "d1"


def _error(text: str, what: str, hint: str = "") -> ConfigError:
    return ConfigError("The allocation cannot be read.", [Problem(repr(text), what, hint)])


def parse_allocations(text: str) -> list[ModelAllocation]:
    """Every part of an allocation, in order.

    Raises ConfigError for a part without backend, sizes that a backend does not have, sizes that contradict each other,
    names that are missing or given twice, and parts on the same ranks that need different numbers of them.
    """
    plain = re.sub(r"\s+", "", text)
    found: list[ModelAllocation] = []
    for group in plain.split("+"):
        found += _group(group, text)
    names = [part.name for part in found if part.name]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _error(text, f"the name {twice[0]} is given twice")
    if len(found) >= 3 and len(names) < len(found):
        raise _error(text, "three parts or more, and not all of them named", "fsdp[actor]:d4")
    return found


def _group(group: str, text: str) -> list[ModelAllocation]:
    """Parts that share their ranks; nearly always one."""
    first, *others = [_part(piece, text) for piece in _pieces(group)]
    made = [first]
    for other in others:
        if not first.name or not other.name:
            raise _error(text, "parts that share ranks need names", "fsdp[actor]:d4|fsdp[critic]:d4")
        if other.parallel.world_size != first.parallel.world_size:
            sizes = f"{first.name} has {first.parallel.world_size}, {other.name} has {other.parallel.world_size}"
            raise _error(text, f"parts that share ranks need the same number of them: {sizes}")
        made.append(replace(other, colocated_with=first.name))
    return made


def _pieces(group: str) -> list[str]:
    """Split at `|`, but not at that between `attn:` and `ffn:`."""
    pieces: list[str] = []
    for piece in group.split("|"):
        if pieces and piece.startswith("ffn:"):
            pieces[-1] += f"|{piece}"
        else:
            pieces.append(piece)
    return pieces


def _part(piece: str, text: str) -> ModelAllocation:
    match = _HEAD.fullmatch(piece)
    backend = match and match["backend"]
    if match is None or (not match["colon"] and "." in piece):
        raise _error(text, "a colon stands between backend and sizes", "fsdp:d4t2")
    if (backend in (None, "attn") or not match["colon"]) and backend not in TRAINING + INFERENCE:
        example = "fsdp:d4" if backend not in (None, "attn") or not piece else "megatron:(attn:d4|ffn:e2)"
        raise _error(text, "a backend has to stand before the sizes", example)
    if backend not in TRAINING + INFERENCE:
        raise _error(text, f"{backend} is no backend", nearest(str(backend), TRAINING + INFERENCE))
    if not match["rest"]:
        raise _error(text, f"{backend} without sizes", f"{backend}:d1")
    rest = match["rest"]
    hybrid = _HYBRID.fullmatch(rest[1:-1] if rest.startswith("(") and rest.endswith(")") else rest)
    if hybrid is None:
        sizes = _sizes(rest, backend, text)
        return ModelAllocation(backend, _strategy(sizes, text), match["name"])
    if backend not in ("megatron", "archon"):
        raise _error(text, f"{backend} has no grid of its own for experts", "megatron and archon have")
    return ModelAllocation(backend, _hybrid(hybrid["attn"], hybrid["ffn"], text), match["name"])


def _sizes(given: str, where: str, text: str) -> dict[str, int]:
    """`d4t2` as letters and sizes; `where` says which letters may stand there."""
    allowed, hint = _ALLOWED[where]
    sizes: dict[str, int] = {}
    problems, end = Problems(), 0
    for match in _SIZE.finditer(given):
        letter, size = match[1], match[2]
        if match.start() != end:
            break
        end = match.end()
        if letter not in SIZES:
            problems.add(
                repr(text), f"{letter}{size}: {letter} is no kind of parallelism", f"known: {', '.join(SIZES)}"
            )
        elif letter not in allowed:
            problems.add(repr(text), f"{letter}{size}: {where} has no {SIZES[letter].replace('_', ' ')}", hint)
        elif letter in sizes:
            problems.add(repr(text), f"{letter} is given twice, {sizes[letter]} and {size}")
        elif size.startswith("0"):
            problems.add(repr(text), f"{letter}{size}: a size is 1 or more, without leading zeros")
        else:
            sizes[letter] = int(size)
    if end != len(given) or not given:
        problems.add(repr(text), f"{given[end:]!r} is no size", "a letter and a number: d4t2")
    problems.raise_as(ConfigError, "The allocation cannot be read.")
    return sizes


def _strategy(sizes: Mapping[str, int], text: str, **more: int) -> ParallelStrategy:
    try:
        return ParallelStrategy(**{SIZES[letter]: size for letter, size in sizes.items()}, **more)
    except ConfigError as error:
        raise _error(text, "; ".join(f"{p.about}: {p.what}" for p in error.problems)) from error


def _hybrid(attn: str, ffn: str, text: str) -> ParallelStrategy:
    """Attention and experts on two grids of the same ranks: equal p, equal numbers of ranks."""
    outer, inner = _sizes(attn, "attn", text), _sizes(ffn, "ffn", text)
    stages = outer.get("p", 1)
    if inner.get("p", stages) != stages:
        raise _error(text, f"attn has p{stages} and ffn p{inner['p']}", "both share the stages: leave p out of ffn")
    ranks = _product(outer, "dptc")
    experts = stages * _product(inner, "te")
    if ranks % experts:
        raise _error(text, f"the {experts} ranks of p·t·e of ffn do not divide the {ranks} of attn")
    if inner.get("d", ranks // experts) != ranks // experts:
        raise _error(
            text,
            f"attn has {ranks} ranks and ffn {experts * inner['d']}",
            f"d{ranks // experts} fits ffn, or leave it out",
        )
    return _strategy({**outer, "e": inner.get("e", 1)}, text, expert_tensor_parallel_size=inner.get("t", 1))


def _product(sizes: Mapping[str, int], letters: Sequence[str]) -> int:
    product = 1
    for letter in letters:
        product *= sizes.get(letter, 1)
    return product
