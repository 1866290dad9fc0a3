"""A model directory, in any format and wherever it lies, as a transformers model that the hub fills."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dtypes import BY_NAME, parse
from ...errors import ConfigError, ConvertError, Problems
from ...opening import open_checkpoint
from ...remote.mounts import ensure_all, mount
from ...sidefiles import collect, read_json
from .text import Text

if TYPE_CHECKING:
    import torch

    from ...checkpoint import Checkpoint

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt")


@dataclass
class Served:
    """A model, ready to answer. `config` is its config.json; `eos` the tokens at which it ends."""

    module: Any
    config: dict[str, Any]
    text: Text
    eos: tuple[int, ...]
    max_len: int
    device: torch.device
    source: str
    notes: list[str] = field(default_factory=list)


def load_model(
    source: str | Path,
    *,
    dtype: str | None = None,
    device: str = "auto",
    tokenizer: str | Path | None = None,
    max_len: int | None = None,
    attention: str | None = None,
    **opening: Any,
) -> Served:
    """Open, build, fill. Raises ConvertError when the directory, its config or one of the options cannot be used.

    dtype      None: the one of the config, else the checkpoint's commonest
    tokenizer  directory with a tokenizer, for sources that carry none
    opening    more arguments of `open_checkpoint`
    """
    import torch

    ckpt = open_checkpoint(source, **opening).check()
    place = _device(device)
    kind = _dtype(ckpt, dtype)
    config = _config(ckpt)
    if place.type == "cpu":
        config._experts_implementation = "eager"  # grouped kernels gain nothing there
    module = _build(config, getattr(torch, BY_NAME[kind].torch), attention)
    _materialize(module, place)
    ckpt.load_into(module, allow_cast=dtype is not None)
    module.eval().requires_grad_(False)
    text, notes = _text(ckpt, tokenizer)
    longest = _longest(config, max_len)
    served = Served(module, ckpt.config, text, _eos(ckpt, text), longest, place, str(ckpt.path), [*ckpt.notes, *notes])
    return served


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch finds no CUDA device here.", hint="--device cpu works everywhere.")
    return device


def _dtype(ckpt: Checkpoint, wanted: str | None) -> str:
    if wanted is not None:
        return parse(wanted).name
    said = ckpt.config.get("dtype") or ckpt.config.get("torch_dtype")
    if isinstance(said, str):
        return parse(said).name
    sizes: dict[str, int] = {}
    for slots in ckpt.slots.values():
        sizes[slots[0].dtype] = sizes.get(slots[0].dtype, 0) + sum(slot.box.volume for slot in slots)
    return max(sizes, key=sizes.__getitem__)


def _config(ckpt: Checkpoint) -> Any:
    from transformers import CONFIG_MAPPING

    kind = ckpt.config.get("model_type", "")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"model_type: transformers has no model {kind!r}.", hint="A newer transformers may have it.")
    return CONFIG_MAPPING[kind].from_dict(dict(ckpt.config))


def _build(config: Any, dtype: torch.dtype, attention: str | None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": attention} if attention else {}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except ValueError as error:
        raise ConfigError(f"transformers cannot build this model: {error}") from error


def _materialize(module: Any, device: torch.device) -> None:
    """Memory for parameters, and the values of those buffers that no checkpoint has (rotary frequencies)."""
    module.to_empty(device=device)
    module.tie_weights()
    problems = Problems()
    for name, part in module.named_modules():
        lost = part._non_persistent_buffers_set & {k for k, b in part._buffers.items() if b is not None}
        if not lost:
            continue
        if getattr(part, "config", None) is None:
            problems.add(name, f"{type(part).__name__} has buffers ({', '.join(sorted(lost))}) and no configuration")
            continue
        twin: Any = type(part)(config=part.config)
        for key in lost:
            part._buffers[key] = twin.get_buffer(key).to(device)
    problems.raise_as(ConfigError, "Buffers that no checkpoint holds cannot be made again:")


def _text(ckpt: Checkpoint, given: str | Path | None) -> tuple[Text, list[str]]:
    """The tokenizer beside the weights, or the one that was named."""
    from transformers import AutoTokenizer

    where = mount(given) if given is not None else ckpt.found.hf
    files = collect(where)[0] if where is not None else {}
    if where is None or not files.keys() & set(_TOKENIZER):
        if given is not None:
            raise ConfigError(f"--tokenizer {given}: there is no tokenizer.", hint=f"One of {', '.join(_TOKENIZER)}.")
        return Text(None), ["there is no tokenizer: requests and answers are token ids (--tokenizer DIR gives one)"]
    ensure_all({path: [None] for path in files.values()})
    try:
        return Text(AutoTokenizer.from_pretrained(str(where), local_files_only=True)), []
    except Exception as error:  # tokenizers raise everything from KeyError to RuntimeError on files that are damaged
        raise ConfigError(f"{where}: the tokenizer cannot be loaded: {error}") from error


def _eos(ckpt: Checkpoint, text: Text) -> tuple[int, ...]:
    """As transformers has it: generation_config.json, else the config's, and the tokenizer's."""
    said: Any = ckpt.config.get("eos_token_id")
    where = ckpt.found.hf / "generation_config.json" if ckpt.found.hf else None
    if where is not None and where.is_file():
        try:
            said = read_json(where).get("eos_token_id", said)
        except (ValueError, AttributeError, ConvertError) as error:
            raise ConfigError(f"{where}: cannot be read: {error}") from None
    if said is None and text.tokenizer is not None:
        said = text.tokenizer.eos_token_id
    found = said if isinstance(said, list) else [said]
    return tuple(int(token) for token in found if token is not None)


def _longest(config: Any, wanted: int | None) -> int:
    most = getattr(config, "max_position_embeddings", None)
    if wanted is not None and most is not None and wanted > most:
        raise ConfigError(f"--max-model-len {wanted}: the model has {most} positions.")
    return wanted or most or 4096
