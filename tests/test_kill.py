"""A conversion may be killed at any moment: the target never looks complete, and `resume` ends with the same bytes.

This file is also a program, `Killer` runs it: it imports the package once and then forks, for every line on its input,
a child that converts and is killed (`kill -9`, nothing is cleaned up) at a chosen call of the operating system or after
a chosen time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from areal_convert.converter import Limits, Mesh, Options, convert, verify
from areal_convert.converter.errors import SourceError, TargetError

CALLS = ("rename", "fsync", "fdatasync", "posix_fallocate", "ftruncate", "pwrite", "mkdir", "unlink", "rmdir")
"""Calls of `os` at which a child can be killed. Path.write_bytes counts too, and dies with half the bytes written."""

FORMATS: dict[str, dict[str, Any]] = {
    "hf": {"to": "hf", "options": {"max_shard": 150_000}},
    "torch_dist": {"to": "torch_dist", "mesh": {"tp": 2, "pp": 2}},
    "mp_rank": {"to": "mp_rank", "mesh": {"tp": 2, "pp": 2}},
    "dcp": {"to": "dcp", "mesh": {"dp_shard": 3}},
    "archon": {"to": "archon", "mesh": {"dp_shard": 2}},
}


# ------------------------------------------------------------------------------------------------ the program


def _serve() -> None:
    """One request a line; the answer is the child's wait status, and the number of calls that it counted."""
    for line in sys.stdin:
        request = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _child(request, write)
        os.close(write)
        if request.get("after") is not None:
            time.sleep(request["after"])
            os.kill(child, request.get("signal", signal.SIGKILL))
        start = time.monotonic()
        _, status = os.waitpid(child, 0)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        print(json.dumps({"status": status, "said": said, "seconds": time.monotonic() - start}), flush=True)


