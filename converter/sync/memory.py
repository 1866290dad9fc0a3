"""A second copy: how much memory it takes, how much is free, and how it is made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .homes import state_of

if TYPE_CHECKING:
    import torch

Free = Callable[[str], int | None]
"""Bytes that are free on a device (`cpu`, `cuda:0`); None where nobody can say."""


def tensors_of(target: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a twin has to have: parameters and all buffers of a module, or the values of a state dict."""
    import torch

    if isinstance(target, torch.nn.Module):
        yield from target.parameters()
        yield from target.buffers()
    else:
        yield from (value for value in state_of(target).values() if isinstance(value, torch.Tensor))


def bytes_of(target: Any) -> dict[str, int]:
    """Bytes on every device, memory that several tensors share counted once."""
    seen: dict[tuple[str, int], int] = {}
    for tensor in tensors_of(target):
        storage = tensor.untyped_storage()
        seen[str(tensor.device), storage.data_ptr()] = storage.nbytes()
    total: dict[str, int] = {}
    for (device, _), size in seen.items():
        total[device] = total.get(device, 0) + size
    return total


def twin(target: Any) -> Any:
    """A copy with memory of its own. Tensors that share memory in the original share it in the copy."""
    if not isinstance(target, Mapping):
        return copy.deepcopy(target)
    memo: dict[int, Any] = {}
    return {name: copy.deepcopy(value, memo) for name, value in target.items()}


def free(device: str) -> int | None:
    """Bytes that this process may still take on a device: of a machine and of its control group, the smaller."""
    if device.startswith("cuda"):
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    found = [amount for amount in (_available(), _group_left()) if amount is not None]
    return min(found) if found else None


def _available() -> int | None:
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _group_left() -> int | None:
    """What the control group (version 2) of a container still allows; cached files in it can be dropped."""
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    if not limit.isdigit() or not used.isdigit():
        return None
    cached = next(
        (int(x.split()[1]) for x in _text("/sys/fs/cgroup/memory.stat").splitlines() if x.startswith("inactive_file ")),
        0,
    )
    return max(0, int(limit) - int(used) + cached)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
