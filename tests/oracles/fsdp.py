"""Ask torch itself: `Torch` keeps an `fsdp_worker` that runs jobs on 2, 3, 4 … local ranks over gloo.

    with Torch() as torch:
        ranks = torch.run("load", hf_dir, mesh={"dp": 2}, dir=our_dcp)

One process imports torch and transformers and is forked for every rank of every job: a job takes about a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any

WORKER = Path(__file__).with_name("fsdp_worker.py")


class TorchFailed(AssertionError):
    """torch refused, or did not end in time. The message holds what the ranks wrote."""


class Torch:
    """Runs jobs one after another. A job that fails or hangs does not spoil the next one."""

    def __init__(self, start_timeout: float = 120, worker: Path = WORKER) -> None:
        self._worker = worker
        self._scratch = tempfile.TemporaryDirectory(prefix="fsdp-")
        self._errors = Path(self._scratch.name) / "stderr"
        self._start_timeout = start_timeout
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Torch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._scratch.cleanup()

    def run(
        self, task: str, hf_dir: str | Path, mesh: dict[str, int], *, timeout: float = 60, **job: Any
    ) -> list[dict[str, Any]]:
        """What every rank found (see `fsdp_worker.Job` for the fields). Raises TorchFailed."""
        process = self._started()
        mark = self._errors.stat().st_size
        line = json.dumps({"task": task, "hf_dir": str(hf_dir), "mesh": mesh, **job}, default=str)
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        try:
            found = json.loads(self._answer(process, timeout, mark))
        except TorchFailed:
            self._stop()
            raise
        if found is None:
            raise TorchFailed(f"{line}\n{self._since(mark)}")
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._starts += 1
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        folder = Path(self._scratch.name) / f"worker{self._starts}"
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(self._worker), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # so that all ranks can be ended together
            )
        self._answer(self._process, self._start_timeout, 0)
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], timeout: float, mark: int) -> bytes:
        pipe: IO[bytes] | None = process.stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], timeout)  # one line for each job: nothing is left in the buffer
        line = pipe.readline() if ready else b""
        if not line:
            what = "the worker ended" if ready else f"no end after {timeout} s"
            raise TorchFailed(f"{what}\n{self._since(mark)}")
        return line

    def _since(self, mark: int) -> str:
        with self._errors.open("rb") as file:
            file.seek(mark)
            return file.read().decode(errors="replace")[-20000:]

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
