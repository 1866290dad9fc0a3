"""What ranks do in the tests of ArchonEngine's saving, loading and exporting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from archon_jobs import Case, digests, make_engine
from engine_jobs import batch_of
from engine_state_jobs import steps

STOP, TOTAL = 3, 5


def stop_and_go(cases: Sequence[tuple[str, Case]], folder: str) -> dict[str, dict[str, Any]]:
    """Train each case through, saving its state at STOP; beside it, a fresh engine that loads it and goes on."""
    return {name: _stop_and_go(case, f"{folder}/{name}") for name, case in cases}


def _stop_and_go(case: Case, path: str) -> dict[str, Any]:
    from areal_convert.engines.api.metas import SaveLoadMeta

    engine = make_engine(case)
    before = steps(engine, 0, STOP)
    engine.set_version(STOP)
    engine.save(SaveLoadMeta(path, "dcp", with_optim=True))
    engine.save(SaveLoadMeta(f"{path}-hf", "hf"))
    answer: dict[str, Any] = {"before": before, "logprobs": logprobs(engine), "rank": engine.data_parallel_rank}
    answer |= {"through": steps(engine.train(), STOP, TOTAL), "digests": digests(engine), "biases": biases(engine)}
    engine.destroy()
    return answer | go_on(replace(case, config={**case.config, "seed": 5}), path)


def go_on(case: Case, path: str) -> dict[str, Any]:
    """Load, on whatever layout, and train to the end."""
    from areal_convert.engines.api.metas import SaveLoadMeta

    engine = make_engine(case)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(0.5)
    engine.load(SaveLoadMeta(path, "dcp", with_optim=True))
    answer = {"version": engine.get_version(), "lr_step": engine.lr_step, "resumed": steps(engine, STOP, TOTAL)}
    answer |= {"digests_resumed": digests(engine), "biases_resumed": biases(engine)}
    engine.destroy()
    return answer


def all_go_on(cases: Sequence[tuple[str, Case]], folder: str) -> dict[str, dict[str, Any]]:
    return {name: go_on(case, f"{folder}/{name}") for name, case in cases}


def beside(case: Case, folder: str) -> dict[str, Any]:
    """Two saves from a process, training going on meanwhile; what they hold is what was there when they began."""
    from areal_convert.engines.state.saving import Progress, Saver
    from areal_convert.engines.states import state_of

    engine = make_engine(case)
    steps(engine, 0, STOP)
    saver, seconds = Saver(asynchronous=True, process=True, keep_latest_k=1), []
    for step in (STOP - 1, STOP):
        progress = Progress(step=step, version=STOP, schedule={"step": engine.lr_step})
        saver.save_step(state_of(engine), progress, folder)
        seconds.append(saver.seconds["blocked"])
    assert saver._beside is not None
    process = saver._beside._process
    through = steps(engine, STOP, TOTAL)
    saver.wait()
    path = sorted(p.name for p in Path(folder).iterdir())
    saver.close()
    ended = process is None or process.returncode == 0
    engine.destroy()
    return {"through": through, "seconds": seconds, "path": path, "ended": ended, **go_on(case, folder)}


def biases(engine: Any) -> dict[str, list[float]]:
    """The experts' biases of the stages that are here."""
    return {
        name: buffer.tolist()
        for part in engine.parts
        for name, buffer in part.named_buffers()
        if name.endswith("expert_bias")
    }


def logprobs(engine: Any) -> list[torch.Tensor]:
    return engine.eval().forward_batch(batch_of(engine, 0), aggregate_fn=list)
