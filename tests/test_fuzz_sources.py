"""Random damage to checkpoints of every format: an error of ours, or weights that are right. Never another exception,
never a hang, never a target that says it was verified and is not.

What is right is said by the libraries that own the formats: when we accept a damaged safetensors or `.bin` file, we
must have read from it what safetensors and torch read.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file

import models
from areal_convert.converter import Mesh, convert, diff, inspect, open_checkpoint, verify
from areal_convert.converter.errors import ConvertError, NotACheckpoint, UnsafePickle

EXAMPLES = int(os.environ.get("AREAL_FUZZ", "30"))
"""Damages for each test. A long search: AREAL_FUZZ=5000."""

FILE = "model.safetensors"
few = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=EXAMPLES <= 100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is to survive a power cut."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


FORMATS: dict[str, tuple[str, Mesh]] = {
    "hf": ("hf", Mesh()),
    "torch_dist": ("torch_dist", Mesh(tp=2)),
    "mp_rank": ("mp_rank", Mesh(tp=2)),
    "dcp": ("dcp", Mesh(dp_shard=2)),
    "archon": ("archon", Mesh(dp_shard=2)),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same small model in every format; read only."""
    root = tmp_path_factory.mktemp("sound")
    source = models.cached_model("llama", dtype="bfloat16", layers=1, vocab_size=40, intermediate_size=8)

    def make(name: str) -> Path:
        path = root / name
        if not path.exists() and name == "bin":
            models.to_bin(shutil.copytree(source, path))
        elif not path.exists():
            to, mesh = FORMATS[name]
            convert(source, path, to, mesh)
        return path

    return make


@contextmanager
def damaged(sound: Path, change: Callable[[Path], Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        path = Path(shutil.copytree(sound, Path(scratch) / "source"))
        change(path)
        yield path


def attempt(path: Path) -> dict[str, torch.Tensor] | None:
    """Convert what is at `path`; the tensors that came out, or None when it was refused, properly, or when a note says
    that these are not the weights that the manifest tells of."""
    target = path.parent / "target"
    try:
        result = convert(path, target, "hf")
    except ConvertError as error:
        assert not target.exists()
        assert not any("areal" in p.name for p in path.parent.iterdir())
        text = str(error)
        assert text.strip() and "report this" not in text
        text.encode()
        look_at(path, refused="NaN" not in text and "differ" not in text)
        return None
    look_at(path, refused=False)
    assert verify(path, target).same
    if any("areal_manifest" in note for note in result.planned.source.notes):
        return None
    return models.tensors(target)


def look_at(path: Path, refused: bool) -> None:
    """`inspect` and `diff` live through everything, and inspect knows why a conversion is refused."""
    try:
        seen = inspect(path)
    except NotACheckpoint:
        assert refused
        return
    assert seen.problems or not refused
    json.dumps(seen.report())
    with suppress(ConvertError):
        diff(path, path)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        t.dtype == b[n].dtype and t.shape == b[n].shape and t.equal(b[n]) for n, t in a.items()
    )


# ------------------------------------------------------------------------------------------------ bytes

PLACE = st.tuples(st.sampled_from(["start", "end", "anywhere"]), st.integers(0, 1 << 30))
DAMAGE = st.one_of(
    st.tuples(st.just("flip"), PLACE, st.integers(1, 255)),
    st.tuples(st.just("set"), PLACE, st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("cut"), PLACE, st.just(0)),
    st.tuples(st.just("zero"), PLACE, st.integers(1, 5000)),
    st.tuples(st.just("insert"), PLACE, st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("remove"), PLACE, st.integers(1, 64)),
    st.tuples(st.just("grow"), PLACE, st.binary(min_size=1, max_size=30)),
    st.tuples(st.just("delete"), PLACE, st.just(0)),
)


def hurt(file: Path, damage: tuple[str, tuple[str, int], Any]) -> None:
    kind, (region, number), value = damage
    raw = bytearray(file.read_bytes())
    size = len(raw)
    at = {"start": number % min(max(size, 1), 2000), "end": size - 1 - number % min(max(size, 1), 600)}.get(
        region, number % max(size, 1)
    )
    if kind == "delete":
        file.unlink()
        return
    if kind == "flip" and size:
        raw[at] ^= value
    elif kind == "set":
        raw[at : at + len(value)] = value
    elif kind == "cut":
        del raw[at:]
    elif kind == "zero":
        raw[at : at + value] = bytes(len(raw[at : at + value]))
    elif kind == "insert":
        raw[at:at] = value
    elif kind == "remove":
        del raw[at : at + value]
    elif kind == "grow":
        raw += value
    file.write_bytes(raw)


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name != "generation_config.json")


