"""`Receiver`: the states of a push on the server's side, and everything that may not happen in them."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal_convert.converter.errors import ConvertError
from areal_convert.converter.sync.commits import Commit
from areal_convert.converter.sync.inlet import InlineInlet, Offered, Stream, open_inlet
from areal_convert.converter.sync.receiver import Receiver
from areal_convert.converter.sync.reception import APPLIERS, Reception
from areal_convert.converter.sync.refusals import Refused
from areal_convert.converter.sync.stage import Stage
from areal_convert.converter.sync.staging import WINDOW
from areal_convert.converter.sync.wire import ABORT, HEADER_BYTES, LAST, Header, Manifest
from sync_parts import HUB, Values, halves, manifest_of, same, tiny_state

BASE, CONFIG = tiny_state(1)
NEW = tiny_state(2)[0]


class Pushed:
    """A receiver with a hub's side by hand, over the `inline` transport."""

    def __init__(self, *, two: bool = False, ttl: float = 30.0, **options: Any) -> None:
        settings: dict[str, Any] = {"timeout": 5.0, **options}
        self.receiver = Receiver(copy.deepcopy(BASE), CONFIG, **settings)
        self.two, self.epoch, self.version = two, 0, 0
        self.receiver.lease({"hub": HUB, "ttl": ttl})

    def join(self, hub: str = HUB) -> None:
        self.epoch += 1
        self.receiver.join({"hub": hub, "run": "run", "epoch": self.epoch, "transport": {"kind": "inline"}})

    def values(self, target: Mapping[str, Any] = NEW, **fields: Any) -> Values:
        layout = self.receiver.stage.layout
        fields = {"epoch": self.epoch, "version": self.version + 1} | fields
        senders = fields.pop("senders", halves(layout) if self.two else None)
        return Values(target, CONFIG, manifest_of(layout, senders, **fields))

    def prepare(self, values: Values, **changes: Any) -> dict[str, Any]:
        return self.receiver.prepare({**values.manifest.to_json(), "hub": HUB, **changes})

    def send(self, values: Values, wanted: Any = None) -> None:
        for header, payload in values.buckets(wanted):
            self.bucket(header, payload)

    def bucket(self, header: Header | bytes, payload: bytes) -> dict[str, Any]:
        return self.receiver.message("bucket", {}, (header if isinstance(header, bytes) else header.pack()) + payload)

    def said(self, values: Values, **changes: Any) -> dict[str, Any]:
        m = values.manifest
        return {"hub": HUB, "epoch": m.epoch, "version": m.version, "root": values.root} | changes

    def stage(self, target: Mapping[str, Any] = NEW, wanted: Any = None, **fields: Any) -> Values:
        if not self.epoch:
            self.join()
        values = self.values(target, **fields)
        self.prepare(values)
        self.send(values, wanted)
        self.receiver.seal(self.said(values))
        return values

    def push(self, target: Mapping[str, Any] = NEW, **fields: Any) -> Values:
        values = self.stage(target, **fields)
        self.receiver.commit(self.said(values))
        self.version += 1
        return values

    def until(self, state: str, within: float = 5.0) -> None:
        end = time.monotonic() + within
        while self.receiver.state != state:
            assert time.monotonic() < end, f"{self.receiver.state}, not {state}: {self.receiver.status()['error']}"
            time.sleep(0.002)

    def serves_the_old(self) -> None:
        assert self.receiver.version == self.version
        assert same(self.receiver.current(), BASE)


