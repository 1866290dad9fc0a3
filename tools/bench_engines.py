#!/usr/bin/env python3
"""Measures the engines against what one writes without them: python tools/bench_engines.py --help

    steps   tokens/s of training steps on one rank: an engine, and the loop that one writes without it, fp32, the same
            attention. Of fsdp and archon that is transformers' model, cross-entropy, clip_grad_norm_ and torch's fused
            AdamW; of megatron it is Megatron-Core driven by hand (`megatron_by_hand.py`: the same layers in its DDP,
            its distributed optimizer, its schedule, its cross-entropy). Twice: on sequences of one length, which
            transformers takes as rows of a batch (the best that it can do), and on sequences of several lengths packed
            into one row with positions that restart, the same row for both. Both models live in one process and take
            turns, a few steps each, so that whatever else the machine does meets both; ratios are those of the medians.
            `--beside` measures further engines in the same turns: archon beside fsdp, and compiled.
    bubbles the share of a pipeline's time in which ranks wait, for every schedule, against theory: see `bubbles.py`.
    load    seconds and peak memory of every rank until the model is cut to N ranks (fsdp: sharded; megatron: tensor
            parallel): through the hub, where a rank reads its own boxes, and by `from_pretrained` on every rank,
            sharded by FSDP2 afterwards. Processes of their own for every measurement; what imports take is not counted.

The goal is 0.95 of the plain loop's tokens/s; `--check` fails without it. Another engine is one entry of ENGINES, and
one of BY_HAND.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GOAL = 0.95
LR = 1e-4

MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 512},
    "32m": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 8192},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32768},
    "250m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "vocab_size": 32000},
}


def make_model(size: str, folder: Path, dtype: str = "float32") -> Path:
    """A llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = MODELS[size]["hidden_size"] // 64 if size != "tiny" else 4
    sizes: dict[str, Any] = dict(MODELS[size])
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2))
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder / size)
    return folder / size


# --- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Sequences of these lengths, in every step."""

    name: str
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def works(tokens: int) -> list[Work]:
    unit = tokens // 16
    mixed = tuple(unit * n for n in (1, 2, 5, 3, 4, 1))
    return [Work("rows of one length", (unit * 4,) * 4), Work("packed, several lengths", mixed)]


Step = Callable[[Work], float]
"""One training step; returns the loss."""


def rows_of(work: Work, vocabulary: int) -> list[Any]:
    import torch

    g = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (n,), generator=g) for n in work.lengths]


