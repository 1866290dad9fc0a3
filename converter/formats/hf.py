"""Hugging Face directories: `model.safetensors`, or shards with an index; `pytorch_model.bin` and its shards are read.

Layout of a file: github.com/huggingface/safetensors, README, "Format". Layout of a directory: transformers,
`modeling_utils.py` (names of the index and the shards) and huggingface_hub, `serialization/_torch.py` (their sizes).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..dtypes import BY_NAME
from ..errors import CorruptFile, SourceError
from ..placement import Local
from ..remote.mounts import ensure_all, mounted, remote_file
from ..sidefiles import INDEX, find_hf, read_json
from ..slots import Buffer
from .base import DTypeOf, Found, Stored, StoredBox, Target, TargetFile, nbytes
from .safetensors_file import HEAD, StHeader, encode_header, read_header
from .torchfile import TensorRef, read

name = "hf"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SINGLE = "model.safetensors"


def detect(path: Path) -> Path | None:
    """The directory if it holds weights under Hugging Face's file names (a lone safetensors file counts)."""
    if path.is_file() and path.suffix in (".safetensors", ".bin"):
        return path.parent
    if not path.is_dir():
        return None
    files = [INDEX, BIN, BIN_INDEX]
    if any((path / f).exists() for f in files) or any(path.glob("*.safetensors")):
        return path
    return None


def read_checkpoint(path: Path) -> Found:
    """Headers of all shards. Problems of all files are collected."""
    where = path if path.is_dir() else path.parent
    found = Found(name, path, where, hf=find_hf(where))
    found.facts["container"] = "safetensors"
    index = _index(where / INDEX, found)
    files = [path] if path.is_file() else _shards(where, index, found)
    if not files and not found.problems:
        index = _index(where / BIN_INDEX, found)
        files = _bin_files(where, index, found)
        found.facts["container"] = "torch .bin"
    ensure_all({file: [(0, HEAD)] for file in files if file.suffix != ".bin"})
    read_one = _read_bin if files and files[0].suffix == ".bin" else _read_safetensors
    for file in files:
        _guard(found, file, lambda file=file: read_one(file, found))
    _leave_strays(found, index)
    _check_index(found, index)
    _check_duplicates(found, index)
    return found


def _guard(found: Found, file: Path, action: Callable[[], None]) -> None:
    """Run one file's reading; what is wrong with it joins the list."""
    try:
        action()
    except SourceError as error:
        found.incomplete = True
        if error.problems:
            found.problems.found.extend(error.problems)
        else:
            found.problems.add(str(file), error.what, error.hint)
    except OSError as error:
        found.incomplete = True
        found.problems.add(str(file), f"cannot be read: {error.strerror or error}")


def _index(path: Path, found: Found) -> dict[str, str] | None:
    if not path.is_file():
        return None
    try:
        index = read_json(path)
        weights = index["weight_map"]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in weights.items()):
            raise ValueError("weight_map must map names to file names")
        bad = sorted(
            {v for v in weights.values() if "/" in v or v.startswith(".") or len(v) > 200 or not v.isprintable()}
        )
        if bad:
            raise ValueError(f"weight_map names {bad[0][:80]!r}, which is no file in its directory")
        return dict(weights)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found.problems.add(str(path), f"is no index of shards: {error}")
        return {}


def _shards(where: Path, index: dict[str, str] | None, found: Found) -> list[Path]:
    """The safetensors files that make up the model: the index decides, then the single file, then whatever is there."""
    weights = sorted(p for p in where.iterdir() if p.suffix == ".safetensors")
    present = [p for p in weights if not _foreign(p.name)]
    found.notes += [f"{p.name} is left aside: not this model's file by its name" for p in weights if _foreign(p.name)]
    if index is None:
        single = [p for p in present if p.name == SINGLE]
        if single and len(present) > 1:
            others = ", ".join(p.name for p in present if p.name != SINGLE)
            found.notes.append(f"{SINGLE} is the model; left aside: {others}")
        return single or present
    named = sorted(set(index.values()))
    missing = [f for f in named if not (where / f).exists()]
    if missing and (where / SINGLE).exists() and SINGLE not in named:
        found.notes.append(f"{INDEX} names {len(missing)} shards that are gone; {SINGLE} is read instead")
        index.clear()
        return [where / SINGLE]
    for file in missing:
        count = sum(v == file for v in index.values())
        what = "a dangling link" if (where / file).is_symlink() else "not there"
        found.incomplete = True
        found.problems.add(str(where / file), f"{what}; the index puts {count} tensors into it", "fetch it again")
    return [where / f for f in named if f not in missing] + [p for p in present if p.name not in named]


def _foreign(file: str) -> bool:
    """Weights of another kind that repositories keep beside the model: Mistral's own format, adapters."""
    return file.startswith(("consolidated", "adapter_", "optimizer"))


