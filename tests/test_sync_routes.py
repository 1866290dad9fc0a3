"""`/ws/*` over real HTTP, and real gloo groups: the server's side of the protocol, mounted in a FastAPI application."""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import requests

from areal_convert.converter.errors import ChannelError, LeaseHeld, ServerRefused
from areal_convert.converter.sync import blocks, channel, reception
from areal_convert.converter.sync.client import Client
from areal_convert.converter.sync.commits import Commit
from areal_convert.converter.sync.inlet_groups import GroupInlet
from areal_convert.converter.sync.protocol_sink import ProtocolSink
from areal_convert.converter.sync.receiver import Receiver
from areal_convert.converter.sync.routes import MESSAGE_BYTES, router
from areal_convert.converter.sync.transport import Place
from areal_convert.converter.sync.transport_groups import GroupTransport
from areal_convert.converter.sync.wire import ABORT, HEAD_BYTES, HEADER_BYTES, LAST, Header
from sync_parts import HUB, Values, halves, manifest_of, same, tiny_state

BASE, CONFIG = tiny_state(1)
NEW = tiny_state(2)[0]


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def served(**options: Any) -> Iterator[tuple[str, Receiver]]:
    """A receiver behind uvicorn, in a thread of this process."""
    import uvicorn
    from fastapi import FastAPI

    settings: dict[str, Any] = {"timeout": 10.0, **options}
    receiver = Receiver(copy.deepcopy(BASE), CONFIG, **settings)
    app = FastAPI()
    app.include_router(router(receiver))

    @app.get("/alive")
    async def alive() -> dict[str, bool]:
        return {"alive": True}

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < end and thread.is_alive()
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", receiver
    finally:
        receiver.close()
        server.should_exit = True
        thread.join(10)


