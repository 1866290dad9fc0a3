"""A hub and its servers: what arrives, what is refused before anything moves, and every failure in a known state.

The servers are real receivers behind real HTTP, in threads of this process (`sync_threads`)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_convert.converter import Mesh, WeightSync, convert
from areal_convert.converter.errors import (
    ConfigError,
    ConvertError,
    InDoubt,
    LeaseHeld,
    PlanError,
    RankError,
    ServerRefused,
    ServerUnreachable,
    SyncAborted,
    SyncError,
)
from areal_convert.converter.peers import Peers
from areal_convert.converter.sync import blocks, reception, sending
from areal_convert.converter.sync.client import Client
from areal_convert.converter.sync.fleet import Fleet
from areal_convert.converter.sync.journal import Journal
from areal_convert.converter.sync.lease import LeaseKeeper
from areal_convert.converter.sync.ledger import Ledger
from areal_convert.converter.sync.members import Member, Settings
from areal_convert.converter.sync.sink import Receipt, SinkLayout, SinkStatus
from areal_convert.converter.sync.source import CheckpointSource
from areal_convert.converter.sync.transport_groups import GroupTransport
from areal_convert.converter.sync.wire import Header
from sync_threads import ThreadServer, serving, start, state_of

SMALL: dict[str, Any] = {"bucket": 1 << 16, "block": 1 << 12, "timeout": 10.0}
"""Many buckets even for a tiny model."""

HASTY: dict[str, Any] = {**SMALL, "timeout": 2.0}

Model = Callable[..., Path]


@pytest.fixture
def a(model: Model) -> Path:
    return model("qwen3", dtype="bfloat16", layers=2)


def values(state: Any) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in state.items()}


def same(found: Any, wanted: Any) -> bool:
    """Bit for bit, and every tensor."""
    return set(found) == set(wanted) and all(
        found[k].dtype == wanted[k].dtype and torch.equal(found[k].view(torch.uint8), wanted[k].view(torch.uint8))
        for k in wanted
    )


def changed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other weights: every element differs."""
    return {k: (v.float() + 1).to(v.dtype) for k, v in state.items()}


def urls(servers: list[ThreadServer]) -> list[str]:
    return [s.url for s in servers]


def untouched(servers: list[ThreadServer]) -> bool:
    """As they started: version 0, weights of zero, nothing under way."""
    return all(
        s.receiver.version == 0
        and s.receiver.state in ("serving", "joined")
        and not any(v.any() for v in s.weights.values())
        for s in servers
    )


# ------------------------------------------------------------------------------------------------ what arrives


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """For every atom its bytes in each bucket that held some of it, as the servers take them."""
    found: dict[str, list[int]] = {}
    claim = Ledger.claim

    def noting(self: Ledger, sender: int, numbers: Any) -> None:
        claim(self, sender, numbers)
        sizes: dict[int, int] = {}
        for number, size in zip(numbers.tolist(), self.blocks.lengths(numbers).tolist(), strict=True):
            atom, _, _ = self.blocks.box(number)
            sizes[atom] = sizes.get(atom, 0) + size
        for atom, size in sizes.items():
            found.setdefault(self.blocks.manifest.atoms[atom].name, []).append(size)

    monkeypatch.setattr(Ledger, "claim", noting)
    return found


@pytest.mark.parametrize("transport", ["gloo", "inline", "auto"])
def test_a_checkpoint_arrives_at_two_servers(a: Path, transport: str, came: dict[str, list[int]]) -> None:
    """Also the tensors that are larger than a bucket: they are split."""
    seen: list[tuple[str, int, int]] = []
    with serving(a, 2) as servers:
        with WeightSync(a, urls(servers), transport=transport, on_progress=lambda *x: seen.append(x), **SMALL) as sync:
            report = sync.push(digests=True)
        wanted = state_of(a, zero=False)
        assert all(same(s.weights, wanted) and s.receiver.version == 1 for s in servers)
        assert report.version == 1 and report.complete and report.root == servers[0].receiver.status()["root"]
        assert report.bytes == report.sent_bytes == sum(v.nbytes for v in wanted.values())
        assert set(report.seconds) >= {"plan", "join", "prepare", "send", "seal", "commit", "total"}
        assert set(report.pause_s) == set(urls(servers)) and report.buckets > 3
        assert set(report.digests) == {atom.name for atom in servers[0].receiver.stage.layout.atoms.values()}
        assert seen[-1] == ("send", report.bytes, report.bytes)
        assert report.report()["servers"][servers[0].url]["kind"] == "committed"
        assert all(s.receiver.status()["lease"] is None for s in servers)
        large = {"embed": wanted["model.embed_tokens.weight"].nbytes, "head": wanted["lm_head.weight"].nbytes}
        for atom, size in large.items():
            assert size > SMALL["bucket"] and sum(came[atom]) == 2 * size
            assert len(came[atom]) >= 4 and max(came[atom]) < SMALL["bucket"], "each server: two buckets at least"


@pytest.mark.parametrize(("fmt", "mesh"), [("torch_dist", Mesh(tp=2)), ("dcp", Mesh()), ("mp_rank", Mesh(tp=2, pp=2))])
def test_any_format_is_a_source(a: Path, tmp_path: Path, fmt: str, mesh: Mesh) -> None:
    convert(a, tmp_path / "c", fmt, mesh)
    with serving(a) as servers, WeightSync(tmp_path / "c", servers[0].url, transport="inline", **SMALL) as sync:
        sync.push()
        assert same(servers[0].weights, state_of(a, zero=False))


def test_fused_experts_and_tied_heads(model: Model) -> None:
    for family, kinds in (("qwen3_moe", {"fused_experts": True}), ("llama_tied", {}), ("deepseek_v3", {})):
        path = model(family, layers=2, **kinds)
        with serving(path) as servers, WeightSync(path, servers[0].url, transport="inline", **SMALL) as sync:
            sync.push()
            assert same(servers[0].weights, state_of(path, zero=False)), family


@pytest.mark.parametrize("long", [None, 256])
def test_there_and_back_again(a: Path, long: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A → B → A: byte equality each time, over one epoch, from a live state dict that changes in place. With runs that
    are long from 256 bytes on, most of it goes from the model's memory right into the server's."""
    for module in (blocks, reception, sending):
        monkeypatch.setattr(module, "LONG", long or module.LONG)
    first = state_of(a, zero=False)
    second = changed(first)
    live = values(first)
    head, straight = live["lm_head.weight"].view(torch.uint8).numpy(), list[int]()
    send = GroupTransport.send

    def noting(self: GroupTransport, header: Header, parts: Sequence[Any]) -> None:
        straight.extend(part.nbytes for part in parts if np.may_share_memory(part, head))
        send(self, header, parts)

    monkeypatch.setattr(GroupTransport, "send", noting)
    with serving(a) as servers, WeightSync(live, servers[0].url, base=a, transport="gloo", **SMALL) as sync:
        epochs, roots = set(), []
        for wanted in (first, second, first):
            for name, value in wanted.items():
                live[name].copy_(value)
            report = sync.push()
            epochs.add(report.epoch)
            roots.append(report.root)
            assert same(servers[0].weights, wanted)
        assert len(epochs) == 1 and roots[0] == roots[2] != roots[1]
        assert sum(straight) == (3 * head.nbytes if long else 0)


def test_fp32_masters_arrive_rounded_and_it_is_said(a: Path) -> None:
    masters = {k: v.float() + 1e-4 for k, v in state_of(a, zero=False).items()}
    with serving(a) as servers, WeightSync(lambda: masters, servers[0].url, base=a, **SMALL) as sync:
        report = sync.push(version=7)
        assert same(servers[0].weights, {k: v.bfloat16() for k, v in masters.items()})
        assert report.version == servers[0].receiver.version == 7
        assert list(report.casts) == ["F32 → BF16"]


def test_only_what_changed_is_sent(a: Path) -> None:
    live = state_of(a, zero=False)
    with serving(a, 2) as servers, WeightSync(live, urls(servers), base=a, mode="delta", **SMALL) as sync:
        first = sync.push()
        name = next(n for n in live if n.endswith("down_proj.weight"))
        live[name][0, 0] += 1
        second, third = sync.push(), sync.push()
        assert [r.mode for r in (first, second, third)] == ["full", "delta", "delta"]
        assert first.sent_bytes == first.bytes and 0 < second.sent_bytes <= 4096 and third.sent_bytes == 0
        assert all(same(s.weights, live) and s.receiver.version == 3 for s in servers)


def test_in_a_thread(a: Path) -> None:
    with serving(a) as servers, WeightSync(a, servers[0].url, **SMALL) as sync:
        assert sync.push_async().result(30).version == 1
        assert sync.status()[servers[0].url]["version"] == 1


# ------------------------------------------------------------------------------------------------ several ranks


def as_ranks(world: int, action: Callable[[Peers], Any]) -> list[Any]:
    """Threads as ranks: objects are gathered at a barrier."""
    barrier = threading.Barrier(world, timeout=30)
    slots: list[Any] = [None] * world
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        def exchange(value: Any) -> list[Any]:
            slots[rank] = value
            barrier.wait()
            found = list(slots)
            barrier.wait()
            return found

        try:
            results[rank] = action(Peers(rank, world, exchange))
        except BaseException as error:
            results[rank] = error
            if not isinstance(error, ConvertError):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def shards(state: dict[str, torch.Tensor], world: int) -> list[dict[str, torch.Tensor]]:
    """As FSDP2 cuts them: rows of the first dimension, `torch.chunk`."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
    for name, value in state.items():
        parts = value.chunk(world)
        for rank in range(world):
            found[rank][name] = parts[rank] if rank < len(parts) else value[:0]
    return found


@pytest.mark.parametrize("transport", ["gloo", "inline", "shm"])
def test_every_rank_sends_what_it_holds(a: Path, transport: str) -> None:
    state = state_of(a, zero=False)
    parts = shards(state, 3)
    with serving(a, 2) as servers:

        def rank(peers: Peers) -> Any:
            mesh = Mesh(dp_shard=3)
            with WeightSync(
                parts[peers.rank],
                urls(servers),
                base=a,
                mesh=mesh,
                rank=peers.rank,
                peers=peers,
                transport=transport,
                **SMALL,
            ) as sync:
                return [sync.push(), sync.push(digests=True)]

        reports = as_ranks(3, rank)
        assert all(isinstance(r, list) for r in reports), reports
        assert {r[1].root for r in reports} == {servers[1].receiver.status()["root"]}
        assert reports[2][1].report()["servers"] == reports[0][1].report()["servers"]
        assert reports[0][0].bytes == sum(v.nbytes for v in state.values())
        assert all(same(s.weights, state) and s.receiver.version == 2 for s in servers)


def test_two_stages_that_make_their_groups_in_opposite_order(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipeline stages, of which one opens its group long before the other comes: first the second, then the first.
    Nobody waits for the timeout, and each one's tensors arrive as its own."""
    state = state_of(a, zero=False)
    convert(a, tmp_path / "stages", "mp_rank", Mesh(pp=2), verify=False)
    files = sorted((tmp_path / "stages").rglob("model_optim_rng.pt"))
    parts = [torch.load(file, weights_only=False)["model"] for file in files]
    late, began, opened = [0], threading.Event(), list[int]()
    open_ = GroupTransport.open

    def open_late(self: GroupTransport, offer: Any) -> None:
        if self.place.sender == late[0]:
            assert began.wait(10)
            time.sleep(0.2)
        else:
            began.set()
        opened.append(self.place.sender)
        open_(self, offer)

    monkeypatch.setattr(GroupTransport, "open", open_late)
    with serving(a, 2) as servers:

        def rank(peers: Peers) -> Any:
            mine = parts[peers.rank]
            mesh = Mesh(pp=2)
            with WeightSync(
                mine, urls(servers), base=a, mesh=mesh, rank=peers.rank, peers=peers, transport="gloo", **SMALL
            ) as sync:
                return sync.push()

        for version, order in enumerate(([1, 0], [0, 1]), 1):
            late[0] = order[1]
            began.clear()
            opened.clear()
            for tensor in (t for values_ in (state, *parts) for t in values_.values()):
                tensor += 1
            reports = as_ranks(2, rank)
            assert [getattr(r, "version", r) for r in reports] == [version] * 2 and opened == order
            assert reports[0].seconds["join"] < SMALL["timeout"] / 2
            assert all(same(s.weights, state) and s.receiver.version == version for s in servers)


def test_a_rank_that_fails_ends_the_push_for_all(a: Path) -> None:
    parts = shards(state_of(a, zero=False), 2)
    with serving(a) as servers:

        def rank(peers: Peers) -> Any:
            mine = parts[peers.rank]
            calls = 0

            def states() -> Any:
                nonlocal calls
                calls += 1
                if peers.rank == 1 and calls == 2:
                    raise PlanError("the optimiser ate it")
                return mine

            with WeightSync(
                states, servers[0].url, base=a, mesh=Mesh(dp_shard=2), rank=peers.rank, peers=peers, **SMALL
            ) as sync:
                with pytest.raises((RankError, PlanError)) as caught:
                    sync.push()
                return type(caught.value), sync.push().version

        assert as_ranks(2, rank) == [(RankError, 1), (PlanError, 1)]


# ------------------------------------------------------------------------------------------------ refused before


def test_what_cannot_be_reached_spoken_to_or_joined(a: Path) -> None:
    with serving(a, token="secret") as servers:
        url = servers[0].url
        with pytest.raises(ServerUnreachable, match="cannot be reached: Connection refused"):
            WeightSync(a, "http://127.0.0.1:9").connect()
        with pytest.raises(ServerRefused) as refused:
            WeightSync(a, url).connect()
        assert refused.value.code == "unauthorized"
        with pytest.raises(ServerRefused) as refused:
            WeightSync(a, url, token="wrong").connect()
        assert refused.value.code == "unauthorized"
        with pytest.raises(ServerRefused) as refused:
            WeightSync(a, url, token="secret", transport="pigeon").connect().push()
        assert refused.value.code == "bad_transport"
        with pytest.raises(SyncError) as several:
            WeightSync(a, ["http://127.0.0.1:9", "http://127.0.0.1:10"]).connect()
        assert [p.about for p in several.value.problems] == ["http://127.0.0.1:9", "http://127.0.0.1:10"]
        assert untouched(servers)


def test_one_hub_at_a_time(a: Path) -> None:
    with serving(a, 2) as servers:
        with WeightSync(a, servers[1].url, **SMALL):
            with pytest.raises(LeaseHeld, match="is pushing to this server"):
                WeightSync(a, urls(servers)).connect()
            assert servers[0].receiver.status()["lease"] is None  # what the second hub had taken is given back
        with WeightSync(a, urls(servers), **SMALL) as sync:
            assert sync.push().complete


def test_versions_only_grow(a: Path) -> None:
    with serving(a) as servers, WeightSync(a, servers[0].url, **SMALL) as sync:
        sync.push(version=5)
        for version, code in ((5, "duplicate_version"), (3, "old_version")):
            with pytest.raises(ServerRefused) as refused:
                sync.push(version=version)
            assert refused.value.code == code
        assert sync.push().version == 6


def test_another_model_is_told_in_every_detail(a: Path, model: Model) -> None:
    with serving(a) as servers:
        for other, said in (
            (model("llama", dtype="bfloat16", layers=2), ["model_type: is llama"]),
            (model("qwen3", dtype="bfloat16", layers=3), ["num_hidden_layers: is 3"]),
            (
                model("qwen3", dtype="bfloat16", layers=2, vocab_size=1009, intermediate_size=128),
                ["vocab_size: is 1009", "128"],
            ),
            (model("qwen3", dtype="bfloat16", layers=2, tie_word_embeddings=True), ["tie_word_embeddings: is 1"]),
        ):
            with pytest.raises(PlanError) as caught:
                WeightSync(other, servers[0].url).connect()
            assert all(text in str(caught.value) for text in said), str(caught.value)
        state = state_of(a, zero=False)
        del state["model.norm.weight"]
        state["model.layers.0.mlp.other.weight"] = torch.zeros(2)
        with pytest.raises(PlanError):
            WeightSync(state, servers[0].url, base=a).connect()
        assert untouched(servers) and servers[0].receiver.status()["lease"] is None


def test_a_draft_head_is_refused_by_name_or_stays_bit_for_bit(a: Path) -> None:
    """A server with tensors that are no part of the family, for speculative decoding. Where it says to keep them, both
    of its copies have them as they were; memory that the draft shares with the model is the model's."""
    state = state_of(a)
    size = state["model.norm.weight"].shape[0]
    draft = {
        "draft_model.fc.weight": torch.rand(size, 2 * size).bfloat16(),
        "draft_model.layers.0.self_attn.q_proj.weight": torch.rand(size, size),
        "draft_model.d2t": torch.arange(50),
    }
    frozen = {"draft_model.embed_tokens.weight": state["model.embed_tokens.weight"], **values(draft)}
    state |= {**draft, "draft_model.embed_tokens.weight": state["model.embed_tokens.weight"]}
    with pytest.raises(PlanError) as refused:
        start(a, state)
    assert {p.about for p in refused.value.problems} == set(frozen)
    assert all(p.hint.startswith("keep=") for p in refused.value.problems)
    server = start(a, state, keep=[r"draft_model\..*"])
    try:
        live = state_of(a, zero=False)
        with WeightSync(live, server.url, base=a, transport="inline", mode="delta", **SMALL) as sync:
            for mode in ("full", "delta", "delta"):
                live["model.embed_tokens.weight"] += 1
                assert sync.push().mode == mode
                found = dict(server.weights)
                assert found["draft_model.embed_tokens.weight"] is found["model.embed_tokens.weight"]
                assert same({n: found[n] for n in draft}, values(draft))
                assert same({n: found[n] for n in live}, live)
    finally:
        server.stop()


def test_servers_that_differ_are_not_pushed_to_together(a: Path) -> None:
    with serving(a) as one, serving(a) as other:
        other[0].stop()
        fp32 = start(a, state_of(a, dtype=torch.float32))
        try:
            with pytest.raises(PlanError, match="The servers do not hold the same tensors"):
                WeightSync(a, [one[0].url, fp32.url]).connect()
        finally:
            fp32.stop()


def test_a_server_without_room_refuses(a: Path) -> None:
    with serving(a, free=lambda device: 1000) as servers, WeightSync(a, servers[0].url, **SMALL) as sync:
        with pytest.raises(ServerRefused) as refused:
            sync.push()
        assert refused.value.code == "memory" and untouched(servers)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"servers": []}, "servers: is empty"),
        ({"mode": "some"}, "mode: is 'some'"),
        ({"on_failure": "cry"}, "on_failure"),
        ({"in_flight": "no"}, "in_flight"),
        ({"bucket": 10}, "bucket: is 10 bytes"),
        ({"block": 1}, "block: is 1 bytes"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        given: dict[str, Any] = {"servers": ["x"], **options}
        WeightSync("nowhere", **given)


# ------------------------------------------------------------------------------------------------ failures on the way


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[int], None]], None]]:
    """Call something with the number of every read of the source."""
    original = CheckpointSource.read

    def arm(action: Callable[[int], None]) -> None:
        count = 0

        def read(self: CheckpointSource, *arguments: Any) -> None:
            nonlocal count
            count += 1
            action(count)
            original(self, *arguments)

        monkeypatch.setattr(CheckpointSource, "read", read)

    yield arm
    monkeypatch.setattr(CheckpointSource, "read", original)


