"""Process groups and devices: from torchrun's environment, or a group of one's own for a single process."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ..converter.errors import ConfigError, MeshError, Problems

GLOO_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another one on the CPU: a rank that died must not hold the others for gloo's half hour."""

NCCL_TIMEOUT = timedelta(minutes=30)

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def device_of(kind: str | None = None) -> torch.device:
    """This rank's device: `LOCAL_RANK`'s GPU where CUDA is, else the CPU. `kind` (cuda or cpu) insists.

    Raises ConfigError when CUDA is asked for and is not there, or has too few devices.
    """
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise ConfigError(f"There is no device type {kind!r} here.", hint="Use cuda or cpu.")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise ConfigError(
            f"LOCAL_RANK is {local}, and this machine has {count} CUDA devices.",
            hint="Start fewer ranks on it (torchrun --nproc-per-node), or run on the CPU with CUDA_VISIBLE_DEVICES=.",
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def start(device: torch.device, world_size: int, timeout: timedelta | None = None) -> bool:
    """Make sure that the default process group exists and has `world_size` ranks; True when it was made here.

    An existing group is used as it is. Otherwise torchrun's variables are; without them a single process makes a group
    of its own, and more than one rank is an error. CPU tensors always go over gloo, also beside NCCL.
    """
    made = not dist.is_initialized()
    if made:
        _check_environment(world_size)
        wait = timeout or (NCCL_TIMEOUT if device.type == "cuda" else GLOO_TIMEOUT)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=wait)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
    if dist.get_world_size() != world_size:
        found = dist.get_world_size()
        if made:
            dist.destroy_process_group()
        raise MeshError(
            f"The parallel strategy needs {world_size} ranks and {found} were started.",
            hint=f"torchrun --nproc-per-node={world_size}, or change the strategy.",
        )
    return made


def _check_environment(world_size: int) -> None:
    problems = Problems()
    given = [name for name in _ENVIRONMENT if name in os.environ]
    if given:
        for name in _ENVIRONMENT:
            if name not in os.environ:
                problems.add(name, f"is not set, but {', '.join(given)} are", "torchrun sets all of them")
    elif world_size > 1:
        problems.add("RANK", f"is not set: this is one process, the strategy needs {world_size}", "start with torchrun")
    problems.raise_as(ConfigError, "The process group cannot be made:")
