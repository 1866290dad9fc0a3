#!/usr/bin/env python3
"""Weight sync against what bounds it, all in one run, on this machine:

    python tools/bench_sync.py                    a 1 GB model to 1 and 2 servers
    python tools/bench_sync.py --gb 0.25 --rounds 5 --json

The servers are bare receivers (a state dict behind FastAPI and uvicorn, no generation), each in a process of its own;
the hub is this process, and its source a live state dict, as a trainer's would be. Reported as medians:

    push        by shared memory and by gloo, against a bare gloo broadcast of the same bytes in 16 MiB buckets: ≥ 0.8;
                and what that broadcast takes when both sides hash every byte, and do nothing else
    disk        export as a Hugging Face directory, and `load_into` from it
    pause       of the commit: < 5 % of the push, and flat in the size of the model
    memory      that hub and servers take beyond their weights, at its peak: < 3 buckets
    delta       1 % of the model changed: ≥ 5 × faster than a whole push
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import xxhash
from synth import KINDS, write

BUCKET, BLOCK = 16 << 20, 256 << 10
EMBEDDING, LAYER = 0.526, 0.122  # GB, of Llama-3.2-1B's embedding and of one of its layers


def machine() -> dict[str, Any]:
    from bench_convert import machine as found

    return found()


def make_model(gb: float, folder: Path) -> Path:
    """A model of about so many GB in bf16, of Llama-3.2-1B's kind with fewer layers, and below 0.7 GB fewer words."""
    kind, path = KINDS["llama-3.2-1b"], folder / f"model-{gb:g}"
    layers = max(1, round((gb - EMBEDDING) / LAYER if gb > 0.7 else gb / 2 / LAYER))
    rows = int((gb - layers * LAYER) * 1e9 / 2 / kind.config["hidden_size"]) // 64 * 64
    vocabulary = kind.config["vocab_size"] if gb > 0.7 else max(64, rows)
    KINDS[path.name] = replace(kind, config={**kind.config, "vocab_size": vocabulary})
    write(path.name, path, layers=layers, shards=1)
    return path


# ------------------------------------------------------------------------------------------------ memory


def anonymous(pid: int) -> int:
    """Bytes of a process that are no file's: its own, and what it has mapped of shared memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
    return values["RssAnon"] + values["RssShmem"]


@contextmanager
def watched(pids: list[int]) -> Iterator[dict[int, int]]:
    """pid → by how much its memory grew at the peak, inside."""
    before = {pid: anonymous(pid) for pid in pids}
    grown = dict.fromkeys(pids, 0)
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.005):
            for pid in pids:
                grown[pid] = max(grown[pid], anonymous(pid) - before[pid])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield grown
    finally:
        stop.set()
        thread.join()


# ------------------------------------------------------------------------------------------------ servers


def serve(model: str, answer: Any) -> None:
    """A bare receiver: the weights of a model as a state dict, and the protocol's routes."""
    import socket

    import uvicorn
    from fastapi import FastAPI

    from areal_convert.converter import open_checkpoint
    from areal_convert.converter.sync import Receiver
    from areal_convert.converter.sync.routes import router

    state = state_of(model)
    receiver = Receiver(state, open_checkpoint(model).config)
    app = FastAPI()
    app.include_router(router(receiver))
    # As the embedded server's: asyncio sets TCP_NODELAY only where the protocol is named.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    sock.listen()  # whoever knows the URL may connect, and is heard when uvicorn is up
    answer.send(f"http://127.0.0.1:{sock.getsockname()[1]}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[sock])


def state_of(model: str | Path) -> dict[str, Any]:
    """The tensors of a checkpoint, in memory."""
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for file in sorted(Path(model).glob("*.safetensors")):
        found |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    return found


@contextmanager
def servers(count: int, model: Path) -> Iterator[tuple[list[str], list[int]]]:
    """URLs and process ids."""
    context = multiprocessing.get_context("spawn")
    started = []
    for _ in range(count):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(str(model), theirs), daemon=True)
        process.start()
        started.append((process, ours))
    try:
        urls = [ours.recv() for _, ours in started]
        yield urls, [process.pid for process, _ in started]
    finally:
        for process, _ in started:
            process.terminate()
            process.join()


# ------------------------------------------------------------------------------------------------ bare broadcast


def _group(port: int, rank: int, world: int) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=60))
    return dist.ProcessGroupGloo(dist.PrefixStore("bench", store), rank, world, timedelta(seconds=60))