def _bin_files(where: Path, index: dict[str, str] | None, found: Found) -> list[Path]:
    if index is None:
        return sorted(where.glob("pytorch_model*.bin"))
    files = sorted(set(index.values()))
    for file in files:
        if not (where / file).exists():
            found.incomplete = True
            found.problems.add(str(where / file), "not there, though the index names it", "fetch it again")
    return [where / f for f in files if (where / f).exists()]


def _read_safetensors(file: Path, found: Found) -> None:
    if not file.is_file():
        raise CorruptFile(f"{file} is not there, or no plain file.")
    header: StHeader = read_header(file)
    found.files[str(file)] = header.size
    for tensor, (dtype, shape, begin, end) in header.tensors.items():
        if begin == end:
            found.problems.add(
                tensor, f"is empty (shape {list(shape)}) in {file.name}", "the save went wrong; see ZeRO-3"
            )
            continue
        if dtype not in BY_NAME:
            found.problems.add(tensor, f"has the type {dtype}, which is not converted")
            continue
        buffer = Buffer(str(file), begin, end - begin, tensor)
        found.tensors.append(Stored(tensor, dtype, tuple(shape), (StoredBox((0,) * len(shape), tuple(shape), buffer),)))


def _read_bin(file: Path, found: Found) -> None:
    tree = read(file)
    found.files[str(file)] = file.stat().st_size
    if isinstance(tree, Mapping) and not any(isinstance(v, TensorRef) for v in tree.values()):
        tree = next((tree[k] for k in ("state_dict", "model", "module") if isinstance(tree.get(k), Mapping)), tree)
    if not isinstance(tree, Mapping):
        raise CorruptFile(f"{file}: holds a {type(tree).__name__}, not a dictionary of tensors.")
    for tensor, ref in tree.items():
        if isinstance(ref, TensorRef) and ref.dtype not in BY_NAME:
            found.problems.add(str(tensor), f"has the type {ref.dtype}, which is not converted")
        elif isinstance(ref, TensorRef):
            found.tensors.append(stored_ref(str(tensor), ref))
        else:
            found.others[str(tensor)] = type(ref).__name__


def stored_ref(tensor: str, ref: TensorRef, rank: int = 0, chunk: int = 0) -> Stored:
    """A tensor of a torch file as a stored one."""
    size = BY_NAME[ref.dtype].size
    span = size + sum((n - 1) * s * size for n, s in zip(ref.shape, ref.strides, strict=True)) if all(ref.shape) else 0
    buffer = Buffer(str(ref.file), ref.offset, span, tensor)
    strides = tuple(s * size for s in ref.strides)
    box = StoredBox((0,) * len(ref.shape), tuple(ref.shape), buffer, strides)
    return Stored(tensor, ref.dtype, tuple(ref.shape), (box,), rank, chunk)


def _leave_strays(found: Found, index: dict[str, str] | None) -> None:
    """Files that the index does not name may repeat the model's tensors; what else they hold is none of it."""
    if not index:
        return
    named, strays = set(index.values()), set()
    kept = []
    for tensor in found.tensors:
        file = Path(tensor.boxes[0].buffer.file).name
        if file in named or tensor.name in index:
            kept.append(tensor)
        else:
            strays.add(file)
    found.tensors = kept
    found.notes += [f"{file} is left aside: the index does not name it" for file in sorted(strays)]


def _check_index(found: Found, index: dict[str, str] | None) -> None:
    """The index and the shards must name the same tensors."""
    if not index:
        return
    held: dict[str, set[str]] = {}
    for tensor in found.tensors:
        held.setdefault(Path(tensor.boxes[0].buffer.file).name, set()).add(tensor.name)
    for tensor, file in index.items():
        if file in held and tensor not in held[file]:
            elsewhere = [f for f, names in held.items() if tensor in names]
            where = f"it is in {elsewhere[0]}" if elsewhere else "no shard has it"
            found.problems.add(tensor, f"the index puts it into {file}, but {where}")
    named = set(index.values())
    for file, names in held.items():
        for tensor in sorted(names - index.keys()) if file in named else ():
            found.problems.add(tensor, f"is in {file}, but the index does not name it")


def _check_duplicates(found: Found, index: dict[str, str] | None) -> None:
    """A tensor in two files: the index decides if they agree byte for byte, otherwise nobody can."""
    first: dict[str, Stored] = {}
    kept: list[Stored] = []
    for tensor in found.tensors:
        other = first.setdefault(tensor.name, tensor)
        if other is tensor:
            kept.append(tensor)
            continue
        a, b = other.boxes[0].buffer, tensor.boxes[0].buffer
        files = f"{Path(a.file).name} and {Path(b.file).name}"
        if (other.shape, other.dtype) != (tensor.shape, tensor.dtype) or not same_bytes(a, b):
            found.problems.add(tensor.name, f"is in {files} with different contents", "delete the stale file")
        else:
            found.notes.append(f"{tensor.name} is in {files}, with equal contents")
        if index and index.get(tensor.name) == Path(b.file).name:
            kept[kept.index(other)] = first[tensor.name] = tensor
    found.tensors = kept


