"""What a target will look like: which tensors it has, who holds which box, in which element type, in which file.

Everything here is decided before a byte moves, from the source's description, the mesh and the user's options.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..mappings.megatron_args import args_from_config
from ..mappings.megatron_flags import flags, unsaid
from ..mappings.schema import Row
from ..mappings.torch_dist import always_indexed, extra_states, global_rows
from .checkpoint import ALTERNATE, Checkpoint
from .dtypes import FLOATS, parse
from .errors import ConfigError, PlanError, Problems
from .formats import bridge, dcp, hf, mp_rank, torch_dist
from .formats.base import Target
from .layout import Named, View, atoms_of
from .manifest import read as read_manifest
from .mesh import Mesh, pipeline
from .placement import FsdpPlacement, Local, MegatronPlacement, padded_vocab, undivided
from .roots import ROOTS
from .sidefiles import read_index

GB = 1_000_000_000
CASTS = frozenset({"F16", "BF16", "F32", "F64"})
"""Types that weights are cast to. FP8 without scales would be another model."""

FLAGS = "megatron_args.txt"
"""Command-line flags that make a Megatron-LM run build this model; `--use-checkpoint-args` takes only some of them."""


@dataclass(frozen=True)
class Options:
    """How a target is to be written.

    dtype       cast floating-point tensors to it (those that a table keeps in fp32 stay); None keeps every type
    max_shard   bytes in one safetensors file, at most
    experts     `per_expert` or `fused`: how Hugging Face names hold experts; None: as the source did, or as the format
                does
    spec        `te` or `local`: whose norm names per-rank Megatron files use
    megatron_experts  experts of per-rank Megatron files: `grouped` (`mlp.experts.linear_fc1.weight0`, TE's),
                `sequential` (`local_experts.0.…`) or `legacy` (`mlp.experts.weight1`); None: grouped with TE's spec,
                else sequential
    vocab_divisor  Megatron pads the vocabulary to a multiple of this × TP
    root        what to put before every name of a `dcp` (`model.`, say)
    allow_nan   convert a checkpoint that holds NaNs
    """

    dtype: str | None = None
    max_shard: int = 5 * GB
    experts: str | None = None
    spec: str = "te"
    megatron_experts: str | None = None
    vocab_divisor: int = 128
    root: str = ""
    allow_nan: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        for name, choices in (
            ("experts", (None, "per_expert", "fused")),
            ("spec", ("te", "local")),
            ("megatron_experts", (None, "grouped", "sequential", "legacy")),
        ):
            if getattr(self, name) not in choices:
                known = ", ".join(str(c) for c in choices if c)
                problems.add(name, f"is {getattr(self, name)!r}; known are {known}")
        for name in ("max_shard", "vocab_divisor"):
            if getattr(self, name) < 1:
                problems.add(name, f"is {getattr(self, name)}; at least 1 was expected")
        if self.root not in ROOTS:
            known = ", ".join(repr(root) for root in ROOTS if root)
            problems.add("root", f"is {self.root!r}; readers know {known}")
        problems.raise_as(ConfigError, "These options cannot be:")


def target_dtypes(ckpt: Checkpoint, options: Options) -> dict[str, str]:
    """The element type in which every atom is written."""
    try:
        wanted = parse(options.dtype).name if options.dtype else None
    except ValueError as error:
        raise ConfigError(f"--dtype: {error}") from None
    if wanted is not None and wanted not in CASTS:
        raise ConfigError(
            f"--dtype {options.dtype}: weights are not cast to it.", hint=f"Types: {', '.join(sorted(CASTS))}."
        )
    result = {}
    for name, dtype in ckpt.dtypes().items():
        atom, _ = ckpt.atoms[name]
        keep = wanted is None or dtype not in FLOATS or atom.exact
        result[name] = dtype if keep else wanted
    return result


# ------------------------------------------------------------------------------------------------ laying the target out


class Placed(NamedTuple):
    """Every tensor as each participant of the target holds it, and how that is written down.

    vocab   rows of a padded embedding; None where nothing is padded
    """

    locals: list[Local]
    dialect: dict[str, Any]
    vocab: int | None = None


def place(ckpt: Checkpoint, name: str, mesh: Mesh, options: Options) -> Placed:
    """Tensors of the target format on the mesh, but for those whose atoms the user left behind.

    Raises MeshError or ConfigError with what would do.
    """
    placed = _place(ckpt, name, mesh, options)
    if not ckpt.left_out:
        return placed
    kept = [x for x in placed.locals if not ckpt.left_out.issuperset(atoms_of(x.named))]
    return placed._replace(locals=kept)


def _place(ckpt: Checkpoint, name: str, mesh: Mesh, options: Options) -> Placed:
    dims, t = ckpt.view.dims, ckpt.table
    if name in ("hf", "dcp"):
        experts = options.experts or experts_form(ckpt, name)
        forms = {"", experts, "mtp_copy"} | ({"stored_tie"} if name == "dcp" else set())
        view = View(t.hf, dims)
        wanted = _forms(forms)
        dialect = {"experts": experts} if dims.get("e") else {}
        if name == "hf":
            _refuse_mesh(mesh, name)
            return Placed(undivided(_in_order(view, wanted)), dialect)
        return Placed(FsdpPlacement(view, mesh).locals(wanted), dialect | {"mesh": str(mesh), "root": options.root})
    if name == "archon":
        if not t.archon:
            raise ConfigError(f"The family {t.name} has no Archon names.")
        if dims["mtp"]:
            layers = "|".join(str(dims["layers"] + n) for n in range(dims["mtp"]))
            raise ConfigError(
                "Archon has no multi-token-prediction (MTP) layers.",
                hint=rf"Leave them behind with --drop 'model\.layers\.({layers})\..*' (as Hugging Face names them).",
            )
        placement = FsdpPlacement(View(t.archon, dims), mesh)
        return Placed(placement.locals(_forms({"", "stored_tie"})), {"mesh": str(mesh)})
    if mesh.dp_shard > 1:
        raise ConfigError(
            "--dp-shard concerns dcp and archon; Megatron's data-parallel ranks all hold the same weights."
        )
    pipe = pipeline(mesh, dims["layers"], dims["mtp"])
    vocab = padded_vocab(dims["v"], options.vocab_divisor, mesh.tp)
    dialect = {
        "mesh": str(mesh),
        "vocab": {"true": dims["v"], "stored": vocab},
        "pipeline": mesh.layout or str(mesh.pp),
    }
    if name == "mp_rank":
        experts = options.megatron_experts or ("grouped" if options.spec == "te" else "sequential")
        dialect |= {"spec": options.spec} | ({"experts": experts} if dims.get("e") else {})
        placed = MegatronPlacement(View(t.megatron, dims), mesh, pipe, vocab, per_rank=True).locals(
            _forms({"", options.spec, experts})
        )
        return Placed(placed, dialect, vocab)
    stacked = not always_indexed(t.megatron, dims)
    dialect["layers"] = "stacked" if stacked else "indexed"
    view = View(global_rows(t.megatron, stacked=stacked), dims)
    return Placed(MegatronPlacement(view, mesh, pipe, vocab).locals(_forms({""})), dialect, vocab)


def _forms(forms: set[str]) -> Callable[[Row], bool]:
    return lambda row: row.form in forms


def _refuse_mesh(mesh: Mesh, name: str) -> None:
    if mesh != Mesh():
        raise ConfigError(
            f"{name} has no ranks; the mesh ({mesh}) does not apply to it.", hint="Drop the mesh options."
        )


def _in_order(view: View, wanted: Callable[[Row], bool]) -> list[Named]:
    """Hugging Face's order: embedding, layers, norm, head."""
    tensors = list(view.all_named(wanted))
    order = {"first": 0, "layer": 1, "mtp": 1, "last": 2}
    return sorted(tensors, key=lambda n: order.get(n.row.place, 2))


def experts_form(ckpt: Checkpoint, name: str) -> str:
    """How to name experts when nobody says: a DCP as transformers 5 holds them in memory, files as the source's did."""
    if name == "dcp":
        return "fused"
    for dialect in (ckpt.dialect, *_earlier_dialects(ckpt)):
        forms = dialect.get("forms")
        forms = forms if isinstance(forms, list) else []
        if ckpt.format in ("hf",) or dialect is not ckpt.dialect:
            for form in ("fused", "per_expert"):
                if form in forms:
                    return form
    return "per_expert"


def _earlier_dialects(ckpt: Checkpoint) -> Iterator[Mapping[str, Any]]:
    """Dialects of the Hugging Face checkpoint from which this one once came, by its manifest."""
    source = (read_manifest(ckpt.found.root) or {}).get("source")
    while isinstance(source, Mapping):
        if source.get("format") == "hf":
            dialect = source.get("dialect")
            yield dialect if isinstance(dialect, Mapping) else {}
        source = source.get("origin")


def dtype_of(ckpt: Checkpoint, options: Options, locals_: Sequence[Local]) -> Callable[[Named], str]:
    """The type of every target tensor. Raises PlanError where one tensor would need two."""
    dtypes = target_dtypes(ckpt, options)
    found: dict[str, str] = {}
    problems = Problems()
    for local in locals_:
        named = local.named
        if named.name in found:
            continue
        held: dict[str, str] = {}
        for atom in atoms_of(named):
            if atom in dtypes:
                held.setdefault(dtypes[atom], atom)
        if len(held) > 1:
            mixed = ", ".join(f"{atom} is {dtype}" for dtype, atom in held.items())
            problems.add(named.name, f"would hold several element types: {mixed}", "choose one with --dtype")
        found[named.name] = next(iter(held), "F32")
    problems.raise_as(PlanError, "Mixed element types:")
    return lambda named: found[named.name]


def lay_out(
    ckpt: Checkpoint, name: str, mesh: Mesh, options: Options, placed: Placed, of: Callable[[Named], str]
) -> Target:
    """Files and places for all local tensors; `of` gives their element types. Repeats of an atom under another name
    become numbered copies."""
    locals_ = _number_copies(placed.locals)
    if name == "hf":
        return hf.lay_out(locals_, of, max_shard=options.max_shard, index=_index(ckpt, options))
    if name in ("dcp", "archon"):
        return dcp.lay_out(locals_, of, root=options.root)
    try:
        return _lay_out_megatron(ckpt, name, mesh, options, placed, locals_, of)
    except KeyError as error:
        raise ConfigError(
            f"{ckpt.config_from}: the field {error.args[0]!r} is missing; Megatron's arguments need it."
        ) from None


def _lay_out_megatron(
    ckpt: Checkpoint,
    name: str,
    mesh: Mesh,
    options: Options,
    placed: Placed,
    locals_: list[Local],
    of: Callable[[Named], str],
) -> Target:
    """Megatron's files, with what a run of Megatron-LM or Megatron-Bridge needs to build the model around them."""
    rows, dims = ckpt.table.megatron, ckpt.view.dims
    config, dtype, vocab = side_config(ckpt, options) or ckpt.config, _main_dtype(ckpt, options), placed.vocab or 0
    args = args_from_config(
        config,
        dims,
        mesh,
        vocab,
        dtype=dtype,
        family=ckpt.table.name,
        spec=options.spec,
        ckpt_format="torch" if name == "mp_rank" else "torch_dist",
        grouped=placed.dialect.get("experts") == "grouped" if name == "mp_rank" else None,
    )
    if name == "mp_rank":
        target = mp_rank.lay_out(locals_, of, args, mesh)
    else:
        states = extra_states(rows, dims, stacked=not always_indexed(rows, dims))
        target = torch_dist.lay_out(locals_, of, args, list(states))
        target.texts[f"{torch_dist.RELEASE}/{bridge.FILE}"] = bridge.run_config(config, dims, mesh, vocab, dtype)
    target.texts[FLAGS] = (shlex.join(flags(args)) + "\n").encode()
    ckpt.notes += [note for note in unsaid(config, dims) if note not in ckpt.notes]
    return target


def _main_dtype(ckpt: Checkpoint, options: Options) -> str:
    dtypes = list(target_dtypes(ckpt, options).values())
    return max(set(dtypes), key=dtypes.count, default="BF16")


def _number_copies(locals_: list[Local]) -> list[Local]:
    """A tensor that repeats another's atoms under a second name or in a second place becomes a numbered copy of it."""
    homes: dict[str, list[tuple[str, str]]] = {}
    result = []
    for local in locals_:
        named = local.named
        key = (named.name, named.row.place)
        known = homes.setdefault(named.row.atoms[0].name.format(i=named.layer, e=named.expert), [key])
        if key not in known:
            known.append(key)
        base = known.index(key) * ALTERNATE
        result.append(replace(local, copy=base + local.copy) if base else local)
    return result


def _index(ckpt: Checkpoint, options: Options) -> bytes | None:
    """The index of the Hugging Face checkpoint from which this one came, unless the user sets a shard size."""
    if options.max_shard != Options.max_shard or ckpt.found.hf is None:
        return None
    return read_index(ckpt.found.hf)


def side_config(ckpt: Checkpoint, options: Options) -> dict[str, Any] | None:
    """The config with what this conversion changes, or None when it changes nothing."""
    changes = dict(ckpt.dialect.get("config_changes", {}))
    if options.dtype:
        wanted = parse(options.dtype).torch
        for key in ("dtype", "torch_dtype"):
            if key in ckpt.config and ckpt.config[key] != wanted:
                changes[key] = wanted
    derived = not ckpt.config_from.endswith("config.json")
    if not changes and not derived:
        return None
    return {k: v for k, v in {**ckpt.config, **changes}.items() if k not in changes or changes[k] is not None}
