"""What ranks do in the tests of an engine's saving, loading and exporting."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine_jobs import Case, batch_of, digest, make_engine


def steps(engine: Any, first: int, last: int) -> list[float]:
    from areal_convert.engines.losses import sft_loss, sft_weight

    losses = []
    for step in range(first, last):
        losses.append(engine.train_batch(batch_of(engine, step), sft_loss, sft_weight)["loss"])
        engine.lr_scheduler_step()
    return losses


def stop_and_go(case: Case, path: str, total: int = 9, stop: int = 7) -> dict[str, Any]:
    """Train through; beside it, a fresh engine with other weights that loads what was saved at `stop`."""
    from areal_convert.engines.api.metas import SaveLoadMeta

    meta = SaveLoadMeta(path, "dcp", with_optim=True)
    engine = make_engine(case)
    before = steps(engine, 0, stop)
    engine.set_version(stop)
    engine.save(meta)
    answer: dict[str, Any] = {"before": before, "through": steps(engine, stop, total), "digest": digest(engine.model)}
    engine.destroy()
    return answer | go_on(dataclasses.replace(case, config={**case.config, "seed": 5}), path, total, stop)


def go_on(case: Case, path: str, total: int = 9, stop: int = 7) -> dict[str, Any]:
    """Load and train to the end."""
    from areal_convert.engines.api.metas import SaveLoadMeta

    engine = make_engine(case)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(0.5)
    engine.load(SaveLoadMeta(path, "dcp", with_optim=True))
    answer = {"version": engine.get_version(), "lr_step": engine.lr_step, "resumed": steps(engine, stop, total)}
    answer |= {"digest_resumed": digest(engine.model)}
    engine.destroy()
    return answer


def export(case: Case, path: str) -> dict[str, Any]:
    """Train a little, export, gather by torch; the engine's own log-probabilities, and those after loading it back."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from areal_convert.engines.api.metas import SaveLoadMeta
    from areal_convert.engines.export import export_model

    engine = make_engine(case)
    steps(engine, 0, 3)
    engine.save(SaveLoadMeta(path, "hf"))
    engine.save(SaveLoadMeta(path, "hf"))  # again, over it
    export_model(engine.model, case.path, path + "-wide", group=engine.cpu_group, dtype="float32", replicas=True)
    state: Any = get_model_state_dict(engine.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        gathered = Path(path + "-torch")
        shutil.copytree(case.path, gathered, ignore=shutil.ignore_patterns("*.safetensors*"))
        if engine.hf_config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, gathered / "model.safetensors")
    answer = {"logprobs": logprobs(engine), "rank": engine.data_parallel_rank}
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(0.5)
    engine.load(SaveLoadMeta(path + "-wide", "hf"))
    answer |= {"loaded": logprobs(engine)}
    engine.destroy()
    return answer


def logprobs(engine: Any) -> list[torch.Tensor]:
    return engine.eval().forward_batch(batch_of(engine, 0), aggregate_fn=list)
