"""What all servers of others have in common: weights go in place, behind a fence, and nothing there can be undone.

    check → (drain, pause) → begin → send … → end → flush the prefix cache → verify → [commit] version, resume

A server that is asleep (its weights are given up, or elsewhere) is left alone: an update would end its engine.
A failure before `begin` opens the fence again, as it was. After `begin` it stays closed whatever happens: the weights
are sent once more from the source, and when that fails too the server is to be replaced, or pushed to again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import xxhash

from ...codecs import Array
from ...errors import ChannelError, ConvertError, Problem, ServerRefused, ServerUnreachable, SyncError
from ..client import Client
from ..sink import Feed, Receipt, SinkLayout, SinkStatus, Tier, Wanted
from .awake import asleep, check_awake
from .base import Choices, Found, Oracle
from .group import Group, with_last
from .quantize import Recipe, recipe_of


class Fenced:
    """One server; see `sink.FencedSink`. Subclasses say the endpoints: `_pause`, `_send`, …

    title   of the server; `fence` which requests the fence keeps out
    """

    title = ""
    fence = "all requests"
    sees_version = False
    """Whether the server tells which version it serves."""
    sleep_path = ""
    """Where the server tells whether it is asleep."""

    def __init__(self, client: Client, found: Found, choices: Choices) -> None:
        self.client, self.url, self.found, self.choices = client, client.url, found, choices
        self.name = f"{self.title} {found.version}".strip()
        self.tier: Tier = "fenced"
        self.notes: list[str] = []
        self.resent = 0
        self._version, self._receipt = 0, Receipt(0, "", 0.0)
        self._fenced_at: float | None = None
        self._dirty = False
        self._loaded: int | None = None
        self._deciding: int | None = None
        self._before: int | None = None
        self._group: Group | None = None
        self._known: dict[str, str] = {}
        self._first: str | None = None
        self._checked: dict[str, str] = {}
        self._recipe: Recipe | None = recipe_of(choices.fp8) if choices.fp8 is not None else None

    # -------------------------------------------------------------------------------------------- what the hub asks

    def status(self) -> SinkStatus:
        """`failed` is a server that stays fenced: it has something else than a whole, verified version."""
        told = self._told_version()
        error = "it is fenced: its weights are not those of any version" if self._dirty else None
        version = self._version if told is None else told
        return SinkStatus("", "failed" if self._dirty else "serving", version, error=error)

    def layout(self) -> SinkLayout:
        return SinkLayout({"family": "", "sizes": {}}, ())

    def lease(self, hub: str, ttl: float) -> None: ...

    def release(self) -> None: ...

    def check(self, wanted: Sequence[Wanted], version: int) -> None:
        problems: list[Problem] = []
        names = [w.name for w in wanted]
        problems += [Problem(n, "is wanted twice") for n in sorted({n for n in names if names.count(n) > 1})]
        problems += [Problem(w.name, f"has no elements: {list(w.shape)}") for w in wanted if 0 in w.shape]
        if self._recipe is not None:
            wanted = self._recipe.expand(wanted, self.url)
        problems += self._unfit(wanted)
        problems += asleep(self.client, self.sleep_path, fenced=self._fenced_at is not None)
        if problems:
            raise ServerRefused("mismatch", f"{self.url} ({self.name}) cannot take version {version}:", problems)

    def load(self, feed: Feed, version: int) -> None:
        """Raises ServerRefused or ServerUnreachable; whether the server is fenced then, `status` says."""
        check_awake(self.client, self.sleep_path, fenced=self._fenced_at is not None)
        self._before, self._loaded, self._deciding, self.resent = self._told_version(), None, None, 0
        self.notes = [self._recipe.said()] if self._recipe is not None else []
        if self._before is not None and self._before != self._version:
            self._drop_group()  # it was restarted, or somebody else's push came between
        if self.choices.path is None:
            self._join()
        self._close_fence()
        while True:
            try:
                self._dirty = True
                self._update(feed, version)
                self._flush()
                self._checked = self._receipts()
                self._verify(version, self._checked)
                self._loaded = version
                return
            except ConvertError as error:
                self._drop_group()
                if self.resent or not self._may_resend(error):
                    raise self._fenced_error(version, error) from error
                self.resent += 1
                self.notes.append(f"{self.url}: version {version} was sent a second time: {error.what}")
                try:
                    if self.choices.path is None:
                        self._join()
                except ConvertError as again:
                    raise self._fenced_error(version, again) from again

    def commit(self, version: int, root: str) -> Receipt:
        if self._receipt.version == version and self._loaded is None:
            return self._receipt
        if self._loaded != version:
            raise ServerRefused("not_loaded", f"{self.url} does not have version {version}; it has {self._loaded}.")
        if self._deciding != version:
            check_awake(self.client, self.sleep_path, fenced=True)
            self._same_server()
        self._deciding = version
        self._set_version(version)
        self._resume()
        pause = time.monotonic() - (self._fenced_at or time.monotonic())
        oracle = self.choices.oracle_of(version)
        if oracle is not None and not self.choices.drained:
            self._probe_open(version, oracle)
        self._version, self._loaded, self._fenced_at, self._dirty = version, None, None, False
        self._receipt = Receipt(version, root, pause, notes=tuple(self.notes))
        self.notes = []
        return self._receipt

    def abort(self, version: int | None, reason: str) -> None:
        if self._dirty:
            raise ServerRefused(
                "fenced",
                f"{self.url} ({self.name}) stays paused: its weights were written over ({reason}).",
                hint="Push again, which sends everything, or replace the server. It is not opened by itself.",
            )
        if self._fenced_at is not None:
            self._open_again()

    def close(self) -> None:
        self._drop_group()

    # -------------------------------------------------------------------------------------------- the fence

    def _close_fence(self) -> None:
        if self._fenced_at is not None:
            return
        start = time.monotonic()
        if self._paused_before():  # by a hub that failed and is gone: what it left there nobody knows
            self._dirty = True
            self.notes.append(f"{self.url} was paused already: an earlier push may have failed there")
        try:
            self._pause()
        except ConvertError:
            if not self._dirty:
                self._open_again()  # the answer may have been lost, not the request
            raise
        self._fenced_at = start

    def _open_again(self) -> None:
        try:
            self._resume()
        except ConvertError as error:
            raise ServerRefused("fenced", f"{self.url} was paused and cannot be opened again: {error.what}") from error
        self._fenced_at = None

    def _same_server(self) -> None:
        """A server that was restarted since it was loaded has its old weights, and no fence."""
        now = self._told_version()
        same = not self._checked or self._receipts() == self._checked
        if now != self._before or not self._still_paused() or not same:
            raise ServerRefused(
                "restarted", f"{self.url} is not the server that was loaded: it was restarted, or opened by others."
            )

    def _fenced_error(self, version: int, error: ConvertError) -> SyncError:
        again = " twice" if self.resent else ""
        return ServerRefused(
            "fenced",
            f"{self.url} ({self.name}) failed{again} to take version {version}, and stays paused: {error.what}",
            error.problems,
            "Push again, which sends everything, or replace the server. It is not opened by itself.",
        )

    # -------------------------------------------------------------------------------------------- sending

    def _update(self, feed: Feed, version: int) -> None:
        path = self.choices.path_of(version)
        if path is not None:
            self._from_disk(path)
            return
        self._begin()
        wanted = feed.wanted()
        for bucket, last in with_last(self._buckets(feed, wanted)):
            self._send(bucket, last)
        self._end()

    def _buckets(self, feed: Feed, wanted: Sequence[Wanted]) -> Iterator[list[tuple[Wanted, Array]]]:
        """Whole tensors, `group_bytes` of them at a time; one that is larger has a bucket of its own size."""
        read = feed.tensors(wanted)
        if self._recipe is not None:
            read = self._recipe.tensors(read)
        bucket: list[tuple[Wanted, Array]] = []
        size = 0
        self._digest = xxhash.xxh3_128()
        for want, data in read:
            if bucket and size + data.nbytes > self.choices.group_bytes:
                yield bucket
                bucket, size = [], 0
            if data.nbytes > self.choices.group_bytes and not self.resent:
                self.notes.append(f"{want.name} has {data.nbytes} bytes, more than a bucket: it is sent by itself")
            self._digest.update(f"{want.name} {want.dtype} {list(want.shape)}".encode())
            self._digest.update((copy := data.copy()).data)
            bucket.append((want, copy))
            size += data.nbytes
        if bucket:
            yield bucket

    def _join(self) -> None:
        if self._group is not None:
            return
        timeout = min(self.client.timeout, 60.0)
        group = Group(self.url, self.choices.backend, self._world(), timeout)
        self._group_name = f"areal-{secrets.token_hex(4)}"
        try:
            self._open_group(group, self._group_name)
        except BaseException:
            group.close()
            raise
        self._group = group

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        group.close()
        try:
            self._leave_group(self._group_name)
        except ConvertError as error:
            self.notes.append(f"{self.url}: the old process group was not given back: {error.what}")

    # -------------------------------------------------------------------------------------------- verifying

    def _verify(self, version: int, receipts: dict[str, str]) -> None:
        """By what the server says that it has, where that means something; else by what it answers."""
        digest = self._digest.hexdigest() if self.choices.path is None else ""
        how = []
        if receipts and digest and self._compare(digest, receipts):
            how.append("the server's checksums")
        oracle = self.choices.oracle_of(version)
        if oracle is not None and self.choices.drained:
            self._probe_drained(version, oracle)
            how.append("logprobs")
        elif oracle is not None:
            how.append("logprobs after it was opened")
        if how:
            self.notes.append(f"{self.url}: version {version} is verified by {' and '.join(how)}")
        else:
            self.notes.append(f"{self.url}: version {version} is unverified: give an oracle")

    def _compare(self, digest: str, receipts: dict[str, str]) -> bool:
        """The same weights have the same checksums, others have others; what they are of, the server knows. False where
        that says nothing: they are those of before the first push, whose weights nobody here knows."""
        text = json.dumps(receipts, sort_keys=True)
        if text == self._first:
            return False
        known, other = self._known.get(digest), next((d for d, t in self._known.items() if t == text), digest)
        if known is not None and known != text:
            raise ServerRefused("verify", f"{self.url} got the same weights as before and has other checksums.")
        if other != digest:
            raise ServerRefused(
                "verify",
                f"{self.url} said that it took other weights, and has those of before: nothing was transferred.",
            )
        self._known[digest] = text
        return True

    def _note_before(self) -> None:
        """Checksums of what is there before the first push."""
        if not self._known and self._first is None and (receipts := self._receipts()):
            self._first = json.dumps(receipts, sort_keys=True)

    def _probe_drained(self, version: int, oracle: Oracle) -> None:
        self._resume()
        try:
            self._ask_oracle(version, oracle)
        finally:
            self._pause()

    def _probe_open(self, version: int, oracle: Oracle) -> None:
        """Answers were given meanwhile: that is what `drained` is for. A server that is wrong is closed again."""
        try:
            self._ask_oracle(version, oracle)
        except ConvertError as error:
            self._pause()
            self._dirty, self._loaded = True, None
            raise self._fenced_error(version, error) from error

    def _ask_oracle(self, version: int, oracle: Oracle) -> None:
        tokens, logprobs = self._greedy(list(oracle.prompt), len(oracle.tokens))
        if fault := oracle.fault(tokens, logprobs):
            raise ServerRefused("verify", f"{self.url}, version {version}: {fault}")

    # -------------------------------------------------------------------------------------------- of each server

    def _told_version(self) -> int | None:
        """The version that the server tells, None where it tells none."""
        return None

    def _unfit(self, wanted: Sequence[Wanted]) -> list[Problem]:
        del wanted
        return []

    def _world(self) -> int:
        raise NotImplementedError

    def _open_group(self, group: Group, name: str) -> None:
        raise NotImplementedError

    def _leave_group(self, name: str) -> None:
        raise NotImplementedError

    def _pause(self) -> None:
        raise NotImplementedError

    def _resume(self) -> None:
        raise NotImplementedError

    def _still_paused(self) -> bool:
        return True

    def _paused_before(self) -> bool:
        """Whether it is paused now, where that can be asked."""
        return False

    def _begin(self) -> None: ...

    def _begin_session(self, begin: Callable[[], Any], end: Callable[[], Any]) -> None:
        """A server of which an update failed may still be in that one: it is ended first, whatever it says to it."""
        try:
            begin()
        except ServerRefused:
            with suppress(ServerRefused):
                end()
            begin()

    def _send(self, bucket: Sequence[tuple[Wanted, Array]], last: bool) -> None:
        raise NotImplementedError

    def _end(self) -> None: ...

    def _flush(self) -> None: ...

    def _from_disk(self, path: str) -> None:
        raise NotImplementedError

    def _receipts(self) -> dict[str, str]:
        return {}

    def _set_version(self, version: int) -> None: ...

    def _greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        raise NotImplementedError

    def _may_resend(self, error: ConvertError) -> bool:
        """Whether the server still lives, and the fault may be one that passes."""
        if isinstance(error, (ChannelError, ServerUnreachable)) or getattr(error, "code", "") in ("http", "verify"):
            return self._alive()
        return False

    def _alive(self) -> bool:
        try:
            self.client.get("/health", timeout=10.0, attempts=2)
        except ServerUnreachable:
            return False
        except ServerRefused as error:
            return error.code == "wrong_dialect" and "status" not in error.facts  # 200, with no JSON
        return True

    def _said(self, path: str, answer: dict[str, Any]) -> dict[str, Any]:
        """An answer that says `success: false` is a failure, whatever its status."""
        if answer.get("success") is False:
            raise ServerRefused("http", f"{self.url}{path}: {answer.get('message') or answer}")
        return answer