def _bare_sink(port: int, rank: int, world: int, total: int, rounds: int, hashed: bool) -> None:
    import torch

    group = _group(port, rank, world)
    buffers = [torch.empty(BUCKET, dtype=torch.uint8) for _ in range(3)]
    parts = [buffers[n % 3][: min(BUCKET, total - at)] for n, at in enumerate(range(0, total, BUCKET))]
    with ThreadPoolExecutor(1) as pool:
        under_way: list[Any] = []
        for _ in range(rounds):
            _broadcast(group, parts, after=(lambda x: under_way.append(pool.submit(_hash, x))) if hashed else None)
            while under_way:
                under_way.pop().result()


def _hash(part: Any) -> None:
    """As a push does, in blocks of 256 KiB."""
    data = memoryview(part.numpy())
    for at in range(0, len(data), BLOCK):
        xxhash.xxh3_128_digest(data[at : at + BLOCK])


def _broadcast(group: Any, parts: list[Any], before: Any = None, after: Any = None) -> None:
    """One after the other, two under way at a time: the faster of one and two."""
    flying: list[tuple[Any, Any]] = []

    def land() -> None:
        work, part = flying.pop(0)
        work.wait()
        if after is not None:
            after(part)

    for part in parts:
        if before is not None:
            before(part)
        if len(flying) == 2:
            land()
        flying.append((group.broadcast(part, 0), part))
    while flying:
        land()


class Bare:
    """gloo alone: the same number of bytes from memory to so many processes, which keep nothing. `hashed`: they and the
    sender hash every byte."""

    def __init__(self, sinks: int, total: int, rounds: int, port: int, hashed: bool = False) -> None:
        import torch

        context = multiprocessing.get_context("spawn")
        self.hashed = hashed
        args = (sinks + 1, total, rounds, hashed)
        self.processes = [
            context.Process(target=_bare_sink, args=(port, n + 1, *args), daemon=True) for n in range(sinks)
        ]
        for process in self.processes:
            process.start()
        self.group = _group(port, 0, sinks + 1)
        data = torch.randint(0, 255, (total,), dtype=torch.uint8)
        self.parts = [data[at : at + BUCKET] for at in range(0, total, BUCKET)]

    def __call__(self) -> None:
        _broadcast(self.group, self.parts, before=_hash if self.hashed else None)

    def close(self) -> None:
        for process in self.processes:
            process.join(30)


# ------------------------------------------------------------------------------------------------ measuring


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def median(values: list[float]) -> float:
    return statistics.median(values)


def change(state: dict[str, Any], share: float) -> None:
    """Change the first so many of the rows of every matrix (a vector changes whole)."""
    for tensor in state.values():
        rows = max(1, int(tensor.shape[0] * share)) if tensor.dim() > 1 else tensor.shape[0]
        tensor[:rows] += 1.0


def measure_push(
    state: dict[str, Any],
    model: Path,
    urls: list[str],
    pids: list[int],
    transport: str,
    rounds: int,
    mode: str = "full",
) -> dict[str, Any]:
    """One hub, a push that is not counted (it makes the servers' second copies), then `rounds` of them."""
    from areal_convert.converter.sync import WeightSync

    found: dict[str, list[float]] = {"seconds": [], "pause": [], "send": [], "share": []}
    phases: dict[str, list[float]] = {}
    with WeightSync(state, urls, base=model, transport=transport, mode="delta" if mode == "delta" else "full") as sync:
        sync.push()
        report = sync.push()  # both copies of the servers are there, and both know their blocks
        with watched([os.getpid(), *pids]) as grown:
            for _ in range(rounds):
                if mode == "delta":
                    change(state, 0.01)
                seconds, report = timed(sync.push)
                found["seconds"].append(seconds)
                found["pause"].append(max(report.pause_s.values()))
                found["send"].append(report.seconds["send"])
                found["share"].append(report.sent_bytes / report.bytes)
                for phase, value in report.seconds.items():
                    phases.setdefault(phase, []).append(value)
        how = report.transport, report.mode
    hub, *others = grown.values()
    return {
        "transport": how[0],
        "mode": how[1],
        "bytes": report.bytes,
        **{name: median(values) for name, values in found.items()},
        "phases": {name: round(median(values), 4) for name, values in phases.items()},
        "hub_memory": hub,
        "server_memory": max(others),
    }