@pytest.mark.parametrize("transport", ["gloo", "inline", "shm"])
def test_a_source_that_fails_on_the_way_changes_nothing(a: Path, transport: str, breaks: Callable[..., None]) -> None:
    def fail(n: int) -> None:
        if n == 30:
            raise ConvertError("the disk is gone")

    with serving(a, 2) as servers, WeightSync(a, urls(servers), transport=transport, **SMALL) as sync:
        breaks(fail)
        with pytest.raises(SyncAborted, match="the disk is gone"):
            sync.push()
        assert untouched(servers)
        breaks(lambda n: None)
        assert sync.push().version == 1  # never used
        assert all(same(s.weights, state_of(a, zero=False)) for s in servers)


@pytest.mark.parametrize("transport", ["gloo", "inline"])
def test_a_server_that_dies_on_the_way_ends_the_push_for_all(
    a: Path, transport: str, breaks: Callable[..., None]
) -> None:
    with serving(a, 2) as servers, WeightSync(a, urls(servers), transport=transport, **SMALL) as sync:

        def stop(n: int) -> None:
            if n == 20:
                servers[1].stop()
            if n > 20:
                time.sleep(0.01)

        breaks(stop)
        begin = time.monotonic()
        with pytest.raises(SyncAborted) as caught:
            sync.push()
        assert servers[1].url in str(caught.value) and time.monotonic() - begin < 9
        assert untouched(servers[:1])


