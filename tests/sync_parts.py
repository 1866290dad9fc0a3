"""What a hub makes, by hand: manifests, blocks, buckets. For tests of the server's side alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from areal_convert.converter.sync.blocks import Blocks, by_bucket, whole_boxes
from areal_convert.converter.sync.homes import Layout
from areal_convert.converter.sync.ledger import bucket_digest, root_of
from areal_convert.converter.sync.stage import Stage
from areal_convert.converter.sync.wire import LAST, Box, Header, Manifest

HUB = "hub-1"


def module_of(path: Path, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Any:
    """The model of a directory, with all of its weights multiplied."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().requires_grad_(False)
    with torch.no_grad():
        for value in {v.data_ptr(): v for v in module.state_dict().values() if v.is_floating_point()}.values():
            value.mul_(scale)
    return module


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def tiny_state(seed: int, layers: int = 1) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a Llama model of a few hundred values, and its config."""
    config = {
        "model_type": "llama",
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-6,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (11, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (11, 8),
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{x}_proj.weight": (8 if x in "qo" else 4, 8) for x in "qkvo"}
        shapes |= {f"{at}mlp.gate_proj.weight": (6, 8), f"{at}mlp.up_proj.weight": (6, 8)}
        shapes |= {f"{at}mlp.down_proj.weight": (8, 6)}
        shapes |= {f"{at}{x}_layernorm.weight": (8,) for x in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in shapes.items()}, config


def manifest_of(layout: Layout, senders: list[list[Box]] | None = None, **fields: Any) -> Manifest:
    """A full push of everything that a server has, by one sender unless told otherwise."""
    atoms = list(layout.atoms.values())
    defaults: dict[str, Any] = {
        "run": "run",
        "epoch": 1,
        "version": 1,
        "mode": "full",
        "block": 64,
        "bucket": 256,
        "model": {"family": layout.family, "sizes": layout.sizes},
    }
    return Manifest(atoms=atoms, senders=senders or [whole_boxes([a.shape for a in atoms])], **(defaults | fields))


def halves(layout: Layout) -> list[list[Box]]:
    """Two senders: each has one half of every atom along its first axis that can be halved."""
    boxes: list[list[Box]] = [[], []]
    for n, atom in enumerate(layout.atoms.values()):
        axis = next((a for a, size in enumerate(atom.shape) if size > 1), None)
        lo, hi = [0] * len(atom.shape), list(atom.shape)
        if axis is None:
            boxes[n % 2].append((n, tuple(lo), tuple(hi)))
            continue
        middle = atom.shape[axis] // 2
        boxes[0].append((n, tuple(lo), (*hi[:axis], middle, *hi[axis + 1 :])))
        boxes[1].append((n, (*lo[:axis], middle, *lo[axis + 1 :]), tuple(hi)))
    return boxes


class Values:
    """The new weights: blocks and digests of a manifest, from a module or state dict."""

    def __init__(self, target: Any, config: Mapping[str, Any], manifest: Manifest) -> None:
        from areal_convert.converter.sync.homes import describe_server, state_of
        from areal_convert.converter.sync.views import Memory

        self.target, self.manifest, self.blocks = target, manifest, Blocks(manifest)
        self._memory = Memory(state_of(target), describe_server(target, config).homes)
        data = [self.block(n) for n in range(self.blocks.count)]
        rows = [np.frombuffer(xxhash.xxh3_128_digest(x.tobytes()), np.uint8) for x in data]
        self.digests = np.stack(rows)
        self.root = root_of(self.digests)

    def block(self, number: int) -> np.ndarray[Any, Any]:
        atom, lo, hi = self.blocks.box(number)
        return self._memory.get(self.manifest.atoms[atom].name, lo, hi)

    def bucket(self, sender: int, number: int, blocks: Iterable[int], flags: int = 0) -> tuple[Header, bytes]:
        numbers = np.array(list(blocks), "<u4")
        payload = numbers.tobytes() + b"".join(self.block(int(n)).tobytes() for n in numbers)
        digest = bucket_digest(numbers, self.digests[numbers])
        m = self.manifest
        return Header(m.epoch, m.version, sender, number, len(payload), len(numbers), digest, flags), payload

    def buckets(self, wanted: Iterable[int] | None = None) -> Iterator[tuple[Header, bytes]]:
        """All buckets of all senders; `wanted`: of these blocks only."""
        chosen = None if wanted is None else set(wanted)
        for sender in range(len(self.manifest.senders)):
            mine = [n for n in self.blocks.of_sender(sender) if chosen is None or n in chosen]
            held = [numbers for numbers, _ in by_bucket(self.blocks, mine, self.manifest.bucket)] or [[]]
            for number, numbers in enumerate(held):
                yield self.bucket(sender, number, numbers, LAST if number == len(held) - 1 else 0)


def same(a: Any, b: Any) -> bool:
    """Whether two modules or state dicts hold the same bits."""
    from areal_convert.converter.sync.homes import state_of

    left, right = state_of(a), state_of(b)
    return left.keys() == right.keys() and all(
        torch.equal(_bytes(value), _bytes(right[name])) for name, value in left.items()
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().cpu().view(torch.uint8)


def stage_all(stage: Stage, values: Values, wanted: Iterable[int] | None = None) -> None:
    """Put blocks into a stage, without a transport."""
    ledger = stage.begin(values.manifest, values.blocks, 1.0)
    numbers = np.array(list(range(values.blocks.count) if wanted is None else wanted), np.int64)
    for sender in range(len(values.manifest.senders)):
        mine = values.blocks.of_sender(sender)
        some = numbers[(numbers >= mine.start) & (numbers < mine.stop)]
        ledger.claim(sender, some)
        for n in some:
            stage.put(int(n), values.block(int(n)))
        ledger.record(some, values.digests[some])
    stage.finish(ledger.root())
