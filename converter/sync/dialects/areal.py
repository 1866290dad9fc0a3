"""The servers that AReaL starts: vLLM with its own endpoints, and SGLang with its scheduler.

AReaL's vLLM resumes its engine after every bucket. What keeps requests out between buckets is the gate in front of
`/v1/completions`; `/v1/chat/completions` has none, and its callers have to hold back by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...codecs import Array
from ...dtypes import BY_NAME
from ...errors import Problem
from ..sink import Wanted
from .base import ask
from .group import Group
from .sglang import Sglang0510
from .vllm import Vllm019


class ArealVllm(Vllm019):
    """It tells no version, and whether it is paused it does not tell either."""

    title = "AReaL's vLLM"
    fence = "/v1/completions"

    def _unfit(self, wanted: Sequence[Wanted]) -> list[Problem]:
        fp8 = [w.name for w in wanted if BY_NAME[w.dtype].size == 1] if self.choices.backend == "gloo" else []
        return [Problem(name, "is FP8, which gloo does not carry to this server", "backend nccl") for name in fp8]

    def _world(self) -> int:
        told = (ask(self.client, "/get_world_size") or {}).get("world_size")
        return 1 + int(self.choices.world or told or 1)

    def _open_group(self, group: Group, name: str) -> None:
        body = {
            "master_address": group.host,
            "master_port": str(group.port),
            "rank_offset": 1,
            "world_size": group.world,
            "backend": group.backend,
            "group_name": name,
        }
        group.open(name, lambda: self._post("/areal_init_weights_update_group", body))

    def _pause(self) -> None:
        """Aborts what runs: there is no other way here."""
        if self.choices.in_flight != "abort":
            self.notes.append(f"{self.url}: requests in flight were aborted; {self.title} can do nothing else")
        self.client.post("/areal_pause_generation", {}, idempotent=True)
        self.notes.append(f"{self.url}: only {self.fence} is kept out while weights are loaded")

    def _still_paused(self) -> bool:
        return True

    def _paused_before(self) -> bool:
        return False

    def _resume(self) -> None:
        self.client.post("/areal_continue_generation", {}, idempotent=True)

    def _begin(self) -> None: ...

    def _end(self) -> None: ...

    def _flush(self) -> None:
        """Every bucket's pause clears the cache; the gate is closed, so nothing has filled it since."""

    def _send(self, bucket: Sequence[tuple[Wanted, Array]], last: bool) -> None:
        del last
        group = self._group
        assert group is not None
        meta = {
            "names": [w.name for w, _ in bucket],
            "dtypes": [BY_NAME[w.dtype].torch for w, _ in bucket],
            "shapes": [list(w.shape) for w, _ in bucket],
            "group_name": self._group_name,
        }
        self._post("/areal_set_update_weight_meta", meta)
        group.send(lambda: self._post("/areal_update_weights_xccl", {}), [d for _, d in bucket])

    def _from_disk(self, path: str) -> None:
        self._post("/areal_update_weights", {"model_path": path})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._said(path, self.client.post(path, body))


class ArealSglang(Sglang0510):
    """One stage only: AReaL's groups are one for each pipeline stage, named by it."""

    title = "AReaL's SGLang"

    def _group_body(self, group: Group, name: str) -> dict[str, Any]:
        self._group_name = f"{name}_0"
        return super()._group_body(group, self._group_name) | {"pp_rank": 0}

    def _open_group(self, group: Group, name: str) -> None:
        body = self._group_body(group, name)
        group.open(self._group_name, lambda: self._post("/init_weights_update_group", body))