def test_the_others_get_it_where_a_server_may_be_dropped(a: Path, breaks: Callable[..., None]) -> None:
    with serving(a, 2) as servers:  # noqa: SIM117 - servers change inside
        with WeightSync(a, urls(servers), transport="gloo", on_failure="drop", **SMALL) as sync:

            def stop(n: int) -> None:
                if n == 20:
                    servers[1].stop()
                if 20 < n < 120:
                    time.sleep(0.01)

            breaks(stop)
            report = sync.push()
            assert [report.servers[s.url].kind for s in servers] == ["committed", "dropped"]
            assert same(servers[0].weights, state_of(a, zero=False)) and not report.complete
            again = sync.push()
            assert [again.servers[s.url].kind for s in servers] == ["committed", "behind"]
            servers[1] = start(a, port=int(servers[1].url.rsplit(":", 1)[1]))  # it comes back, with nothing
            assert sync.behind() == [servers[1].url] == sync.catch_up()
            assert same(servers[1].weights, servers[0].weights) and servers[1].receiver.version == 2
            assert sync.push().complete and servers[1].receiver.version == 3


def test_a_server_that_was_restarted_joins_again(a: Path) -> None:
    with serving(a, 2) as servers, WeightSync(a, urls(servers), transport="gloo", **SMALL) as sync:
        first = sync.push()
        servers[0].stop()
        servers[0] = start(a, port=int(servers[0].url.rsplit(":", 1)[1]))
        second = sync.push()
        assert second.epoch > first.epoch and second.version == 2
        assert all(same(s.weights, state_of(a, zero=False)) and s.receiver.version == 2 for s in servers)


