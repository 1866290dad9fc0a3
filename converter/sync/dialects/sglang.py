"""SGLang. From 0.5.23 on `/begin_weight_update` and `/end_weight_update` are wanted around an update.

Its own `weight_version` of an update is never used: it stands for every bucket, not for the whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...codecs import Array
from ...dtypes import BY_NAME
from ...errors import ConvertError, Problem, ServerRefused
from ..sink import Wanted
from .base import ask
from .fenced import Fenced
from .group import Group


class Sglang0510(Fenced):
    """The endpoints of 0.5.10 to 0.5.22."""

    title = "SGLang"
    sees_version = True

    def _told_version(self) -> int | None:
        said = str((ask(self.client, "/model_info", "/get_model_info") or {}).get("weight_version"))
        return int(said) if said.isdecimal() else 0

    def _unfit(self, wanted: Sequence[Wanted]) -> list[Problem]:
        problems = []
        facts = self.found.facts
        for name, why in (("dp_size", "an update reaches one replica only"), ("pp_size", "ranks of stages collide")):
            if int(facts.get(name) or 1) != 1 and self.choices.path is None:
                problems.append(Problem(name, f"is {facts[name]}: {why}", "from disk (path=) it works"))
        del wanted
        return problems

    def _world(self) -> int:
        return 1 + int(self.choices.world or self.found.facts.get("tp_size") or 1)

    def _open_group(self, group: Group, name: str) -> None:
        body = self._group_body(group, name)
        group.open(name, lambda: self._post("/init_weights_update_group", body))

    def _group_body(self, group: Group, name: str) -> dict[str, Any]:
        return {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.world,
            "group_name": name,
            "backend": group.backend,
        }

    def _leave_group(self, name: str) -> None:
        self._post("/destroy_weights_update_group", {"group_name": name})

    def _pause(self) -> None:
        """`abort` waits for nobody, so requests are let finish before; those that are left then are aborted."""
        if self.choices.in_flight in ("finish", "wait"):
            self._drain()
        mode = "retract" if self.choices.in_flight == "keep" else "abort"
        self.client.post("/pause_generation", {"mode": mode}, idempotent=True)

    def _drain(self) -> None:
        end = time.monotonic() + self.choices.drain_timeout
        while (running := self._running()) and time.monotonic() < end:
            time.sleep(0.05)
        if running:
            self.notes.append(f"{self.url}: {running} requests ran longer than the drain, and were aborted")

    def _running(self) -> int:
        found = ask(self.client, "/get_load", "/server_info")
        states = (found or {}).get("internal_states") or [found or {}]
        return sum(int(s.get("num_reqs") or s.get("num_running_reqs") or 0) for s in states if isinstance(s, dict))

    def _resume(self) -> None:
        self.client.post("/continue_generation", {}, idempotent=True)

    def _send(self, bucket: Sequence[tuple[Wanted, Array]], last: bool) -> None:
        del last
        group = self._group
        assert group is not None
        fp8 = any(BY_NAME[w.dtype].size == 1 for w, _ in bucket)
        body: dict[str, Any] = {
            "names": [w.name for w, _ in bucket],
            "dtypes": [BY_NAME[w.dtype].torch for w, _ in bucket],
            "shapes": [list(w.shape) for w, _ in bucket],
            "group_name": self._group_name,
            "flush_cache": False,
        }
        arrays = [d for _, d in bucket]
        if fp8 and group.backend == "gloo":  # gloo has no FP8: all in one, as bytes
            body["load_format"] = "flattened_bucket"
            arrays = [_joined(arrays)]
        group.send(lambda: self._post("/update_weights_from_distributed", body), arrays)

    def _flush(self) -> None:
        """Answers in plain text; 400 while something is running, which passes."""
        for left in range(20, -1, -1):
            try:
                self.client.post("/flush_cache", idempotent=True)
                return
            except ServerRefused as error:
                if error.code == "wrong_dialect" and "status" not in error.facts:
                    return
                if not left or error.facts.get("status") != 400:
                    raise
                time.sleep(0.1)

    def _from_disk(self, path: str) -> None:
        body = {"model_path": path, "abort_all_requests": False, "flush_cache": True}
        self._post("/update_weights_from_disk", body)

    def _set_version(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        self.client.post("/update_weight_version", body, idempotent=True)

    def _greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True},
            "return_logprob": True,
        }
        found = self.client.post("/generate", body, idempotent=True)
        pairs = found["meta_info"]["output_token_logprobs"]
        return [int(p[1]) for p in pairs], [float(p[0]) for p in pairs]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._said(path, self.client.post(path, body))


class Sglang0523(Sglang0510):
    """The endpoints from 0.5.23 on."""

    def _begin(self) -> None:
        self._note_before()
        self._begin_session(
            lambda: self._post("/begin_weight_update", {"selector": "all"}),
            lambda: self._post("/end_weight_update", {}),
        )

    def _end(self) -> None:
        self._post("/end_weight_update", {})

    def _receipts(self) -> dict[str, str]:
        try:
            found = self.client.post("/weights_checker", {"action": "checksum"}, idempotent=True)
        except ConvertError:
            return {}
        whole = found.get("per_engine_checksum")
        return {"per_engine_checksum": str(whole)} if found.get("success") and whole else {}


def _joined(arrays: Sequence[Array]) -> Array:
    import numpy as np

    return np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays])
