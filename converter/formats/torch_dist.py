"""Megatron-Core distributed checkpoints (`torch_dist`), read and written without Megatron.

The container is torch DCP's. Around it: `metadata.json` with the backend's name, `common.pt` with Megatron's arguments
(until megatron-core 0.18; later versions keep them inside), and, above, `latest_checkpointed_iteration.txt` naming
`iter_%07d` or `release` (megatron/training/checkpointing.py, megatron/core/dist_checkpointing/core.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SourceError
from ..placement import Local
from ..remote.mounts import ensure
from ..sidefiles import above, find_hf, read_json
from . import dcp
from .base import DTypeOf, Found, Target
from .bridge import FILE, read_run_config
from .dcpfile import METADATA, read
from .pickle_values import Global, Opaque
from .torchfile import plan
from .torchfile import read as read_torch

name = "torch_dist"
TRACKER, COMMON, BACKEND = "latest_checkpointed_iteration.txt", "common.pt", "metadata.json"
RELEASE = "release"


def iteration_directory(root: Path, holds: Any) -> Path | None:
    """Where a Megatron run's root keeps its newest checkpoint: the tracker decides, then the highest number.

    holds   whether a directory is a checkpoint of the format in question
    """
    if holds(root):
        return root
    if not root.is_dir():
        return None
    named = tracked(root)
    if named is not None:
        return named if holds(named) else None
    below = sorted(p for p in root.glob("iter_*") if holds(p))
    if below:
        return below[-1]
    return root / RELEASE if holds(root / RELEASE) else None


def tracked(root: Path) -> Path | None:
    """The directory that a run's tracker file names, or None when there is no (sensible) tracker."""
    ensure(root / TRACKER)
    try:
        text = (root / TRACKER).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    if text == RELEASE:
        return root / RELEASE
    return root / f"iter_{int(text):07d}" if re.fullmatch(r"\d{1,12}", text, re.ASCII) else None


def _holds(path: Path) -> bool:
    return ((path / BACKEND).is_file() and ((path / METADATA).is_file() or any(path.glob("__*.distcp")))) or (
        (path / COMMON).is_file() and (path / METADATA).is_file()
    )


def detect(path: Path) -> Path | None:
    """The directory with the checkpoint: `path`, the one that its tracker names, or its newest `iter_*`."""
    return iteration_directory(path, _holds)


def read_checkpoint(path: Path, also: Sequence[Path] = ()) -> Found:
    """Headers, and Megatron's arguments where there are some."""
    where = detect(path) or path
    found = Found(name, path, where, hf=find_hf(path, where, *above(where)))
    try:
        found.facts["backend"] = read_backend(where)
    except ValueError as error:
        found.notes.append(f"{where / BACKEND} cannot be read ({error}); taken for torch_dist")
    index = read(where, also, only=dcp.is_weight)
    found.others |= dict.fromkeys(index.skipped, "not a weight")
    found.notes += [str(warning) for warning in index.warnings]
    found.files = dcp.files_of(index, where, also)
    found.others |= dict.fromkeys(index.objects, "object")
    _read_common(where, index, found)
    if found.args is None and (said := read_run_config(where)) is not None:
        found.args, found.facts["common"] = said, FILE
    dcp.locate_all(index, found)
    return found


def read_backend(where: Path) -> str:
    """The backend that `metadata.json` names. Raises SourceError for any but torch_dist, ValueError for no file."""
    backend = read_json(where / BACKEND)
    if not isinstance(backend, dict):
        raise SourceError(f"{where / BACKEND}: holds a {type(backend).__name__}, not an object.")
    name = backend.get("sharded_backend")
    if name != "torch_dist":
        raise SourceError(
            f"{where}: its backend is {name!r}; only torch_dist is read.",
            hint="Megatron-LM's tools/checkpoint converts older backends (zarr).",
        )
    return name


def _read_common(where: Path, index: Any, found: Found) -> None:
    """Megatron's arguments: in `common.pt`, or, since megatron-core 0.19, in the entry `common_state`."""
    common: Any = None
    if (where / COMMON).is_file():
        found.files[str(where / COMMON)] = (where / COMMON).stat().st_size
        common = read_torch(where / COMMON)
        found.facts["common"] = COMMON
    else:
        entry = next((e for key, e in index.objects.items() if key.startswith("common_state")), None)
        if entry is not None:
            common = read_torch(entry.file, entry.offset, entry.length)
            found.facts["common"] = "common_state (megatron-core 0.19)"
    if isinstance(common, Mapping):
        found.args = arguments(common.get("args"))
        if isinstance(common.get("iteration"), int):
            found.facts["iteration"] = common["iteration"]


def arguments(args: Any) -> dict[str, Any] | None:
    """An `argparse.Namespace` out of a pickle as a plain dict; enums and classes stay inert."""
    if isinstance(args, Opaque) and isinstance(args.state, dict):
        return {str(k): v for k, v in args.state.items()}
    return dict(args) if isinstance(args, Mapping) else None


# ------------------------------------------------------------------------------------------------ writing


def lay_out(locals_: Sequence[Local], dtype_of: DTypeOf, args: Mapping[str, Any], states: Sequence[str]) -> Target:
    """A root with `release/`: what Megatron-LM starts from with `--load`, weights only, iteration 0.

    states   names of the extra states to declare; they hold `[None]`, as Megatron's do without FP8
    """
    nothing = torch_bytes([None])
    target = dcp.lay_out(
        locals_, dtype_of, prefix=f"{RELEASE}/", planner=False, objects=states, blob_of_objects=nothing
    )
    target.texts[TRACKER] = RELEASE.encode()
    target.texts[f"{RELEASE}/{BACKEND}"] = json.dumps(
        {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
    ).encode()
    target.texts[f"{RELEASE}/{COMMON}"] = torch_bytes(common_state(args))
    return target


def common_state(args: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron-LM keeps beside the tensors: its arguments, the format's version, the iteration."""
    state = dict(args)
    if isinstance(state.get("params_dtype"), str):
        state["params_dtype"] = Global(*state["params_dtype"].split("."))
    return {
        "args": Opaque("argparse", "Namespace", state=state, new=True),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }


def torch_bytes(tree: Any) -> bytes:
    """A whole torch file of values without tensors."""
    file = plan(tree, archive="common")
    raw = bytearray(file.size)
    for offset, data in file.segments:
        raw[offset : offset + len(data)] = data
    return bytes(raw)