def measure_disk(state: dict[str, Any], model: Path, folder: Path, rounds: int) -> dict[str, float]:
    """What going by files costs: the export, and one server's load (into its only copy, without verification)."""
    from areal_convert.converter import open_checkpoint
    from areal_convert.converter.live import export_hf

    export, load, out = [], [], folder / "exported"
    target = {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(rounds):
        seconds, _ = timed(lambda: export_hf(state, model, out, overwrite=True, verify=False))
        export.append(seconds)
        seconds, _ = timed(lambda: open_checkpoint(out).load_into(target))
        load.append(seconds)
    return {"export": median(export), "load": median(load), "seconds": median(export) + median(load)}


def bare_seconds(sinks: int, total: int, rounds: int, port: int, *, hashed: bool) -> list[float]:
    bare = Bare(sinks, total, rounds + 1, port, hashed)
    seconds = [timed(bare)[0] for _ in range(rounds + 1)][1:]
    bare.close()
    return seconds


def run(gb: float, rounds: int, folder: Path, port: int) -> dict[str, Any]:
    model = make_model(gb, folder)
    state = state_of(model)
    total = sum(tensor.nbytes for tensor in state.values())
    results: dict[str, Any] = {"machine": machine(), "bytes": total, "rounds": rounds}
    results |= {"bare": {}, "hashed": {}, "push": {}}
    for sinks in (1, 2):
        seconds = bare_seconds(sinks, total, rounds, port + 2 * sinks, hashed=False)
        results["bare"][str(sinks)] = median(seconds)
        hashed = bare_seconds(sinks, total, rounds, port + 2 * sinks + 1, hashed=True)
        results["hashed"][str(sinks)] = median(hashed)
        with servers(sinks, model) as (urls, pids):
            for transport in ("shm", "gloo"):
                pushed = measure_push(state, model, urls, pids, transport, rounds)
                pushed["ratio"] = median(seconds) / pushed["seconds"]
                results["push"][f"{transport}, {sinks}"] = pushed
            if sinks == 1:
                for transport in ("shm", "gloo"):
                    pushed = measure_push(state, model, urls, pids, transport, rounds, "delta")
                    pushed["faster"] = results["push"][f"{transport}, 1"]["seconds"] / pushed["seconds"]
                    results["push"][f"{transport}, 1, delta"] = pushed
    results["disk"] = measure_disk(state, model, folder, min(rounds, 3))
    return results


def pauses(folder: Path, rounds: int) -> dict[str, float]:
    """The pause for models of three sizes."""
    found = {}
    for gb in (0.1, 0.3, 1.0):
        model = make_model(gb, folder / "pauses")
        state = state_of(model)
        with servers(1, model) as (urls, pids):
            found[f"{gb:g} GB"] = measure_push(state, model, urls, pids, "shm", rounds)["pause"]
    return found


def report(results: dict[str, Any]) -> str:
    """Tables in Markdown."""
    total = results["bytes"]
    lines = [f"{total / 1e9:.2f} GB, {results['rounds']} rounds, {results['machine']}", ""]
    lines += [
        "| to servers | seconds | GB/s | of bare gloo | pause, ms | of the push | hub, buckets | server, buckets |"
    ]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for sinks, seconds in results["bare"].items():
        lines.append(f"| bare gloo, {sinks} | {seconds:.3f} | {total / 1e9 / seconds:.2f} | 1 | | | | |")
        bound = results["hashed"][sinks]
        share = f"{seconds / bound:.2f}"
        lines.append(f"| and hashed, {sinks} | {bound:.3f} | {total / 1e9 / bound:.2f} | {share} | | | | |")
    for name, one in results["push"].items():
        ratio = f"{one['ratio']:.2f}" if "ratio" in one else f"{one['faster']:.1f} × a whole push"
        memory = f"{one['hub_memory'] / BUCKET:.1f} | {one['server_memory'] / BUCKET:.1f}"
        pause = f"{one['pause'] * 1e3:.2f} | {one['pause'] / one['seconds']:.2%}"
        speed = f"{one['seconds']:.3f} | {total / 1e9 / one['seconds']:.2f}"
        lines.append(f"| {name} | {speed} | {ratio} | {pause} | {memory} |")
    disk = results["disk"]
    text = f"| disk: export {disk['export']:.3f}, load {disk['load']:.3f} | {disk['seconds']:.3f} | | | | | | |"
    lines += [text, ""]
    lines += [
        f"delta: {one['share']:.1%} of the bytes sent" for one in results["push"].values() if one["mode"] == "delta"
    ]
    lines += [f"pause by size: {', '.join(f'{k}: {v * 1e3:.2f} ms' for k, v in results.get('pauses', {}).items())}"]
    lines += [f"phases of {name}: {one['phases']}" for name, one in results["push"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29650, help="for the bare broadcast")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-pauses", action="store_true", help="leave out the pause of three sizes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-sync-") as folder:
        results = run(arguments.gb, arguments.rounds, Path(folder), arguments.port)
        if not arguments.no_pauses:
            results["pauses"] = pauses(Path(folder), arguments.rounds)
    print(json.dumps(results, indent=2) if arguments.json else report(results))


if __name__ == "__main__":
    main()
