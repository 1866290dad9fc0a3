"""torch's profiler over a window of steps, as a Chrome trace a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ..converter.errors import ConfigError

__all__ = ["ProfilerWindow"]


class Recorder(Protocol):
    """What else is recorded, in the last step of the window: an engine's pipeline."""

    def start(self) -> None: ...

    def stop(self) -> object: ...


class ProfilerWindow:
    """Records steps `first` to `last` (counted from 1, both among them) and writes `trace-rank-N.json` to a directory.

    `first` of 0: records nothing. Call `before(step)` and `after(step)` around each step, `close` at the end.
    """

    def __init__(
        self,
        path: Path,
        first: int = 0,
        last: int = 0,
        rank: int = 0,
        memory: bool = False,
        pipeline: Recorder | None = None,
    ) -> None:
        if first < 0 or (first and last < first):
            raise ConfigError(f"The profiler cannot record steps {first} to {last}.")
        self.path, self.first, self.last, self.rank, self.memory = path, first, last, rank, memory
        self.profile: Any = None
        self.pipeline = pipeline

    def before(self, step: int) -> None:
        if self.first and self.profile is None and self.first <= step <= self.last:
            import torch
            from torch.profiler import ProfilerActivity, profile

            kinds = [ProfilerActivity.CPU]
            kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.profile = profile(activities=kinds, record_shapes=True, profile_memory=self.memory)
            self.profile.start()
        if self.profile is not None and self.pipeline is not None and step == self.last:
            self.pipeline.start()

    def after(self, step: int) -> Path | None:
        """The trace, when this was the last step of the window."""
        if self.profile is not None and self.pipeline is not None and step == self.last:
            self.pipeline.stop()
        return self.close() if self.profile is not None and step >= self.last else None

    def close(self) -> Path | None:
        """Write what was recorded, also when the run ends inside the window."""
        if self.profile is None:
            return None
        self.profile.stop()
        self.path.mkdir(parents=True, exist_ok=True)
        trace = self.path / f"trace-rank-{self.rank}.json"
        self.profile.export_chrome_trace(str(trace))
        self.profile, self.first = None, 0
        return trace