def _child(request: dict[str, Any], out: int) -> None:
    # Tests that run in the background of a shell inherit an ignored SIGINT, and would wait for it in vain.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        counter = _trap(request.get("kill_at"))
        if request.get("pace"):
            _slow_down(request["pace"])
        _convert(request)
        os.write(out, json.dumps({"calls": counter}).encode())
    except BaseException as error:
        os.write(out, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    os._exit(0)


def _convert(request: dict[str, Any]) -> Any:
    return convert(
        request["source"],
        request["target"],
        request["to"],
        Mesh(**request.get("mesh", {})),
        Options(**request.get("options", {})),
        limits=Limits(workers=request.get("workers", 1)),
        **request.get("how", {}),
    )


def _trap(kill_at: int | None) -> list[str]:
    """Count calls, and die at one of them. Every atom is journalled at once, so that there is more to interrupt."""
    from areal_convert.converter.workdir import WorkDir

    counter: list[str] = []

    def tick(name: str, half: Callable[[], object]) -> None:
        counter.append(name)
        if kill_at is not None and len(counter) > kill_at:
            half()
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            tick(name, lambda: None)
            return call(*args, **kwargs)

        return wrapped

    for name in CALLS:
        setattr(os, name, counted(name, _no_sync if name in ("fsync", "fdatasync") else getattr(os, name)))
    write_bytes, finished = Path.write_bytes, WorkDir.finished

    def write_half(self: Path, data: Any) -> int:
        tick("write_bytes", lambda: write_bytes(self, data[: len(data) // 2]))
        return write_bytes(self, data)

    def finished_at_once(self: WorkDir, atom: str, digest: str, files: Iterable[str]) -> None:
        finished(self, atom, digest, files)
        self._flush()

    Path.write_bytes = write_half
    WorkDir.finished = finished_at_once
    return counter


def _no_sync(fd: int) -> None:
    """A kill takes nothing from the page cache: waiting for the disk would only take time."""


def _slow_down(pace: float) -> None:
    """A model this small is converted in no time; a pause before each atom makes it last."""
    module = sys.modules["areal_convert.converter.convert"]
    transfer = module.transfer

    def slow(*args: Any, **kwargs: Any) -> str:
        time.sleep(pace)
        return transfer(*args, **kwargs)

    vars(module)["transfer"] = slow


def _program() -> subprocess.Popen[str]:
    """It sees what we see: the same package, of the same version."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


class Killer:
    """The program above, running."""

    def __init__(self) -> None:
        self.process = _program()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request, default=str) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self, **request: Any) -> bool:
        """Run a conversion that is to be killed; whether it was (it may have ended before)."""
        answer = self.ask(**request)
        if os.WIFEXITED(answer["status"]):
            assert os.WEXITSTATUS(answer["status"]) == 0, answer["said"]
            return False
        assert os.WTERMSIG(answer["status"]) == signal.SIGKILL
        return True

    def calls(self, **request: Any) -> list[str]:
        """The calls that an undisturbed conversion makes, in order."""
        answer = self.ask(**request)
        assert answer["status"] == 0, answer["said"]
        return json.loads(answer["said"])["calls"]

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    killer = Killer()
    yield killer
    killer.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", _no_sync)
    monkeypatch.setattr(os, "fdatasync", _no_sync)


# ------------------------------------------------------------------------------------------------ helpers


def content(directory: Path) -> dict[str, str]:
    """Every file below a directory, by its path, with a digest; directories too."""
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "directory"
        for p in sorted(directory.rglob("*"))
    }


def neighbours(target: Path) -> list[str]:
    """What stands beside the target under a name that begins like its."""
    return sorted(p.name for p in target.parent.iterdir() if p.name.startswith(target.name) and p != target)


def sample(count: int, points: int, seed: int) -> list[int]:
    """Some of the calls: the first and the last few, where directories are made and renamed, and others in between."""
    ends = {*range(4), *range(max(0, count - 12), count)}
    inside = random.Random(seed).sample(range(count), min(count, points))
    return sorted(n for n in ends | set(inside) if n < count)


def finish(target: Path, request: dict[str, Any], **how: Any) -> Any:
    return _convert({**request, "how": {**request.get("how", {}), "resume": True, **how}})


# ------------------------------------------------------------------------------------------------ killed and resumed


@pytest.mark.parametrize("format_name", FORMATS)
def test_killed_at_some_call_and_resumed(
    format_name: str, killer: Killer, model: Callable[..., Path], tmp_path: Path
) -> None:
    """Whatever the call, the target is not there, or whole; resumed, it is bitwise what an undisturbed run gives."""
    family = "qwen3_moe" if format_name == "torch_dist" else "llama_tied"
    source = model(family, dtype="bfloat16", layers=2)
    before = content(source)
    request = {"source": source, **FORMATS[format_name]}
    calls = killer.calls(**request, target=tmp_path / "calm")
    wanted = content(tmp_path / "calm")
    assert {"rename", "fsync", "fdatasync", "pwrite"} <= set(calls)
    resumed = []
    for n in sample(len(calls), 16, seed=len(format_name)):
        target = tmp_path / f"t{n}"
        assert killer.kill(**request, target=target, kill_at=n)
        if target.exists():
            assert content(target) == wanted, f"killed at {calls[n]}, call {n}: a target that is not whole"
        else:
            result = finish(target, {**request, "target": target})
            resumed.append(result.resumed)
            assert result.verified
        assert content(target) == wanted, f"killed at {calls[n]}, call {n}"
        assert neighbours(target) == [], f"killed at {calls[n]}, call {n}"
        shutil.rmtree(target)
    assert max(resumed) > 0, "nothing was ever taken over from the journal"
    assert content(source) == before


@pytest.mark.parametrize("format_name", ["torch_dist", "mp_rank"])
def test_killed_again_and_again(format_name: str, killer: Killer, model: Callable[..., Path], tmp_path: Path) -> None:
    """Every attempt is killed at a random moment, the next one resumes; in the end nobody can tell."""
    chance = random.Random(5)
    source = model("llama_tied", dtype="bfloat16", layers=2)
    request = {"source": source, **FORMATS[format_name], "workers": 2, "pace": 0.02}
    assert not killer.kill(**request, target=tmp_path / "calm")
    target = tmp_path / "target"
    for n in range(12):
        moment = {"after": chance.uniform(0.05, 0.35)} if n % 2 else {"kill_at": chance.randrange(4, 90)}
        if not killer.kill(**request, target=target, **moment, how={"resume": True}):
            break
        assert not target.exists() or content(target) == content(tmp_path / "calm")
        if target.exists():
            break
    if not target.exists():
        finish(target, {**request, "target": target})
    assert content(target) == content(tmp_path / "calm")
    assert neighbours(target) == []


def test_an_overwrite_killed_at_some_call(killer: Killer, model: Callable[..., Path], tmp_path: Path) -> None:
    """The target is the old one or the new one, whole. Between the renames it is away; the next run brings it back."""
    source = model("llama_tied", dtype="bfloat16", layers=2)
    convert(source, tmp_path / "old", "dcp")
    old = content(tmp_path / "old")
    request = {"source": source, **FORMATS["torch_dist"], "how": {"overwrite": True}}
    calls = killer.calls(**request, target=shutil.copytree(tmp_path / "old", tmp_path / "calm"))
    wanted = content(tmp_path / "calm")
    away = 0
    for n in sample(len(calls), 10, seed=1):
        target = shutil.copytree(tmp_path / "old", tmp_path / f"t{n}")
        assert killer.kill(**request, target=target, kill_at=n)
        if target.exists():
            assert content(target) in (old, wanted), f"killed at {calls[n]}, call {n}"
        else:
            away += 1
            with pytest.raises(TargetError):  # whoever comes without --overwrite finds the old one again
                convert(source, target, "torch_dist", Mesh(tp=2, pp=2))
            assert content(target) == old, f"killed at {calls[n]}, call {n}"
        finish(target, {**request, "target": target})
        assert content(target) == wanted, f"killed at {calls[n]}, call {n}"
        assert neighbours(target) == [], f"killed at {calls[n]}, call {n}"
        shutil.rmtree(target)
    assert away == 1  # exactly one call stands between the two renames: the second rename itself


def test_ctrl_c_ends_soon_and_can_be_resumed(killer: Killer, model: Callable[..., Path], tmp_path: Path) -> None:
    """An interrupt must not wait until all the work that was handed to the threads is done."""
    source = model("llama_tied", dtype="bfloat16", layers=2)
    request = {"source": source, **FORMATS["torch_dist"], "target": tmp_path / "t", "pace": 0.25}
    answer = killer.ask(**request, after=0.7, signal=signal.SIGINT)
    assert os.WIFEXITED(answer["status"]), "it was not a signal that ended it"
    assert "KeyboardInterrupt" in answer["said"]
    assert answer["seconds"] < 2, "it went on working after Ctrl-C"
    assert not (tmp_path / "t").exists()
    assert finish(tmp_path / "t", {**request, "pace": None}).resumed > 0
    assert verify(source, tmp_path / "t").same


# ------------------------------------------------------------------------------------------------ the journal


@pytest.fixture
def unfinished(
    killer: Killer, model: Callable[..., Path], tmp_path: Path
) -> tuple[dict[str, Any], Path, dict[str, str]]:
    """A conversion that was killed late: its request, the directory that it left, and what it would have become."""
    source = shutil.copytree(model("llama_tied", dtype="bfloat16", layers=2), tmp_path / "source")
    request = {"source": source, **FORMATS["torch_dist"], "target": tmp_path / "target"}
    calls = killer.calls(**{**request, "target": tmp_path / "calm"})
    last = max(n for n, name in enumerate(calls) if name == "fdatasync")
    assert killer.kill(**request, kill_at=last - 1)
    partial = next(p for p in tmp_path.iterdir() if p.name.startswith("target"))
    return request, partial, content(tmp_path / "calm")


def journal_of(partial: Path) -> Path:
    return next(p for p in partial.iterdir() if "journal" in p.name)


def test_a_journal_cut_anywhere_in_its_last_lines(
    unfinished: tuple[dict[str, Any], Path, dict[str, str]], tmp_path: Path
) -> None:
    request, partial, wanted = unfinished
    raw = journal_of(partial).read_bytes()
    lines = raw.splitlines(keepends=True)
    assert len(lines) > 3
    cuts = [0, 1, len(lines[0]) // 2, len(lines[0]) - 1, len(lines[0])]
    cuts += [len(raw) - n for n in (0, 1, 2, len(lines[-1]) // 2, len(lines[-1]) - 1, len(lines[-1]) + 3)]
    kept = []
    for n, cut in enumerate(cuts):
        target = tmp_path / f"cut{n}"
        copy = shutil.copytree(partial, tmp_path / partial.name.replace("target", target.name))
        journal_of(copy).write_bytes(raw[:cut])
        kept.append(finish(target, {**request, "target": target}).resumed)
        assert content(target) == wanted
        shutil.rmtree(target)
    assert kept[0] == 0 and kept[5] == len(lines) - 1


@pytest.mark.parametrize(
    "line", ["5", "null", "[]", '{"done": 5}', '{"done": null}', '{"done": {"nosuch": "00"}}', "[" * 30_000, "\0" * 64]
)
def test_a_journal_that_says_something_else(
    line: str, unfinished: tuple[dict[str, Any], Path, dict[str, str]], tmp_path: Path
) -> None:
    """Never a crash, never a wrong target: what cannot be understood is not believed."""
    request, partial, wanted = unfinished
    journal = journal_of(partial)
    first, *others = journal.read_text().splitlines()
    journal.write_text("\n".join([first, others[0], line, *others[1:]]) + "\n")
    try:
        finish(tmp_path / "target", request)
    except TargetError:
        assert not (tmp_path / "target").exists()
    else:
        assert content(tmp_path / "target") == wanted


@pytest.mark.parametrize(
    "other",
    [
        {"mesh": {"tp": 4, "pp": 2}},
        {"options": {"dtype": "float32"}},
        {"options": {"vocab_divisor": 1}},
        {"to": "dcp", "mesh": {}},
        {"to": "mp_rank"},
    ],
    ids=["mesh", "dtype", "padding", "dcp", "mp_rank"],
)
def test_resuming_with_other_options_is_refused(
    other: dict[str, Any], unfinished: tuple[dict[str, Any], Path, dict[str, str]], tmp_path: Path
) -> None:
    request, partial, wanted = unfinished
    left = content(partial)
    with pytest.raises(TargetError, match=r"overwrite"):
        finish(tmp_path / "target", {**request, **other})
    assert content(partial) == left
    finish(tmp_path / "target", request)  # and the refusal holds no lock
    assert content(tmp_path / "target") == wanted


def test_without_resume_an_unfinished_one_is_in_the_way(
    unfinished: tuple[dict[str, Any], Path, dict[str, str]], tmp_path: Path
) -> None:
    request, partial, wanted = unfinished
    left = content(partial)
    with pytest.raises(TargetError, match=r"(?s)unfinished.*--resume.*--overwrite"):
        _convert(request)
    assert content(partial) == left
    assert _convert({**request, "how": {"overwrite": True}}).resumed == 0
    assert content(tmp_path / "target") == wanted


def test_resuming_from_another_copy_of_the_source_is_refused(
    unfinished: tuple[dict[str, Any], Path, dict[str, str]], tmp_path: Path
) -> None:
    request, _, _ = unfinished
    other = shutil.copytree(request["source"], tmp_path / "elsewhere")
    with pytest.raises(TargetError):
        finish(tmp_path / "target", {**request, "source": other})


def test_resuming_after_the_source_changed_does_not_mix(
    unfinished: tuple[dict[str, Any], Path, dict[str, str]], tmp_path: Path
) -> None:
    """A trainer saved again in between, same names and sizes: half old and half new would verify against itself."""
    request, _, _ = unfinished
    file = request["source"] / "model.safetensors"
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start:] = bytes(b ^ (n % 2 == 0) for n, b in enumerate(raw[start:]))
    file.write_bytes(raw)
    try:
        finish(tmp_path / "target", request)
    except TargetError:
        return
    assert verify(request["source"], tmp_path / "target").same


@pytest.mark.parametrize("damage", ["gone", "short", "long"])
def test_resuming_after_a_file_of_the_unfinished_one_was_touched(
    damage: str, unfinished: tuple[dict[str, Any], Path, dict[str, str]], tmp_path: Path
) -> None:
    """What the journal says of a file that is not there any more is not true; also without reading back."""
    request, partial, wanted = unfinished
    for file in partial.rglob("*.distcp"):
        if damage == "gone":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size + (100 if damage == "long" else -100))
    finish(tmp_path / "target", request, verify=False)
    assert content(tmp_path / "target") == wanted


def test_nothing_strange_travels_along(unfinished: tuple[dict[str, Any], Path, dict[str, str]], tmp_path: Path) -> None:
    """Files that the resumed run does not write (a side file since deleted, an editor's backup) do not travel along."""
    request, partial, wanted = unfinished
    (partial / "hf").mkdir(exist_ok=True)
    (partial / "hf" / "tokenizer.json").write_text("from an earlier attempt")
    (partial / "notes").write_text("whose?")
    finish(tmp_path / "target", request)
    assert content(tmp_path / "target") == wanted


# ------------------------------------------------------------------------------------------------ two at once


def test_two_conversions_into_one_target(model: Callable[..., Path], tmp_path: Path) -> None:
    """Another process is at it: refused in every mode, and the first one ends undisturbed."""
    source = model("llama_tied", dtype="bfloat16", layers=2)
    target = tmp_path / "t"
    request = {"source": str(source), "target": str(target), "to": "torch_dist", "pace": 0.1}
    process = _program()
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    deadline = time.monotonic() + 20
    while not any(p.rglob("*.distcp") for p in tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for how in ({}, {"overwrite": True}, {"resume": True}, {"overwrite": True, "resume": True}):
        with pytest.raises(TargetError, match=r"another conversion|unfinished"):
            _convert({**request, "how": how})
    answer, _ = process.communicate(timeout=60)
    assert json.loads(answer)["status"] == 0, answer
    assert verify(source, target).same
    assert neighbours(target) == []


def test_conversions_side_by_side(model: Callable[..., Path], tmp_path: Path) -> None:
    """Several at once in one process, from one source: no shared state gets in between."""
    source = model("llama_tied", dtype="bfloat16", layers=2)
    jobs = [(n, name) for n in range(2) for name in FORMATS]
    with ThreadPoolExecutor(5) as pool:
        done = [
            pool.submit(_convert, {"source": source, "target": tmp_path / f"{name}{n}", **FORMATS[name]})
            for n, name in jobs
        ]
        assert all(job.result().verified for job in done)
    for name in FORMATS:
        assert content(tmp_path / f"{name}0") == content(tmp_path / f"{name}1")


def test_an_overwrite_keeps_its_lock_while_it_clears_away(
    unfinished: tuple[dict[str, Any], Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can step in between the old directory's removal and the new one."""
    request, _, wanted = unfinished
    seen: list[str] = []

    def intruded(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not seen:
                seen.append("tried")
                with pytest.raises(TargetError, match="another conversion"):
                    finish(tmp_path / "target", request)
            return call(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(shutil, "rmtree", intruded(shutil.rmtree))
    for name in ("rename", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, intruded(getattr(os, name)))
    _convert({**request, "how": {"overwrite": True}})
    assert seen == ["tried"]
    assert content(tmp_path / "target") == wanted


# ------------------------------------------------------------------------------------------------ what is replaced


def test_a_target_that_appears_meanwhile_is_not_replaced(model: Callable[..., Path], tmp_path: Path) -> None:
    """Nobody allowed that: it was not there when the conversion began."""
    target = tmp_path / "t"

    def progress(phase: str, done: int, total: int) -> None:
        if not target.exists():
            target.mkdir()
            (target / "precious").write_text("somebody's only copy")

    with pytest.raises(TargetError):
        convert(model("llama_tied", dtype="bfloat16", layers=2), target, "dcp", progress=progress)
    assert (target / "precious").read_text() == "somebody's only copy"
    assert [p.name for p in target.iterdir()] == ["precious"]


def test_overwriting_does_not_replace_what_changed_meanwhile(model: Callable[..., Path], tmp_path: Path) -> None:
    """Overwriting was allowed for the checkpoint that stood there, not for what stands there at the end."""
    source, target = model("llama_tied", dtype="bfloat16", layers=2), tmp_path / "t"
    convert(source, target, "dcp")

    def progress(phase: str, done: int, total: int) -> None:
        if not (target / "precious").exists():
            shutil.rmtree(target)
            target.mkdir()
            (target / "precious").write_text("somebody's only copy")

    with pytest.raises(TargetError):
        convert(source, target, "dcp", overwrite=True, progress=progress)
    assert [p.name for p in target.iterdir()] == ["precious"]


def _notes_and_checkpoint(target: Path, source: Path) -> None:
    convert(source, target / "step_100", "dcp")


def _training_run(target: Path, source: Path) -> None:
    for step in (10, 20):
        convert(source, target / "scratch", "torch_dist")
        (target / "scratch" / "release").rename(target / f"iter_{step:07d}")
        shutil.rmtree(target / "scratch")
    (target / "tensorboard").mkdir()


def _empty_files(target: Path, source: Path) -> None:
    target.mkdir()


def _data_set(target: Path, source: Path) -> None:
    target.mkdir()
    (target / "train.parquet").write_bytes(b"x")


def _source_code(target: Path, source: Path) -> None:
    (target / ".git").mkdir(parents=True)
    (target / "config.json").write_text("{}")


@pytest.mark.parametrize("make", [_notes_and_checkpoint, _training_run, _empty_files, _data_set, _source_code])
def test_overwriting_only_replaces_checkpoints(
    make: Callable[[Path, Path], None], model: Callable[..., Path], tmp_path: Path
) -> None:
    """A directory that holds more than one checkpoint's files (an experiment, a run's root, data) stays as it is."""
    source, target = model("llama_tied", dtype="bfloat16", layers=2), tmp_path / "t"
    make(target, source)
    (target / "notes.txt").write_text("precious")
    before = content(target)
    with pytest.raises(TargetError, match="overwrite"):
        convert(source, target, "hf", overwrite=True)
    assert content(target) == before
    assert neighbours(target) == []


@pytest.mark.parametrize("format_name", FORMATS)
def test_overwriting_replaces_a_checkpoint(format_name: str, model: Callable[..., Path], tmp_path: Path) -> None:
    """What we wrote, in every format, is replaced as a whole: no old shard stays behind (B77)."""
    source, target = model("llama_tied", dtype="bfloat16", layers=2), tmp_path / "t"
    chosen = FORMATS[format_name]
    convert(source, target, chosen["to"], Mesh(**chosen.get("mesh", {})), Options(**chosen.get("options", {})))
    convert(source, tmp_path / "calm", "hf")
    convert(source, target, "hf", overwrite=True)
    assert content(target) == content(tmp_path / "calm")
    assert neighbours(target) == []


def test_the_old_target_comes_back_when_the_swap_fails(
    model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of the two renames fails (a network file system does that): the old target must not stay away."""
    source, target = model("llama_tied", dtype="bfloat16", layers=2), tmp_path / "t"
    convert(source, target, "dcp")
    old, rename, seen = content(target), os.rename, []

    def second_fails(a: Any, b: Any, **kwargs: Any) -> None:
        seen.append(a)
        if len(seen) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(a))
        rename(a, b, **kwargs)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(TargetError):
        convert(source, target, "torch_dist", overwrite=True)
    assert content(target) == old


# ------------------------------------------------------------------------------------------------ calls that fail


FAILURES = [(name, errno.ENOSPC) for name in (*CALLS, "write_bytes")]
FAILURES += [("pwrite", errno.EDQUOT), ("posix_fallocate", errno.EDQUOT), ("mkdir", errno.EROFS)]
FAILURES += [(name, errno.EIO) for name in ("pwrite", "fsync", "rename")]


@pytest.mark.parametrize(("name", "code"), FAILURES, ids=[f"{name}-{errno.errorcode[code]}" for name, code in FAILURES])
def test_a_call_that_fails(
    name: str, code: int, model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a quota, a file system that turns read-only: an error of ours that says so, no target, no lock left;
    and the next run succeeds."""
    source, target, calls = model("llama_tied", dtype="bfloat16", layers=2), tmp_path / "t", 0
    where: Any = Path if name == "write_bytes" else os
    call = getattr(where, name)
    said = {errno.ENOSPC: "full", errno.EDQUOT: "quota", errno.EROFS: "written", errno.EIO: "Input/output error"}

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(code, os.strerror(code), str(args[0]) if name == "write_bytes" else None)
        return call(*args, **kwargs)

    for nth in (1, 2, 4):  # noqa: B007 - `failing` looks at it
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(where, name, failing)
            try:
                convert(source, target, "torch_dist", Mesh(tp=2), limits=Limits(workers=1))
            except TargetError as error:
                assert said[code] in str(error)
                assert not target.exists()
        if not target.exists():
            convert(source, target, "torch_dist", Mesh(tp=2), resume=True)
        assert verify(source, target).same
        assert neighbours(target) == []
        shutil.rmtree(target)


def test_a_disk_that_is_full_from_the_start_leaves_nothing(
    model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even room for the first line of the journal."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("fdatasync", "posix_fallocate", "ftruncate"):
        with monkeypatch.context() as patch, pytest.raises(TargetError, match="full"):
            patch.setattr(os, name, full)
            convert(model("llama_tied", dtype="bfloat16", layers=2), tmp_path / "t", "torch_dist")
        assert list(tmp_path.iterdir()) == [], name


def test_a_source_that_fails_leaves_nothing(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Resuming cannot help here, so nothing is left that would refuse the next attempt."""
    import torch
    from safetensors.torch import load_file, save_file

    source = model_copy("llama_tied", dtype="bfloat16", layers=2)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"model\.norm\.weight.*NaN"):
        convert(source, tmp_path / "t", "torch_dist")
    assert neighbours(tmp_path / "t") == []
    convert(source, tmp_path / "t", "torch_dist", options=Options(allow_nan=True))


if __name__ == "__main__":
    _serve()
