#!/usr/bin/env python3
"""MegatronEngine on a real model, against transformers and FSDPEngine: python tools/check_smollm2.py [--steps 10]

SmolLM2-135M (`tools/make_smollm2.py build/smollm2`), on gloo ranks of this machine, in fp32:

    log-probabilities   of every token of a few sentences: transformers' own forward pass, one sentence at a time, and
                        `forward_batch` of MegatronEngine at TP3 (with sequence parallelism) and at PP2
    training            losses and gradient norms of SFT steps on the same sentences with the same configuration:
                        FSDPEngine on one rank, and MegatronEngine at TP3 and at PP2

Prints a table; the exit status is 1 when a figure differs by more than the tolerance. About 4 GiB of memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOGPROBS, LOSSES, NORMS = 1e-4, 1e-5, 1e-4
"""Tolerances in fp32: the largest absolute difference of a log-probability, the largest relative ones of a loss and of
a gradient norm (the embedding's 28 million squares are added up in fp32). What is wrong shows in a few steps: a head
that is tied on one side only makes 1e-3 of both."""

PROMPT = 3
"""Tokens at the beginning of a sample that are no targets."""

TEXTS = (
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "Water boils at a hundred degrees Celsius at sea level.",
    "A checkpoint holds the weights of a model and how they are cut.",
    "She opened the window, looked at the rain, and decided to stay at home.",
    "def add(a, b):\n    return a + b",
    "Seven times eight is fifty-six.",
    "Light needs about eight minutes from the sun to the earth.",
    "The gradient of a sum is the sum of the gradients.",
)
SAMPLES = 4
"""In a step."""


@dataclass(frozen=True)
class Layout:
    """One engine and its ranks."""

    name: str
    backend: str
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def world(self) -> int:
        world = 1
        for size in self.sizes.values():
            world *= size
        return world


BASE = Layout("FSDPEngine, 1 rank", "fsdp")
LAYOUTS = (
    Layout("MegatronEngine, TP3", "megatron", {"tensor_parallel_size": 3}),
    Layout("MegatronEngine, PP2", "megatron", {"pipeline_parallel_size": 2}),
)


# --- on the ranks ----------------------------------------------------------------------------------------------------


def tokens(path: Path) -> list[Any]:
    """Each sentence as a 1-D tensor."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    return [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS]


def batch_of(rows: Sequence[Any], step: int) -> Any:
    """The samples of a step: others in the next one, all of them again after two."""
    import torch

    from areal_convert.engines.data.batches import from_sequences

    chosen = [rows[(step * SAMPLES + n) % len(rows)] for n in range(SAMPLES)]
    return from_sequences(chosen, loss_mask=[(torch.arange(len(row)) >= PROMPT).long() for row in chosen])


def plain_logprobs(path: Path) -> dict[str, Any]:
    """transformers alone; nothing of ours."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for row in tokens(path):
            logits = model(input_ids=row[None]).logits[0]
            found.append(torch.log_softmax(logits[:-1], -1).gather(1, row[1:, None])[:, 0].tolist())
    return {"logprobs": found}


def by_engine(path: Path, layout: Layout, steps: int, lr: float) -> dict[str, Any]:
    """Log-probabilities of all sentences before training, then losses and gradient norms."""
    from areal_convert import engines
    from areal_convert.engines.data.batches import from_sequences
    from areal_convert.engines.losses import sft_loss, sft_weight

    kind = engines.MegatronEngine if layout.backend == "megatron" else engines.FSDPEngine
    config = engines.TrainEngineConfig(
        path=str(path),
        dtype="float32",
        attn_impl="sdpa",
        parallel_strategy=engines.ParallelStrategy(**layout.sizes),
        optimizer=engines.OptimizerConfig(lr=lr),
    )
    engine = kind(config)
    engine.create_process_group()
    start = time.perf_counter()
    engine.initialize()
    loaded = time.perf_counter() - start
    rows = tokens(path)
    engine.eval()
    keep: Any = list
    logprobs = engine.forward_batch(from_sequences(rows), aggregate_fn=keep)
    engine.train()
    start = time.perf_counter()
    results = [engine.train_batch(batch_of(rows, step), sft_loss, sft_weight) for step in range(steps)]
    seconds = time.perf_counter() - start
    engine.destroy()
    return {
        "logprobs": [row[:-1].tolist() for row in logprobs],
        "losses": [r["loss"] for r in results],
        "norms": [r["grad_norm"] for r in results],
        "load_seconds": loaded,
        "step_seconds": seconds / max(steps, 1),
    }


def _rank(rank: int, world: int, folder: str, answers: Any, job: Callable[..., Any], arguments: Sequence[Any]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
        answers.put((rank, job(*arguments), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
        raise


def on_ranks(world: int, job: Callable[..., dict[str, Any]], *arguments: Any, limit: float) -> list[dict[str, Any]]:
    """What `job` returns on every rank. Exits with a rank's traceback when one fails."""
    context = multiprocessing.get_context("spawn")
    answers, found = context.Queue(), {}
    with tempfile.TemporaryDirectory(prefix="check-smollm2-") as folder:
        processes = [
            context.Process(target=_rank, args=(rank, world, folder, answers, job, arguments)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            for _ in processes:
                rank, answer, error = answers.get(timeout=limit)
                if error is not None:
                    raise SystemExit(f"rank {rank} of {world} failed:\n{error}")
                found[rank] = answer
            for process in processes:
                process.join(10)
        except queue.Empty:
            raise SystemExit(f"the ranks did not answer within {limit:g} s") from None
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [found[rank] for rank in range(world)]


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """One comparison: the figures in between, and the largest difference."""

    what: str
    side: str
    against: str
    difference: float
    tolerance: float

    @property
    def fine(self) -> bool:
        return self.difference <= self.tolerance  # not a number is not


def worst(differences: Sequence[float]) -> float:
    """`max` passes over what is not a number, unless it comes first."""
    return float("nan") if any(d != d for d in differences) else max(differences)


def largest(found: Sequence[float], wanted: Sequence[float], *, relative: bool) -> float:
    if len(found) != len(wanted):
        raise SystemExit(f"{len(found)} figures and {len(wanted)}: not the same work")
    differences = [abs(a - b) / (abs(b) if relative else 1.0) for a, b in zip(found, wanted, strict=True)]
    return worst(differences)


def flat(rows: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]


def compare(layout: Layout, answers: Sequence[Mapping[str, Any]], plain: Any, base: Mapping[str, Any]) -> list[Line]:
    """Of every rank, the worst."""
    name = layout.name
    most = worst([largest(flat(a["logprobs"]), flat(plain["logprobs"]), relative=False) for a in answers])
    lines = [Line("log-probabilities", name, "transformers", most, LOGPROBS)]
    if layout is not BASE:
        for what, key, tolerance in (("losses", "losses", LOSSES), ("gradient norms", "norms", NORMS)):
            most = worst([largest(a[key], base[key], relative=True) for a in answers])
            lines.append(Line(what, name, BASE.name, most, tolerance))
    return lines


def show_training(runs: Mapping[str, Mapping[str, Any]]) -> None:
    print("step  " + "".join(f"{name:>34}" for name in runs))
    for step in range(len(next(iter(runs.values()))["losses"])):
        cells = (f"loss {run['losses'][step]:.6f}  norm {run['norms'][step]:.5f}" for run in runs.values())
        print(f"{step:4}  " + "".join(f"{cell:>34}" for cell in cells))
    for name, run in runs.items():
        print(f"{name}: loaded in {run['load_seconds']:.1f} s, {run['step_seconds']:.2f} s a step")


def show(lines: Sequence[Line]) -> None:
    for line in lines:
        kind = "absolute" if line.what == "log-probabilities" else "relative"
        print(
            f"{'ok  ' if line.fine else 'FAIL'}  {line.what:18}{line.side:22}= {line.against:20}"
            f"within {line.difference:.1e} {kind} (tolerance {line.tolerance:.0e})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that ranks may take")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        raise SystemExit(f"{args.model} is no model: python tools/make_smollm2.py {args.model}")
    if args.steps < 1:
        raise SystemExit("--steps: at least 1")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    (plain,) = on_ranks(1, plain_logprobs, args.model, limit=args.limit)
    runs: dict[str, dict[str, Any]] = {}
    lines: list[Line] = []
    for layout in (BASE, *LAYOUTS):
        answers = on_ranks(layout.world, by_engine, args.model, layout, args.steps, args.lr, limit=args.limit)
        runs[layout.name] = answers[0]
        lines += compare(layout, answers, plain, runs[BASE.name])
    show_training(runs)
    show(lines)
    if args.json:
        figures = [{"what": x.what, "side": x.side, "difference": x.difference, "fine": x.fine} for x in lines]
        args.json.write_text(json.dumps({"steps": args.steps, "figures": figures, "runs": runs}, indent=1))
    if not all(line.fine for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    main()
