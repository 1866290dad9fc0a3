#!/usr/bin/env python3
"""Measures an engine on one GPU: python tools/gpu_check.py --help

    speed     step time, tokens/s, MFU and peak memory of a llama of 1.1 billion random weights, bf16 with fp32 masters
              and AdamW, one side after the other. fsdp: the engine, and plain transformers under autocast with the same
              attention. megatron: the engine, Megatron-Core driven by hand, and FSDPEngine; with Transformer Engine's
              layers where it is installed. Sequences of one length, so that the plain loop can take rows of a batch.
              archon: the engine compiled and not, plain transformers, and FSDPEngine.
    fp8       megatron again, engine and by hand, with FP8 and block scales: on Hopper, with Transformer Engine. Where
              it cannot run the reason is printed.
    offload   seconds of offload() and onload(), memory left in between; the loss before and after must be equal.

MFU is model FLOPs (`engines.flops`: six for every weight and token, attention by true lengths, nothing for
recomputation) by the bf16 peak of the device's data sheet. `--dry-run` does the same with a tiny model on the CPU: it
shows that the script works, its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench_engines import BY_HAND, Step, Work, end_groups, make_model, train_step, with_engine

PRECISION = "bfloat16"


@dataclass
class Speed:
    """Of one side. `mfu` is None where the device's peak is not known."""

    side: str
    attention: str
    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    peak_bytes: int
    loss: float


@dataclass
class Moved:
    offload_seconds: float
    onload_seconds: float
    bytes_before: int
    bytes_away: int


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def memory(device: str, *, peak: bool = False) -> int:
    """Bytes that tensors have on the GPU; 0 on the CPU, where nobody counts them."""
    import torch

    if device != "cuda":
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def measure(side: str, attention: str, step: Step, work: Work, device: str, steps: int, path: Path) -> Speed:
    import torch

    from areal_convert.engines.flops import Architecture, peak_tflops

    for _ in range(2):  # kernels are chosen, states made
        step(work)
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start, loss = time.perf_counter(), 0.0
    for _ in range(steps):
        loss = step(work)
    synchronize(device)
    seconds = (time.perf_counter() - start) / steps
    flops = Architecture.of(json.loads((path / "config.json").read_text())).training(work.lengths)
    peak = peak_tflops(torch.cuda.get_device_name()) if device == "cuda" else None
    mfu = None if peak is None else flops / seconds / (peak * 1e12)
    return Speed(side, attention, seconds, work.tokens / seconds, mfu, memory(device, peak=True), loss)


def move(engine: Any, work: Work, device: str) -> Moved:
    """Away and back; nothing may have changed."""
    import torch

    from areal_convert.engines.data.batches import from_sequences
    from areal_convert.engines.losses import sft_loss, sft_weight

    rows = [torch.arange(3, 3 + work.lengths[0])]
    batch = from_sequences(rows, loss_mask=[torch.ones_like(row) for row in rows])
    before, held = float(engine.eval_batch(batch, sft_loss, sft_weight)), memory(device)
    times = []
    away = 0
    for action in (engine.offload, engine.onload):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - start)
        away = away or memory(device)
    after = float(engine.eval_batch(batch, sft_loss, sft_weight))
    if after != before:
        raise SystemExit(f"offload and onload changed the model: loss {before} before, {after} after")
    if device == "cuda" and away > held / 10:
        raise SystemExit(f"offload left {away} of {held} bytes on the GPU")
    train_step(engine, work)  # and it still trains
    return Moved(times[0], times[1], held, away)


@dataclass(frozen=True)
class Bench:
    """What is measured, and on what; `layers` is what stands in the table."""

    work: Work
    device: str
    steps: int
    path: Path
    attention: str
    layers: str

    def engine(self, name: str, *, moves: bool = False, **settings: Any) -> tuple[Speed, Moved | None]:
        engine, step = with_engine(name, self.path, PRECISION, self.attention, **settings)
        found = self._speed(name, step)
        moved = move(engine, self.work, self.device) if moves else None
        engine.destroy()
        del engine, step
        clean(self.device)
        return found, moved

    def by_hand(self, name: str, **settings: Any) -> Speed:
        side, make = BY_HAND[name]
        step = make(self.path, PRECISION, self.device, self.attention, **settings)
        found = self._speed(side, step)
        del step
        clean(self.device)
        return found

    def _speed(self, side: str, step: Step) -> Speed:
        return measure(side, self.layers, step, self.work, self.device, self.steps, self.path)


def clean(device: str) -> None:
    """Nothing of one side stays for the next: memory is counted for each by itself."""
    import torch

    if (state := sys.modules.get("megatron.core.parallel_state")) is not None:
        state.destroy_model_parallel()
    end_groups()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def run_fsdp(bench: Bench) -> list[dict[str, Any]]:
    speed, moved = bench.engine("fsdp", moves=True)
    return [report([speed, bench.by_hand("fsdp")], moved)]


