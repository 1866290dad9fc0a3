#!/usr/bin/env python3
"""Measures conversions against a plain copy of the same bytes: python tools/bench_convert.py --help

What is measured is what a person waits for: whole processes, from their start until the target is on the disk.

- Each run of ours stands beside a `cp -r` of the same source within seconds, in an order that rotates, so that a
  disk or a neighbour that slows down slows all of them. Ratios are those of the medians.
- Both are followed by an fsync of every file and directory of the target. Ours already did that when it returned;
  `cp` leaves it to the kernel, and a copy that a power cut would take back is no fair comparison.
- Page cache, the same before every run: earlier targets are deleted, everything dirty is written back, and the source
  is read through once (`--cache warm`) or dropped from the cache (`--cache cold`).
- Memory: `ru_maxrss` is the largest process, with the pages of mapped files. A sampler adds up the anonymous memory
  of the whole process tree every 50 ms: what would have to be swapped.
- Start-up is measured apart. It is part of every figure nevertheless.
- After the first run of each job `areal-convert verify` compares source and target; a difference ends the benchmark.

It runs on the standard library alone and stays small: a child's `ru_maxrss` begins at that of its parent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
MIB = 1 << 20
PLAN_MESH = ["--to", "torch_dist", "--tp", "8", "--pp", "16", "--ep", "64", "--etp", "1"]
# DeepSeek's 61 layers do not divide by 16 stages; half of them are cut the same way.
PLAN_LAYOUTS = {61: "Et*3|(tttt|)*14t*2mL", 30: "Et|(tt|)*14tmL"}
PEERS = {
    "transformers load + save": (
        "import sys; from transformers import AutoModelForCausalLM as M; "
        "M.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[2])"
    ),
    "safetensors load + save": (
        "import sys, pathlib; from safetensors.torch import load_file, save_file; "
        "a, b = map(pathlib.Path, sys.argv[1:]); b.mkdir(); "
        "[save_file(load_file(f), b / f.name) for f in sorted(a.glob('*.safetensors'))]"
    ),
}


@dataclass(frozen=True)
class Job:
    """One conversion. `source` names the job whose target it begins with, or is empty for the HF directory."""

    title: str
    flags: Sequence[str]
    source: str = ""


JOBS: dict[str, Job] = {
    "to_torch_dist": Job("HF → torch_dist TP4×PP2", ["--to", "torch_dist", "--tp", "4", "--pp", "2"]),
    "from_torch_dist": Job("torch_dist TP4×PP2 → HF", ["--to", "hf"], source="to_torch_dist"),
    "to_mp_rank": Job("HF → mp_rank TP4", ["--to", "mp_rank", "--tp", "4"]),
    "to_dcp": Job("HF → dcp on 8 ranks", ["--to", "dcp", "--dp-shard", "8"]),
    "to_archon": Job("HF → archon", ["--to", "archon"]),
}


# --- one run ---------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """What one run took: seconds until the target is durable, CPU seconds of the processes, bytes of memory."""

    wall: float
    cpu: float
    rss: int
    anonymous: int


@dataclass
class Series:
    """The runs of one command."""

    samples: list[Sample] = field(default_factory=list)

    def median(self, what: str) -> float:
        return statistics.median(getattr(sample, what) for sample in self.samples)

    def peak(self, what: str) -> int:
        return max(getattr(sample, what) for sample in self.samples)

    def seconds(self) -> str:
        """`4.87 (4.80–5.02)`: the median, and the fastest and the slowest run."""
        times = [sample.wall for sample in self.samples]
        return f"{self.median('wall'):.2f} ({min(times):.2f}–{max(times):.2f})"


class MemorySampler(threading.Thread):
    """Watches the memory of a process and of all that descend from it."""

    def __init__(self, pid: int, every: float = 0.05) -> None:
        super().__init__(daemon=True)
        self.pid, self.every = pid, every
        self.anonymous = self.rss = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(self.every):
            found = [_memory(pid) for pid in _tree(self.pid)]
            self.anonymous = max(self.anonymous, sum(anonymous for anonymous, _ in found))
            self.rss = max(self.rss, sum(rss for _, rss in found))


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        except OSError:  # it ended while we looked
            continue
    return found


def _memory(pid: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    values = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("Rss", "VmRSS"))}
    return values.get("RssAnon", 0) + values.get("RssShmem", 0), values.get("VmRSS", 0)


def measure(command: Sequence[str | Path], target: Path | None = None, env: Mapping[str, str] | None = None) -> Sample:
    """Runs a command to its end, and until `target` is on the disk. A command that fails ends the benchmark."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
    )
    sampler = MemorySampler(process.pid)
    sampler.start()
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if target is not None:
        fsync_tree(target)
    wall = time.perf_counter() - start
    sampler.stop.set()
    sampler.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        words = " ".join(map(str, command))
        raise SystemExit(f"{words}\nfailed with {process.returncode}:\n{output.decode(errors='replace')[-4000:]}")
    peak = max(usage.ru_maxrss << 10, sampler.rss)
    return Sample(wall, usage.ru_utime + usage.ru_stime, peak, sampler.anonymous)


