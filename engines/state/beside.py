"""A rank's file of a state, held in memory that a process beside it writes from: training shares no interpreter with
the digesting and the writing, and no lock.

What is staged is the file itself, byte for byte, in anonymous shared memory (Linux's memfd): the process needs neither
torch nor a layout, and starts in a tenth of a second, once.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from ...converter.errors import ConfigError, TargetError
from .shards import Key, Layout


class Beside:
    """Stage, then write; in this order, one after the other. Raises ConfigError where there is no memfd."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("save.async_in: processes need Linux.", hint="save.async_in=thread")
        self._fd = os.memfd_create("areal-state")
        self._memory: mmap.mmap | None = None
        self._process: subprocess.Popen[str] | None = None
        self._size = 0

    def stage(self, layout: Layout, data_of: Callable[[Key], torch.Tensor]) -> None:
        """Copy what this rank writes, as its file has it."""
        if layout.size != self._size or self._memory is None:
            self._release()
            os.ftruncate(self._fd, layout.size)
            self._size = layout.size
            self._memory = mmap.mmap(self._fd, layout.size) if layout.size else None
        cuda = False
        for key, plan, at in layout.mine:
            region, memory = data_of(key), self._memory
            assert memory is not None
            start, length = at + len(plan.head), region.numel() * region.element_size()
            memory[at:start] = plan.head
            memory[start + length : at + plan.size] = plan.tail
            place = torch.frombuffer(memory, dtype=torch.uint8, count=length, offset=start)
            place.view(region.dtype).view(region.shape).copy_(region.detach(), non_blocking=True)
            cuda = cuda or region.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()

    def write(self, path: Path) -> tuple[int, str]:
        """The staged file, on disk; its size and digest. Raises OSError as writing here would, and TargetError when the
        process is gone."""
        process = self._running()
        stdin, stdout = _pipes(process)
        try:
            stdin.write(json.dumps({"path": str(path), "size": self._size}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        if not line:
            self._process = None
            code = _ended(process)
            raise TargetError(f"{path}: the process that was to write it ended with {code}.", hint="Was it killed?")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]), str(path))
        return self._size, answer["digest"]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _ended(process)
        self._release()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            command = [sys.executable, "-m", f"{__package__}.writer", str(self._fd)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[self._fd],
                start_new_session=True,  # a Ctrl-C is the trainer's, which saves and then closes this
            )
        return self._process

    def _release(self) -> None:
        """Unmap; tensors over the memory are gone when `stage` has returned."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


def _ended(process: subprocess.Popen[str]) -> int:
    """Let it come to its end; its exit code."""
    for pipe in _pipes(process):
        with suppress(BrokenPipeError):
            pipe.close()
    return process.wait()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout
