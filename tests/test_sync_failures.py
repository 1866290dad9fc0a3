"""What may fail in a push, by the numbers of the list of failure tests, and where each is tested (`test_` left out).
Here: real processes that are killed or stopped at every step of a push, under requests that never pause.

 1  killed at every step: here (hub, sender rank, server, which also dies inside of its commit). With shm:
    sync_shm a_hub_that_is_killed_leaves_nothing, a_server_that_is_killed_ends_the_push
 2  bad buckets: sync_receiver a_bad_bucket_is_never_installed, blocks_that_come_twice_or_from_the_wrong_sender,
    a_push_that_ends_too_early_says_what_is_missing; over gloo: sync_routes a_push_over_gloo (flipped, skipped,
    duplicated, reordered, truncated, cut on the wire, ended too early), a_header_that_lies…;
    dtype, shape, stride: sync_hub another_model_is_told_in_every_detail, sync_stage strided_views_of_one_memory
 3  missing, extra, tied, aliased: sync_stage what_is_no_tensor_of_the_family_is_named,
    a_tied_head_with_memory_of_its_own…, shared_memory_that_the_config_does_not_know_of_is_refused;
    draft: sync_hub a_draft_head_is_refused_by_name_or_stays…, sync_source everything_that_does_not_fit_is_told…
 4  A → B → A: sync_end_to_end two_fsdp_ranks…, sync_receiver a_to_b_to_a_over_several_epochs
 5  two of three committed, restart, stale epoch: here; late joiners: sync_hub servers_come_and_go;
    a join in the middle of a push: here (a_server_that_hangs…), sync_receiver a_newer_epoch_ends_what_was_under_way
 6  a collective that pends: here; who says nothing: sync_hub who_lets_the_whole_timeout_pass…, a_silent_server…;
    retries, double begin: sync_receiver messages_that_come_twice_are_answered_alike, out_of_turn. Update while asleep:
    sync_dialects a_server_that_is_asleep_is_left_alone (vLLM; no server of ours sleeps, and SGLang does not tell)
 7  several senders: sync_receiver many_senders, sync_end_to_end four_megatron_ranks…; groups in opposite order:
    sync_hub two_stages_that_make_their_groups_in_opposite_order
 8  a bucket smaller than a tensor: sync_hub a_checkpoint_arrives_at_two_servers (it is split), here (64 KiB);
    staging: sync_stage an_allocation_that_fails_is_refused
 9  requests in flight: server_versions, each policy with its spans
10  exceptions: sync_receiver a_hook_that_fails…, server_versions an_install_that_fails…, a_wait_that_takes_too_long…
11  delta: sync_delta, sync_stage another_base_is_refused
12  LoRA: sync_lora, server_generation an_adapter_…
13  false success: sync_hub a_server_that_says_yes_and_takes_nothing…, sync_dialects a_server_that_says_200_and…
14  dialects: sync_dialects
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from areal_convert.converter.errors import ConvertError, SyncError
from areal_convert.converter.sync.hub import WeightSync
from engine_worker import RanksFailed, run_ranks
from sync_failure_jobs import SMALL, STEPS, dies_in_commit, hub_that_dies, interposed, rank_that_dies
from sync_jobs import other_weights
from sync_server import Answers, Oracle, RunningServer, hammer, oracle_of, start_server, wrong

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(60)]

PROMPTS = [[5, 6, 7], [900, 3, 44], [11]]
DECIDED = list(STEPS)[list(STEPS).index("journalled") :]


class World:
    """Servers that begin with the weights `a`, and what transformers answers with `a` and with `b`."""

    def __init__(self, a: Path, b: Path, where: Path, stack: ExitStack) -> None:
        self.a, self.b, self.where, self._stack = a, b, where, stack
        self.journal = str(where / "journal")
        self.servers: list[RunningServer] = []
        self.oracle = {path: oracle_of(path, PROMPTS, 4) for path in (a, b)}
        self.has: dict[int, Oracle] = {0: self.oracle[a]}
        self.answers: list[Answers] = []
        assert all(self.oracle[a](tuple(p))[0] != self.oracle[b](tuple(p))[0] for p in PROMPTS)

    def serve(self, count: int) -> list[str]:
        for _ in range(count):
            self.servers.append(self.start())
        return [server.url for server in self.servers]

    def start(self, port: int = 0, before: Callable[[], None] | None = None) -> RunningServer:
        server = start_server(self.a, self.where / f"server-{time.monotonic_ns()}.log", before, port=port)
        self._stack.callback(server.kill)
        return server

    def hammer(self, server: RunningServer) -> None:
        self.answers.append(self._stack.enter_context(hammer(server.url, PROMPTS, clients=1, tokens=4)))
        self.answers[-1].wait_for(1)

    def check(self, versions: set[int]) -> None:
        """Nobody got an answer that no version gives, or none at all; and there are answers of these versions."""
        for answers in self.answers:
            answers.wait_for(3)
            found = list(answers.found)
            assert wrong(Answers(found), self.has) == [] and Answers(found).failed == []
            assert versions <= Answers(found).versions

    def versions(self) -> list[int]:
        return [server.version for server in self.servers]


@pytest.fixture
def world(model: Callable[..., Path], tmp_path: Path) -> Iterator[World]:
    a = model("qwen3")
    with ExitStack() as stack:
        yield World(a, other_weights(a, tmp_path / "b", 1), tmp_path, stack)


def test_a_hub_is_killed_at_every_step(world: World) -> None:
    """Before the decision all servers keep what they have; after it the next hub brings it to all three, however many
    were told. Both versions answer meanwhile, and nothing else does."""
    urls, version, sources = world.serve(3), 0, cycle([world.b, world.a])
    source = next(sources)
    for server in world.servers:
        world.hammer(server)
    for step in STEPS:
        if step in DECIDED:
            world.has[version + 1] = world.oracle[source]
        assert hub_that_dies(str(source), urls, world.journal, step) == -9, step
        told = int(step[-1]) if step.startswith("told") else 0
        assert sorted(world.versions()) == [version] * (3 - told) + [version + 1] * told, step
        for answers in world.answers:
            answers.wait_for(1)
        if step in DECIDED:
            version += 1
        with WeightSync(str(source), urls, journal=world.journal, **SMALL):
            assert world.versions() == [version] * 3, step
        digests = [server.get("/ws/digests")["atoms"] for server in world.servers]
        assert digests[0] == digests[1] == digests[2], step
        if step in DECIDED:
            source = next(sources)
    world.check({0, version})
    for server in world.servers:
        body = {"hub": "late", "epoch": 1, "version": version + 1, "root": "0" * 32, "reason": "late"}
        server.post("/ws/lease", {"hub": "late", "ttl": 30})
        for path in ("seal", "commit", "abort"):
            answer = server.post(f"/ws/{path}", body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stale_epoch"), path


RANK_STEPS = ["Joining the epoch", "a bucket", "Sealing", "Deciding", "Committing"]


def test_a_sender_rank_is_killed_at_every_step(world: World) -> None:
    """The other rank's push ends in an error; all servers have the old version, or all have the new one. A number that
    was decided and called off before anybody was told is not used again."""
    urls, version, source, answer = world.serve(2), 0, world.b, world.where / "answer"
    for server in world.servers:
        world.hammer(server)
    for step in RANK_STEPS:
        world.has[version + 1] = world.has[version + 2] = world.oracle[source]
        with pytest.raises(RanksFailed, match="exit -9"):
            run_ranks(
                2, rank_that_dies, source=str(source), urls=urls, journal=world.journal, step=step, answer=str(answer)
            )
        assert answer.read_text(), step
        answer.unlink()
        committed = step == "Committing"
        with WeightSync(str(source), urls, journal=world.journal, **SMALL):
            found = world.versions()
            assert found[0] == found[1] and found[0] in ((version,), (version + 1, version + 2))[committed], step
            version = found[0]
    world.check({0, version})


SERVER_STEPS = ["joining", "joined", "prepared", "sending", "sent", "staged", "journalled", "installed"]
"""The last one: inside of the server's own critical section."""


