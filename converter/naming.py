"""The namings in which a model's tensors can be asked for: Hugging Face's, Archon's, and Megatron's of a live model.

A checkpoint's own names are one of them (`torch_dist` stacks layers, so its names are a fourth).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..mappings.schema import skeleton
from .checkpoint import Checkpoint
from .errors import ConfigError
from .layout import Named, View, atoms_of
from .roots import best_root, unwrap

NAMINGS = ("hf", "archon", "megatron")


def view_of(ckpt: Checkpoint, naming: str) -> View:
    """The checkpoint's model in one naming. Raises ConfigError for a naming that is none, or that the family lacks."""
    rows = {"hf": ckpt.table.hf, "archon": ckpt.table.archon, "megatron": ckpt.table.megatron}.get(naming)
    if rows is None:
        raise ConfigError(f"There is no naming {naming!r}.", hint=f"Namings: {', '.join(NAMINGS)}.")
    if not rows:
        raise ConfigError(f"The family {ckpt.table.name} has no names for {naming}.")
    return View(rows, ckpt.view.dims)


def naming_for(ckpt: Checkpoint, names: Iterable[str]) -> str:
    """Whose names these are. Raises ConfigError when no naming of the family has any of them."""
    names = list(names)
    scores: dict[str, int] = {}
    for naming in NAMINGS:
        try:
            view = view_of(ckpt, naming)
        except ConfigError:
            continue
        knows = _knows(view)
        plain = [unwrap(name) for name in names]
        root = best_root(plain, knows)
        scores[naming] = sum(knows(name.removeprefix(root)) for name in plain if name.startswith(root))
    best = max(scores, key=lambda n: scores[n])
    if not scores[best]:
        shown = ", ".join(names[:3]) or "nothing"
        raise ConfigError(
            f"None of the tensors is called as {ckpt.table.name} calls its own in any naming; there is: {shown}.",
            hint=f"Namings that are known: {', '.join(scores)}. Is it a model of this family?",
        )
    return best


def root_of(view: View, names: Iterable[str]) -> str:
    """The root (`model.`, …) that stands before the names of a naming in what a framework saved or holds."""
    return best_root([unwrap(name) for name in names], _knows(view))


def _knows(view: View) -> Callable[[str], bool]:
    keys = {row.key for row in view.rows}
    return lambda name: skeleton(name)[0] in keys


def resolve(ckpt: Checkpoint, name: str) -> Named | None:
    """The tensor that a name means: the checkpoint's own first, then in every naming of the family. None: nothing."""
    inside = unwrap(name)
    views = [] if ckpt.format == "mp_rank" else [ckpt.view]  # layers and experts of per-rank names are counted by rank
    views += [View(rows, ckpt.view.dims) for rows in (ckpt.table.hf, ckpt.table.archon, ckpt.table.megatron) if rows]
    for view in views:
        for candidate in dict.fromkeys((inside, inside.removeprefix(ckpt.dialect.get("root") or ""))):
            named, _ = view.resolve(candidate, ())
            if named is not None:
                return named
    return None


def atoms_called(ckpt: Checkpoint, name: str) -> list[str]:
    """The atoms that a tensor of this name holds, in whatever naming; none when there is no such tensor."""
    if name in ckpt.atoms:
        return [name]
    named = resolve(ckpt, name)
    return [atom for atom in atoms_of(named) if atom in ckpt.atoms] if named else []
