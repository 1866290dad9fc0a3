#!/usr/bin/env python3
"""Measures conversions from a Hub against `hf download` of the same repository: python tools/bench_hub.py --help

A Hub of the tests (`tests/hub_server.py`) serves a synthetic model on loopback, in a process of its own; it counts the
requests and the bytes that went out. What is measured is what a person waits for, as in `bench_convert`: whole
processes, from their start, with empty caches, until the target is on the disk; the commands of one run stand beside
each other in an order that rotates, and ratios are those of the medians.

    hf download           the repository, as it is, into a directory
    convert               straight from the Hub to torch_dist TP4 × PP2, without and with reading it back
    download, convert     what one does without us: both, one after the other
    pull                  our `pull`, as it is and converting (`--to`)
    one rank              `convert --rank 0`: what one of the eight ranks needs

Both sides of the wire share the machine's cores, so these are figures for fast networks: on a slow one all commands
take as long as the bytes do. The goal is 0.8 of the throughput of `hf download` while converting; `--check` fails
without it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_convert import MIB, TOOLS, Sample, Series, fsync_tree, machine, measure, table

REPO = "bench/model"
MESH = ["--to", "torch_dist", "--tp", "4", "--pp", "2"]
GOAL = 0.8

MODELS: dict[str, list[str]] = {
    "small": ["llama-3.2-1b", "--layers", "2", "--shards", "2"],
    "llama": ["llama-3.2-1b", "--layers", "4", "--shards", "4"],
    "moe": ["qwen3-moe-small", "--shards", "4"],
}
"""Arguments of `synth.py`: 0.77 GB in 20 tensors, 1.01 GB in 38 and 1.5 GB in 1,263; several files, as Hugging Face's
client fetches one at a time from each."""


# --- the Hub, in a process of its own --------------------------------------------------------------------------------


def serve(root: Path, model: Path, delay: float) -> None:
    """Serve a directory as REPO. Says how to reach it, then, for every line of input, what was sent since the last.
    `delay`: seconds before every answer."""
    sys.path.insert(0, str(TOOLS.parent / "tests"))
    from hub_server import HubServer  # pyright: ignore[reportMissingImports]

    with HubServer(root) as hub:
        hub.add_repo(REPO, model)
        if delay:
            hub.fault(delay=delay)
        print(json.dumps(hub.settings()), flush=True)
        for _ in sys.stdin:
            sent = [call for call in hub.calls() if call.kind in ("file", "cdn")]
            counted = {"bytes": sum(call.sent for call in sent), "requests": len(hub.calls()), "ranges": len(sent)}
            hub.reset()
            print(json.dumps(counted), flush=True)


class Hub:
    """The other process. `env` is for its clients; `count` says what went out since it was last asked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        settings = json.loads(self._line())
        plain = {n: text for n, text in os.environ.items() if not n.startswith(("HF_", "HUGGING", "AREAL_CACHE"))}
        self.env = plain | settings

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("The Hub ended.")
        return line

    def count(self) -> dict[str, int]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self._line())


