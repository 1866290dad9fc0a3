"""Supervised data: JSONL files or a `datasets` dataset, tokenised once, everything that is wrong with it told at once.

Every process tokenises the whole: the samples' number and order are those of all ranks, whatever their number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...converter.errors import ConfigError, Problems, SourceError
from .batches import Batch, from_sequences
from .chat import Encoder, NoSample, Tokens
from .fields import PER_SAMPLE, PER_TOKEN

__all__ = ["SFTDataset", "read_rows"]

TOO_LONG = ("error", "truncate", "drop")
_ENOUGH = 200
"""Problems after which reading stops: more of them say nothing new."""


@dataclass
class SFTDataset:
    """Tokenised samples. `make` reads them; `batch` packs some."""

    ids: list[np.ndarray[Any, Any]]
    masks: list[np.ndarray[Any, Any]]
    path: str = ""
    more: list[dict[str, np.ndarray[Any, Any]]] = field(default_factory=list)
    """Further values of each sample, by name, for policy-gradient training; nothing, or one for each sample."""
    counts: dict[str, int] = field(default_factory=dict)
    """`samples`, `tokens`, `targets`, and those `dropped` and `truncated`."""
    _digest: str | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def digest(self) -> str:
        """Of all tokens and masks in order: a resumed run checks that its data is the same."""
        if self._digest is None:
            self._digest = self._hash()
        return self._digest

    def _hash(self) -> str:
        h = hashlib.sha256()
        for ids, mask in zip(self.ids, self.masks, strict=True):
            h.update(len(ids).to_bytes(8, "little") + ids.tobytes() + mask.tobytes())
        for values in self.more:
            for name in sorted(values):
                h.update(name.encode() + values[name].tobytes())
        return h.hexdigest()[:32]

    def batch(self, which: Sequence[int]) -> Batch:
        """A packed batch (`input_ids`, `loss_mask`, and further values) of these samples."""
        ids = [torch.from_numpy(self.ids[i].astype(np.int64)) for i in which]
        per_token = {"loss_mask": [torch.from_numpy(self.masks[i]) for i in which]}
        per_sample = {}
        for name in self.more[0] if self.more else ():
            rows = [torch.from_numpy(self.more[i][name]) for i in which]
            if name in PER_SAMPLE:
                per_sample[name] = torch.stack(rows)
            else:
                per_token[name] = rows
        return from_sequences(ids, **per_token) | per_sample

    @classmethod
    def make(
        cls,
        path: str,
        encoder: Encoder,
        *,
        split: str = "train",
        max_length: int | None = None,
        too_long: str = "error",
        vocab_size: int | None = None,
        limit: int | None = None,
        policy: bool = False,
        needed: Sequence[str] = (),
    ) -> SFTDataset:
        """Read and tokenise. `too_long` says what becomes of samples above `max_length`: `error`, `truncate`, `drop`.
        With `policy`, rewards, advantages and so on are read too; all samples have the same ones, `needed` among them.

        Raises SourceError for files that cannot be read, samples that are none, samples without a target, samples that
        are too long, tokens that the model of `vocab_size` does not have: with file and line of each.
        """
        if too_long not in TOO_LONG:
            raise ConfigError(f"too_long is {too_long!r}.", hint=f"Known: {', '.join(TOO_LONG)}.")
        made, problems = cls([], [], path), Problems()
        made.counts = {"samples": 0, "tokens": 0, "targets": 0, "dropped": 0, "truncated": 0}
        for place, row in read_rows(path, split, problems, limit):
            try:
                tokens = encoder(row)
                more = _more(row, len(tokens.ids), needed) if policy else {}
            except NoSample as reason:
                problems.add(place, str(reason))
            else:
                if made._add(place, tokens, more, max_length, too_long, problems):
                    _check_ids(place, made.ids[-1], encoder.tokenizer, vocab_size, problems)
            if len(problems.found) >= _ENOUGH:
                break
        problems.raise_as(SourceError, f"{path}: cannot be trained on.", _hint(problems))
        if not made.ids:
            dropped = made.counts["dropped"]
            why = f" All {dropped} were longer than {max_length} tokens." if dropped else ""
            raise SourceError(f"{path}: there is no sample in it.{why}")
        return made

    def _add(
        self, place: str, tokens: Tokens, more: dict[str, Any], most: int | None, too_long: str, problems: Problems
    ) -> bool:
        """One more sample, whole, cut, or not at all (False)."""
        ids, mask = np.array(tokens.ids, np.int32), np.array(tokens.mask, np.bool_)
        if most is not None and len(ids) > most:
            if too_long == "error":
                problems.add(place, f"{len(ids)} tokens, at most {most}")
                return False
            self.counts["dropped" if too_long == "drop" else "truncated"] += 1
            if too_long == "drop":
                return False
            ids, mask = ids[:most], mask[:most]
            more = {name: value[:most] if value.ndim else value for name, value in more.items()}
        targets = int(mask[1:].sum())
        if not targets:
            problems.add(place, f"none of its {len(ids)} tokens is a target: nothing to learn from")
        elif self.more and more.keys() != self.more[0].keys():
            problems.add(place, f"has {', '.join(more)}; the samples before have {', '.join(self.more[0])}")
        else:
            self.ids.append(ids)
            self.masks.append(mask)
            self.more += [more] if more else []
            for name, count in (("samples", 1), ("tokens", len(ids)), ("targets", targets)):
                self.counts[name] += count
            return True
        return False


def _more(row: dict[str, Any], size: int, needed: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Rewards, advantages and so on. Raises NoSample for what is lacking or has another length than the tokens."""
    found = {}
    for name, dtype in (PER_TOKEN | PER_SAMPLE).items():
        if row.get(name) is None:
            if name in needed:
                raise NoSample(f"has no {name}")
            continue
        try:
            values = np.array(row[name], dtype)
        except (TypeError, ValueError) as error:
            raise NoSample(f"{name}: {error}") from error
        wanted = () if name in PER_SAMPLE else (size,)
        if values.shape != wanted:
            raise NoSample(f"{name} has the shape {values.shape}, expected {wanted}")
        if not np.isfinite(values).all():
            raise NoSample(f"{name} has a value that is not finite")
        found[name] = values
    return found