def refusal(code: str, act: Callable[..., Any], *args: Any, **named: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        act(*args, **named)
    assert refused.value.code == code, refused.value
    json.dumps(refused.value.to_json())
    return refused.value


# ------------------------------------------------------------------------------------------------ the way it should go


@pytest.mark.parametrize("two", [False, True])
def test_states_and_what_the_server_says(two: bool) -> None:
    seen: list[str] = []
    p = Pushed(two=two, on_change=lambda state: seen.append(state))
    assert p.receiver.state == "serving"
    p.join()
    p.until("joined")
    values = p.values()
    assert p.prepare(values)["blocks"] == values.blocks.count
    assert p.receiver.state == "prepared"
    buckets = list(values.buckets())
    p.bucket(*buckets[0])
    p.until("receiving")
    assert p.receiver.status()["receiving"]["blocks"] == buckets[0][0].blocks
    for bucket in buckets[1:]:
        p.bucket(*bucket)
    p.serves_the_old()
    assert p.receiver.seal(p.said(values))["state"] == p.receiver.state == "staged"
    p.serves_the_old()
    assert p.receiver.status()["staged"] == {"version": 1, "root": values.root}
    assert p.receiver.digests(1)["staged"] and p.receiver.digests()["version"] == 0
    receipt = p.receiver.commit(p.said(values, in_flight="keep"))
    assert (receipt["version"], receipt["root"], receipt["in_flight"]) == (1, values.root, {"policy": "keep"})
    assert receipt["pause_s"] < 0.5
    assert same(p.receiver.current(), NEW) and p.receiver.state == "joined"
    status = p.receiver.status()
    assert (status["version"], status["root"], status["error"]) == (1, values.root, None)
    assert list(dict.fromkeys(seen)) == ["serving", "joined", "prepared", "receiving", "staged", "committing"]
    assert p.receiver.counters.committed == 1 and p.receiver.counters.buckets == len(buckets)
    json.dumps([status, p.receiver.layout(), receipt])


def test_a_to_b_to_a_over_several_epochs() -> None:
    p = Pushed(two=True)
    first = p.push(NEW)
    second = p.push(BASE)
    p.join()
    third = p.push(NEW)
    assert first.root == third.root != second.root and same(p.receiver.current(), NEW)
    assert p.receiver.version == 3


def test_a_delta_over_the_wire() -> None:
    p = Pushed(two=True)
    before = p.push(NEW)
    target = {name: value.clone() for name, value in NEW.items()}
    target["model.norm.weight"][3] = 9
    p.epoch = 1
    values = p.values(target, mode="delta", base=(1, before.root))
    changed = np.flatnonzero((values.digests != before.digests).any(1))
    assert len(changed) == 1
    p.prepare(values)
    p.send(values, changed)
    p.receiver.seal(p.said(values))
    p.receiver.commit(p.said(values))
    assert same(p.receiver.current(), target)
    refusal("base_mismatch", p.prepare, p.values(NEW, version=3, mode="delta", base=(1, before.root)))
    assert p.receiver.state == "joined"


def test_a_callable_makes_the_model() -> None:
    receiver = Receiver(lambda: copy.deepcopy(BASE), CONFIG, name="made", version=4)
    with receiver.reading() as (state, version):
        assert version == 4 and same(state, BASE)
    assert receiver.sink.startswith("made-") and receiver.status()["version"] == 4


class Adapters(Stage):
    """Where pushes of adapters go: here simply another model."""


def test_adapters_have_a_stage_and_versions_of_their_own() -> None:
    adapters = Adapters(copy.deepcopy(BASE), CONFIG)
    p = Pushed(adapters=adapters)
    first = p.push(NEW, mode="lora", lora={"r": 8})
    assert same(adapters.current(), NEW) and same(p.receiver.current(), BASE) and p.receiver.version == 0
    p.version = 0
    second = p.push(NEW, block=100)
    assert (adapters.version, p.receiver.version) == (1, 1) and first.root != second.root
    for values in (first, second):
        assert p.receiver.commit(p.said(values))["repeated"]
    assert p.receiver.status()["adapters"] == {"version": 1, "root": first.root}
    assert p.receiver.status()["root"] == second.root


def test_many_senders() -> None:
    """More than are received from at a time: they get their turn, in order."""
    p = Pushed()
    p.join()
    shapes = [atom.shape for atom in p.receiver.stage.layout.atoms.values()]
    rows = [(n, (i, *(0 for _ in s[1:])), (i + 1, *s[1:])) for n, s in enumerate(shapes) for i in range(s[0])]
    values = p.values(senders=[[row] for row in rows])
    assert len(rows) > WINDOW
    p.prepare(values)
    p.send(values)
    p.receiver.seal(p.said(values))
    p.receiver.commit(p.said(values))
    assert same(p.receiver.current(), NEW)


# ------------------------------------------------------------------------------------------------ the same once more


def test_messages_that_come_twice_are_answered_alike() -> None:
    """An answer was lost, and the hub sends again: nothing happens twice."""
    p = Pushed(two=True)
    p.join()
    values = p.values()
    assert p.prepare(values) == p.prepare(values)
    for bucket in values.buckets():
        assert not p.bucket(*bucket)["repeated"]
        assert p.bucket(*bucket)["repeated"]
    assert p.receiver.seal(p.said(values)) == p.receiver.seal(p.said(values))
    one, two = p.receiver.commit(p.said(values)), p.receiver.commit(p.said(values))
    assert two == {**one, "repeated": True}
    assert p.receiver.counters.committed == 1
    p.version = 1
    p.join()  # a hub that was restarted, with a new epoch
    assert p.receiver.commit(p.said(values))["repeated"]
    refusal("root_mismatch", p.receiver.commit, p.said(values, root="0" * 32))
    values = p.values(BASE)
    p.prepare(values)
    assert p.receiver.abort({"epoch": 2, "reason": "test"})["aborted"]
    assert not p.receiver.abort({"epoch": 2, "reason": "test"})["aborted"]
    assert p.receiver.version == 1


def test_out_of_turn() -> None:
    p = Pushed()
    values = p.values(epoch=1)
    refusal("not_joined", p.prepare, values)
    refusal("no_push", p.bucket, *next(iter(values.buckets())))
    refusal("not_joined", p.receiver.seal, p.said(values))
    p.join()
    refusal("no_push", p.receiver.seal, p.said(values))
    refusal("no_push", p.receiver.commit, p.said(values))
    p.prepare(values)
    refusal("not_staged", p.receiver.commit, p.said(values))
    refusal("other_version", p.receiver.seal, p.said(values, version=2))
    refusal("push_in_progress", p.prepare, p.values(BASE, block=100))
    p.send(values)
    refusal("failed", p.receiver.seal, p.said(values, root="0" * 32))
    refusal("failed", p.receiver.seal, p.said(values))
    refusal("not_staged", p.receiver.commit, p.said(values))
    refusal("push_in_progress", p.prepare, values)
    assert p.receiver.abort({"epoch": 1, "version": 1, "reason": "x"})["aborted"]
    p.serves_the_old()


def test_epochs_and_versions() -> None:
    p = Pushed()
    p.push()
    join = {"hub": HUB, "run": "run", "transport": {"kind": "inline"}}
    assert refusal("stale_epoch", p.receiver.join, {**join, "epoch": 1}).facts["epoch"] == 1
    p.receiver.join({**join, "epoch": 7})
    for act in (p.receiver.seal, p.receiver.abort):
        refusal("stale_epoch", act, {"epoch": 1, "version": 2, "root": "x", "reason": "r"})
    refusal("stale_epoch", p.prepare, p.values(BASE))
    refusal("not_joined", p.prepare, p.values(BASE, epoch=8))
    assert "installed here already" in str(refusal("duplicate_version", p.prepare, p.values(NEW, epoch=7, version=1)))
    p.epoch = 7
    p.push(BASE, version=5)
    assert "older than version 5" in str(refusal("older_version", p.prepare, p.values(NEW, version=3)))
    refusal("bad_manifest", p.prepare, p.values(NEW, version=6, run="another"))


def test_a_newer_epoch_ends_what_was_under_way() -> None:
    p = Pushed()
    p.join()
    values = p.values()
    p.prepare(values)
    p.bucket(*next(iter(values.buckets())))
    p.join()
    p.until("joined")
    refusal("stale_epoch", p.receiver.seal, p.said(values))
    p.push()
    assert same(p.receiver.current(), NEW) and p.receiver.counters.aborted == 1


# ------------------------------------------------------------------------------------------------ lease


def test_one_hub_at_a_time() -> None:
    p = Pushed()
    error = refusal("lease_held", p.receiver.lease, {"hub": "other", "ttl": 5})
    assert HUB in str(error) and 0 < error.facts["expires_in"] <= 30 and error.retryable
    refusal("lease_held", p.join, "other")
    p.epoch = 0
    p.join()
    refusal("lease_held", p.receiver.prepare, {**p.values().manifest.to_json(), "hub": "other"})
    refusal("lease_held", p.receiver.abort, {"epoch": 1, "reason": "no", "hub": "other"})
    p.receiver.lease({"hub": HUB, "ttl": 0.05})
    time.sleep(0.1)
    p.receiver.lease({"hub": "other", "ttl": 30})
    refusal("not_joined", p.prepare, p.values(), hub="other")
    refusal("lease_held", p.receiver.lease, {"hub": HUB, "ttl": 5})
    assert p.receiver.release({"hub": HUB}) == {"released": False}
    assert p.receiver.release({"hub": "other"}) == {"released": True}
    refusal("no_lease", p.join)


@pytest.mark.parametrize("how_far", ["prepared", "receiving", "staged"])
def test_a_hub_that_is_gone_is_presumed_to_have_aborted(how_far: str) -> None:
    p = Pushed()
    p.join()
    values = p.values()
    p.prepare(values)
    for n, bucket in enumerate(values.buckets()):
        if how_far == "staged" or (how_far == "receiving" and n == 0):
            p.bucket(*bucket)
    if how_far == "staged":
        p.receiver.seal(p.said(values))
    p.until(how_far)
    p.receiver.lease({"hub": HUB, "ttl": 0.05})  # the last that is heard of it
    p.until("serving")
    p.serves_the_old()
    assert "lease of the hub hub-1 ran out" in p.receiver.status()["error"]["message"]
    refusal("not_joined", p.receiver.commit, p.said(values))
    p.receiver.lease({"hub": "hub-2", "ttl": 5})  # it may begin again at once
    p.receiver.close()


def test_signs_of_life_renew_the_lease() -> None:
    p = Pushed(ttl=0.8)
    p.join()
    values = p.values()
    p.prepare(values)
    start = time.monotonic()
    for bucket in list(values.buckets())[:5]:
        time.sleep(0.2)
        p.bucket(*bucket)
    assert time.monotonic() - start > 0.8 and p.receiver.state == "receiving"
    p.receiver.lease({"hub": HUB, "ttl": 30})
    for bucket in list(values.buckets())[5:]:
        p.bucket(*bucket)
    p.receiver.seal(p.said(values))
    p.receiver.commit(p.said(values))
    assert same(p.receiver.current(), NEW)


# ------------------------------------------------------------------------------------------------ bad buckets


def damaged(kind: str, header: Header, payload: bytes, values: Values) -> tuple[bytes, bytes]:
    """A bucket with one thing wrong."""
    fields = {name: getattr(header, name) for name in Header.__slots__}
    raw = bytearray(payload)
    if kind == "flip":
        raw[-1] ^= 1
    elif kind == "short":
        return Header(**fields).pack(), payload[:-2]
    elif kind == "long":
        return Header(**fields).pack(), payload + b"xx"
    elif kind == "short_said":
        fields["nbytes"] -= 2
        return Header(**fields).pack(), payload[:-2]
    elif kind == "digest":
        fields["digest"] = bytes(16)
    elif kind == "blocks":
        fields["blocks"] += 1
    elif kind == "many_blocks":
        fields["blocks"] = (1 << 32) - 1
    elif kind == "beyond":
        raw[:4] = (values.blocks.count).to_bytes(4, "little")
    elif kind == "garbage":
        return b"\xff" * HEADER_BYTES, payload
    elif kind == "cut_header":
        return Header(**fields).pack()[:20], b""
    elif kind == "huge":
        fields["nbytes"] = 1 << 60
    elif kind == "flags":
        fields["flags"] = 64
    elif kind == "abort":
        fields |= {"flags": ABORT, "nbytes": 0, "blocks": 0}
        raw = bytearray()
    else:
        fields[kind] += 7
    return Header(**fields).pack(), bytes(raw)


FAULTS = ["flip", "short", "long", "short_said", "digest", "blocks", "many_blocks", "beyond", "garbage", "cut_header"]
FAULTS += ["huge", "flags", "epoch", "version", "sender", "number", "abort"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_bucket_is_never_installed(fault: str) -> None:
    p = Pushed()
    p.join()
    values = p.values()
    p.prepare(values)
    buckets = list(values.buckets())
    p.bucket(*buckets[0])
    with pytest.raises(Refused) as refused:
        p.bucket(*damaged(fault, *buckets[1], values))
    assert refused.value.code in ("bad_bucket", "aborted"), refused.value
    if p.receiver.state != "failed":  # it was turned away at the door: the right one may still come
        assert fault in ("garbage", "cut_header", "sender", "number")
        for bucket in buckets[1:]:
            p.bucket(*bucket)
        p.receiver.seal(p.said(values))
        p.receiver.commit(p.said(values))
        assert same(p.receiver.current(), NEW)
        return
    with pytest.raises(Refused):
        for bucket in buckets[1:]:
            p.bucket(*bucket)
    error = refusal("failed", p.receiver.seal, p.said(values))
    assert error.facts["reason"]["message"]
    p.serves_the_old()
    p.receiver.abort({"epoch": 1, "reason": "failed"})
    p.join()
    p.push()
    assert same(p.receiver.current(), NEW)


def test_blocks_that_come_twice_or_from_the_wrong_sender() -> None:
    for two, numbers, text in ((False, [0, 0], "came twice"), (True, [-1], "is none of sender 0")):
        p = Pushed(two=two)
        p.join()
        values = p.values()
        p.prepare(values)
        wanted = [n % values.blocks.count for n in numbers]
        with pytest.raises(Refused, match=text):
            p.bucket(*values.bucket(0, 0, wanted))
        p.until("failed")
        p.serves_the_old()


def test_a_push_that_ends_too_early_says_what_is_missing() -> None:
    p = Pushed()
    p.join()
    values = p.values()
    p.prepare(values)
    p.bucket(*values.bucket(0, 0, [0, 1, 3], LAST))
    assert "after its last one" in str(refusal("bad_bucket", p.bucket, *values.bucket(0, 1, [2])))
    error = refusal("failed", p.receiver.seal, p.said(values))
    assert f"{values.blocks.count - 3} of {values.blocks.count} blocks did not come; the first is 2" in str(error)
    p.serves_the_old()


@settings(max_examples=40)
@given(st.data())
def test_whatever_comes_nothing_is_half_installed(data: st.DataObject) -> None:
    """Headers of any bytes, payloads with any damage: it commits the right bytes, or serves the old ones."""
    p = Pushed(two=data.draw(st.booleans()), timeout=2.0)
    p.join()
    values = p.values()
    p.prepare(values)
    buckets = list(values.buckets())
    victim = data.draw(st.integers(0, len(buckets) - 1))
    harmed = False
    for n, (header, payload) in enumerate(buckets):
        raw, body = bytearray(header.pack()), bytearray(payload)
        if n == victim:
            where = data.draw(st.sampled_from(["none", "header", "payload", "both"]))
            for part in [raw] * (where in ("header", "both")) + [body] * (where in ("payload", "both") and bool(body)):
                part[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
                harmed = True
        try:
            p.bucket(bytes(raw), bytes(body))
        except Refused:
            assert harmed
            break
    try:
        if not harmed or p.receiver.state == "failed":
            p.receiver.seal(p.said(values))
            p.receiver.commit(p.said(values))
    except Refused:
        assert harmed
    if harmed:
        p.serves_the_old()
    else:
        assert same(p.receiver.current(), NEW)
    p.receiver.close()
    assert p.receiver.state == "serving"


# ------------------------------------------------------------------------------------------------ bad manifests


def refused_manifest(changes: Mapping[str, Any], code: str, *texts: str) -> None:
    p = Pushed()
    p.join()
    error = refusal(code, p.prepare, p.values(), **changes)
    for text in texts:
        assert text in str(error), error
    p.until("joined")
    assert p.receiver.stage.spare() is None
    p.push()
    assert same(p.receiver.current(), NEW)


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"atoms": []}, "bad_manifest", "atoms"),
        ({"atoms": [["embed", [11, -8], "BF16"]]}, "bad_manifest", "atoms[0]"),
        ({"atoms": [["embed", [11, 8], "BF17"]]}, "bad_manifest", "BF17"),
        ({"atoms": [["embed", [11, 8.5], "BF16"]]}, "bad_manifest", "atoms[0]"),
        ({"atoms": [["embed", [1 << 70], "BF16"]], "senders": [[0]]}, "mismatch", "embed"),
        ({"senders": [[0, 0]]}, "bad_manifest", "more than once"),
        ({"senders": [[[0, [0, 0], [5, 8]]]]}, "bad_manifest", "the others are missing"),
        ({"senders": [[[0, [0, 0], [99, 8]]]]}, "bad_manifest", "embed"),
        ({"senders": [[[0, [-1, 0], [11, 8]]]]}, "bad_manifest", "senders[0][0]"),
        ({"senders": [[[0, [5, 0], [5, 8]]]]}, "bad_manifest", "senders[0][0]"),
        ({"senders": [[[0, [0], [11]]]]}, "bad_manifest", "senders[0][0]"),
        ({"senders": [[77]]}, "bad_manifest", "senders[0][0]"),
        ({"senders": []}, "bad_manifest", "senders"),
        ({"senders": 3}, "bad_manifest", "senders"),
        ({"block": 0}, "bad_manifest", "block"),
        ({"block": 1}, "bad_manifest", "block"),
        ({"block": 1 << 40}, "bad_manifest", "block"),
        ({"bucket": 1 << 40}, "bad_manifest", "bucket"),
        ({"bucket": True}, "bad_manifest", "bucket"),
        ({"version": 1 << 70}, "bad_manifest", "version"),
        ({"version": 0}, "bad_manifest", "version"),
        ({"version": "1"}, "bad_manifest", "version"),
        ({"mode": "partial"}, "bad_manifest", "mode"),
        ({"mode": "delta"}, "bad_manifest", "base"),
        ({"base": [1, "x"]}, "bad_manifest", "base"),
        ({"base": 7}, "bad_manifest", "base"),
        ({"mode": "lora", "lora": {"r": 8}}, "no_adapters", "LoRA"),
        ({"protocol": 99}, "bad_manifest", "version 99"),
        ({"model": "qwen"}, "bad_manifest", "model"),
        ({"model": {"family": "qwen3"}}, "mismatch", "qwen3"),
        ({"run": None}, "bad_manifest", "run"),
    ],
)
def test_a_manifest_that_cannot_be_believed(changes: dict[str, Any], code: str, text: str) -> None:
    refused_manifest(changes, code, text)


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=8,
    ),
    st.sampled_from(["", *Manifest.__slots__]),
)
def test_any_json_is_refused_by_name(value: Any, field: str) -> None:
    p, fits = plain()
    body = value if not field else {**fits, field: value}
    try:
        p.receiver.prepare(body)
    except Refused as error:
        assert error.status in (409, 422)
    else:
        assert field in ("model", "lora", "base", "block", "bucket", "version"), (field, value)
        p.receiver.abort({"epoch": 1, "reason": "it fits"})
        p.receiver._seen = 0
        p.epoch = 0
        p.join()