def error_of(answer: requests.Response, status: int, code: str) -> dict[str, Any]:
    """The JSON error, which has to have its form whatever went wrong."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code and error["message"] and isinstance(error["hint"], str), error
    assert isinstance(error["retryable"], bool)
    return error


def values_of(receiver: Receiver, target: Any = NEW, two: bool = False, **fields: Any) -> Values:
    layout = receiver.stage.layout
    return Values(target, CONFIG, manifest_of(layout, halves(layout) if two else None, **fields))


def test_a_push_over_http_with_buckets_in_the_bodies() -> None:
    with served(token="secret") as (url, receiver):
        sink = ProtocolSink(Client(url, "secret"), HUB)
        assert sink.status().state == "serving" and sink.layout().model["family"] == "llama"
        sink.lease(HUB, 30)
        sink.run = "run"
        sink.join(1, {"kind": "inline"})
        values = values_of(receiver, two=True)
        sink.prepare(values.manifest)
        with ThreadPoolExecutor(2) as pool:
            sent = [pool.submit(sink.client.post_bytes, "/ws/bucket", h.pack() + p) for h, p in values.buckets()]
            assert all(one.result()["applied"] for one in sent)
        assert sink.seal(1, values.root) == values.root
        assert sink.status().staged == (1, values.root)
        receipt = sink.commit(1, values.root)
        assert receipt.version == 1 and receipt.pause_s < 1 and sink.commit(1, values.root).root == values.root
        assert same(receiver.current(), NEW)
        assert sink.digests() == receiver.stage.digests()
        assert list(sink.client.get("/ws/digests?name=embed&name=head&version=1")["atoms"]) == ["embed", "head"]
        sink.abort(None, "nothing to abort")
        sink.release()
        assert sink.status().lease is None


Buckets = list[tuple[Header, bytes]]


def flipped(sent: Buckets) -> Buckets:
    header, payload = sent[1]
    return [sent[0], (header, payload[:-1] + bytes([payload[-1] ^ 1])), *sent[2:]]


def skipped(sent: Buckets) -> Buckets:
    return [sent[0], *sent[2:]]


def duplicated(sent: Buckets) -> Buckets:
    return [*sent[:2], *sent[1:]]


def reordered(sent: Buckets) -> Buckets:
    return [sent[0], sent[2], sent[1], *sent[3:]]


def truncated(sent: Buckets) -> Buckets:
    """Header and payload agree, and the last block lacks its end."""
    header, payload = sent[1]
    return [sent[0], (replace(header, nbytes=header.nbytes - 2), payload[:-2]), *sent[2:]]


def cut_on_the_wire(sent: Buckets) -> Buckets:
    """Less arrives than the header says: gloo calls that a success, and leaves the end of the buffer as it was."""
    header, payload = sent[1]
    return [sent[0], (header, payload[:-4]), *sent[2:]]


def without_end(sent: Buckets) -> Buckets:
    """The last bucket says that it is the last one, and is not: a block never comes."""
    return [*sent[:-2], (replace(sent[-2][0], flags=LAST), sent[-2][1])]


DAMAGES: list[tuple[Callable[[Buckets], Buckets], str]] = [
    (flipped, r"Bucket 1 of sender \d is damaged: its bytes are not those that were sent"),
    (skipped, r"Bucket 2 of sender \d: number 2; 1 was expected"),
    (duplicated, r"Bucket 1 of sender \d: number 1; 2 was expected"),
    (reordered, r"Bucket 2 of sender \d: number 2; 1 was expected"),
    (truncated, r"Bucket 1 of sender \d has \d+ bytes; its \d blocks make \d+"),
    (cut_on_the_wire, r"Bucket 1 of sender \d is damaged: its bytes are not those that were sent"),
    (without_end, r"\d+ of \d+ blocks did not come"),
]
"""What every sender does to its buckets, and what the servers say."""


@pytest.mark.parametrize("senders", [1, 2])
def test_a_push_over_gloo(senders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers, real groups. Every bad bucket is refused by its name on both, which serve what they had; the next
    push, in a new epoch, arrives. With two senders most blocks are received right where they belong in the stage."""
    monkeypatch.setattr(channel, "_TICK", 0.02)
    for module in (blocks, reception) if senders == 2 else ():
        monkeypatch.setattr(module, "LONG", 32)
    with served() as (url, one), served() as (url2, two):
        sinks = [ProtocolSink(Client(u), HUB) for u in (url, url2)]

        def new(epoch: int, version: int) -> Values:
            """Weights that were never sent before: no buffer has the rest of a bucket by chance."""
            return values_of(one, tiny_state(10 * epoch + version)[0], senders == 2, epoch=epoch, version=version)

        for version, (damage, said) in enumerate([*DAMAGES, (None, "")], 1):
            good = new(version, version)
            hub = Gloo(sinks, version, good, senders)
            hub.send()
            for sink in sinks:
                assert sink.seal(version, good.root) == good.root
                sink.commit(version, good.root)
            if damage is None:
                hub.close()
                break
            bad = new(version, version + 1)
            hub.prepare(bad)
            hub.send(damage)
            for sink in sinks:
                with pytest.raises(ServerRefused, match=said):
                    sink.seal(version + 1, bad.root)
                assert sink.status().state == "failed"
                sink.abort(version + 1, damage.__name__)
            hub.close()
            for receiver in (one, two):
                assert same(receiver.current(), good.target) and receiver.version == version, damage


class Gloo:
    """A hub with all of its senders in this process."""

    def __init__(self, sinks: list[ProtocolSink], epoch: int, values: Values, senders: int) -> None:
        self.sinks = sinks
        clients = [sink.client for sink in sinks]
        places = [Place("run", epoch, s, senders, clients, "127.0.0.1", 256, 10.0) for s in range(senders)]
        self.senders = [GroupTransport("gloo", place) for place in places]
        offer = self.senders[0].offer()
        for n, sink in enumerate(sinks):
            sink.lease(HUB, 30)
            sink.run = "run"
            sink.join(epoch, {**offer, "rank": n + 1, "world": len(sinks) + 1})
        for sender in self.senders:
            sender.open(offer)
        self.prepare(values)

    def prepare(self, values: Values) -> None:
        self.values = values
        for sink in self.sinks:
            sink.prepare(values.manifest)

    def send(self, damage: Callable[[Buckets], Buckets] | None = None) -> None:
        def run(sender: int) -> None:
            transport = self.senders[sender]
            transport.begin(self.values.manifest.version)
            own = [(header, payload) for header, payload in self.values.buckets() if header.sender == sender]
            assert len(own) > 2
            for header, payload in damage(own) if damage is not None else own:
                buffer = transport.buffer()[: len(payload)]
                buffer[:] = np.frombuffer(payload, np.uint8)
                transport.send(header, self._cut(header, buffer))
            transport.finish()

        with ThreadPoolExecutor(len(self.senders)) as pool:
            sending = [pool.submit(run, sender) for sender in range(len(self.senders))]
            while damage is not None and not all(one.done() for one in sending):
                if any(sink.status().state == "failed" for sink in self.sinks):
                    for transport in self.senders:
                        transport.abort("a server failed")  # as a hub does that looks after its servers
                    break
                time.sleep(0.01)
            for one in sending:
                with suppress(*([ChannelError] if damage is not None else [])):
                    one.result()

    def _cut(self, header: Header, payload: Any) -> list[Any]:
        """The parts in which a payload travels: numbers, long runs alone, short ones together."""
        start = 4 * header.blocks
        numbers = payload[:start].view("<u4").astype(np.int64)
        runs = self.values.blocks.runs(numbers, self.values.blocks.lengths(numbers))
        parts = [payload[:start]]
        for some in blocks.parts_of(runs):
            end = start + sum(run.nbytes for run in some)
            parts.append(payload[start:end])
            start = end
        return parts

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


