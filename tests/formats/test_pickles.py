"""The restricted pickle reader and the pickle writer, against Python's own pickle, attacks and garbage."""

from __future__ import annotations

import argparse
import builtins
import collections
import copyreg
import datetime
import io
import os
import pathlib
import pickle
import signal
import struct
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_convert.converter.errors import CorruptFile, SourceError, UnsafePickle
from areal_convert.converter.formats import pickles
from areal_convert.converter.formats.pickles import Global, Opaque, dump, load

PROTOCOLS = (2, 3, 4, 5)


# ------------------------------------------------------------------------------------------------ plain values

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_what_python_pickles_is_read(value: Any, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol), "x") == value


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_what_is_written_python_reads(value: Any) -> None:
    assert pickle.loads(dump(value)) == value
    assert load(dump(value), "x") == value


@given(st.integers())
def test_integers_take_the_opcode_that_python_chooses(value: int) -> None:
    assert dump(value) == pickle.dumps(value, 2)


@pytest.mark.parametrize("value", [2**31 - 1, 2**31, -(2**31), -(2**31) - 1, -128, -(2**39), 2**39, -(2**63), 2**2100])
def test_integers_at_the_edges(value: int) -> None:
    assert dump(value) == pickle.dumps(value, 2)
    assert load(dump(value), "x") == value


def test_the_bytes_of_a_small_pickle() -> None:
    """PROTO 2, EMPTY_DICT, MARK, 'a' into memo 0, 1, 'b' into memo 1, (True, None), SETITEMS, STOP."""
    expected = b"\x80\x02}(X\x01\x00\x00\x00aq\x00K\x01X\x01\x00\x00\x00bq\x01\x88N\x86u."
    assert dump({"a": 1, "b": (True, None)}) == expected


def test_names_and_calls_are_written_without_importing_them() -> None:
    code = dump([Global("no.such.module", "Thing"), Opaque("no.such.module", "Other", (7,), {"x": 1}, new=True)])
    assert code == (
        b"\x80\x02](cno.such.module\nThing\nq\x00"
        b"cno.such.module\nOther\nq\x01K\x07\x85\x81}(X\x01\x00\x00\x00xq\x02K\x01ube."
    )


def test_the_writer_refuses_what_it_cannot_say() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        dump(loop)
    with pytest.raises(TypeError, match="no way to write a module"):
        dump(os)


def test_sets_streams_paths_and_times_survive_the_writer() -> None:
    value = {"s": {1, 2}, "f": frozenset("ab"), "d": datetime.timedelta(1, 2, 3), "p": pathlib.PurePosixPath("/a/b")}
    assert pickle.loads(dump(value)) == value
    assert pickle.loads(dump(io.BytesIO(b"\xff\x00"))).read() == b"\xff\x00"


# ------------------------------------------------------------------------------------------------ allowed names


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_megatron_arguments_hold_becomes_values_or_descriptions(protocol: int) -> None:
    import torch

    args = argparse.Namespace(
        num_layers=4,
        dtype=torch.bfloat16,
        path=pathlib.PurePosixPath("/data/x"),
        when=datetime.timedelta(minutes=10),
        sig=signal.SIGTERM,
        f=np.float32(1.5),
        i=np.int64(-7),
        big=np.dtype(">i2").type(3),
        od=collections.OrderedDict(a=1),
        st={1, 2},
        fs=frozenset((3,)),
        ba=bytearray(b"xy"),
        raw=b"\x00\xff",
        none=b"",
        size=torch.Size((2, 3)),
        ns=types.SimpleNamespace(q=1),
        stream=io.BytesIO(b"abc"),
        rng=np.arange(3, dtype=np.uint32),
    )
    found = load(pickle.dumps(args, protocol), "args")
    assert (found.module, found.name) == ("argparse", "Namespace")
    state = found.state
    plain = {"num_layers": 4, "f": 1.5, "i": -7, "big": 3, "od": {"a": 1}, "st": {1, 2}, "fs": {3}, "size": (2, 3)}
    assert {key: state[key] for key in plain} == plain
    assert (state["ba"], state["raw"], state["none"]) == (b"xy", b"\x00\xff", b"")
    assert state["dtype"] == Global("torch", "bfloat16")
    assert state["path"] == pathlib.PurePosixPath("/data/x")
    assert (state["when"].name, state["when"].args) == ("timedelta", (0, 600, 0))
    assert (state["sig"].name, state["sig"].args) == ("Signals", (15,))
    assert state["ns"].state == {"q": 1}
    assert state["stream"].name == "BytesIO" and state["stream"].state[0] == b"abc"
    assert isinstance(state["rng"], Opaque)


