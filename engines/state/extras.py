"""What a training state holds besides tensors, as JSON: random states of every rank, the optimizer's scalars."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from ...converter.errors import CorruptFile, PlanError, Problems
from .entries import Collected, is_scalar

# ------------------------------------------------------------------------------------------------ random numbers


def capture_rng(more: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """The states of torch's, CUDA's, numpy's and Python's generators, and of what else the engine has."""
    kind, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "numpy": {
            "kind": str(kind),
            "keys": _text(torch.from_numpy(np.asarray(keys, np.uint32).view(np.uint8).copy())),
            "at": int(at),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss).hex(),
        },
        "python": {
            "version": version,
            "state": list(internal),
            "gauss": None if gauss_next is None else float(gauss_next).hex(),
        },
        "more": {name: _text(value) for name, value in (more or {}).items()},
    }


def restore_rng(saved: Mapping[str, Any], about: str) -> dict[str, torch.Tensor]:
    """Put the generators back; returns the engine's own states. Raises CorruptFile for what is none."""
    try:
        of_numpy, of_python = saved["numpy"], saved["python"]
        keys = _bytes(of_numpy["keys"]).numpy().view(np.uint32)
        gauss = of_python["gauss"]
        python = (
            int(of_python["version"]),
            tuple(int(x) for x in of_python["state"]),
            None if gauss is None else float.fromhex(gauss),
        )
        more = {str(name): _bytes(value) for name, value in saved["more"].items()}
        torch.set_rng_state(_bytes(saved["torch"]))
        if saved["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes(saved["cuda"]))
        state = (of_numpy["kind"], keys, of_numpy["at"], of_numpy["has_gauss"], float.fromhex(of_numpy["gauss"]))
        np.random.set_state(state)
        random.setstate(python)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptFile(f"{about}: holds no random states: {type(error).__name__} {error}.") from None
    return more


def reseed(seed: int, step: int, rank: int) -> None:
    """Random states for ranks that did not exist when the state was saved: declared, and the same each time."""
    mixed = (seed * 1_000_003 + step) * 65_537 + rank
    torch.manual_seed(mixed % (1 << 63))
    np.random.seed(mixed % (1 << 32))
    random.seed(mixed)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().contiguous().numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


# ------------------------------------------------------------------------------------------------ the optimizer


def capture_optimizers(optimizers: Sequence[Optimizer], found: Collected) -> dict[str, Any]:
    """Options of every parameter group, its parameters by name, and their scalars (steps)."""
    problems = Problems()
    groups, scalars = [], dict[str, dict[str, float]]()
    moments: dict[str, set[str]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            names = list(dict.fromkeys(found.names[id(p)] for p in group["params"]))
            options = {key: _plain(value) for key, value in group.items() if key != "params"}
            for key, value in options.items():
                if not _is_plain(value):
                    problems.add(
                        f"option {key} of a parameter group", f"is a {type(value).__name__}: it cannot be saved"
                    )
            groups.append({"optimizer": type(optimizer).__name__, "options": options, "params": names})
            for parameter in group["params"]:
                name = found.names[id(parameter)]
                for key, value in optimizer.state.get(parameter, {}).items():
                    if value is None:
                        continue
                    if is_scalar(value):
                        scalars.setdefault(key, {})[name] = float(value)
                    else:
                        moments.setdefault(key, set()).add(name)
    problems.raise_as(PlanError, "The optimizer cannot be saved:")
    return {"groups": groups, "scalars": scalars, "moments": {k: sorted(v) for k, v in moments.items()}}


def united(described: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """What all ranks have, of what each of them captured: with pipeline stages each has other parameters.

    Raises PlanError where two ranks say different things of the same.
    """
    known = [one for one in described if one is not None]
    if not known or all(one == known[0] for one in known):
        return known[0] if known else None
    problems, first = Problems(), known[0]
    groups = [{**group, "params": dict.fromkeys(group["params"])} for group in first["groups"]]
    scalars, moments = dict[str, dict[str, float]](), dict[str, set[str]]()
    for rank, one in enumerate(known):
        if [(g["optimizer"], g["options"]) for g in one["groups"]] != [(g["optimizer"], g["options"]) for g in groups]:
            problems.add(f"rank {rank}", "has other parameter groups or options than rank 0")
            continue
        for group, more in zip(groups, one["groups"], strict=True):
            group["params"] |= dict.fromkeys(more["params"])
        for key, of in one["scalars"].items():
            there = scalars.setdefault(key, {})
            odd = [name for name, value in of.items() if there.setdefault(name, value) != value]
            for name in odd:
                problems.add(name, f"{key} is {of[name]:g} on rank {rank}, {there[name]:g} elsewhere")
        for key, names in one["moments"].items():
            moments.setdefault(key, set()).update(names)
    problems.raise_as(PlanError, "The ranks do not have one optimizer:")
    return {
        "groups": [{**group, "params": list(group["params"])} for group in groups],
        "scalars": scalars,
        "moments": {key: sorted(names) for key, names in moments.items()},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


def _is_plain(value: Any) -> bool:
    plain = value is None or isinstance(value, bool | int | float | str)
    return plain or (isinstance(value, list) and all(map(_is_plain, value)))


def grouped(optimizers: Sequence[Optimizer], found: Collected) -> list[list[str]]:
    """The names of every parameter group of this rank."""
    return [[found.names.get(id(p), "?") for p in group["params"]] for o in optimizers for group in o.param_groups]


def check_optimizers(
    saved: Mapping[str, Any], optimizers: Sequence[Optimizer], everywhere: Sequence[Sequence[Sequence[str]]]
) -> list[str]:
    """Whether the saved groups are these ones. `everywhere`: what `grouped` gave on every rank.

    Raises PlanError with what differs; returns notes on changed options.
    """
    problems, notes = Problems(), []
    here = [(type(o).__name__, group) for o in optimizers for group in o.param_groups]
    there = saved["groups"]
    if len(here) != len(there):
        problems.add("parameter groups", f"there are {len(here)}, {len(there)} were saved")
    for number, ((kind, group), was) in enumerate(zip(here, there, strict=False)):
        names = {name for groups in everywhere for name in groups[number]}
        about = f"parameter group {number}"
        if names != set(was["params"]):
            odd = sorted(names ^ set(was["params"]))
            problems.add(about, f"has {len(names)} parameters, {len(was['params'])} were saved", ", ".join(odd[:3]))
        if kind != was["optimizer"]:
            problems.add(about, f"belongs to {kind}, was saved by {was['optimizer']}", "use the same optimizer")
        for key, value in was["options"].items():
            if key in group and _plain(group[key]) != value:
                notes.append(f"{about}: {key} is {value} as it was saved, not {_plain(group[key])}")
    problems.raise_as(PlanError, "The saved optimizer is another one:")
    return notes


def restore_optimizers(saved: Mapping[str, Any], optimizers: Sequence[Optimizer], found: Collected) -> None:
    """Set options and scalars, and make room for the moments that `shards.fill` reads next."""
    groups = iter(saved["groups"])
    for optimizer in optimizers:
        make: Any = getattr(optimizer, "materialize", None)
        if make is not None:
            make()
        for group in optimizer.param_groups:
            for key, value in next(groups)["options"].items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
            for parameter in group["params"]:
                _restore_one(saved, optimizer, group, parameter, found.names[id(parameter)])


def _restore_one(
    saved: Mapping[str, Any], optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, name: str
) -> None:
    scalars = {key: of[name] for key, of in saved["scalars"].items() if name in of}
    moments = [key for key, names in saved["moments"].items() if name in names]
    if not scalars and not moments:
        optimizer.state.pop(parameter, None)
        return
    state = optimizer.state[parameter]
    for key, value in scalars.items():
        old = state.get(key)
        if isinstance(old, torch.Tensor):
            old.fill_(value)
        else:
            on_device = group.get("capturable") or group.get("fused")
            device = parameter.device if on_device else torch.device("cpu")
            state[key] = torch.tensor(value, dtype=torch.float32, device=device)
    for key in moments:
        if key not in state:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
