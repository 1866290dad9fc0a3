"""The values of a sharded model: read from a checkpoint of any format, or drawn, every rank what it holds."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..converter.checkpoint import Checkpoint
from ..converter.errors import PlanError, Problems
from ..converter.live import base_of
from ..converter.loading import Loaded
from ..converter.loading_targets import local_pieces
from ..converter.opening import open_checkpoint

VALUE_HEAD = "score"
"""The module that a critic has in the place of the vocabulary: hidden → 1."""

_BLOCK = 1 << 20
"""Elements of a parameter that are drawn at a time."""


def open_model(path: str, *, with_weights: bool = True) -> Checkpoint:
    """The checkpoint that a model comes from; `with_weights` False: a directory with a config.json will do.

    Raises ConfigError or SourceError when the hub finds nothing that it can read.
    """
    return open_checkpoint(path) if with_weights else base_of(path)


def load(
    parts: Sequence[nn.Module],
    checkpoint: Checkpoint,
    *,
    critic: bool = False,
    seed: int = 0,
    spread: float = 0.02,
    naming: str | None = None,
    skip: Sequence[str] = (),
) -> Loaded:
    """Fill a model, whole or the stages of it that are here, from a checkpoint of any format; every rank reads what it
    holds. Returns the hub's report.

    critic  its value head is drawn (`seed`, `spread`) when the checkpoint has none
    naming  of the parameters; None: by the names
    skip    patterns of atoms that other ranks have

    bf16 values are widened into fp32 masters; fp32 values are rounded only into parameters that are meant to be bf16.
    """
    narrow = any(p.dtype == torch.bfloat16 for part in parts for p in part.parameters())
    options: dict[str, Any] = {"allow_cast": narrow, "naming": naming, "skip": skip, "strict": not critic}
    found: Loaded = checkpoint.load_into(list(parts), **options)
    if not critic:
        return found
    problems = Problems()
    heads = {f"{VALUE_HEAD}.weight", f"{VALUE_HEAD}.bias"}
    for name in set(found.unknown) - heads:
        problems.add(name, f"nothing in the checkpoint is this tensor: {found.unknown[name]}")
    for name in found.missing:
        if name.startswith("layers."):
            problems.add(name, "the critic has no tensor for it")
    problems.raise_as(PlanError, f"{checkpoint.path} does not fit the critic:")
    with torch.no_grad():
        for name, parameter in (named for part in parts for named in part.named_parameters()):
            if name in found.unknown:
                _draw(name, parameter, seed, 0.0 if name.endswith("bias") else spread)
    return found


@torch.no_grad()
def init_from_scratch(model: nn.Module, spread: float, seed: int, names: Mapping[str, str] | None = None) -> None:
    """Random weights: normal with `spread`, norms 1, biases 0. The same model on every layout.

    Each tensor is drawn from its own name and the seed, in blocks of rows, so that a rank draws only those it holds.
    `names` gives some the name of another one, whose copy they are.
    """
    for owner, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{owner}.{key}"
            name = (names or {}).get(name, name)
            if "norm" in type(module).__name__.lower():
                parameter.fill_(0.0 if key == "bias" else 1.0)
            else:
                _draw(name, parameter, seed, 0.0 if key == "bias" else spread)
                _zero_padding_row(module, key, parameter)


def _draw(name: str, parameter: Tensor, seed: int, spread: float) -> None:
    given: Any = parameter
    memory = given.to_local() if hasattr(given, "device_mesh") else parameter
    if spread == 0.0:
        memory.zero_()
        return
    shape = tuple(parameter.shape)
    width = parameter[:1].numel() if shape[0] else 1
    step = max(1, _BLOCK // max(1, width))
    for lo, hi, at in _pieces(parameter):
        for begin in range(lo[0] - lo[0] % step, hi[0], step):
            end = min(begin + step, shape[0])
            source = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}/{begin}".encode()))
            block = torch.randn((end - begin, *shape[1:]), generator=source) * spread
            first, last = max(begin, lo[0]), min(end, hi[0])
            inside = [slice(first - begin, last - begin), *map(slice, lo[1:], hi[1:])]
            there = at[0] + first - lo[0]
            place = [slice(there, there + last - first)]
            place += [slice(a, a + h - low) for a, low, h in zip(at[1:], lo[1:], hi[1:], strict=True)]
            memory[tuple(place)].copy_(block[tuple(inside)])


def _pieces(parameter: Tensor) -> list[tuple[Any, Any, Any]]:
    if hasattr(parameter, "device_mesh"):
        return [(piece.lo, piece.hi, piece.at) for piece in local_pieces(parameter)]
    zero = (0,) * parameter.dim()
    return [(zero, tuple(parameter.shape), zero)]


def _zero_padding_row(module: nn.Module, key: str, parameter: Tensor) -> None:
    """An embedding's padding row is 0, wherever it is."""
    row = getattr(module, "padding_idx", None)
    if key != "weight" or row is None:
        return
    given: Any = parameter
    memory = given.to_local() if hasattr(given, "device_mesh") else parameter
    for lo, hi, at in _pieces(parameter):
        if lo[0] <= row < hi[0]:
            memory[at[0] + row - lo[0]].zero_()