@contextmanager
def hub_of(model: Path, root: Path, delay: float) -> Iterator[Hub]:
    shutil.rmtree(root, ignore_errors=True)
    command = [sys.executable, __file__, "--serve", root, "--model", model, "--delay", str(delay)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Hub(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


# --- the benchmark ---------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """One way to get the model here. `command` is given the target; `share` is what of the repository it needs."""

    title: str
    command: Callable[[Path], Sequence[str | Path]]
    series: Series = field(default_factory=Series)
    sent: list[dict[str, int]] = field(default_factory=list)
    share: int = 0

    def median(self, what: str) -> float:
        counts = sorted(count[what] for count in self.sent)
        return counts[len(counts) // 2]


@dataclass
class Bench:
    """Where things are, and how often they are measured."""

    convert: list[str]
    hf: str
    workdir: Path
    runs: int
    delay: float

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def model(self, name: str) -> Path:
        """A directory, or the synthetic model of that name, made if it is not there."""
        if Path(name).is_dir():
            return Path(name).resolve()
        path = self.workdir / "models" / f"hub-{name}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(f".{path.name}")
            shutil.rmtree(scratch, ignore_errors=True)
            kind, *flags = MODELS[name]
            subprocess.run([sys.executable, TOOLS / "synth.py", kind, scratch, *flags], check=True, stdout=sys.stderr)
            scratch.rename(path)
        return path

    def ways(self, model: Path, wanted: Sequence[str]) -> dict[str, Way]:
        ours, url = self.convert, f"hf://{REPO}"
        down = [self.hf, "download", REPO, "--local-dir"]

        def both(target: Path) -> list[str | Path]:
            local = target.with_name("downloaded")
            script = '"$1" download "$2" --local-dir "$3" && shift && exec "$@"'
            convert = [*ours, "convert", local, target, *MESH, "--no-verify"]
            return ["sh", "-c", script.replace("shift", "shift 3"), "sh", self.hf, REPO, local, *convert]

        ways = {
            "download": Way("hf download", lambda t: [*down, t]),
            "convert": Way("convert", lambda t: [*ours, "convert", url, t, *MESH, "--no-verify"]),
            "verified": Way("convert, verified", lambda t: [*ours, "convert", url, t, *MESH]),
            "both": Way("hf download, then convert", both),
            "pull": Way("pull", lambda t: [*ours, "pull", REPO, "-o", t]),
            "pull_to": Way("pull --to torch_dist", lambda t: [*ours, "pull", REPO, "-o", t, *MESH]),
            "rank": Way("convert --rank 0", lambda t: [*ours, "convert", url, t, *MESH, "--rank", "0", "--no-verify"]),
            "rank_gap": Way(
                "… --max-gap 1MiB",
                lambda t: [*ours, "convert", url, t, *MESH, "--rank", "0", "--max-gap", "1MiB", "--no-verify"],
            ),
        }
        whole = sum(file.stat().st_size for file in model.rglob("*") if file.is_file())
        mine = self.share(model)
        for name, way in ways.items():
            way.share = mine if name.startswith("rank") else whole
        return {name: way for name, way in ways.items() if name in wanted}

    def share(self, model: Path) -> int:
        """Bytes of the source that rank 0 holds."""
        command = [*self.convert, "plan", str(model), *MESH, "--rank", "0", "--json"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["bytes_read"]

    def once(self, hub: Hub, way: Way) -> Sample:
        """One run, with caches that nobody has used. Removing what is left of it does not count."""
        place = self.workdir / "run"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        caches = {"HF_HOME": str(place / "home"), "AREAL_CACHE": str(place / "cache")}
        os.sync()
        hub.count()
        target = place / "target"
        sample = measure(way.command(target), target, hub.env | caches)
        way.series.samples.append(sample)
        way.sent.append(hub.count())
        return sample

    def check(self, model: Path) -> None:
        """What the last run wrote holds the same weights."""
        command = [*self.convert, "verify", str(model), str(self.workdir / "run" / "target")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} found a difference:\n{done.stdout}{done.stderr}")

    def run(self, model: Path, wanted: Sequence[str]) -> dict[str, Way]:
        ways = self.ways(model, wanted)
        fsync_tree(model)
        with hub_of(model, self.workdir / "hub", self.delay) as hub:
            for run in range(self.runs):
                names = list(ways)
                for name in names[run % len(names) :] + names[: run % len(names)]:
                    sample = self.once(hub, ways[name])
                    self.say(f"  run {run + 1}, {ways[name].title}: {sample.wall:.2f} s")
                    if run == 0 and not name.startswith("rank"):
                        self.check(model)
        shutil.rmtree(self.workdir / "run", ignore_errors=True)
        shutil.rmtree(self.workdir / "hub", ignore_errors=True)
        return ways


# --- the report ------------------------------------------------------------------------------------------------------


def report(ways: dict[str, Way], host: dict[str, Any], runs: int, delay: float) -> str:
    size = max(way.share for way in ways.values())
    late = f"every answer {delay * 1000:.0f} ms late, " if delay else ""
    intro = (
        f"{host['cpu']}, {host['cores']} cores, Python {host['python']}; {size / 1e9:.2f} GB over loopback, client and "
        f"Hub on the same cores; {late}{runs} runs each, median (fastest–slowest); load before {host['load']:.2f}."
    )
    head = ["", "s", "MB/s", "of `hf download`", "CPU s", "peak RSS", "fetched", "of its share", "requests"]
    rows = [_row(way, ways.get("download")) for way in ways.values()]
    return f"{intro}\n\n{table(head, rows)}\n\n{verdict(ways)}\n"


def _row(way: Way, download: Way | None) -> list[str]:
    ratio = f"**{throughput(way) / throughput(download):.2f}**" if download and way.share == download.share else ""
    return [
        way.title,
        way.series.seconds(),
        f"{throughput(way) / 1e6:.0f}",
        ratio,
        f"{way.series.median('cpu'):.1f}",
        f"{way.series.peak('rss') / MIB:.0f} MiB",
        f"{way.median('bytes') / 1e6:.1f} MB",
        f"{way.median('bytes') / way.share:.3f}",
        f"{way.median('requests'):.0f}",
    ]


def throughput(way: Way) -> float:
    return way.share / way.series.median("wall")


def goals(ways: dict[str, Way]) -> dict[str, tuple[float, bool]]:
    """What was promised: name → (figure, whether it is kept)."""
    found: dict[str, tuple[float, bool]] = {}
    download = ways.get("download")
    for name in ("convert", "verified", "pull", "pull_to"):
        if download and name in ways:
            ratio = throughput(ways[name]) / throughput(download)
            found[f"{ways[name].title}: throughput of `hf download`"] = (ratio, ratio >= GOAL)
    if "rank" in ways:
        ratio = ways["rank"].median("bytes") / ways["rank"].share
        found["convert --rank 0: bytes fetched of its share"] = (ratio, ratio <= 1.1)
    return found


def verdict(ways: dict[str, Way]) -> str:
    return "\n".join(f"- {name}: {x:.2f}, {'kept' if kept else 'MISSED'}" for name, (x, kept) in goals(ways).items())


def main() -> None:
    every = ["download", "convert", "verified", "both", "pull", "pull_to", "rank", "rank_gap"]
    binaries = Path(sys.executable).parent
    parser = argparse.ArgumentParser(description="measure conversions from a Hub against `hf download`")
    parser.add_argument("--model", default="small", help=f"{', '.join(MODELS)} or a directory (default %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each command (default %(default)s)")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=every, help=",".join(every))
    parser.add_argument("--workdir", type=Path, default=Path("build/bench"), help="needs about four times the model")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before every answer: a Hub that is far away")
    parser.add_argument("--check", action="store_true", help="fail when a goal is missed")
    parser.add_argument("--convert", default=str(binaries / "areal-convert"), help="the command that is measured")
    parser.add_argument("--hf", default=str(binaries / "hf"), help="Hugging Face's command")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, Path(arguments.model), arguments.delay)
        return
    if unknown := set(arguments.ways) - set(every):
        parser.error(f"unknown ways {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    workdir = arguments.workdir.resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    host = machine()
    bench = Bench(arguments.convert.split(), arguments.hf, workdir, arguments.runs, arguments.delay)
    ways = bench.run(bench.model(arguments.model), arguments.ways)
    text = report(ways, host, arguments.runs, arguments.delay)
    name = f"hub-{Path(arguments.model).name}"
    plain = {k: {"title": w.title, "share": w.share, "sent": w.sent, "runs": asdict(w.series)} for k, w in ways.items()}
    (workdir / f"{name}.json").write_text(json.dumps({"machine": host, "ways": plain}, indent=1) + "\n")
    (workdir / f"{name}.md").write_text(text)
    print(text, end="")
    if arguments.check and not all(kept for _, kept in goals(ways).values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
