"""vLLM, in development mode (`VLLM_SERVER_DEV_MODE=1`), with the transfer engine of `vllm_gloo.py`.

0.19 to 0.29 know init, update, pause and resume; from 0.30 on start and finish are wanted around an update, and the
server has a version and checksums. vLLM's own engine `nccl` is a communicator of its own, which no torch group meets:
hence the engine, which takes torch groups of either backend, and gives a digest of what it got.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ...codecs import Array
from ...dtypes import BY_NAME
from ...errors import ConvertError, Problem, ServerRefused
from ..sink import Wanted
from .fenced import Fenced
from .group import Group

EMPTY = hashlib.sha256(b"").hexdigest()
"""The checksum of weights that vLLM cannot read back (packed for a CPU): says nothing."""


class Vllm019(Fenced):
    """The endpoints of 0.19 to 0.29."""

    title = "vLLM"
    sleep_path = "/is_sleeping"

    def _world(self) -> int:
        return 1 + int(self.client.get("/get_world_size?include_dp=true")["world_size"])

    def _open_group(self, group: Group, name: str) -> None:
        info = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.world,
            "group_name": name,
            "backend": group.backend,
            "timeout": group.timeout,
        }
        body = {"init_info": info}
        group.open(name, lambda: self.client.post("/init_weight_transfer_engine", body), as_torch=False)

    def _leave_group(self, name: str) -> None:
        """The next init replaces it."""

    def _unfit(self, wanted: Sequence[Wanted]) -> list[Problem]:
        if self.choices.path is not None:
            return []
        try:
            self._engine()
        except ServerRefused as error:
            what = f"has no transfer engine that a torch group can feed ({error.what})"
            hint = "start it with --worker-extension-cls …dialects.vllm_gloo.Extension, see docs/guides/sync.md"
            return [Problem(self.url, what, hint)]
        return []

    def _engine(self) -> list[dict[str, Any]]:
        """What the engine on every worker says: digest of the last update, tensors, bytes."""
        answer = self.client.post("/collective_rpc", {"method": "areal_convert_receipt"}, idempotent=True)
        found = answer.get("results")
        if not isinstance(found, list) or not all(isinstance(r, dict) and "digest" in r for r in found):
            raise ServerRefused("wrong_dialect", f"{self.url} answers areal_convert_receipt with {answer}.")
        return found

    def _pause(self) -> None:
        mode = {"finish": "wait", "wait": "wait"}.get(self.choices.in_flight, self.choices.in_flight)
        limit = max(self.client.timeout, self.choices.drain_timeout)
        self.client.post(f"/pause?mode={mode}&clear_cache=true", idempotent=True, timeout=limit)
        if not self._still_paused():
            raise ServerRefused("http", f"{self.url} says that it is not paused after /pause.")

    def _still_paused(self) -> bool:
        return self.client.get("/is_paused").get("is_paused") is True

    def _paused_before(self) -> bool:
        return self._still_paused()

    def _resume(self) -> None:
        self.client.post("/resume", idempotent=True)

    def _send(self, bucket: Sequence[tuple[Wanted, Array]], last: bool) -> None:
        del last
        group = self._group
        assert group is not None
        info = {
            "names": [w.name for w, _ in bucket],
            "dtype_names": [BY_NAME[w.dtype].torch for w, _ in bucket],
            "shapes": [list(w.shape) for w, _ in bucket],
        }
        for want, data in bucket:
            self._sent.update(f"{want.name} {BY_NAME[want.dtype].torch} {list(want.shape)}".encode())
            self._sent.update(data.tobytes())
        group.send(lambda: self.client.post("/update_weights", {"update_info": info}), [d for _, d in bucket])

    def _begin(self) -> None:
        """The engine begins its digest anew with the first bucket after a receipt was asked for."""
        self._engine()
        self._sent = hashlib.blake2b(digest_size=16)

    def _end(self) -> None:
        expected = self._sent.hexdigest()
        for worker, said in enumerate(self._engine()):
            if said["digest"] != expected:
                raise ServerRefused(
                    "verify", f"{self.url}: worker {worker} got {said}, not what was sent ({expected})."
                )
        self.notes.append(f"{self.url}: every worker got what was sent (blake2b {expected[:12]}…)")

    def _flush(self) -> None:
        """An answer without `success` is 0.19's."""
        try:
            answer = self.client.post("/reset_prefix_cache", idempotent=True)
        except ServerRefused as error:
            if error.code != "wrong_dialect" or "status" in error.facts:
                raise
            return
        self._said("/reset_prefix_cache", answer)

    def _from_disk(self, path: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self.client.post("/collective_rpc", body)

    def _greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        model = self.choices.model or str(self.client.get("/v1/models")["data"][0]["id"])
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": count,
            "min_tokens": count,
            "temperature": 0.0,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
        }
        found = self.client.post("/v1/completions", body, idempotent=True)["choices"][0]["logprobs"]
        return [int(t.removeprefix("token_id:")) for t in found["tokens"]], [float(x) for x in found["token_logprobs"]]


class Vllm030(Vllm019):
    """The endpoints from 0.30 on."""

    sees_version = True

    def _told_version(self) -> int | None:
        said = str(self.client.get("/weight_info").get("weight_version"))
        return int(said) if said.isdecimal() else 0

    def _begin(self) -> None:
        self._note_before()
        super()._begin()
        end = {"weight_version": None}
        self._begin_session(
            lambda: self.client.post("/start_weight_update"),
            lambda: self.client.post("/finish_weight_update", end),
        )

    def _end(self) -> None:
        self.client.post("/finish_weight_update", {"weight_version": None})
        super()._end()

    def _receipts(self) -> dict[str, str]:
        """Not where the checker hashes what it cannot read: a CPU's packed weights are empty to it."""
        try:
            found = self.client.post("/weight_checker", {"action": "checksum"}, idempotent=True).get("checksums")
        except ConvertError:
            return {}
        if not isinstance(found, dict) or EMPTY in found.values():
            return {}
        return {str(k): str(v) for k, v in found.items()}

    def _set_version(self, version: int) -> None:
        self.client.post("/update_weight_version", {"new_version": str(version)}, idempotent=True)

    def _leave_group(self, name: str) -> None:
        del name
        self.client.post("/shutdown_weight_transfer_engine")
