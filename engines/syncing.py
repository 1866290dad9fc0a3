"""An engine's weights into running inference servers: `connect_engine` and `update_weights` of all engines.

    engine.connect_engine(rollout, WeightUpdateMeta.from_fsdp_xccl(None))     # rollout: whatever knows the servers
    engine.update_weights(meta.with_version(3))

Every rank sends the boxes that it holds, under the plans of the converter; nothing is gathered. The way is the
converter's `sync`: all servers change, or none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..converter.errors import ConfigError
from ..converter.sync.hub import WeightSync
from .ranks import peers_of

if TYPE_CHECKING:
    from ..converter.sync.report import PushReport
    from .api.base import TrainEngine
    from .api.metas import WeightUpdateMeta

__all__ = ["EngineSync", "for_engine", "servers_of"]

ADDRESSES = "AREAL_LLM_SERVER_ADDRS"
"""Where AReaL's launcher says the servers' addresses, with commas between them."""

_NAMES = ("addresses", "server_addresses", "servers")
_INNER = ("_engine", "engine", "inf_engine")


def servers_of(engine: Any) -> list[str]:
    """The servers' URLs, from what is connected: URLs or host:port, one or several, or an inference engine of AReaL's,
    which has them as `addresses`; None: those that the environment names.

    Raises ConfigError where there are none.
    """
    found = [_url(address) for address in _addresses(engine)]
    if not found:
        raise ConfigError(
            f"{type(engine).__name__} knows no inference server.",
            hint=f"Pass URLs, an engine that is initialized (`addresses`), or set {ADDRESSES}.",
        )
    return list(dict.fromkeys(found))


def _addresses(engine: Any) -> Iterable[str]:
    if engine is None:
        return [part for part in os.environ.get(ADDRESSES, "").split(",") if part.strip()]
    if isinstance(engine, str):
        return [part for part in engine.split(",") if part.strip()]
    if isinstance(engine, (list, tuple, set)):
        return list(engine)
    for name in _NAMES:
        if isinstance(value := getattr(engine, name, None), (list, tuple)) and value:
            return list(value)
    for name in _INNER:
        inner = getattr(engine, name, None)
        if inner is not None and inner is not engine and (found := list(_addresses(inner))):
            return found
    return []


def _url(address: Any) -> str:
    text = str(address).strip().rstrip("/")
    return text if "://" in text else f"http://{text}"


# ------------------------------------------------------------------------------------------------ the hub of an engine


def for_engine(engine: TrainEngine, servers: Sequence[str], **options: Any) -> WeightSync:
    """A hub over the live weights of an engine that is initialized; every rank makes it alike, and takes part in every
    push. With adapters, `push` sends the model with the adapters merged.

    options  as `WeightSync` has them (`allow_nan=True`: weights with NaN go, which are refused by name otherwise). The
             engine's configuration says whether only changes are sent, and how often everything
             (`enable_delta_weight_update`, `weight_update_anchor_interval`)

    Raises ConfigError for an engine without a checkpoint to take names and shapes from.
    """
    held: Any = engine
    checkpoint = getattr(held, "checkpoint", None)
    if not engine.initialized or checkpoint is None:
        raise ConfigError(
            "The engine has no weights to send, or no checkpoint that tells of which family they are.",
            hint="Call initialize() first; a model of random weights is exported before (SaveLoadMeta(…, 'hf')).",
        )
    if engine.config.is_critic:
        raise ConfigError("is_critic: inference servers have no value head; a critic's weights stay where they are.")
    config = engine.config
    given = {
        "mode": "delta" if config.enable_delta_weight_update else "full",
        "anchor": config.weight_update_anchor_interval,
        "mesh": getattr(held, "mesh", None) if engine.backend == "megatron" else None,
        "rank": getattr(held, "rank", 0) if engine.backend == "megatron" else 0,
        "peers": peers_of(engine.cpu_group),
    }
    return WeightSync(lambda: states_of(engine), list(servers), base=checkpoint, **{**given, **options})


def states_of(engine: TrainEngine) -> Any:
    """What of an engine is a model: a module, or a rank's state dicts; adapters are merged into it."""
    held: Any = engine
    if engine.backend == "megatron":
        held.gather_parameters()
    if held.lora is not None:
        return held.lora.merged()
    if engine.backend != "megatron":
        return held.parts
    from .megatron.weights import state_dicts

    return state_dicts(held.model)