def test_a_header_that_lies_closes_the_groups() -> None:
    """How much comes next cannot be known then: the server leaves, and the hub learns of it at once."""
    with served() as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        values = values_of(receiver)
        hub = Gloo([sink], 1, values, 1)
        transport = hub.senders[0]
        transport.begin(1)
        transport.send(Header(9, 9, 9, 9, 0, 0, bytes(16)), [transport.buffer()[:0]])
        with pytest.raises(ServerRefused, match="epoch 9; 1 was expected"):
            sink.seal(1, values.root)
        assert receiver.state == "failed" and same(receiver.current(), BASE)
        sink.abort(1, "failed")
        assert receiver.state == "serving"
        hub.close()


def test_a_hub_that_dies_in_the_middle() -> None:
    with served() as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        values = values_of(receiver)
        hub = Gloo([sink], 1, values, 1)
        transport = hub.senders[0]
        transport.begin(1)
        header, payload = next(iter(values.buckets()))
        buffer = transport.buffer()[: len(payload)]
        buffer[:] = np.frombuffer(payload, np.uint8)
        transport.send(header, hub._cut(header, buffer))
        transport.finish()
        hub.close()
        end = time.monotonic() + 8
        while receiver.state != "failed":
            assert time.monotonic() < end, receiver.status()
            time.sleep(0.01)
        assert same(receiver.current(), BASE) and receiver.status()["error"]
        sink.abort(1, "it died")


def test_a_hub_that_says_nothing_can_be_aborted() -> None:
    """Threads that wait in a collective are freed, and a new epoch begins while the old group is still there."""
    with served() as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        silent = Gloo([sink], 1, values_of(receiver), 1)
        start = time.monotonic()
        sink.abort(1, "it says nothing")
        assert time.monotonic() - start < 3 and receiver.state == "serving"
        values = values_of(receiver, epoch=2)
        hub = Gloo([sink], 2, values, 1)
        hub.send()
        sink.seal(1, values.root)
        sink.commit(1, values.root)
        assert same(receiver.current(), NEW)
        hub.close()
        silent.close()


class Wire:
    """In a channel's place: what was broadcast (none of it is over), and what breaks instead of which broadcast."""

    def __init__(self, broken: Mapping[int, BaseException] | None = None) -> None:
        self.broken = dict(broken or {})
        self.posted: list[np.ndarray[Any, Any]] = []
        self.promised: list[np.ndarray[Any, Any]] = []

    def check(self) -> None: ...

    def wait(self) -> None: ...

    def settled(self, timeout: float) -> bool:
        return False

    def post(self, buffer: np.ndarray[Any, Any]) -> Wire:
        if len(self.posted) in self.broken:
            raise self.broken.pop(len(self.posted))
        self.posted.append(buffer)
        return self

    broadcast = post

    def close(self, promised: list[np.ndarray[Any, Any]]) -> None:
        self.promised = promised


def sent(transport: GroupTransport, number: int, flags: int = 0) -> None:
    transport.buffer()
    parts = [np.empty(0, np.uint8), np.full(number + 5, number, np.uint8)]
    transport.send(Header(1, 1, 0, number, number + 5, 0, bytes(16), flags), parts)