@pytest.mark.timeout(240 + EXAMPLES)
@pytest.mark.parametrize("name", [*FORMATS, "bin"])
def test_damaged_bytes(name: str, sound: Callable[[str], Path]) -> None:
    origin = sound(name)
    weights = [n for n, f in enumerate(files_of(origin)) if f.suffix not in (".json", ".txt")]

    @few
    @given(
        st.lists(
            st.tuples(st.sampled_from([*weights * 3, *range(len(files_of(origin)))]), DAMAGE), min_size=1, max_size=2
        )
    )
    def run(damages: list[tuple[int, Any]]) -> None:
        files = [f.relative_to(origin) for f in files_of(origin)]

        def change(path: Path) -> None:
            for number, damage in damages:
                if (path / files[number]).exists():
                    hurt(path / files[number], damage)

        with damaged(origin, change) as path:
            have = attempt(path)
            if have is not None:
                agree(name, path, have)

    run()


def agree(name: str, path: Path, have: dict[str, torch.Tensor]) -> None:
    """What the library reads from damaged files is what we read. Where it refuses them, it does not tell."""
    try:
        if name == "hf":
            theirs = load_file(path / FILE)
        elif name == "bin":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = torch.load(path / "pytorch_model.bin", weights_only=True)
        else:
            return
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, OSError, ValueError, KeyError):
        return
    assert equal(have, {n: t for n, t in theirs.items() if torch.is_tensor(t)})


# ------------------------------------------------------------------------------------------------ values

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 7, 2**31, 2**63, 2**64, 10**30, -(10**30)]),
    st.sampled_from([0.0, 1.5, 1e300, float("inf"), float("nan")]),
    st.sampled_from(["", "x", "llama", "qwen3", "hf", "..", "/", "\0", "\ud800", "F32", "9" * 50, "9" * 5000]),
    st.sampled_from([[], {}, [[]], [None], {"": None}, [0, 0], [-1, 2**70], {"a": {"b": []}}]),
)


def replace_node(value: Any, path: list[int], odd: Any) -> Any:
    """The value with one of its parts, found by following `path` modulo whatever there is, replaced."""
    if not path or not isinstance(value, dict | list) or not value:
        return odd
    step, rest = path[0], path[1:]
    if isinstance(value, dict):
        key = sorted(value, key=str)[step % len(value)]
        return {**value, key: replace_node(value[key], rest, odd)}
    return [replace_node(x, rest, odd) if n == step % len(value) else x for n, x in enumerate(value)]


JSONS = {
    "hf": ["config.json", "areal_manifest.json", FILE],
    "torch_dist": ["hf/config.json", "areal_manifest.json", "release/metadata.json"],
}
JSONS |= {"mp_rank": ["hf/config.json", "areal_manifest.json"], "dcp": ["hf/config.json", "areal_manifest.json"]}


@pytest.mark.timeout(240 + EXAMPLES)
@pytest.mark.parametrize("name", JSONS)
def test_odd_values_in_json(name: str, sound: Callable[[str], Path]) -> None:
    """One value of a config, a manifest or a header is another: the weights, if we take them, are the same."""
    origin = sound(name)
    original = models.tensors(sound("hf"))

    @few
    @given(st.sampled_from(JSONS[name]), st.lists(st.integers(0, 1000), min_size=1, max_size=4), ODD)
    def run(file: str, where: list[int], odd: Any) -> None:
        def change(path: Path) -> None:
            raw = (path / file).read_bytes()
            if file != FILE:
                (path / file).write_text(json.dumps(replace_node(json.loads(raw), where, odd)))
                return
            length = int.from_bytes(raw[:8], "little")
            text = json.dumps(replace_node(json.loads(raw[8 : 8 + length]), where, odd)).encode()
            text += b" " * (-len(text) % 8)
            (path / file).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

        with damaged(origin, change) as path:
            have = attempt(path)
            if have is None:
                return
            if file == FILE:
                agree("hf", path, have)
            else:
                assert equal(have, original)

    run()


def _mutate(value: Any, path: list[int], odd: Any) -> Any:
    """The same for what `.metadata` is made of: objects with fields, too."""
    if not path:
        return odd
    step, rest = path[0], path[1:]
    if isinstance(value, dict) and value:
        key = sorted(value, key=str)[step % len(value)]
        return {**value, key: _mutate(value[key], rest, odd)}
    if isinstance(value, list | tuple) and value and not hasattr(value, "_fields"):
        kept = [_mutate(x, rest, odd) if n == step % len(value) else x for n, x in enumerate(value)]
        return kept if isinstance(value, list) else tuple(kept)
    fields = getattr(value, "__dict__", None)
    if fields:
        name = sorted(fields)[step % len(fields)]
        copy = object.__new__(type(value))
        copy.__dict__.update(fields | {name: _mutate(fields[name], rest, odd)})
        return copy
    return odd