@cache
def plain() -> tuple[Pushed, dict[str, Any]]:
    """A receiver that has joined, and a manifest that fits it."""
    p = Pushed(ttl=3000)
    p.join()
    return p, p.values().manifest.to_json()


def test_memory_is_looked_at_before_anything_else() -> None:
    p = Pushed(free=lambda device: 100)
    p.join()
    error = refusal("memory", p.prepare, p.values())
    assert error.status == 409 and error.facts["free"] == 100
    p.until("joined")


# ------------------------------------------------------------------------------------------------ commit


def test_the_critical_section_has_both_hooks_around_it() -> None:
    seen: list[Any] = []

    def before(commit: Commit) -> dict[str, Any]:
        seen.append(("before", commit.version, commit.in_flight, same(p.receiver.current(), BASE)))
        return {"waited": 2}

    def after(commit: Commit, installed: bool) -> dict[str, Any]:
        seen.append(("after", installed, same(p.receiver.current(), NEW)))
        return {"flushed": 5}

    p = Pushed(before_install=before, after_install=after)
    values = p.stage()
    receipt = p.receiver.commit(p.said(values, in_flight="wait"))
    assert receipt["in_flight"] == {"policy": "wait", "waited": 2, "flushed": 5}
    assert seen == [("before", 1, "wait", True), ("after", True, True)]
    refusal("bad_request", p.receiver.commit, p.said(values, in_flight="drop"))


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_hook_that_fails_leaves_the_old_version_and_the_stage(where: str) -> None:
    broken, opened = [True], []

    def fail(name: str) -> None:
        if name == where and broken[0]:
            raise RuntimeError("no flush today")

    def after(commit: Commit, installed: bool) -> None:
        if installed:
            fail("after")
        opened.append(installed)

    p = Pushed(before_install=lambda commit: fail("before"), after_install=after)
    values = p.stage()
    error = refusal("install_failed", p.receiver.commit, p.said(values))
    assert "no flush today" in str(error) and error.status == 500
    p.serves_the_old()
    assert opened == [False] and p.receiver.state == "staged"
    broken[0] = False
    p.receiver.commit(p.said(values))
    assert same(p.receiver.current(), NEW) and opened == [False, True]