def test_nothing_follows_a_bucket_that_broke_off_and_what_there_is_room_for_comes() -> None:
    """A server that gets a head where it waits for a body is ended by gloo; and one that waits for a body which never
    comes cannot use its second copy for anything else before the timeout."""
    whole, torn = Wire(), Wire({2: KeyboardInterrupt()})
    for wire in (whole, torn):
        transport = GroupTransport("gloo", Place("run", 1, 0, 1, [], "127.0.0.1", 256, 10.0))
        transport._channel = wire  # type: ignore[assignment]
        transport.begin(1)
        sent(transport, 0)
        with pytest.raises(KeyboardInterrupt) if wire is torn else nullcontext():
            sent(transport, 1)
        if wire is torn:
            with pytest.raises(ChannelError, match="broken off within a bucket"):
                sent(transport, 2, ABORT)
        transport.close()
    assert [b.size for b in whole.posted] == [HEAD_BYTES, HEAD_BYTES, 5]
    off, body = whole.promised
    header = Header.unpack(off[:HEADER_BYTES].tobytes())
    assert (header.flags, header.number, off.size, body.tolist()) == (ABORT, 2, HEAD_BYTES, [1] * 6)
    assert len(torn.posted) == 2 and not torn.promised


def test_room_is_known_to_be_given_away_where_an_abort_comes_between_two_parts() -> None:
    inlet = GroupInlet({"kind": "gloo", "host": "h", "port": 1, "names": ["a"], "rank": 1, "world": 2}, 10.0)
    inlet._channels = [Wire({2: ChannelError("it was aborted")})]  # type: ignore[list-item]
    stream = inlet.next(0)
    assert inlet.settled(0)
    with pytest.raises(ChannelError):
        stream.fill(Header(1, 1, 0, 0, 8, 0, bytes(16), LAST), [np.empty(4, np.uint8), np.empty(4, np.uint8)])
    assert not inlet.settled(0)


def test_a_join_that_nobody_meets(unused_tcp_port: int) -> None:
    with served(timeout=15.0) as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        sink.lease(HUB, 30)
        sink.run = "run"
        transport = {
            "kind": "gloo",
            "host": "127.0.0.1",
            "port": unused_tcp_port,
            "names": ["a"],
            "rank": 1,
            "world": 2,
        }
        sink.join(1, {**transport, "timeout": 1.0})
        with pytest.raises(ServerRefused, match="does not answer") as refused:
            sink.prepare(values_of(receiver).manifest)
        assert refused.value.code == "join_failed" and receiver.state == "serving"


# ------------------------------------------------------------------------------------------------ who may, and how


def test_a_page_in_a_browser_may_not_push() -> None:
    """A site somewhere posts to a server on loopback, without a preflight (text/plain), as its visitor's browser."""
    with served() as (url, receiver):
        page = {"origin": "https://example.org", "content-type": "text/plain"}
        body = '{"hub": "page", "ttl": 30}'
        error_of(requests.post(f"{url}/ws/lease", data=body, headers=page, timeout=5), 403, "browser")
        assert receiver.status()["lease"] is None
        for name in ("status", "layout", "digests"):
            error_of(requests.get(f"{url}/ws/{name}", headers={"origin": "null"}, timeout=5), 403, "browser")