def same_bytes(a: Buffer, b: Buffer, chunk: int = 1 << 22) -> bool:
    """Whether two buffers hold the same bytes."""
    if a.size != b.size:
        return False
    if mounted(a.file) or mounted(b.file):
        return _same_elsewhere(a, b)
    with open(a.file, "rb") as left, open(b.file, "rb") as right:
        left.seek(a.begin)
        right.seek(b.begin)
        done = 0
        while done < a.size:
            step = min(chunk, a.size - done)
            if left.read(step) != right.read(step):
                return False
            done += step
    return True


def _same_elsewhere(a: Buffer, b: Buffer) -> bool:
    """The same, in steps that begin small: what differs mostly does so at once."""
    done, step = 0, 1 << 16
    while done < a.size:
        step = min(step, a.size - done)
        if _part(a, done, step) != _part(b, done, step):
            return False
        done, step = done + step, 1 << 24
    return True


def _part(buffer: Buffer, at: int, size: int) -> bytes:
    place, begin = remote_file(buffer.file), buffer.begin + at
    if place is not None:
        return bytes(place[0].fetcher.read(place[1], begin, begin + size))
    with open(buffer.file, "rb") as file:
        file.seek(begin)
        return file.read(size)


# ------------------------------------------------------------------------------------------------ writing


def lay_out(locals_: Sequence[Local], dtype_of: DTypeOf, *, max_shard: int, index: bytes | None = None) -> Target:
    """Cut the tensors into shards and give each its bytes.

    max_shard   bytes of tensors in a file, at most (a larger tensor gets a file for itself)
    index       the source's own index of shards: used, and kept byte for byte, when it describes exactly these tensors
    """
    target = Target()
    dtypes = {id(local): dtype_of(local.named) for local in locals_}
    before, before_size = _parse_index(index)
    as_before = _as_before(locals_, before)
    groups = as_before or _greedy(locals_, dtypes, max_shard)
    total = sum(nbytes(local, dtypes[id(local)]) for local in locals_)
    for file, members in groups.items():
        # The library's order: larger element types first, then by name (safetensors/src/tensor.rs, `prepare`).
        members = sorted(members, key=lambda x: (-BY_NAME[dtypes[id(x)]].size, x.name))
        entries = [(x.name, dtypes[id(x)], x.shape) for x in members]
        header = encode_header(entries, {"format": "pt"})
        at = len(header)
        for local in members:
            size = nbytes(local, dtypes[id(local)])
            target.place(local, Buffer(file, at, size, local.name), dtypes[id(local)])
            at += size
        target.files.append(TargetFile(file, at, ((0, header),)))
    if list(groups) != [SINGLE]:
        names = {x.name: file for file, members in groups.items() for x in members}
        parameters = sum(_elements(x) for x in locals_)
        same = index is not None and as_before is not None and before_size in (None, total)
        target.texts[INDEX] = index if same and index else index_json(names, total, parameters)
    return target


def index_json(weight_map: Mapping[str, str], total: int, parameters: int) -> bytes:
    """`model.safetensors.index.json` as transformers writes it."""
    index: dict[str, Any] = {
        "metadata": {"total_parameters": parameters, "total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _parse_index(index: bytes | None) -> tuple[dict[str, str] | None, int | None]:
    """Weight map and total size of an index, or None for what it does not say."""
    try:
        parsed = json.loads(index or b"{}")
        size = parsed.get("metadata", {}).get("total_size")
        weights = {str(k): str(v) for k, v in parsed["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, None
    return weights, size if isinstance(size, int) else None


def _elements(local: Local) -> int:
    count = 1
    for length in local.shape:
        count *= length
    return count


def _as_before(locals_: Sequence[Local], weight_map: Mapping[str, str] | None) -> dict[str, list[Local]] | None:
    """The shards of the source, if its index names exactly the tensors that are to be written."""
    if weight_map is None or {x.name for x in locals_} != set(weight_map):
        return None
    groups: dict[str, list[Local]] = {file: [] for file in sorted(set(weight_map.values()))}
    for local in locals_:
        groups[weight_map[local.name]].append(local)
    return groups


def _greedy(locals_: Sequence[Local], dtypes: Mapping[int, str], limit: int) -> dict[str, list[Local]]:
    """Fill one shard after the other, in the order of the tensors, as huggingface_hub's
    `split_state_dict_into_shards_factory` does."""
    shards: list[list[Local]] = [[]]
    filled = 0
    for local in locals_:
        size = nbytes(local, dtypes[id(local)])
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(local)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards)}