@pytest.mark.timeout(240 + EXAMPLES)
@pytest.mark.parametrize("name", ["dcp", "torch_dist"])
def test_odd_values_in_metadata(name: str, sound: Callable[[str], Path]) -> None:
    """One field of `.metadata` is another."""
    origin, original = sound(name), models.tensors(sound("hf"))
    file = "release/.metadata" if name == "torch_dist" else ".metadata"
    metadata = pickle.loads((origin / file).read_bytes())

    @few
    @given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), ODD)
    def run(where: list[int], odd: Any) -> None:
        try:
            raw = pickle.dumps(_mutate(metadata, where, odd))
        except Exception:
            return  # nothing that a pickle could hold
        with damaged(origin, lambda path: (path / file).write_bytes(raw)) as path:
            have = attempt(path)
            assert have is None or equal(have, original)

    run()


@pytest.mark.timeout(240 + EXAMPLES)
@pytest.mark.parametrize("name", ["bin", "mp_rank"])
def test_odd_values_in_torch_files(name: str, sound: Callable[[str], Path]) -> None:
    """Any value where a tensor, a dictionary or the arguments were."""
    origin, original = sound(name), models.tensors(sound("hf"))
    file = next(f for f in files_of(origin) if f.suffix in (".bin", ".pt")).relative_to(origin)
    tree = torch.load(origin / file, weights_only=False)
    tensors = st.sampled_from(
        [torch.empty(0), torch.tensor(1.0), torch.ones(3), torch.ones(2, 2, 2), torch.zeros(1).expand(40, 64)]
    )

    @few
    @given(st.lists(st.integers(0, 1000), min_size=1, max_size=3), ODD | tensors)
    def run(where: list[int], odd: Any) -> None:
        changed = _mutate(tree, where, odd)
        with damaged(origin, lambda path: torch.save(changed, path / file)) as path:
            have = attempt(path)
            assert have is None or name == "bin" or equal(have, original)
            if have is not None and name == "bin":
                agree("bin", path, have)

    run()


# ------------------------------------------------------------------------------------------------ pickles that call

CALLABLES = [
    *("os\nsystem", "posix\nsystem", "os.path\nsystem", "builtins\neval", "builtins\nexec", "builtins\n__import__"),
    *("builtins\ngetattr", "subprocess\nPopen", "shutil\nrmtree", "importlib\nimport_module", "operator\nattrgetter"),
    *("torch\nload", "torch.storage\n_load_from_bytes", "pickle\nloads", "functools\npartial", "codecs\ndecode"),
    *("types\nFunctionType", "collections\ndefaultdict", "argparse\nNamespace", "io\nBytesIO", "", "\n"),
    "torch.distributed.checkpoint.metadata\nMetadata\x00",
]


@pytest.mark.parametrize("end", [b"R.", b"\x81.", b"b.", b"."], ids=["reduce", "newobj", "build", "name"])
@pytest.mark.parametrize("short", [True, False])
def test_metadata_that_calls(end: bytes, short: bool, sound: Callable[[str], Path]) -> None:
    """Whatever a pickle calls, by whichever opcode: it is refused, and nothing happened."""
    for name in CALLABLES:
        module, _, attribute = name.partition("\n")
        _call(module, attribute, end, short, sound("dcp"))


def _call(module: str, attribute: str, end: bytes, short: bool, origin: Path) -> None:
    if short:
        raw = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(attribute)])
        raw += attribute.encode() + b"\x93"
    else:
        raw = b"\x80\x02c" + module.encode() + b"\n" + attribute.encode() + b"\n"
    canary = Path(tempfile.gettempdir()) / f"areal-canary-{os.getpid()}"
    argument = f"touch {canary}".encode()
    raw += b"(X" + len(argument).to_bytes(4, "little") + argument + b"t" + end
    with damaged(origin, lambda path: (path / ".metadata").write_bytes(raw)) as path:
        with pytest.raises(ConvertError) as caught:
            open_checkpoint(path)
        if attribute in ("system", "eval", "exec", "Popen", "rmtree", "__import__"):
            assert isinstance(caught.value, UnsafePickle)
    assert not canary.exists()