def test_a_live_model_is_retained_for_those_who_come_late(a: Path, tmp_path: Path) -> None:
    live = state_of(a, zero=False)
    with serving(a, 2) as servers:
        sync = WeightSync(live, urls(servers), base=a, retain=tmp_path / "kept", **SMALL)
        with sync:
            assert [sync.push().version, sync.push().version] == [1, 2]
            assert [p.name for p in (tmp_path / "kept").iterdir()] == ["v000002"]
            wanted = values(live)
            for value in live.values():
                value.zero_()  # training goes on
            servers[0].stop()
            servers[0] = start(a, port=int(servers[0].url.rsplit(":", 1)[1]))
            assert sync.catch_up() == [servers[0].url]
            assert same(servers[0].weights, wanted) and sync.catch_up() == []


def test_a_server_that_says_yes_and_takes_nothing_is_found_out(a: Path) -> None:
    """Its receipt carries a digest of what it holds, which it cannot know."""
    with serving(a, 2) as servers, WeightSync(a, urls(servers), transport="inline", **SMALL) as sync:
        sync.push()
        for lie in ({}, {"root": "0" * 32}):
            servers[1].replace("seal", lambda body, lie=lie: lie)
            with pytest.raises(SyncAborted, match="It did not receive what was sent"):
                sync.push()
        assert all(s.receiver.version == 1 for s in servers)