def plain(path: Path, dtype: str, device: str, attention: str = "sdpa") -> Step:
    """transformers and torch alone: fp32 masters, computation in `dtype` by autocast."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(work: Work) -> float:
        rows = [row.to(device) for row in rows_of(work, model.config.vocab_size)]
        if len(set(work.lengths)) == 1:
            ids, positions = torch.stack(rows), None
        else:
            ids = torch.cat(rows)[None]
            positions = torch.cat([torch.arange(len(row), device=device) for row in rows])[None]
        labels = torch.cat([torch.cat([row[1:], row.new_full((1,), -100)]) for row in rows])
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def plain_megatron(path: Path, dtype: str, device: str, attention: str = "sdpa", **settings: Any) -> Step:
    """Megatron-Core by hand. After the engine, whose process groups it shares: they are the process's. `device` is
    where CUDA says."""
    from megatron_by_hand import ByHand

    loop = ByHand(path, engine_config(path, dtype, attention, **settings))
    return lambda work: loop(rows_of(work, loop.vocabulary))


BY_HAND: dict[str, tuple[str, Callable[..., Step]]] = {
    "fsdp": ("transformers", plain),
    "megatron": ("megatron-core", plain_megatron),
    "archon": ("transformers", plain),
    "archon-compiled": ("transformers", plain),
}
"""What an engine is measured against."""


def engine_config(path: Path, dtype: Any, attention: Any, **settings: Any) -> Any:
    from areal_convert.engines import OptimizerConfig, TrainEngineConfig

    optimizer = OptimizerConfig(lr=LR)
    return TrainEngineConfig(path=str(path), dtype=dtype, attn_impl=attention, optimizer=optimizer, **settings)


def fsdp(path: Path, dtype: str, attention: str = "sdpa") -> Any:
    from areal_convert.engines import FSDPEngine

    return FSDPEngine(engine_config(path, dtype, attention))


def megatron(path: Path, dtype: str, attention: str = "sdpa", **settings: Any) -> Any:
    from areal_convert.engines import MegatronEngine

    return MegatronEngine(engine_config(path, dtype, attention, **settings))


def archon(path: Path, dtype: str, attention: str = "sdpa", *, compiled: bool = False, **settings: Any) -> Any:
    from areal_convert.engines import ArchonEngine, ArchonEngineConfig

    kind: Any = "sdpa" if attention == "sdpa" else "varlen"
    own = ArchonEngineConfig(attn_type=kind, enable_compile=compiled)
    return ArchonEngine(engine_config(path, dtype, attention, archon=own, **settings))


def archon_compiled(path: Path, dtype: str, attention: str = "sdpa", **settings: Any) -> Any:
    return archon(path, dtype, attention, compiled=True, **settings)


ENGINES: dict[str, Callable[..., Any]] = {
    "fsdp": fsdp,
    "megatron": megatron,
    "archon": archon,
    "archon-compiled": archon_compiled,
}


def with_engine(name: str, path: Path, dtype: str, attention: str = "sdpa", **settings: Any) -> tuple[Any, Step]:
    """The engine, and its training step."""
    engine = ENGINES[name](path, dtype, attention, **settings)
    engine.create_process_group()
    engine.initialize()
    return engine, lambda work: train_step(engine, work)


def train_step(engine: Any, work: Work) -> float:
    import torch

    from areal_convert.engines.data.batches import from_sequences
    from areal_convert.engines.losses import sft_loss, sft_weight

    model = json.loads(Path(engine.config.path, "config.json").read_text())
    rows = rows_of(work, model["vocab_size"])
    batch = from_sequences(rows, loss_mask=[torch.ones_like(row) for row in rows])
    return float(engine.train_batch(batch, sft_loss, sft_weight)["loss"])


@dataclass
class Speed:
    """Tokens/s of one kind of work: medians, and the ratio to the plain loop's."""

    work: str
    side: str
    tokens_per_second: float
    ratio: float
    loss: float
    samples: list[float]


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` is for a machine that others use as well: with one thread it is what the wall clock shows on an idle one."""


def measure_steps(
    size: str, engines: Sequence[str], tokens: int, rounds: int, threads: int, clock: str, folder: Path
) -> list[Speed]:
    """The first of the engines is the one that is measured, and whose plain loop is the measure; the others take turns
    with the two."""
    import torch

    torch.set_num_threads(threads)
    now = CLOCKS[clock]
    path = make_model(size, folder)
    base, by_hand = BY_HAND[engines[0]]
    all_found = []
    for work in works(tokens):  # new models each time: after the same steps both must be where the other is
        made = {engine: with_engine(engine, path, "float32") for engine in engines}
        sides = {base: by_hand(path, "float32", "cpu")} | {engine: step for engine, (_, step) in made.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        losses: dict[str, float] = {}
        for number in range(rounds + 1):
            order = list(sides.items())
            for name, step in order if number % 2 else reversed(order):
                start = now()
                losses[name] = step(work)
                if number:  # the first one makes optimizer states, caches and buffers
                    seconds[name].append(now() - start)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        found = []
        for name, times in seconds.items():
            ratio = medians[base] / medians[name]
            samples = [work.tokens / t for t in times]
            found.append(Speed(work.name, name, work.tokens / medians[name], ratio, losses[name], samples))
        if any(abs(loss - losses[base]) > 1e-4 * losses[base] for loss in losses.values()):
            raise SystemExit(f"{work.name}: the losses differ, the work is not the same: {losses}")
        for one, _ in reversed(made.values()):  # the first has made the process group
            one.destroy()
        end_groups()
        show_steps(found)
        all_found += found
    return all_found


def end_groups() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


# --- load ------------------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """Of the slowest, and of the fullest rank."""

    side: str
    ranks: int
    seconds: float
    peak_bytes: int
    held_bytes: int


def status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def by_engine(name: str, path: Path) -> Any:
    """Parameters are fp32: FSDPEngine's always are, they are its masters."""
    import torch.distributed as dist

    from areal_convert.engines import ParallelStrategy

    tensor = name == "megatron"
    engine = ENGINES[name](path, "float32" if tensor else "bfloat16")
    engine.config.optimizer = None
    sizes = ParallelStrategy(tensor_parallel_size=dist.get_world_size()) if tensor else None
    engine.create_process_group(sizes)
    engine.initialize()
    return engine.model[0] if tensor else engine.model


def by_transformers(path: Path) -> Any:
    """Every rank reads all, in fp32 as masters are, and keeps its part."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def load_rank(side: str, path: Path, rank: int, ranks: int, port: int, answer: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist
    import torch.distributed.fsdp
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    import areal_convert.engines.fsdp.engine  # noqa: F401

    if side == "megatron":
        from areal_convert.engines.megatron.engine import cpu_megatron

        with cpu_megatron():  # it imports Megatron-Core
            import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    model = by_transformers(path) if side == "transformers" else by_engine(side, path)
    dist.barrier()
    seconds = time.perf_counter() - start
    held = sum(getattr(p, "to_local", lambda p=p: p)().untyped_storage().nbytes() for p in model.parameters())
    answer.put((seconds, status("VmHWM") - before, held))
    dist.barrier()


def measure_load(size: str, engine: str, ranks: int, rounds: int, folder: Path) -> list[Load]:
    path = make_model(size, folder, "bfloat16")
    context = multiprocessing.get_context("spawn")
    samples: dict[str, list[tuple[float, int, int]]] = {"transformers": [], engine: []}
    for _ in range(rounds):
        for side, found in samples.items():
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            answer = context.Queue()
            arguments = [(side, path, rank, ranks, port, answer) for rank in range(ranks)]
            processes = [context.Process(target=load_rank, args=a) for a in arguments]
            for process in processes:
                process.start()
            answers = [answer.get(timeout=300) for _ in processes]
            for process in processes:
                process.join()
            found.append(tuple(max(values) for values in zip(*answers, strict=True)))
    middle = {side: [statistics.median(v) for v in zip(*found, strict=True)] for side, found in samples.items()}
    return [Load(side, ranks, seconds, int(peak), int(held)) for side, (seconds, peak, held) in middle.items()]


# --- the command -----------------------------------------------------------------------------------------------------


def show_steps(found: Sequence[Speed]) -> None:
    for speed in found:
        least, most = min(speed.samples), max(speed.samples)
        print(
            f"{speed.work:26}{speed.side:14}{speed.tokens_per_second:9,.0f} tokens/s  ({least:,.0f} to {most:,.0f})"
            f"  ratio {speed.ratio:.3f}  loss {speed.loss:.4f}",
            flush=True,
        )


def show_load(found: Sequence[Load]) -> None:
    base = found[0]
    for load in found:
        print(
            f"{load.side:14}{load.ranks} ranks  {load.seconds:6.2f} s  peak {load.peak_bytes / 2**20:7,.0f} MiB a rank"
            f"  (holds {load.held_bytes / 2**20:,.0f})  time × {load.seconds / base.seconds:.2f}"
            f"  memory × {load.peak_bytes / base.peak_bytes:.2f}"
        )


def bubbles_of(args: Any) -> list[dict[str, Any]]:
    import bubbles

    from areal_convert.engines.api.backends import SCHEDULES

    found = []
    for pp in args.pp:
        names: list[str] = args.schedules or list(SCHEDULES)
        measured = bubbles.measure(pp, args.micro or 2 * pp, names, args.pace, args.rounds, args.pictures)
        bubbles.show(measured)
        found += [asdict(bubble) for bubble in measured]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "load", "bubbles"))
    parser.add_argument("--engine", choices=sorted(ENGINES), default="fsdp")
    parser.add_argument("--beside", choices=sorted(ENGINES), nargs="+", default=[], help="of steps: further engines")
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4], help="of bubbles: ranks of the pipelines")
    parser.add_argument("--micro", type=int, help="of bubbles: micro-batches; default: twice the ranks")
    parser.add_argument("--pace", type=float, default=0.02, help="of bubbles: seconds of a rank's forward pass")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="of bubbles: a chart of each")
    parser.add_argument("--schedules", nargs="+", help="of bubbles; default: all")
    parser.add_argument("--model", choices=sorted(MODELS), help="default: 32m for steps, 250m for load")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side")
    parser.add_argument("--ranks", type=int, default=2, help="of load")
    parser.add_argument("--threads", type=int, default=1, help="of steps")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="of steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--check", action="store_true", help=f"fail below {GOAL} of the plain loop's tokens/s")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="bench-engines-") as folder:
        if args.what == "steps":
            engines = [args.engine, *args.beside]
            size = args.model or "32m"
            speeds = measure_steps(size, engines, args.tokens, args.rounds, args.threads, args.clock, Path(folder))
            figures = [asdict(s) for s in speeds]
            low = [s.ratio for s in speeds if s.ratio < GOAL]
        elif args.what == "bubbles":
            figures, low = bubbles_of(args), []
        else:
            loads = measure_load(args.model or "250m", args.engine, args.ranks, args.rounds, Path(folder))
            show_load(loads)
            figures, low = [asdict(load) for load in loads], []
    if args.json:
        args.json.write_text(json.dumps({"what": args.what, "arguments": sys.argv[1:], "figures": figures}, indent=1))
    if args.check and low:
        raise SystemExit(f"below the goal of {GOAL}: {', '.join(f'{r:.3f}' for r in low)}")


if __name__ == "__main__":
    main()
