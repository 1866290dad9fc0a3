"""Run a function on N gloo ranks: `run_ranks(4, job, family="qwen3")` gives what each rank returned, in rank order.

Ranks are forked from one server process that has imported torch and transformers already (multiprocessing's
forkserver): a rank costs a fork, not an import. They meet through a file, so no port is taken. The function and its
arguments are pickled: it has to be a module-level function of a module that the ranks can import.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

GRACE = 5.0
"""Seconds that the other ranks get to fail by themselves once one has: their tracebacks say where they stood."""

_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers", "engine_preload"]


class RanksFailed(AssertionError):
    """Some rank raised, died, or did not come to an end; the message has every rank's traceback."""


def run_ranks(
    world: int, function: Callable[..., Result], *, limit: float = 100.0, init: bool = True, **kwargs: Any
) -> list[Result]:
    """Call `function(**kwargs)` on `world` ranks and return their results, which have to be picklable.

    limit  seconds for all of it; ranks that are not done are killed, their stacks are shown
    init   make the default process group (gloo) first; False: only RANK and WORLD_SIZE are set

    Raises RanksFailed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    _start_server()
    deadline, ends = time.monotonic() + limit, time.time() + limit
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, world, folder, theirs, init, ends, function, kwargs)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            answers = _collect([ours for _, ours in ranks], deadline)
        finally:
            for process, _ in ranks:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                    process.join()
        if all(answer is not None and answer[0] for answer in answers):
            return [answer[1] for answer in answers if answer is not None]
        raise RanksFailed(_report(answers, [process.exitcode for process, _ in ranks], Path(folder), limit))


def _start_server() -> None:
    """Python 3.11 does not hand its module path on to the server, which then passes over what it cannot import."""
    before = os.environ.get("PYTHONPATH")
    own = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = own if before is None else f"{own}{os.pathsep}{before}"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _collect(pipes: list[Connection], deadline: float) -> list[tuple[bool, Any] | None]:
    """(succeeded, result or traceback) of every rank; None of one that did not say anything."""
    answers: list[tuple[bool, Any] | None] = [None] * len(pipes)
    left = dict(zip(pipes, range(len(pipes)), strict=True))
    while left:
        ready = wait(list(left), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = left.pop(pipe)  # type: ignore[arg-type]
            with suppress(EOFError):
                answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            if answers[rank] is None or not answers[rank][0]:  # type: ignore[index]
                deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def _report(answers: list[tuple[bool, Any] | None], codes: list[int | None], folder: Path, limit: float) -> str:
    lines = []
    for rank, answer in enumerate(answers):
        if answer is None:
            stack = folder / f"stack-{rank}"
            where = stack.read_text() if stack.exists() else ""
            lines.append(
                f"rank {rank}: no answer within {limit:g} s or after another failed, exit {codes[rank]}\n{where}"
            )
        else:
            lines.append(f"rank {rank}: {'finished' if answer[0] else answer[1]}")
    return "\n".join(lines)


def _rank(
    rank: int,
    world: int,
    folder: str,
    answer: Connection,
    init: bool,
    ends: float,
    function: Callable[..., Any],
    kwargs: dict[str, Any],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with open(Path(folder, f"stack-{rank}"), "w") as stack:
        faulthandler.dump_traceback_later(max(1.0, ends - time.time() - 2), file=stack)
        try:
            if init:
                store = dist.FileStore(str(Path(folder, "store")), world)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            # Plain pickle: torch's own would pass tensors by descriptors that end with this process.
            answer.send_bytes(pickle.dumps((True, function(**kwargs))))
        except BaseException:
            answer.send_bytes(pickle.dumps((False, traceback.format_exc())))
            sys.stdout.flush()
            os._exit(1)
        answer.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of gloo may still wait for ranks that are gone; nothing is left to be done here.
        os._exit(0)
