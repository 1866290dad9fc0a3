"""Hugging Face directories straight from an engine's live shards; the work is `converter.live`'s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..converter.live import Exported, export_hf
from .ranks import peers_of

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..converter.checkpoint import Checkpoint
    from ..converter.loading_targets import Target
    from ..converter.mesh import Mesh
    from .api.metas import SaveLoadMeta


def export_model(
    states: Target,
    base: str | Path | Checkpoint,
    out: str | Path,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: Mesh | None = None,
    rank: int = 0,
    tokenizer: Any | None = None,
    processor: Any | None = None,
    **options: Any,
) -> Exported:
    """Write the model that the ranks of `group` hold together; every rank calls it.

    group    a gloo group of all ranks; None: the default group
    base     what the model was loaded from, an open checkpoint or its path: family, config, side files, element types
    tokenizer, processor  saved into the directory (`save_pretrained`) in the place of the base model's files
    options  as `converter.live.export_hf` has them: dtype, max_shard, overwrite, config_changes, …
    """

    def finish(partial: Path) -> None:
        for saved in (tokenizer, processor):
            if saved is not None:
                saved.save_pretrained(str(partial))

    return export_hf(states, base, out, peers=peers_of(group), mesh=mesh, rank=rank, finish=finish, **options)


def save_hf(
    states: Target,
    meta: SaveLoadMeta,
    base: str | Path | Checkpoint,
    *,
    group: dist.ProcessGroup | None = None,
    config_changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> Exported:
    """What `engine.save(SaveLoadMeta(path, "hf"))` does: an export to `meta.path`, over an earlier one.

    `meta.base_model_path` takes the place of `base` for config and side files.
    """
    return export_model(
        states,
        meta.base_model_path or base,
        meta.path,
        group=group,
        tokenizer=meta.tokenizer,
        processor=meta.processor,
        config_changes=config_changes,
        overwrite=True,
        **options,
    )
