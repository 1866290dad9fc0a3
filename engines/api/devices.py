"""Memory of the device that this process works on. torch is imported when it is asked for."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from .metas import DeviceStats

__all__ = ["device_stats", "write_memory_snapshot"]


def device_stats() -> DeviceStats:
    """Of the current CUDA device, or of this process where there is none."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return DeviceStats(
            device=f"cuda:{torch.cuda.current_device()}",
            allocated=torch.cuda.memory_allocated(),
            reserved=torch.cuda.memory_reserved(),
            peak=torch.cuda.max_memory_allocated(),
            total=total,
            used=total - free,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    page, now = os.sysconf("SC_PAGE_SIZE"), peak
    statm = Path("/proc/self/statm")
    if statm.exists():
        now = int(statm.read_text(encoding="ascii").split()[1]) * page
    total = page * os.sysconf("SC_PHYS_PAGES")
    return DeviceStats(device="cpu", allocated=now, reserved=now, peak=max(peak, now), total=total, used=now)


def write_memory_snapshot(directory: str) -> None:
    """What `torch.cuda.memory._record_memory_history` recorded, as `memory-{rank}.pickle` in `directory`."""
    import torch

    if not torch.cuda.is_available():
        return
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(folder / f"memory-{os.environ.get('RANK', '0')}.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