def test_tokens() -> None:
    def check(token: str) -> str | None:
        return None if token == "new" else "it expired yesterday" if token == "old" else "nobody knows it"

    paths = [("GET", p) for p in ("status", "layout", "digests")] + [("DELETE", "lease")]
    paths += [("POST", p) for p in ("lease", "join", "prepare", "bucket", "load", "seal", "commit", "abort")]
    with served(token="secret") as (url, _):
        for method, path in paths:
            answer = requests.request(method, f"{url}/ws/{path}", json={}, timeout=5)
            error_of(answer, 401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
        wrong = {"Authorization": "Bearer secret2"}
        assert (
            "not this server's"
            in error_of(requests.get(f"{url}/ws/status", headers=wrong, timeout=5), 401, "unauthorized")["message"]
        )
        error_of(
            requests.get(f"{url}/ws/status", headers={"Authorization": "Basic secret"}, timeout=5), 401, "unauthorized"
        )
        assert Client(url, "secret").get("/ws/status")["state"] == "serving"
    with served(token=check) as (url, _):
        assert Client(url, "new").get("/ws/status")["state"] == "serving"
        for token, code in (("old", "expired_token"), ("x", "unauthorized")):
            with pytest.raises(ServerRefused) as refused:
                Client(url, token).get("/ws/status")
            assert refused.value.code == code


def test_bodies_that_are_nothing() -> None:
    with served() as (url, receiver):
        post = f"{url}/ws/"
        for data in (b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000):
            error_of(requests.post(post + "lease", data=data, timeout=5), 422, "bad_request")
        error_of(requests.post(post + "lease", data=b" " * (MESSAGE_BYTES + 1), timeout=5), 413, "too_large")
        chunks = (b" " * 65536 for _ in range(MESSAGE_BYTES // 65536 + 2))
        error_of(requests.post(post + "seal", data=chunks, timeout=5), 413, "too_large")
        for body in ({}, {"hub": 5}, {"hub": "a", "ttl": -1}, {"hub": "a", "ttl": "x"}, {"hub": "a" * 2000}):
            error_of(requests.post(post + "lease", json=body, timeout=5), 422, "bad_request")
        requests.post(post + "lease", json={"hub": HUB}, timeout=5).raise_for_status()
        for epoch in (0, -1, 1.5, True, "1", 1 << 80, None):
            body = {"hub": HUB, "run": "r", "epoch": epoch, "transport": {"kind": "inline"}}
            error_of(requests.post(post + "join", json=body, timeout=5), 422, "bad_request")
        error_of(requests.post(post + "prepare", json={"protocol": 2}, timeout=5), 422, "bad_manifest")
        error_of(requests.get(post + "digests?version=x", timeout=5), 422, "bad_request")
        error_of(requests.get(post + "digests?version=3", timeout=5), 409, "other_version")
        octets = {"Content-Type": "application/octet-stream"}
        error_of(requests.post(post + "bucket", data=b"x" * 100, headers=octets, timeout=5), 409, "no_push")
        assert receiver.state == "serving" and receiver.version == 0


def test_a_body_that_breaks_off(caplog: pytest.LogCaptureFixture) -> None:
    with served() as (url, receiver):
        host, port = url.removeprefix("http://").split(":")
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=5) as s:
                s.sendall(b"POST /ws/prepare HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert requests.get(f"{url}/ws/status", timeout=5).json()["state"] == receiver.state == "serving"
    assert not caplog.records


def test_errors_have_figures_and_all_problems() -> None:
    with served(free=lambda device: 10) as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        sink.lease(HUB, 30)
        with pytest.raises(LeaseHeld, match=HUB) as held:
            ProtocolSink(Client(url), "other").lease("other", 3)
        assert held.value.retryable and held.value.facts["hub"] == HUB
        sink.run = "run"
        sink.join(1, {"kind": "inline"})
        values = values_of(receiver)
        with pytest.raises(ServerRefused) as refused:
            sink.prepare(values.manifest)
        assert refused.value.code == "memory" and refused.value.facts["free"] == 10
        atoms = values.manifest.atoms
        values.manifest.atoms = [a if n > 2 else type(a)(f"x{n}", a.shape, a.dtype) for n, a in enumerate(atoms)]
        with pytest.raises(ServerRefused) as refused:
            sink.prepare(values.manifest)
        assert refused.value.code == "mismatch" and len(refused.value.problems) == 6


def test_nothing_blocks_the_event_loop() -> None:
    """Forty requests that wait, and the loop still answers; and so does a commit."""
    inside, go = threading.Event(), threading.Event()

    def before(commit: Commit) -> None:
        inside.set()
        go.wait(10)

    with served(before_install=before) as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        sink.lease(HUB, 30)
        sink.run = "run"
        sink.join(1, {"kind": "inline"})
        values = values_of(receiver)
        sink.prepare(values.manifest)
        for header, payload in values.buckets():
            sink.client.post_bytes("/ws/bucket", header.pack() + payload)
        sink.seal(1, values.root)
        with ThreadPoolExecutor(4) as pool:
            commits = [pool.submit(sink.commit, 1, values.root) for _ in range(4)]
            assert inside.wait(5)
            start = time.monotonic()
            assert requests.get(f"{url}/alive", timeout=5).json() == {"alive": True}
            assert sink.status().state == "committing"
            assert time.monotonic() - start < 1
            go.set()
            assert {one.result().version for one in commits} == {1}


def test_a_fault_of_the_server_is_an_answer_too(caplog: pytest.LogCaptureFixture) -> None:
    with served() as (url, receiver):
        receiver.stage.layout.to_json = lambda: {}["nothing"]
        error = error_of(requests.get(f"{url}/ws/layout", timeout=5), 500, "internal")
        assert "KeyError" in error["message"]
        assert json.loads(requests.get(f"{url}/ws/status", timeout=5).text)["state"] == "serving"
    assert "GET /ws/layout failed" in caplog.text