# ------------------------------------------------------------------------------------------------ who says nothing


class Mute:
    """A server that is there and does not answer: whatever it is asked takes its time, and fails."""

    tier, url = "swap", "http://mute"

    def __init__(self, seconds: float) -> None:
        self.seconds, self.asked = seconds, list[str]()

    def status(self) -> SinkStatus:
        return self._nothing("status")

    def lease(self, hub: str, ttl: float) -> None:
        self._nothing("lease")

    def abort(self, version: int | None, reason: str) -> None:
        self._nothing("abort")

    def _nothing(self, what: str) -> Any:
        self.asked.append(what)
        time.sleep(self.seconds)
        raise ServerUnreachable(f"{self.url} did not answer {what}")


class Alive(Mute):
    url = "http://alive"

    def _nothing(self, what: str) -> Any:
        self.asked.append(what)
        return SinkStatus("alive", "receiving", 0)


def test_who_lets_the_whole_timeout_pass_is_not_asked_again() -> None:
    """One that is only just gone is asked again. A stopped process takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as stopped, socket.create_server(("127.0.0.1", 0)) as rude:
        gone: list[bool] = []

        def hang_up() -> None:
            while len(gone) < 3:
                connection, _ = rude.accept()
                connection.close()
                gone.append(True)

        threading.Thread(target=hang_up, daemon=True).start()
        for server in (stopped, rude):
            client = Client(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=0.8)
            with pytest.raises(ServerUnreachable):
                client.post("/ws/abort", idempotent=True)
        stopped.settimeout(0.1)
        stopped.accept()[0].close()
        with pytest.raises(TimeoutError):
            stopped.accept()
        assert len(gone) == 3


def test_a_silent_server_does_not_cost_the_others_their_leases() -> None:
    mute, alive = Mute(1.5), Alive(0)
    keeper = LeaseKeeper("hub", 0.3)
    mute.seconds = 0
    for sink in (mute, alive):
        with suppress(ServerUnreachable):
            keeper.take(sink)  # type: ignore[arg-type]
    keeper._sinks.append(mute)  # type: ignore[arg-type]  # as if it had answered the first time
    keeper._start(keeper._run, mute)  # type: ignore[arg-type]
    mute.seconds = 1.5
    time.sleep(0.75)
    keeper._stop.set()
    assert len(mute.asked) == 2 and len(alive.asked) >= 5


def test_a_server_that_falls_silent_is_called_off_within_the_timeout_and_asked_once(tmp_path: Path) -> None:
    """It is not asked for its state once more to find who is to blame, nor told twice of the end."""
    mute, alive = Mute(0.3), Alive(0)
    members = [Member(sink, None, None, SinkStatus("", "receiving", 0)) for sink in (mute, alive)]  # type: ignore[arg-type]
    fleet = Fleet([], Journal.open(tmp_path / "journal"), Settings(timeout=0.4))
    said: list[str] = []
    over = threading.Event()
    begin = time.monotonic()

    def call_off(why: str) -> None:
        said.append(why)
        over.set()

    with fleet.watching(members, call_off):
        assert over.wait(5)
    assert time.monotonic() - begin < 1.5 and said == ["http://mute did not answer status"]
    assert mute.asked == ["status"] and "status" in alive.asked
    assert fleet.diagnose(members) == {"http://mute": "http://mute did not answer status"}
    for _ in range(2):
        fleet.abort(members, None, "it is silent")
    assert mute.asked == ["status", "abort"] and alive.asked.count("abort") == 1
    fleet.close()


# ------------------------------------------------------------------------------------------------ after the decision


class Died(BaseException):
    """As if the hub's process had ended."""


def die(sync: WeightSync) -> None:
    """Leave without a word: leases are not given back, nothing is aborted."""
    fleet = sync._fleet
    assert fleet is not None
    fleet.leases._stop.set()
    fleet.leases._sinks = []
    sync.close()