def test_a_server_is_killed_at_every_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one keeps the old version until it is decided, and answers all the time; the killed one is started
    again with what it had at first, and gets what was decided."""
    urls, version, source = world.serve(2), 0, world.b
    quick: dict[str, Any] = SMALL | {"timeout": 2.5}
    world.hammer(world.servers[0])
    for step, after in zip(SERVER_STEPS, [*SERVER_STEPS[1:], ""], strict=True):
        decided = step in ("staged", "journalled", "installed")  # a server that dies when it has it all is in doubt
        world.has[version + 1] = world.oracle[source]
        with WeightSync(str(source), urls, journal=world.journal, **quick) as sync:
            with monkeypatch.context() as patched:
                if step != "installed":
                    patched.setattr(*interposed(step, world.servers[1].kill))
                if decided:
                    report = sync.push()
                    assert [report.servers[url].kind for url in urls] == ["committed", "in_doubt"]
                else:
                    with pytest.raises(SyncError):
                        sync.push()
            assert world.servers[0].version == version + decided, step
            world.servers[1].process.join(5)
            assert world.servers[1].process.exitcode == -9, step
            last = after == "installed"
            world.servers[1] = world.start(world.servers[1].port, dies_in_commit if last else None)
            version += decided
        if not decided:
            continue
        assert world.servers[1].version == 0
        if after == "installed":
            continue  # it would die as it catches up
        with WeightSync(str(source), urls, journal=world.journal, **quick) as sync:
            assert sync.behind() == [urls[1]] == sync.catch_up()
            assert world.versions() == [version] * 2
    atoms = [server.get("/ws/digests")["atoms"] for server in world.servers]
    assert atoms[0] == atoms[1]
    world.hammer(world.servers[1])
    world.answers[1].wait_for(3)
    assert world.answers[1].versions == {version}
    world.check({version})
    assert 0 in world.answers[0].versions


def test_a_server_that_hangs_in_a_collective(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP between two buckets: calls time out while a broadcast pends. The push is called off, the other server
    answers with the old weights, and so does this one when it goes on; the next push is a new epoch. While that one is
    under way a third server comes: it is taken in when there is a committed version, and gets that one, verified."""
    urls = world.serve(2)
    world.hammer(world.servers[0])
    hasty: dict[str, Any] = SMALL | {"timeout": 2.0}
    with WeightSync(str(world.b), urls, journal=world.journal, **hasty) as sync:
        with monkeypatch.context() as patched:
            patched.setattr(*interposed("sending", world.servers[1].pause))
            start = time.monotonic()
            with pytest.raises(ConvertError):
                sync.push()
            assert time.monotonic() - start < 15
        assert world.servers[0].version == 0
        world.servers[1].resume()
        world.hammer(world.servers[1])
        assert world.versions() == [0, 0]
        world.has[1] = world.has[2] = world.oracle[world.b]
        third, found = world.start(), list[list[int]]()
        world.hammer(third)
        adding = threading.Thread(target=lambda: (sync.add(third.url), found.append(world.versions())))
        with monkeypatch.context() as patched:
            patched.setattr(*interposed("sending", adding.start))
            report = sync.push(digests=True)
        adding.join(20)
        assert report.complete and set(report.servers) == set(urls) and found == [[1, 1]] == [world.versions()]
        assert third.version == 0 and sync.behind() == [third.url] == sync.catch_up()
        world.servers.append(third)
        assert world.versions() == [1, 1, 1]
        again = sync.push(digests=True)
        assert again.complete and again.epoch > report.epoch and world.versions() == [2, 2, 2]
    world.check({0, 2})