def test_a_critical_section_that_forgets_to_swap() -> None:
    p = Pushed(critical=lambda commit, swap: None)
    values = p.stage()
    assert "without a swap" in str(refusal("install_failed", p.receiver.commit, p.said(values)))
    p.serves_the_old()


def test_too_late_to_abort() -> None:
    """While a commit is carried out neither an abort, a join, a lease that runs out, nor a second commit gets in."""
    inside, go = threading.Event(), threading.Event()

    def critical(commit: Commit, swap: Callable[[], None]) -> None:
        inside.set()
        go.wait(5)
        swap()

    p = Pushed(critical=critical)
    values = p.stage()
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(p.receiver.commit(p.said(values)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert inside.wait(5)
    refusal("committing", p.receiver.abort, {"epoch": 1, "reason": "too late"})
    p.receiver.lease({"hub": HUB, "ttl": 0.05})
    time.sleep(0.3)
    assert p.receiver.state == "committing"
    go.set()
    for thread in threads:
        thread.join(5)
    assert sorted(bool(a.get("repeated")) for a in answers) == [False, True]
    assert same(p.receiver.current(), NEW)


def test_requests_that_run_keep_their_version() -> None:
    p = Pushed()
    with p.receiver.reading() as (old, version):
        p.push()
        assert version == 0 and same(old, BASE) and same(p.receiver.current(), NEW)
        p.receiver.timeout = 0.1
        assert "still read version 0" in str(refusal("busy", p.prepare, p.values(BASE)))
        assert same(old, BASE)
    p.push(BASE)
    assert p.receiver.version == 2


def test_what_says_on_change_may_fail() -> None:
    def fail(state: str) -> None:
        raise RuntimeError("a broken display")

    p = Pushed(on_change=fail)
    p.push()
    assert same(p.receiver.current(), NEW)


# ------------------------------------------------------------------------------------------------ aborts, inlets


def test_an_abort_while_a_seal_waits() -> None:
    p = Pushed()
    p.join()
    values = p.values()
    p.prepare(values)
    p.bucket(*next(iter(values.buckets())))
    found: list[Refused] = []

    def seal() -> None:
        try:
            p.receiver.seal(p.said(values))
        except Refused as error:
            found.append(error)

    thread = threading.Thread(target=seal)
    thread.start()
    time.sleep(0.05)
    start = time.monotonic()
    assert p.receiver.abort({"epoch": 1, "reason": "changed my mind"})["state"] == "serving"
    thread.join(5)
    assert time.monotonic() - start < 2 and found[0].code == "aborted"
    p.serves_the_old()
    refusal("no_push", p.bucket, *list(values.buckets())[1])


def test_an_abort_waits_for_no_bucket_that_is_still_to_come() -> None:
    """Buckets whose bytes never come wait for a thread that applies them: all are let go of, and nobody is told that
    one of them was applied."""
    stage = Stage(copy.deepcopy(BASE), CONFIG)
    atoms = list(stage.layout.atoms.values())
    senders = [[(n, (0,) * len(atom.shape), atom.shape)] for n, atom in enumerate(atoms)]
    values = Values(NEW, CONFIG, manifest_of(stage.layout, senders))
    ended, ends, waiting = threading.Event(), list[ConvertError | None](), threading.Semaphore(0)
    waited: list[bool] = []

    class Silent(Offered):
        def next(self, sender: int) -> Stream:
            header, payload = values.bucket(sender, 0, [values.blocks.of_sender(sender).start], LAST)

            def fill(header: Header, places: Any) -> Callable[[], None]:
                waiting.release()
                return lambda: waited.append(ended.wait(3))

            return Stream(header.pack(), lambda h: np.frombuffer(payload[:4], np.uint8), fill, ends.append)

        def abort(self, reason: str) -> None: ...

    ledger = stage.begin(values.manifest, values.blocks, 1.0)
    reception = Reception(Silent({}, 1.0), values.manifest, values.blocks, stage, ledger)
    reception.start()
    for _ in atoms:
        assert waiting.acquire(timeout=3)
    threading.Timer(0.1, ended.set).start()
    reception.cancel("enough")
    assert len(ends) == len(atoms) and all(ends) and len(waited) <= APPLIERS


def test_an_abort_of_what_is_staged_keeps_the_epoch() -> None:
    p = Pushed()
    p.stage()
    assert p.receiver.abort({"epoch": 1, "version": 1, "reason": "x"})["state"] == "joined"
    p.serves_the_old()
    p.push()
    assert same(p.receiver.current(), NEW)


def test_a_server_that_shuts_down() -> None:
    p = Pushed()
    p.join()
    values = p.values()
    p.prepare(values)
    p.receiver.close()
    p.serves_the_old()
    refusal("shutting_down", p.join)


class Slow(Offered):
    """Opens when it is told to; fails when it is told to."""

    kind = "inline"
    gate = threading.Event()
    fails = False

    def open(self) -> None:
        self.gate.wait(5)
        if self.fails:
            raise ConvertError("the others did not come")


def test_prepare_waits_for_the_join(monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_convert.converter.sync import inlet

    monkeypatch.setattr(inlet, "Slow", Slow, raising=False)
    monkeypatch.setitem(inlet.KINDS, "inline", "inlet:Slow")
    for fails in (False, True):
        monkeypatch.setattr(Slow, "fails", fails)
        Slow.gate.clear()
        p = Pushed(timeout=2.0)
        p.join()
        assert p.receiver.state == "serving"
        threading.Timer(0.1, Slow.gate.set).start()
        if not fails:
            assert p.prepare(p.values())["state"] == "prepared"
            p.receiver.close()
            continue
        assert "did not come" in str(refusal("join_failed", p.prepare, p.values()))
        assert p.receiver.status()["error"]["code"] == "join_failed"
        p.serves_the_old()


def test_transports_that_are_none() -> None:
    p = Pushed(transports=("inline",))
    body = {"hub": HUB, "run": "run", "epoch": 1}
    refusal("bad_transport", p.receiver.join, {**body, "transport": {"kind": "pigeon"}})
    refusal("bad_transport", p.receiver.join, {**body, "transport": {"kind": "gloo"}})
    refusal("bad_request", p.receiver.join, {**body, "transport": 5})
    refusal("bad_transport", open_inlet, {"kind": None}, 1.0)
    q = Pushed()
    for transport in ({"kind": "gloo"}, {"kind": "gloo", "host": "h", "port": 1, "rank": 1, "world": 2, "names": []}):
        refusal(
            "bad_request" if "host" not in transport else "bad_transport",
            q.receiver.join,
            body | {"transport": transport},
        )
    assert q.receiver.status()["epoch"] == 0, "an epoch that could not begin was not seen"


def test_offers_that_overtake_each_other() -> None:
    """Concurrent requests: the second bucket may be here before the first. Far ahead, and twice, are refused."""
    inlet = InlineInlet({"kind": "inline"}, 2.0)
    inlet.begin(1, 100)
    headers = [Header(1, 1, 0, n, 2, 0, bytes(16)).pack() for n in range(9)]
    taken: list[int] = []
    done = threading.Event()

    def take() -> None:
        for n in range(3):
            arrival = inlet.next(0)
            taken.append(Header.unpack(arrival.header).number)
            arrival.done(None if n < 2 else Refused("bad_bucket", "damaged"))
        done.set()

    threading.Thread(target=take, daemon=True).start()
    answers: list[Any] = []
    second = threading.Thread(target=lambda: answers.append(inlet.accept("bucket", {}, headers[1] + b"ab")))
    second.start()
    time.sleep(0.05)
    assert not taken
    refusal("bad_bucket", inlet.accept, "bucket", {}, headers[8] + b"ab")
    inlet.accept("bucket", {}, headers[0] + b"ab")
    second.join(2)
    refusal("bad_bucket", inlet.accept, "bucket", {}, headers[2] + b"ab")
    assert done.wait(2) and taken == [0, 1, 2] and answers[0]["number"] == 1
    refusal("bad_bucket", inlet.accept, "bucket", {}, headers[2] + b"ab")
    inlet.close()
    refusal("aborted", inlet.accept, "bucket", {}, headers[3] + b"ab")


# ------------------------------------------------------------------------------------------------ in any order


class AnyOrder(RuleBasedStateMachine):
    """Messages of a confused hub. Whatever it does, what serves is exactly one committed version."""

    def __init__(self) -> None:
        super().__init__()
        self.p = Pushed(two=True, ttl=600, timeout=1.0)
        self.committed: dict[int, Any] = {0: BASE}
        self.values: Values | None = None
        self.target: Any = None
        self.sent = 0
        self.spoiled = False

    def teardown(self) -> None:
        self.p.receiver.close()

    def attempt(self, act: Callable[..., Any], *args: Any) -> Any:
        try:
            return act(*args)
        except Refused as error:
            assert error.code not in ("internal", "install_failed"), error
            return None

    @initialize()
    def begin(self) -> None:
        self.p.join()

    @rule(seed=st.integers(2, 9), upto=st.integers(1, 4))
    def as_it_should(self, seed: int, upto: int) -> None:
        """The steps of a push, in their order, up to one of them."""
        if self.p.receiver.state != "joined":
            self.p.join()
        self.prepare(seed, 1, 64, 0)
        assert self.values is not None
        for step in (lambda: self.send(99, "none"), lambda: self.finish(self.values), lambda: self.commit(False))[
            :upto
        ]:
            step()

    @rule()
    def join(self) -> None:
        self.p.join()

    @rule(
        seed=st.integers(2, 9),
        skip=st.integers(0, 2),
        block=st.sampled_from([64, 128]),
        early=st.sampled_from([0, 0, 1]),
    )
    def prepare(self, seed: int, skip: int, block: int, early: int) -> None:
        epoch = max(1, self.p.epoch - early)
        target = tiny_state(seed)[0]
        values = self.p.values(target, epoch=epoch, version=self.p.receiver.version + skip, block=block)
        if values.manifest.version and self.attempt(self.p.prepare, values):
            self.values, self.target, self.sent, self.spoiled = values, target, 0, False

    @precondition(lambda self: self.values is not None)
    @rule(count=st.integers(1, 12), fault=st.sampled_from(["none"] * 8 + ["flip", "skip"]))
    def send(self, count: int, fault: str) -> None:
        assert self.values is not None
        buckets = list(self.values.buckets())
        for header, payload in buckets[self.sent : self.sent + count]:
            self.sent += 1
            if fault == "skip":
                self.spoiled = True
                continue
            body = bytearray(payload)
            if fault == "flip":
                body[-1] ^= 4
                self.spoiled = True
            if self.attempt(self.p.bucket, header, bytes(body)) is None:
                self.spoiled = True
                break

    @precondition(lambda self: self.values is not None)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        assert self.values is not None
        whole = self.sent >= len(list(self.values.buckets())) and not self.spoiled
        if not whole and self.p.receiver.state in ("prepared", "receiving"):
            return  # it would wait
        root = data.draw(st.sampled_from([self.values.root, self.values.root, "0" * 32]))
        self.finish(self.values, root, whole)

    def finish(self, values: Values | None, root: str = "", whole: bool = True) -> None:
        assert values is not None
        if self.attempt(self.p.receiver.seal, self.p.said(values, root=root or values.root)):
            assert whole and root in ("", values.root)

    @precondition(lambda self: self.values is not None)
    @rule(again=st.booleans())
    def commit(self, again: bool) -> None:
        assert self.values is not None
        target = self.target
        before = self.p.receiver.state
        receipt = self.attempt(self.p.receiver.commit, self.p.said(self.values))
        if receipt:
            assert before == "staged" or receipt["repeated"]
            self.committed[receipt["version"]] = target
            if again:
                assert self.p.receiver.commit(self.p.said(self.values))["repeated"]

    @rule(which=st.integers(-1, 0))
    def abort(self, which: int) -> None:
        self.attempt(self.p.receiver.abort, {"epoch": max(0, self.p.epoch + which), "reason": "any"})

    @invariant()
    def one_version_serves(self) -> None:
        with self.p.receiver.reading() as (state, version):
            assert version == self.p.receiver.version == max(self.committed)
            assert same(state, self.committed[version])


AnyOrder.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
test_any_order = AnyOrder.TestCase