def run_megatron(bench: Bench) -> list[dict[str, Any]]:
    from areal_convert.engines import FP8EngineConfig, MegatronEngineConfig

    speed, moved = bench.engine("megatron", moves=True)
    other, _ = replace(bench, layers=bench.attention).engine("fsdp")
    found = [report([speed, bench.by_hand("megatron"), other], moved)]
    fp8 = FP8EngineConfig(recipe="blockwise")
    if (reason := no_fp8(bench, fp8)) is not None:
        print(f"FP8, blockwise: skipped: {reason}")
        return [*found, {"skipped": f"FP8, blockwise: {reason}"}]
    own = replace(bench, layers="FP8, blockwise")
    speed, _ = own.engine("megatron", megatron=MegatronEngineConfig(fp8_config=fp8))
    return [*found, report([speed, own.by_hand("megatron", megatron=MegatronEngineConfig(fp8_config=fp8))])]


def run_archon(bench: Bench) -> list[dict[str, Any]]:
    compiled, moved = replace(bench, layers=f"{bench.layers}, compiled").engine("archon-compiled", moves=True)
    eager, _ = bench.engine("archon")
    other = replace(bench, layers=bench.attention)
    fsdp, _ = other.engine("fsdp")
    return [report([compiled, other.by_hand("archon"), eager, fsdp], moved)]


RUNS = {"fsdp": run_fsdp, "megatron": run_megatron, "archon": run_archon}


def no_fp8(bench: Bench, config: Any) -> str | None:
    """Why FP8 is not measured here; None: it is."""
    import torch

    from areal_convert.converter.errors import ConfigError
    from areal_convert.engines.megatron import fp8

    model = json.loads((bench.path / "config.json").read_text())
    try:
        fp8.check(config, model, fp8.machine(torch.device(bench.device)))
    except ConfigError as error:
        return "; ".join(problem.what for problem in error.problems) or str(error)
    return None


def benches(engine: str, work: Work, device: str, steps: int, path: Path) -> list[Bench]:
    """One for every kind of attention that there is; Transformer Engine chooses by itself."""
    if engine == "megatron" and device == "cuda" and find_spec("transformer_engine"):
        return [Bench(work, device, steps, path, "sdpa", "transformer engine")]
    if engine == "archon" and device == "cuda":
        plain = "flash_attention_2" if find_spec("flash_attn") else "flex_attention"
        return [Bench(work, device, steps, path, plain, "varlen")]
    kinds = ["sdpa"]
    if device == "cuda" and find_spec("flash_attn"):
        kinds.append("flash_attention_2")
    return [Bench(work, device, steps, path, kind, kind) for kind in kinds]


def report(found: list[Speed], moved: Moved | None = None) -> dict[str, Any]:
    """Print it; what goes into the file. Ratios are to the second one, which is driven by hand."""
    base = found[1].tokens_per_second
    for speed in found:
        mfu = "      -" if speed.mfu is None else f"{speed.mfu:7.1%}"
        print(
            f"{speed.side:14}{speed.attention:20}{speed.step_seconds * 1000:9,.1f} ms"
            f"{speed.tokens_per_second:11,.0f} tokens/s  MFU {mfu}  peak {speed.peak_bytes / 2**30:6.1f} GiB"
            f"  ratio {speed.tokens_per_second / base:.3f}  loss {speed.loss:.4f}"
        )
    if moved is None:
        return {"speed": [asdict(s) for s in found]}
    print(
        f"offload {moved.offload_seconds:.2f} s, onload {moved.onload_seconds:.2f} s;"
        f" {moved.bytes_before / 2**30:.1f} GiB before, {moved.bytes_away / 2**30:.1f} GiB while away"
    )
    return {"speed": [asdict(s) for s in found], "offload": asdict(moved)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(RUNS), nargs="+", default=["fsdp"])
    parser.add_argument("--length", type=int, default=2048, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=4, help="in a step")
    parser.add_argument("--steps", type=int, default=10, help="measured, of each side")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if args.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --dry-run tries the script on the CPU")
    device = "cpu" if args.dry_run else "cuda"
    work = Work("rows of one length", (args.length,) * args.sequences)
    figures = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = make_model("tiny" if args.dry_run else "1b", Path(folder), "bfloat16")
        for engine in args.engine:
            for bench in benches(engine, work, device, args.steps, path):
                figures += RUNS[engine](bench)
    if args.json:
        name = torch.cuda.get_device_name() if device == "cuda" else "dry run"
        args.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