def test_classes_of_known_packages_stay_descriptions() -> None:
    code = b"cmegatron.core.transformer.enums\nAttnBackend\nK\x01\x85R."
    found = load(code, "x")
    assert (found.module, found.name, found.args) == ("megatron.core.transformer.enums", "AttnBackend", (1,))
    assert found.state is None


def test_an_enum_as_python_3_11_0_pickled_it() -> None:
    code = b"\x80\x02c__builtin__\ngetattr\ncmegatron.core.enums\nModelType\nX\x02\x00\x00\x00ok\x86R."
    found = load(code, "x")
    assert (found.module, found.name) == ("megatron.core.enums", "ModelType.ok")


def test_further_names_can_be_allowed() -> None:
    code = pickle.dumps(collections.ChainMap, 2)
    with pytest.raises(UnsafePickle, match="ChainMap"):
        load(code, "x")
    assert load(code, "x", {("collections", "ChainMap"): lambda: 1}) == Global("collections", "ChainMap")
    assert load(code[:-1] + b")R.", "x", {("collections", "ChainMap"): lambda: 41}) == 41


# ------------------------------------------------------------------------------------------------ attacks


class Call:
    """Pickles as a call of `function(*args)`."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.parts = (function, args, state) if state is not None else (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def command(canary: Path) -> str:
    return f"touch {canary}"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def attacks(canary: Path) -> dict[str, bytes]:
    run = command(canary)
    system = b"cposix\nsystem\n"
    out = {f"reduce, protocol {p}": pickle.dumps(Call(os.system, run), p) for p in range(6)}
    out |= {
        "eval": pickle.dumps(Call(builtins.eval, f"__import__('os').system({run!r})"), 2),
        "exec": pickle.dumps(Call(builtins.exec, f"import os; os.system({run!r})"), 4),
        "import": b"\x80\x02c__builtin__\n__import__\n" + text("antigravity") + b"\x85R.",
        "subprocess": b"\x80\x02csubprocess\nPopen\n](" + text("touch") + text(str(canary)) + b"e\x85R.",
        "deep inside": pickle.dumps({"a": [1, (2, Call(os.system, run))]}, 4),
        "in a namespace": pickle.dumps(argparse.Namespace(x=Call(os.system, run)), 2),
        "as a state": pickle.dumps(Call(collections.OrderedDict, state={"x": Call(os.system, run)}), 2),
        "through partial": b"\x80\x02cfunctools\npartial\n" + system + text(run) + b"\x86R)R.",
        "stack_global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + text(run) + b"\x85R.",
        "inst": b"(" + text(run) + b"iposix\nsystem\n.",
        "obj": b"(" + system + text(run) + b"o.",
        "newobj": b"\x80\x02" + system + text(run) + b"\x85\x81.",
        "newobj_ex": b"\x80\x04" + system + text(run) + b"\x85}\x92.",
        "popped before the end": b"\x80\x02" + system + text(run) + b"\x85R0K\x01.",
        "by the memo": b"\x80\x02" + system + b"q\x000h\x00" + text(run) + b"\x85R.",
        "after a mark": b"\x80\x02(" + system + text(run) + b"\x85R1K\x01.",
        "dotted name": b"\x80\x04\x8c\x08argparse\x8c\x15Namespace.__class__.x\x93.",
        "submodule of a known one": b"\x80\x02cargparse._sys\nexit\n.",
        "load from bytes": b"\x80\x02ctorch.storage\n_load_from_bytes\n" + text("x") + b"\x85R.",
        "torch.load": b"\x80\x02ctorch\nload\n" + text(str(canary)) + b"\x85R.",
        "torch.hub": b"\x80\x02ctorch.hub\nload\n" + text("a/b") + b"\x85R.",
        "numpy.load": b"\x80\x02cnumpy\nload\n" + text(str(canary)) + b"\x85R.",
        "codecs": b"\x80\x02c_codecs\ndecode\n.",
        "looks like megatron": b"\x80\x02cmegatronx.evil\nrun\n.",
        "extension 1": b"\x80\x02\x82\x01.",
        "extension 2": b"\x80\x02\x83\x01\x00.",
        "extension 4": b"\x80\x02\x84\x01\x00\x00\x00.",
    }
    return out


NAMES = list(attacks(Path("/x")))


@pytest.mark.parametrize("name", NAMES)
def test_an_attack_is_refused_by_name_and_never_runs(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    before = set(sys.modules)
    with pytest.raises(UnsafePickle) as caught:
        load(attacks(canary)[name], "some/file.pt")
    assert "some/file.pt refers to " in str(caught.value)
    assert not canary.exists()
    assert set(sys.modules) == before


def test_these_attacks_would_work_on_python(tmp_path: Path) -> None:
    """The test above proves nothing unless the payloads are real."""
    for name in ("reduce, protocol 2", "stack_global", "inst", "obj", "popped before the end", "by the memo"):
        canary = tmp_path / name.replace(" ", "_")
        pickle.loads(attacks(canary)[name])
        assert canary.exists(), name


def test_the_message_says_what_the_file_refers_to() -> None:
    with pytest.raises(UnsafePickle, match=r"refers to posix\.system, .*nothing of it was run"):
        load(pickle.dumps(Call(os.system, "true"), 4), "model.bin")


def test_a_registered_extension_is_refused(tmp_path: Path) -> None:
    """The registry is another way to a name, and one that `find_class` would be asked about only once."""
    copyreg.add_extension("posix", "system", 240)
    try:
        code = pickle.dumps(Call(os.system, command(tmp_path / "canary")), 2)
        assert b"\x82\xf0" in code
        with pytest.raises(UnsafePickle):
            load(code, "x")
    finally:
        copyreg.remove_extension("posix", "system", 240)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "code",
    [
        b"\x80\x02c__builtin__\ngetattr\nc__builtin__\nint\nX\x03\x00\x00\x00mro\x86R.",
        b"\x80\x02c__builtin__\ngetattr\ncargparse\nNamespace\n)RX\x01\x00\x00\x00a\x86R.",
        b"\x80\x02c__builtin__\nbytes\nJ\x00\x00\x00\x7f\x85R.",  # bytes(2 billion)
        b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.",
        b"\x80\x02ctorch\nSize\n}X\x01\x00\x00\x00xK\x01sb.",  # state for a name
        b"\x80\x02ctorch\nSize\nN}X\x07\x00\x00\x00__new__K\x01s\x86b.",
        b"\x80\x02K\x01)R.",  # a call of a number
        b"\x80\x02cargparse\nNamespace\n)R)R.",  # a call of what a call gave
        b"\x80\x02cargparse\nNamespace\nK\x01R.",
        b"\x80\x02X\x01\x00\x00\x00aQ.",  # a persistent id where there are none
        b"Pa\n.",
        b"(X\x01\x00\x00\x00aX\x01\x00\x00\x00bo.",
        b"\x80\x04K\x01K\x02\x93.",
    ],
)
def test_tricks_within_the_allowed_names_are_damage(code: bytes) -> None:
    with pytest.raises(CorruptFile):
        load(code, "x")


# ------------------------------------------------------------------------------------------------ absurdities

TUPLES = b"\x80\x02}" + b")" + b"\x85" * 200_000
DOUBLING = b"\x80\x02})" + b"".join(b"q" + bytes((i,)) + b"h" + bytes((i,)) + b"\x86" for i in range(200))
ABSURD = {
    "memo index of 4 billion": b"\x80\x02K\x01r\xff\xff\xff\xff.",
    "text of 2**62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"abc.",
    "bytes of 4 GB": b"\x80\x03B\xff\xff\xff\xffabc.",
    "bytearray of 2**63 bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**63) + b"abc.",
    "a number of 4 GB": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "a tower of tuples as a key": TUPLES + b"K\x01s.",  # Python's own unpickler dies of this: the hash recurses in C
    "a key that takes 2**200 steps to hash": DOUBLING + b"K\x01s.",
    "a tower of tuples in a set": b"\x80\x04(" + TUPLES[3:] + b"\x91.",
    "a tower of lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a tower below the first level": b"\x80\x02]q\x00" + b"]q\x01h\x01" * 1 + b"]" * 300 + b"a" * 300 + b"aa.",
    "a list as a key": b"\x80\x02}]K\x01s.",
    "protocol 9": b"\x80\x09K\x01.",
    "no pickle at all": b"<!DOCTYPE html>",
    "nothing": b"",
    "only a protocol": b"\x80\x02",
    "an empty stack": b"\x80\x02.",
    "a pop too many": b"\x80\x02" + b"0" * 5 + b".",
    "a mark that is missing": b"\x80\x02K\x01t.",
    "out-of-band buffers": b"\x80\x05\x97.",
    "text that is no text": b"\x80\x04\x8c\x02\xff\xfe.",
    "append to a dict": b"\x80\x02}K\x01a.",
    "one list copied 100,000 times": b"\x80\x02c__builtin__\nlist\nq\x00]("
    + b"N" * 10_000
    + b"eq\x01"
    + b"h\x00h\x01\x85R" * 100_000
    + b".",
    "one text encoded 100,000 times": b"\x80\x02c_codecs\nencode\nq\x00X\xff\xff\x00\x00"
    + b"a" * 65535
    + b"q\x01X\x06\x00\x00\x00latin1q\x02"
    + b"h\x00h\x01h\x02\x86R" * 100_000
    + b".",
    "a tower in keyword arguments": b"\x80\x04cmegatron.x\ny\n)}X\x01\x00\x00\x00k"
    + b"]" * 300
    + b"a" * 299
    + b"s\x92.",
    "a layout that is a tower": b"\x80\x02ctorch.serialization\n_get_layout\n" + b"]" * 9000 + b"a" * 8999 + b"\x85R.",
    "an odd number of items": b"\x80\x02}(K\x01u.",
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_pickles_are_damage_and_cost_nothing(name: str) -> None:
    start = time.perf_counter()
    with pytest.raises(CorruptFile, match="some/file"):
        load(ABSURD[name], "some/file")
    assert time.perf_counter() - start < 5


def test_a_shared_value_is_no_cycle() -> None:
    shared = [1, 2]
    value = {"a": shared, "b": [shared, shared]}
    assert load(pickle.dumps(value, 4), "x") == value


def test_every_prefix_of_a_pickle_is_damage() -> None:
    code = pickle.dumps({"a": [1, 2.5, "text", b"bytes", None], "b": collections.OrderedDict(x=(1, 2, 3, 4))}, 4)
    for end in range(len(code)):
        with pytest.raises(CorruptFile):
            load(code[:end], "x")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_our_errors(data: bytes) -> None:
    _try(data)
    _try(b"\x80\x04" + data)


SEEDS = [
    pickle.dumps({"a": [1, 2.5, "x", b"y"], "s": {1}, "t": (1, 2, 3, 4), "n": argparse.Namespace(q=7)}, protocol)
    for protocol in PROTOCOLS
]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_pickles_raise_nothing_but_our_errors(seed: bytes, changes: list[tuple[int, int]]) -> None:
    data = bytearray(seed)
    for at, value in changes:
        data[at % len(data)] = value
    _try(bytes(data))


def _try(data: bytes) -> None:
    try:
        load(data, "x", persistent=lambda identity: identity)
    except SourceError as error:
        assert str(error)


def test_ten_thousand_records_take_no_time() -> None:
    value = [{"offsets": (i, i + 1), "name": f"n{i}", "x": collections.OrderedDict()} for i in range(10_000)]
    code = pickle.dumps(value, 4)
    start = time.perf_counter()
    assert len(load(code, "x")) == 10_000
    assert time.perf_counter() - start < 5  # a quarter of a second on an idle core


def test_module_exports() -> None:
    assert set(pickles.__all__) == {"Global", "Opaque", "dump", "load"}