def fsync_tree(path: Path) -> None:
    for folder, _, files in os.walk(path):
        for name in (*(os.path.join(folder, file) for file in files), folder):
            descriptor = os.open(name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def set_cache(source: Path, state: str) -> None:
    """Writes back everything that is dirty, then reads the source through or drops it from the page cache."""
    os.sync()
    for file in (file for file in source.rglob("*") if file.is_file()):
        with file.open("rb", buffering=0) as opened:
            if state == "cold":
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                buffer = bytearray(8 * MIB)
                while opened.readinto(buffer):
                    pass


# --- the benchmark ---------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """Where things are, and how often they are measured."""

    convert: list[str]
    workdir: Path
    runs: int
    cache: str

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def model(self, kind: str, *flags: str) -> Path:
        """The synthetic checkpoint, made if it is not there. In a process of its own: it takes memory."""
        path = self.workdir / "models" / "-".join([kind, *(flag.lstrip("-") for flag in flags)])
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(f".{path.name}")
            shutil.rmtree(scratch, ignore_errors=True)
            subprocess.run([sys.executable, TOOLS / "synth.py", kind, scratch, *flags], check=True, stdout=sys.stderr)
            scratch.rename(path)
        return path

    def target(self) -> Path:
        path = self.workdir / "target"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def timed(self, source: Path, command: Callable[[Path], Sequence[str | Path]]) -> Sample:
        target = self.target()
        set_cache(source, self.cache)
        return measure(command(target), target)

    def job(self, name: str, model: Path) -> dict[str, Any]:
        """A job's runs: copy, ours without and ours with verification, side by side."""
        job = JOBS[name]
        source = self.prepared(job.source, model)
        ours = [*self.convert, "convert", source]
        commands: dict[str, Callable[[Path], Sequence[str | Path]]] = {
            "copy": lambda target: ["cp", "-r", source, target],
            "plain": lambda target: [*ours, target, *job.flags, "--no-verify"],
            "verified": lambda target: [*ours, target, *job.flags],
        }
        series = {kind: Series() for kind in commands}
        for run in range(self.runs):
            for kind in _rotated(commands, run):
                series[kind].samples.append(self.timed(source, commands[kind]))
                if run == 0 and kind == "plain":
                    self.check(source)
            times = ", ".join(f"{kind} {one.samples[-1].wall:.2f} s" for kind, one in series.items())
            self.say(f"  {job.title}, run {run + 1}: {times}")
        size = _bytes(source)
        return {"title": job.title, "bytes": size, "series": series}

    def check(self, source: Path) -> None:
        command = [*self.convert, "verify", str(source), str(self.workdir / "target")]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} found a difference:\n{done.stdout}{done.stderr}")

    def prepared(self, name: str, model: Path) -> Path:
        """The input of a job: the model, or what another job makes of it (once)."""
        if not name:
            return model
        path = self.workdir / "prepared" / f"{model.name}-{name}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            measure([*self.convert, "convert", model, path, *JOBS[name].flags])
        return path

    def peers(self, model: Path) -> dict[str, Series]:
        """What people do without us, on the same files."""
        series = {name: Series() for name in PEERS}
        for run in range(self.runs):
            for name in _rotated(PEERS, run):
                code = PEERS[name]
                command = [sys.executable, "-c", code, model]
                series[name].samples.append(self.timed(model, lambda target, c=command: [*c, target]))
            self.say(
                f"  peers, run {run + 1}: {', '.join(f'{n} {s.samples[-1].wall:.2f} s' for n, s in series.items())}"
            )
        return series

    def startup(self) -> dict[str, Series]:
        commands = {
            "areal-convert --help": [*self.convert, "--help"],
            "python -c 'import torch'": [sys.executable, "-c", "import torch"],
            "python -c pass": [sys.executable, "-c", "pass"],
        }
        series = {name: Series() for name in commands}
        for run in range(self.runs + 1):  # the first one reads the files of the interpreter
            for name, command in commands.items():
                sample = measure(command)
                if run:
                    series[name].samples.append(sample)
        return series

    def plan(self, fp8: bool) -> dict[int, dict[str, Any]]:
        """Planning DeepSeek-V3 at full size, and at about half the layers: is it linear?"""
        found: dict[int, dict[str, Any]] = {}
        for layers, layout in PLAN_LAYOUTS.items():
            model = self.model("deepseek-v3-headers", "--layers", str(layers), *(["--fp8"] if fp8 else []))
            index = json.loads((model / "model.safetensors.index.json").read_text())
            series = Series()
            for _ in range(self.runs):
                series.samples.append(measure([*self.convert, "plan", model, *PLAN_MESH, "--layout", layout, "--json"]))
            self.say(f"  plan, {layers} layers: {series.seconds()} s")
            size = index["metadata"]["total_size"]
            found[layers] = {"tensors": len(index["weight_map"]), "bytes": size, "series": series}
        return found


