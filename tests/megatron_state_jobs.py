"""What ranks do in the tests of a Megatron run's training states."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import importlib
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine_jobs import batch_of
from megatron_jobs import Case, make_engine


@contextmanager
def writers() -> Iterator[None]:
    """Megatron-Core writes from processes of its own, which the ranks of a test, being daemons, may not start; and none
    of these may be left behind when the rank ends at once."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        writing: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
        writing._results_queue = None
        gc.collect()


def digest(engine: Any) -> str:
    """Of all parameters and buffers of this rank."""
    h = hashlib.sha256()
    for chunk in engine.model:
        for name, value in sorted(chunk.state_dict().items()):
            if isinstance(value, torch.Tensor):
                h.update(name.encode() + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def loaded_weights(cases: Sequence[Case]) -> list[tuple[str, float]]:
    """Of every case: the digest of what was loaded, and the first loss."""
    found = []
    for case in cases:
        engine = make_engine(case)
        found.append((digest(engine), steps(engine, 0, 1)[0]))
        engine.destroy()
    return found


def steps(engine: Any, first: int, last: int) -> list[float]:
    from areal_convert.engines.losses import sft_loss, sft_weight

    losses = []
    for step in range(first, last):
        losses.append(engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)["loss"])
        engine.lr_scheduler_step()
    return losses


def draws(engine: Any) -> list[float]:
    """Random numbers of the default generator and of Megatron's tracker."""
    from areal_convert.engines.megatron_cpu import cpu_megatron

    with cpu_megatron():
        from megatron.core import tensor_parallel

        tracker: Any = tensor_parallel.get_cuda_rng_tracker()
        plain = float(torch.rand(1))
        with tracker.fork():
            return [plain, float(torch.rand(1))]


def stop_and_go(case: Case, path: str, total: int = 5, stop: int = 3) -> dict[str, Any]:
    """Train through; beside it, a fresh engine with other weights that loads what was saved at `stop`."""
    from areal_convert.engines.api.metas import SaveLoadMeta

    meta = SaveLoadMeta(path, "dcp", with_optim=True)
    with writers():
        engine = make_engine(case)
        before = steps(engine, 0, stop)
        engine.set_version(stop)
        engine.save(meta)
        engine.save(SaveLoadMeta(path + "-hf", "hf"))
        answer: dict[str, Any] = {"before": before, "draws": draws(engine)}
        answer |= {"through": steps(engine, stop, total), "digest": digest(engine)}
        engine.destroy()
        return answer | _go_on(dataclasses.replace(case, config={**case.config, "seed": 5}), path, total, stop)


def go_on(case: Case, path: str, total: int = 5, stop: int = 3) -> dict[str, Any]:
    with writers():
        return _go_on(case, path, total, stop)


def _go_on(case: Case, path: str, total: int, stop: int) -> dict[str, Any]:
    from areal_convert.engines.api.metas import SaveLoadMeta

    engine = make_engine(case)
    with torch.no_grad():
        for chunk in engine.model:
            for parameter in chunk.parameters():
                parameter.fill_(0.5)
    engine.load(SaveLoadMeta(path, "dcp", with_optim=True))
    answer = {"version": engine.get_version(), "lr_step": engine.lr_step, "draws_resumed": draws(engine)}
    answer |= {"resumed": steps(engine, stop, total), "digest_resumed": digest(engine)}
    engine.destroy()
    return answer


def behind(case: Case, root: str) -> dict[str, Any]:
    """Save behind training, twice, and see what is on disk when."""
    from areal_convert.engines.megatron.checkpoint import MegatronSaver, load_state, state_of
    from areal_convert.engines.state import directory
    from areal_convert.engines.state.saving import Progress

    with writers():
        engine = make_engine(case)
        saver = MegatronSaver(asynchronous=True, keep_latest_k=1)
        steps(engine, 0, 2)
        wanted = digest(engine)
        first = saver.save_step(state_of(engine), Progress(step=2, data={"at": 7}), root)
        at_once = (first / directory.MARKER).exists()
        steps(engine, 2, 3)  # goes on while that is written, and changes every weight
        changed = digest(engine) != wanted
        saver.wait()
        complete = (first / directory.MARKER).is_file()
        restored = load_state(state_of(engine), root)
        same = digest(engine) == wanted
        second = saver.save_step(state_of(engine), Progress(step=4), root)
        for _ in range(600):
            saver.poll()
            if saver._pending is None:
                break
            torch.distributed.barrier()
        polled = (second / directory.MARKER).is_file()
        saver.close()
        engine.destroy()
    kept = sorted(path.name for path in Path(root).iterdir())
    found = {"at_once": at_once, "complete": complete, "changed": changed, "same": same, "kept": kept}
    return found | {"data": restored.progress.data, "polled": polled, "step": restored.progress.step}


def refuse(case: Case, path: str, how: str) -> str:
    """Load what does not fit; the message."""
    from areal_convert.converter.errors import ConvertError
    from areal_convert.engines.api.metas import SaveLoadMeta

    engine = make_engine(case)
    before = digest(engine)
    try:
        engine.load(SaveLoadMeta(path, "dcp", with_optim=how != "weights"))
    except ConvertError as error:
        assert digest(engine) == before
        return str(error)
    finally:
        engine.destroy()
    return "loaded"
