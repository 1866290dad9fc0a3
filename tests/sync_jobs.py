"""What trainer ranks of `test_sync_end_to_end` do; run by `engine_worker.run_ranks`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areal_convert.converter import Mesh, open_checkpoint
from areal_convert.converter.sync.hub import WeightSync
from areal_convert.converter.sync.report import PushReport
from areal_convert.engines.ranks import peers_of
from sync_server import generate, logprobs_of, tokens_of


@dataclass
class Pushed:
    """What one push reported, and what every server answered right after it (on the first rank)."""

    source: str
    version: int
    root: str
    complete: bool
    senders: int
    transport: str
    bytes: int
    sent: int
    pause_s: list[float]
    digests: dict[str, str]
    answers: dict[str, list[tuple[int, list[int], list[float]]]] = field(default_factory=dict)


def pushed(report: PushReport, source: str, urls: Sequence[str], prompts: Sequence[Sequence[int]]) -> Pushed:
    """A report, and what the servers answer now."""
    done = Pushed(
        source, report.version, report.root, report.complete, report.senders, report.transport, report.bytes,
        report.sent_bytes, list(report.pause_s.values()), report.digests,
    )  # fmt: skip
    for url in urls:
        found = [generate(url, prompt, 6) for prompt in prompts]
        done.answers[url] = [(a["weight_version"], tokens_of(a), logprobs_of(a)) for a in found]
    return done


def _push(sync: WeightSync, source: str, urls: Sequence[str], prompts: Sequence[Sequence[int]]) -> Pushed:
    """Rank 0 asks the servers; nobody pushes again before it is done."""
    done = pushed(sync.push(digests=True), source, urls if dist.get_rank() == 0 else (), prompts)
    dist.barrier()
    return done


def _sharded(path: str) -> Any:
    """transformers' model, its layers FSDP2 units over all ranks, filled from a checkpoint."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    for layer in module.model.layers:
        fully_shard(layer)
    return fully_shard(module)


def fsdp(sources: Sequence[str], urls: Sequence[str], prompts: Any, trained: str, options: Any) -> list[Pushed]:
    """Push every source; then train a step, push that, and save what torch gathers of it to `trained`."""
    module = _sharded(sources[0])
    done = []
    with WeightSync(module, urls, base=sources[0], peers=peers_of(), **options) as sync:
        for source in sources:
            open_checkpoint(source).load_into(module)
            done.append(_push(sync, source, urls, prompts))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        tokens = torch.tensor([prompts[2], prompts[2][::-1]])
        module(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _save(module, Path(sources[0]), Path(trained))
        done.append(_push(sync, trained, urls, prompts))
    return done


def _save(module: Any, like: Path, path: Path) -> None:
    from safetensors.torch import save_file

    whole = {name: value.full_tensor().detach() for name, value in module.state_dict().items()}
    if dist.get_rank() == 0:
        path.mkdir()
        shutil.copy(like / "config.json", path)
        save_file({name: value.contiguous() for name, value in whole.items()}, path / "model.safetensors")
    dist.barrier()


def megatron(
    sources: Sequence[str], shards: str, mesh: dict[str, Any], urls: Sequence[str], prompts: Any, options: Any
) -> list[Pushed]:
    """The same from a state dict with Megatron's names and shards, as `shards` (mp_rank files) has them by rank."""
    rank, where = dist.get_rank(), Mesh(**mesh)
    tp, pp = rank % where.tp, rank // where.tp
    file = next(Path(shards).rglob(f"mp_rank_{tp:02d}_{pp:03d}/model_optim_rng.pt"))
    state = torch.load(file, weights_only=False)["model"]
    state = {name: torch.zeros_like(value) for name, value in state.items()}
    done = []
    with WeightSync(state, urls, base=sources[0], mesh=where, rank=rank, peers=peers_of(), **options) as sync:
        for source in sources:
            open_checkpoint(source).load_into(state, where, rank)
            done.append(_push(sync, source, urls, prompts))
    return done


def other_weights(path: Path, out: Path, seed: int) -> Path:
    """The same model with other weights: every tensor keeps about half of its values' share."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(path, out)
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(out.glob("*.safetensors")):
        tensors = load_file(file)
        new = {n: (t + torch.randn(t.shape, generator=generator) * t.std()).to(t.dtype) for n, t in tensors.items()}
        save_file(new, file, metadata={"format": "pt"})
    assert json.loads((out / "config.json").read_text()) == json.loads((path / "config.json").read_text())
    return out