@pytest.mark.parametrize("told", [0, 1, 2])
def test_the_next_hub_completes_what_was_decided(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: int
) -> None:
    """The hub dies between the journal's entry and the commits: with none, one, two of three servers told."""
    commit = Fleet._commit
    count = 0

    def dying(self: Fleet, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count > told:
            raise Died
        return commit(self, *arguments)

    def serial(members: Any, action: Any) -> Any:
        return {m.url: action(m) for m in members}, {}

    with serving(a, 3) as servers:
        journal = tmp_path / "journal"
        sync = WeightSync(a, urls(servers), transport="gloo", journal=journal, **SMALL).connect()
        monkeypatch.setattr(Fleet, "_commit", dying)
        from areal_convert.converter.sync import deciding as module

        original = module.each
        monkeypatch.setattr(module, "each", lambda m, f: serial(m, f) if "commit" in f.__qualname__ else original(m, f))
        with pytest.raises(Died):
            sync.push()
        die(sync)
        monkeypatch.undo()
        assert sorted(s.receiver.version for s in servers) == [0] * (3 - told) + [1] * told
        with WeightSync(a, urls(servers), journal=journal, **SMALL) as second:
            assert [s.receiver.version for s in servers] == [1, 1, 1]
            assert all(same(s.weights, state_of(a, zero=False)) for s in servers)
            assert len(second.notes) == 3 - told and second.push().version == 2


def test_what_was_not_decided_is_presumed_aborted(a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub dies when all are STAGED: the next one finds no decision, and its push takes their place."""
    with serving(a, 2) as servers:
        journal = tmp_path / "journal"
        sync = WeightSync(a, urls(servers), transport="gloo", journal=journal, **SMALL).connect()

        def dead(*_: Any) -> None:
            raise Died

        monkeypatch.setattr(Fleet, "decide", dead)
        monkeypatch.setattr(Fleet, "abort", lambda *_: {})
        with pytest.raises(Died):
            sync.push()
        die(sync)
        monkeypatch.undo()
        assert [s.receiver.state for s in servers] == ["staged", "staged"] and servers[0].receiver.version == 0
        with WeightSync(a, urls(servers), journal=journal, **SMALL) as second:
            assert [s.receiver.version for s in servers] == [0, 0]
            assert second.push().version == 1


def test_a_commit_whose_answer_is_lost_is_looked_up(a: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_convert.converter.sync.protocol_sink import ProtocolSink

    commit = ProtocolSink.commit

    def lost(self: ProtocolSink, *arguments: Any) -> Any:
        commit(self, *arguments)
        raise ServerUnreachable("the answer was lost")

    with serving(a) as servers, WeightSync(a, servers[0].url, **SMALL) as sync:
        monkeypatch.setattr(ProtocolSink, "commit", lost)
        report = sync.push()
        assert report.complete and "was lost" in report.servers[servers[0].url].notes[0]


def test_a_server_that_does_not_confirm_is_in_doubt_until_it_does(a: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_convert.converter.sync.protocol_sink import ProtocolSink

    commit = ProtocolSink.commit
    with serving(a, 2) as servers:
        silent = {servers[1].url}

        def some(self: ProtocolSink, *arguments: Any) -> Any:
            if self.url in silent:
                raise ServerUnreachable(f"{self.url} did not answer")
            return commit(self, *arguments)

        monkeypatch.setattr(ProtocolSink, "commit", some)
        with WeightSync(a, urls(servers), **HASTY) as sync:
            report = sync.push()
            assert [report.servers[s.url].kind for s in servers] == ["committed", "in_doubt"]
            assert [s.receiver.version for s in servers] == [1, 0] and not report.complete
            silent.clear()
            assert sync.push().version == 2  # the first thing it does is to complete version 1
            assert [s.receiver.version for s in servers] == [2, 2]
            silent |= set(urls(servers))
            with pytest.raises(InDoubt, match="not confirmed by any server"):
                sync.push()


# ------------------------------------------------------------------------------------------------ who comes and goes


def test_servers_come_and_go(a: Path) -> None:
    """Each change is a new epoch; who goes keeps its weights and is free for another hub."""
    with serving(a, 3) as servers, WeightSync(a, servers[0].url, transport="gloo", **SMALL) as sync:
        epochs = [sync.push().epoch]
        sync.add(servers[1].url)
        assert sync.behind() == [servers[1].url] == sync.catch_up()
        assert [s.receiver.version for s in servers] == [1, 1, 0]
        epochs.append(sync.push().epoch)
        sync.remove(servers[0].url)
        epochs.append(sync.push().epoch)
        assert [s.receiver.version for s in servers] == [2, 3, 0] and epochs == sorted(set(epochs))
        assert servers[0].receiver.status()["lease"] is None
        with pytest.raises(ServerUnreachable):
            sync.add("127.0.0.1:9")
        assert sync.push().complete


def test_a_server_with_other_tensors_is_not_added(a: Path, model: Model) -> None:
    other = model("qwen3", dtype="bfloat16", layers=3)
    with serving(a) as servers, serving(other) as others, WeightSync(a, servers[0].url, **SMALL) as sync:
        with pytest.raises(PlanError, match="do not hold the same tensors"):
            sync.add(others[0].url)
        assert sync.push().complete and others[0].receiver.status()["lease"] is None


# ------------------------------------------------------------------------------------------------ servers of others


class Fenced:
    """A server without a stage, as a dialect would give it: it takes whole tensors behind a fence."""

    name, tier = "fake", "fenced"

    def __init__(self, url: str, told: list[str], fails: bool = False) -> None:
        self.url, self.told, self.fails = url, told, fails
        self.state: dict[str, torch.Tensor] = {}
        self.version = 0

    def status(self) -> SinkStatus:
        return SinkStatus("", "serving", self.version)

    def layout(self) -> SinkLayout:
        return SinkLayout({"family": ""}, [])

    def lease(self, hub: str, ttl: float) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...

    def check(self, wanted: Any, version: int) -> None:
        self.told.append("check")

    def load(self, feed: Any, version: int) -> None:
        self.told.append("load")
        for want, data in feed.tensors(feed.wanted()):
            if self.fails and len(self.state) == 5:
                raise ServerRefused("fenced", f"{self.url}: tensor 5 was refused")
            self.state[want.name] = torch.from_numpy(data.copy()).view(torch.bfloat16)

    def commit(self, version: int, root: str) -> Receipt:
        self.told.append("commit")
        self.version = version
        return Receipt(version, root, 0.5)

    def abort(self, version: int | None, reason: str) -> None:
        self.told.append("abort")
        if self.state:
            raise ServerRefused("fenced", f"{self.url} is half loaded")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fenced]:
    """url → the fenced server there; everybody else is what it is."""
    from areal_convert.converter.sync import fleet as module

    original, found = module.open_sink, dict[str, Fenced]()
    monkeypatch.setattr(module, "open_sink", lambda client, *x: found.get(client.url) or original(client, *x))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_fenced_servers_get_the_same_after_all_others_have_it(a: Path, others: dict[str, Fenced], world: int) -> None:
    """Whole tensors, put together from what the ranks hold; the fence opens last."""
    told: list[str] = []
    fenced = others["http://fenced:1"] = Fenced("http://fenced:1", told)
    state = state_of(a, zero=False)
    parts = shards(state, world)
    with serving(a) as servers:
        commit = servers[0].receiver.commit
        servers[0].replace("commit", lambda body: told.append("commit stage") or commit(body))
        both = [fenced.url, servers[0].url]

        def rank(peers: Peers) -> Any:
            mesh = Mesh(dp_shard=world)
            with WeightSync(parts[peers.rank], both, base=a, mesh=mesh, rank=peers.rank, peers=peers, **SMALL) as sync:
                return sync.push()

        reports = as_ranks(world, rank)
        assert told == ["check", "load", "commit stage", "commit"], reports
        assert same(fenced.state, state) and same(servers[0].weights, state)
        assert [reports[-1].servers[url].tier for url in both] == ["fenced", "swap"]
        assert reports[0].complete and reports[0].pause_s[fenced.url] == 0.5


@pytest.mark.parametrize("world", [1, 2])
def test_a_fenced_server_that_fails_keeps_the_others_at_the_old_version(
    a: Path, others: dict[str, Fenced], world: int
) -> None:
    told: list[str] = []
    fenced = others["http://fenced:1"] = Fenced("http://fenced:1", told, fails=True)
    parts = shards(state_of(a, zero=False), world)
    with serving(a) as servers:

        def rank(peers: Peers) -> Any:
            with WeightSync(
                parts[peers.rank],
                [servers[0].url, fenced.url],
                base=a,
                mesh=Mesh(dp_shard=world),
                rank=peers.rank,
                peers=peers,
                **SMALL,
            ) as sync:
                with pytest.raises((SyncAborted, RankError), match="tensor 5 was refused") as caught:
                    sync.push()
                return peers.rank > 0 or "it answers nobody: http://fenced:1 is half loaded" in str(caught.value)

        assert as_ranks(world, rank) == [True] * world
        assert told == ["check", "load", "abort"] and untouched(servers) and fenced.version == 0


def test_only_fenced_servers(a: Path, others: dict[str, Fenced]) -> None:
    fenced = others["http://fenced:1"] = Fenced("http://fenced:1", [])
    with WeightSync(a, fenced.url, **SMALL) as sync:
        first = sync.push()
        assert same(fenced.state, state_of(a, zero=False)) and first.transport == "none"
        assert sync.push().root == first.root != ""