def _rotated(names: Iterable[str], by: int) -> list[str]:
    names = list(names)
    by %= len(names)
    return names[by:] + names[:by]


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# --- the report ------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next((int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def job_table(jobs: dict[str, dict[str, Any]]) -> str:
    head = ["job", "`cp -r`, s", "ours, s", "ratio", "verified, s", "ratio", "CPU s", "peak RSS", "anonymous"]
    return table(head, (_job_row(job) for job in jobs.values()))


def _job_row(job: dict[str, Any]) -> list[str]:
    copy, plain, verified = (job["series"][kind] for kind in ("copy", "plain", "verified"))

    def cells(ours: Series) -> list[str]:
        return [ours.seconds(), f"**{ours.median('wall') / copy.median('wall'):.2f}**"]

    def memory(what: str) -> str:
        return f"{plain.peak(what) / MIB:.0f} / {verified.peak(what) / MIB:.0f} MiB"

    return [
        f"{job['title']}, {job['bytes'] / 1e9:.2f} GB",
        copy.seconds(),
        *cells(plain),
        *cells(verified),
        " / ".join(f"{series.median('cpu'):.1f}" for series in (copy, plain, verified)),
        memory("rss"),
        memory("anonymous"),
    ]


def series_table(first: str, series: dict[str, Series]) -> str:
    rows = (
        [name, one.seconds(), f"{one.median('cpu'):.2f}", f"{one.peak('rss') / MIB:.0f} MiB"]
        for name, one in series.items()
    )
    return table([first, "s", "CPU s", "peak RSS"], rows)


def plan_table(plans: dict[int, dict[str, Any]]) -> str:
    def row(layers: int, plan: dict[str, Any]) -> list[str]:
        series: Series = plan["series"]
        return [
            f"{layers} layers, {plan['bytes'] / 1e9:,.0f} GB",
            f"{plan['tensors']:,}",
            series.seconds(),
            f"{series.median('wall') / plan['tensors'] * 1e6:.0f}",
            f"{series.peak('rss') / MIB:.0f} MiB",
        ]

    return table(
        ["plan of DeepSeek-V3", "tensors", "s", "µs a tensor", "peak RSS"], (row(n, plan) for n, plan in plans.items())
    )


def report(results: dict[str, Any]) -> str:
    host = results["machine"]
    parts = [
        f"{host['cpu']}, {host['cores']} cores, {host['memory'] / (1 << 30):.0f} GiB, Python {host['python']}; "
        f"{results['runs']} runs each, median (fastest–slowest); page cache {results['cache']}; "
        f"load before the first run {host['load']:.2f}.",
    ]
    if jobs := results.get("jobs"):
        parts.append("CPU: copy / ours / ours verified. Memory: ours / ours verified, the highest of all runs.")
        parts.append(job_table(jobs))
    if results.get("peers"):
        parts.append(series_table("on the same files", results["peers"]))
    if results.get("startup"):
        parts.append(series_table("start-up", results["startup"]))
    if results.get("plan"):
        parts.append(plan_table(results["plan"]))
    return "\n\n".join(parts) + "\n"


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(arguments.convert.split(), arguments.workdir, arguments.runs, arguments.cache)
    results: dict[str, Any] = {"machine": machine(), "model": arguments.model, "runs": bench.runs, "cache": bench.cache}
    wanted = arguments.jobs
    if "startup" in wanted:
        results["startup"] = bench.startup()
    names = [name for name in wanted if name in JOBS]
    if names or "peers" in wanted:
        given = Path(arguments.model)
        model = (given if given.is_dir() else bench.model(arguments.model)).resolve()  # `cp -r` would copy a link
        bench.say(f"{model}: {_bytes(model) / 1e9:.2f} GB")
        if names:
            results["jobs"] = {name: bench.job(name, model) for name in names}
        if "peers" in wanted:
            results["peers"] = bench.peers(model)
    if "plan" in wanted:
        results["plan"] = bench.plan(arguments.fp8)
    bench.target()
    return results


def main() -> None:
    everything = ["startup", *JOBS, "peers", "plan"]
    parser = argparse.ArgumentParser(description="measure conversions against `cp -r` of the same bytes")
    parser.add_argument("--model", default="llama-3.2-1b", help="a kind that tools/synth.py knows, or a directory")
    parser.add_argument("--runs", type=int, default=5, help="runs of each command (default %(default)s)")
    parser.add_argument("--jobs", type=lambda text: text.split(","), default=everything, help=",".join(everything))
    parser.add_argument("--workdir", type=Path, default=Path("build/bench"), help="needs about four times the model")
    parser.add_argument("--cache", choices=["warm", "cold"], default="warm", help="the source before each run")
    parser.add_argument("--fp8", action="store_true", help="plan DeepSeek-V3 in its published FP8 layout, not in bf16")
    parser.add_argument(
        "--convert", default=str(Path(sys.executable).with_name("areal-convert")), help="the command that is measured"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.jobs) - set(everything):
        parser.error(f"unknown jobs {', '.join(sorted(unknown))}; there are {', '.join(everything)}")
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    results = run(arguments)
    text = report(results)
    name = f"{Path(arguments.model).name}-{arguments.cache}"
    (arguments.workdir / f"{name}.json").write_text(json.dumps(results, indent=1, default=asdict) + "\n")
    (arguments.workdir / f"{name}.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
