"""Ranks over gloo that train a little and then export or save through ours; torch itself says what is right.

Started by `oracles.fsdp.Torch(worker=…)`: jobs, processes and models are `oracles.fsdp_worker`'s.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oracles import fsdp_worker
from oracles.fsdp_worker import Job, build, distribute, local, whole


@dataclass
class StateJob(Job):
    options: dict[str, Any] = field(default_factory=dict)


def trained(job: Job, steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    """The model in fp32, distributed, after some steps of AdamW; the same tokens on every data rank."""
    model, tied = build(job, None)
    model = model.float()
    distribute(model, job, tied)
    if "drift" not in job.set:
        freeze_norms_of_heads(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=False)
    for step in range(steps):
        train_step(model, optimizer, step)
    return model, optimizer


def freeze_norms_of_heads(model: Any) -> None:
    """Under TP a rank sees its own heads, and nobody here adds up these norms' gradients: ranks would drift apart."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.requires_grad_(False)


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    tokens = torch.randint(3, 1000, (2, 12), generator=torch.Generator().manual_seed(step))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(whole(loss))


def gathered(model: Any, job: Job, to: Path, dtype: torch.dtype | None) -> None:
    """What torch gathers, saved by safetensors beside the base model's small files."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        shutil.copytree(job.hf_dir, to, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
        if model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        save_file({n: t.to(dtype or t.dtype).contiguous() for n, t in state.items()}, to / "model.safetensors")
    dist.barrier()


def export(job: StateJob) -> dict[str, Any]:
    """Train, export by ours and by torch; logits of the model itself for comparison."""
    from areal_convert.engines.export import export_model

    model, _ = trained(job)
    states: Any = model
    if job.options.pop("nan", False):
        with torch.no_grad():
            local(model.model.norm.weight).fill_(torch.nan)
    base_dtype = getattr(torch, job.options.pop("gather_dtype", "float32"))
    gathered(model, job, Path(job.dir + "-torch"), base_dtype)
    fail = job.options.pop("fail", None)
    if fail == dist.get_rank():
        states = {"model.norm.weight": torch.zeros(3)}
    answer: dict[str, Any] = {}
    try:
        done = export_model(states, job.options.pop("base", job.hf_dir), job.dir, **job.options)
        answer |= {"written": done.bytes_written, "total": done.bytes_total, "casts": done.casts}
    except Exception as error:
        answer |= {"error": type(error).__name__, "message": str(error)}
    if fail is None and job.logits:
        tokens = torch.randint(3, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            answer["logits"] = whole(model.eval()(input_ids=tokens, use_cache=False).logits).flatten()[:4000].tolist()
    return answer


# ------------------------------------------------------------------------------------------------ training state


def export_death(job: StateJob) -> dict[str, Any]:
    """Rank 1 dies as it writes; rank 0 leaves a note of what it heard."""
    from areal_convert.converter import live
    from areal_convert.engines.export import export_model

    model, _ = trained(job, steps=0)
    if dist.get_rank() == 1:
        live.write_box = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    try:
        export_model(model, job.hf_dir, job.dir)
    except Exception as error:
        Path(job.dir + "-said").write_text(f"{type(error).__name__}: {error}")
        raise
    raise AssertionError("nobody died")


def start(job: StateJob, seed: int = 0) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A fresh model, its optimizer, and what the engine would offer to be saved."""
    from areal_convert.converter import open_checkpoint
    from areal_convert.engines.state.entries import TrainState

    torch.manual_seed(100 * seed + dist.get_rank() // job.mesh.tp)
    model, tied = build(job, None)
    model = model.float().train()
    distribute(model, job, tied)
    if job.mesh.tp > 1:
        freeze_norms_of_heads(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=job.options.get("fused", False))
    topology = {"dp": job.mesh.dp, "tp": job.mesh.tp, "replicate": job.mesh.replicate}
    extra = {"head": torch.arange(5.0)} if job.options.get("extra") else {}
    state = TrainState([model], open_checkpoint(job.hf_dir), [optimizer], topology=topology, extra=extra)
    return model, optimizer, state


def noisy_step(model: Any, optimizer: torch.optim.Optimizer, step: int, noise: bool = True) -> float:
    """A step whose loss depends on the random state of this rank."""
    tokens = torch.randint(3, 1000, (2, 12), generator=torch.Generator().manual_seed(step))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    if noise:
        loss = loss * (1 + 0.01 * torch.rand(()))
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 / (1 + step)
    optimizer.step()
    optimizer.zero_grad()
    return float(whole(loss))


def progress(step: int) -> Any:
    from areal_convert.engines.state.saving import Progress

    return Progress(step, step + 1, {"step": step}, {"epoch": 0, "index": 8 * step}, {"tokens": 24 * step}, "a: 1\n", 7)


def resume(job: StateJob) -> dict[str, Any]:
    """Train to the end with a save on the way; or start there from the save."""
    from areal_convert.engines.state.loading import load
    from areal_convert.engines.state.saving import Saver

    options, noise = job.options, job.options.get("noise", True)
    model, optimizer, state = start(job, seed=options.get("seed", 0))
    answer: dict[str, Any] = {"losses": []}
    first = 0
    if options.get("load"):
        done = load(state, job.dir)
        first = done.progress.step
        answer |= {"progress": done.progress.__dict__, "notes": done.notes, "same": done.same_topology}
        answer |= {"lr": optimizer.param_groups[0]["lr"], "read": done.bytes_read}
    saver = Saver(asynchronous=options.get("asynchronous", False), keep_latest_k=options.get("keep"))
    for step in range(first, options["steps"]):
        answer["losses"].append(noisy_step(model, optimizer, step, noise).hex())
        if step + 1 in options.get("save", []):
            saver.save_step(state, progress(step + 1), job.dir)
    saver.close()
    parts = {n: local(v) for n, v in model.state_dict().items()}
    parts |= {f"{k}.{n}": local(v) for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}
    answer["digest"] = {name: hashlib.sha1(v.contiguous().numpy().tobytes()).hexdigest() for name, v in parts.items()}
    return answer


def torch_loads(job: StateJob) -> dict[str, Any]:
    """torch's own `dcp.load` of a saved state into this layout, against ours."""
    import torch.distributed.checkpoint as dcp

    from areal_convert.engines.state.loading import load

    model, optimizer, state = start(job, seed=5)
    load(state, job.dir)
    theirs = {n: torch.zeros_like(v) for n, v in model.state_dict().items()}
    moments = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    from areal_convert.engines.state.directory import latest

    dcp.load({"model": theirs, "optim": {"exp_avg": moments}}, checkpoint_id=f"{latest(job.dir)}/dcp")
    mine = model.state_dict()
    wrong = [n for n in mine if not torch.equal(local(mine[n]), local(theirs[n]))]
    averages = {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    return {"wrong": wrong + [n for n in moments if not torch.equal(local(averages[n]), local(moments[n]))]}


def kill(job: StateJob) -> dict[str, Any]:
    """Save once, then die in the middle of the next save: at a file's beginning, or before the rename."""
    from areal_convert.engines.state import directory, shards
    from areal_convert.engines.state.saving import Saver

    model, optimizer, state = start(job)
    saver = Saver(asynchronous=job.options["asynchronous"])
    noisy_step(model, optimizer, 0)
    saver.save_step(state, progress(1), job.dir)
    saver.wait()
    noisy_step(model, optimizer, 1)
    module, name = {"write": (shards, "write"), "publish": (directory, "publish")}[job.options["where"]]
    real = getattr(module, name)

    def die(*args: Any, **named: Any) -> Any:
        if dist.get_rank() == 0:
            if name == "write":
                real(*args, **named)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **named)

    setattr(module, name, die)
    try:
        saver.save_step(state, progress(2), job.dir)
        saver.close()
    finally:
        if dist.get_rank() != 0:
            os._exit(0)  # its peer is gone: what it raised is not what is looked at
    raise AssertionError("rank 0 lives")


def full(job: StateJob) -> dict[str, Any]:
    """A save for which the disk has no room (a file size limit says so), then one that has it again."""
    from areal_convert.engines.state.saving import Saver

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    model, optimizer, state = start(job)
    saver = Saver(asynchronous=True, keep_latest_k=1)
    noisy_step(model, optimizer, 0)
    saver.save_step(state, progress(1), job.dir)
    saver.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == job.options["rank"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    saver.save_step(state, progress(2), job.dir)
    answer: dict[str, Any] = {}
    try:
        saver.save_step(state, progress(3), job.dir)
    except Exception as error:
        answer |= {"error": type(error).__name__, "message": str(error)}
    left = sorted(p.name for p in Path(job.dir).iterdir())
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    saver.save_step(state, progress(4), job.dir)
    saver.close()
    return answer | {"left": left, "after": sorted(p.name for p in Path(job.dir).iterdir())}


def overlap(job: StateJob) -> dict[str, Any]:
    """An asynchronous save of step 1 while training goes on: what is saved is step 1."""
    from areal_convert.engines.state import shards
    from areal_convert.engines.state.saving import Saver

    model, optimizer, state = start(job)
    noisy_step(model, optimizer, 0, noise=False)
    Saver().save_step(state, progress(1), job.dir + "-now")
    go = threading.Event()
    real = shards.write
    shards.write = lambda *args: go.wait(30) and real(*args)
    saver = Saver(asynchronous=True)
    saver.save_step(state, progress(1), job.dir)
    for step in (1, 2):
        noisy_step(model, optimizer, step, noise=False)
    early = sorted(p.name for p in Path(job.dir).iterdir())
    go.set()
    saver.close()
    return {"early": early}


TASKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "export": export,
    "export_death": export_death,
    "resume": resume,
    "torch_loads": torch_loads,
    "kill": kill,
    "full": full,
    "overlap": overlap,
}


if __name__ == "__main__":
    import transformers.models.auto.modeling_auto  # noqa: F401

    import areal_convert.engines.export
    import areal_convert.engines.state.loading  # noqa: F401

    torch.set_num_threads(1)
    fsdp_worker.TASKS.update(TASKS)
    fsdp_worker.Job = StateJob
    fsdp_worker.main()