class EngineSync:
    """The way from one engine to the servers that `connect_engine` was given, for `update_weights` to go.

    type xccl  the live weights, bucket by bucket
    type disk  a Hugging Face directory at `meta.path` (or the adapter), from which the servers get them; it goes
               afterwards with `clear_checkpoint_after_load`
    """

    def __init__(self, engine: TrainEngine, servers: Sequence[str], meta: WeightUpdateMeta) -> None:
        self.engine, self.servers, self.type = engine, list(servers), meta.type
        self.sync: WeightSync | None = None
        self._options: dict[str, Any] = {}
        if meta.nccl_master_address:
            self._options["host"] = meta.nccl_master_address
        if meta.type == "xccl":
            self._open()

    def _open(self) -> WeightSync:
        if self.sync is None:
            self.sync = for_engine(self.engine, self.servers, **self._options)
            self.sync.connect()
        return self.sync

    def update(self, meta: WeightUpdateMeta) -> PushReport:
        """Bring the servers to the engine's weights, as version `meta.version` (None: the next one after theirs)."""
        if meta.type != self.type:
            raise ConfigError(
                f"type: {meta.type} was asked for, and {self.type} is connected.", hint="connect_engine with this meta."
            )
        if meta.use_lora:
            return self._update_adapter(meta)
        if meta.type == "disk":
            return self._update_from(meta)
        return self._open().push(meta.version)

    def _update_adapter(self, meta: WeightUpdateMeta) -> PushReport:
        """The adapter alone, under `meta.lora_name`."""
        if self.engine.lora is None:
            raise ConfigError("use_lora: the engine has no adapters.", hint="TrainEngineConfig.use_lora=true")
        from .lora import adapter_fields

        lora = self.engine.lora
        return self._open().push_adapter(
            meta.lora_name or "default", (adapter_fields(lora.config), lora.entries()), meta.version
        )

    def _update_from(self, meta: WeightUpdateMeta) -> PushReport:
        """Through a directory that stays, unless it is to go when the servers have it."""
        peers = peers_of(self.engine.cpu_group)
        path = save_for_servers(self.engine, meta)
        report = self._open().push(meta.version, source=path)
        if meta.clear_checkpoint_after_load:

            def clear() -> None:
                if peers.rank == 0:
                    shutil.rmtree(path, ignore_errors=True)

            peers.together(f"Clearing {path}", clear)
        return report

    def close(self) -> None:
        """Give back leases and groups."""
        if self.sync is not None:
            self.sync.close()
            self.sync = None


def save_for_servers(engine: TrainEngine, meta: WeightUpdateMeta) -> str:
    """Write the current weights, or with `meta.use_lora` the adapter, to `meta.path`. Raises ConfigError without it."""
    from .api.metas import SaveLoadMeta

    if meta.path is None:
        raise ConfigError(
            "path: a directory is needed to update weights by disk.", hint="WeightUpdateMeta.from_disk(…)"
        )
    merge = engine.lora is not None and not meta.use_lora
    engine.save(SaveLoadMeta(meta.path, "hf", base_model_path=engine.config.path, merge_adapters=merge))
    return meta.path


def connect(engine: TrainEngine, inference: Any, meta: WeightUpdateMeta) -> EngineSync | None:
    """What `TrainEngine.connect_engine` does. None: by disk, with nobody to tell (`update_weights` then only writes).

    Rank 0 knows the servers; the others need not. Raises ConfigError for awex, and where no server is known.
    """
    if meta.type == "awex":
        raise ConfigError("type: awex has a protocol of its own, which is not spoken here.", hint="xccl or disk")
    if meta.type == "disk" and inference is None and not os.environ.get(ADDRESSES):
        return None
    peers = peers_of(engine.cpu_group)
    found: list[str] = []

    def look() -> list[str]:
        return servers_of(inference) if peers.rank == 0 else []

    found = peers.together("Looking for inference servers", look)[0]
    return EngineSync(engine, found, meta)
