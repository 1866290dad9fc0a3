"""All ranks of a job on this machine: started, watched, ended together. No torch in this process.

python -m areal_convert.engines.local_ranks BACKEND CONFIG [UNTIL]     one rank, as `run_ranks` starts it
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..converter.errors import ConvertError, Problem, RankError
from .watchdog import FOLLOWED

__all__ = ["run_ranks"]

REFUSED, INTERRUPTED = 2, 130
"""Exit codes of a rank: what it found wrong itself; Ctrl-C before the training had begun."""

_GRACE = 5.0
"""Seconds in which the others may find out and say so by themselves, once one has failed."""

_TAIL = 40


@dataclass
class Rank:
    number: int
    process: subprocess.Popen[bytes]
    output: Path


def run_ranks(count: int, backend: str, config: Path, logs: Path, until: int | None = None) -> int:
    """Start `count` ranks on one machine and wait; returns 0, or 128 + the signal that ended the run.

    Rank 0 writes to the terminal, every other one to `logs/rank-N.log`. SIGINT and SIGTERM are passed on once; the
    ranks save and leave. Raises ConvertError with the end of the first failing rank's output, all ranks being ended.
    """
    logs.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    got: list[int] = []
    ranks: list[Rank] = []

    def pass_on(number: int, frame: object) -> None:
        got.append(number)
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(number)

    before = {s: signal.signal(s, pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        ranks += [_start(n, count, port, backend, config, logs, until) for n in range(count)]
        failed = _wait(ranks)
    finally:
        _end(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)
    if any(_own_fault(rank, got) for rank in failed):
        raise _error(failed)
    return 128 + got[0] if got else 0


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _start(number: int, count: int, port: int, backend: str, config: Path, logs: Path, until: int | None) -> Rank:
    threads = max(1, (os.cpu_count() or 1) // count)
    env = os.environ | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    command = [sys.executable, "-m", __name__, backend, str(config), *([] if until is None else [str(until)])]
    output = logs / f"rank-{number}.log"
    # Sessions of their own: Ctrl-C reaches the ranks once, through `pass_on`, and not from the terminal as well.
    if number == 0:
        return Rank(0, subprocess.Popen(command, env=env, start_new_session=True), output)
    with output.open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    return Rank(number, process, output)


def _wait(ranks: Sequence[Rank]) -> list[Rank]:
    """Until all ranks have ended; those that failed, in the order in which they did. After the first the others get a
    little time."""
    failed: list[Rank] = []
    seen: set[int] = set()
    deadline = float("inf")
    while len(seen) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks:
            if rank.number not in seen and rank.process.poll() is not None:
                seen.add(rank.number)
                if rank.process.returncode != 0:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.05)
    return failed


def _own_fault(rank: Rank, got: Sequence[int]) -> bool:
    """Whether it failed otherwise than by a signal that was passed on to it."""
    return not any(rank.process.returncode in (-number, 128 + number) for number in got)


def _end(ranks: Sequence[Rank]) -> None:
    """No rank outlives the job."""
    left = [rank for rank in ranks if rank.process.poll() is None]
    for rank in left:
        rank.process.terminate()
    end = time.monotonic() + 3
    for rank in left:
        try:
            rank.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()


def _error(failed: Sequence[Rank]) -> ConvertError:
    """Of the rank that failed by itself; those that only followed are left out."""
    first = next((rank for rank in failed if rank.process.returncode != FOLLOWED), failed[0])
    code = first.process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed (exit code {code})"
    tail: list[str] = []
    if first.number and first.output.is_file():
        tail = first.output.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
    where = "its output is above" if first.number == 0 else f"all of its output: {first.output}"
    others = [Problem(f"rank {r.number}", "stopped as well") for r in failed if r is not first]
    text = "\n".join([f"Rank {first.number} {how}; {where}.", *(f"  | {line}" for line in tail)])
    return RankError(text, others, "The last complete training state is untouched; the same command resumes from it.")


# ------------------------------------------------------------------------------------------------ in a rank


def _leave_with_parent() -> None:
    """A rank whose launcher was killed must not train on."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="areal-parent", daemon=True).start()


def main(arguments: Sequence[str]) -> int:
    """One rank."""
    from ..converter.cli_show import error_text

    _leave_with_parent()
    backend, config = arguments[0], arguments[1]
    until = int(arguments[2]) if len(arguments) > 2 else None
    try:
        from .api.reading import read_config
        from .training import train

        train(read_config(config), backend, until)
    except RankError as error:
        print(error_text(error), file=sys.stderr)
        return FOLLOWED
    except ConvertError as error:
        print(error_text(error), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