def _check_ids(place: str, ids: np.ndarray[Any, Any], tokenizer: Any, vocab: int | None, to: Problems) -> None:
    """Whether every token is one of the model's."""
    worst = int(ids.max())
    if vocab is not None and worst >= vocab:
        text = tokenizer.convert_ids_to_tokens(worst) if worst < len(tokenizer) else "not the tokenizer's either"
        to.add(place, f"token {worst} ({text!r}) is not in the model's vocabulary of {vocab}")


def _hint(problems: Problems) -> str:
    said = " ".join(problem.what for problem in problems.found)
    hints = {
        "at most": "data.too_long=truncate or drop takes care of long samples.",
        "is not in the model's vocabulary": "The tokenizer is that of another model.",
        "nothing to learn": "Samples need a turn of the assistant, or a completion, within data.max_length.",
    }
    return " ".join(hint for words, hint in hints.items() if words in said)


# ------------------------------------------------------------------------------------------------ where samples stand


def read_rows(
    path: str, split: str, problems: Problems, limit: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every sample with its place (`file:line`). Lines that are no JSON object are added to `problems`.

    A file, a directory of `*.jsonl` (in order of name), a directory that `datasets` saved, or what
    `datasets.load_dataset` knows by name. Raises SourceError when there is nothing of all that.
    """
    local = Path(path)
    if local.is_file():
        rows = _lines([local], problems)
    elif local.is_dir() and not _saved_dataset(local):
        files = sorted(local.glob("*.jsonl"))
        if not files:
            raise SourceError(f"{path}: neither *.jsonl files nor a dataset saved by `datasets`.")
        rows = _lines(files, problems)
    else:
        rows = _dataset(path, split)
    for count, row in enumerate(rows):
        if limit is not None and count >= limit:
            return
        yield row


def _lines(files: Sequence[Path], problems: Problems) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in files:
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    place = f"{file}:{number}"
                    if not line.strip():
                        continue
                    try:
                        row = json.loads(line)
                    except ValueError as error:  # UnicodeDecodeError is one
                        problems.add(place, f"is no JSON: {error}")
                        continue
                    if isinstance(row, dict):
                        yield place, row
                    else:
                        problems.add(place, f"is {type(row).__name__}, expected an object")
        except OSError as error:
            raise SourceError(f"{file}: cannot be read: {error.strerror}.") from error


def _saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json"))


def _dataset(path: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise SourceError(
            f"{path}: is no file here, and the package `datasets` is not installed.",
            hint='pip install "areal-convert[train]"',
        ) from error
    looks_local = path.startswith((".", "/", "~")) or path.endswith((".jsonl", ".json"))
    if looks_local and not Path(path).exists():
        raise SourceError(f"{path}: no such file or directory.")
    try:
        loaded = datasets.load_from_disk(path) if Path(path).is_dir() else datasets.load_dataset(path)
    except Exception as error:  # it raises whatever the network, a file or a script of its own raised
        raise SourceError(f"{path}: `datasets` cannot load it: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise SourceError(f"{path}: has no split {split!r}.", hint=f"It has: {', '.join(map(str, loaded))}.")
        loaded = loaded[split]
    for index, row in enumerate(loaded):
        yield f"{path}[{index}]", {k: v for k, v in dict(row).items() if v is not None}
