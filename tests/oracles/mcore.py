"""Ask Megatron-Core itself: `run_mcore` starts `mcore_worker` on as many local processes as the mesh has ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("mcore_worker.py")


class MegatronFailed(AssertionError):
    """Megatron-Core refused, or did not end in time. The message holds what it wrote."""


def padded_vocab(size: int, tp: int = 1, multiple: int = 128) -> int:
    """Megatron-LM's padded vocabulary: up to a multiple of make_vocab_size_divisible_by * TP."""
    return -(-size // (multiple * tp)) * multiple * tp


def run_jobs(jobs: Sequence[dict[str, Any]], *, timeout: float = 240) -> list[list[dict[str, Any]]]:
    """Run jobs (see `mcore_worker.Job`) one after another in one worker; per job the result of every rank."""
    with tempfile.TemporaryDirectory(prefix="mcore-") as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps(list(jobs), default=str))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # so that all ranks can be ended together
        )
        try:
            _, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            _, errors = process.communicate()
            raise MegatronFailed(f"no end after {timeout} s\n{errors}") from None
        if process.returncode != 0:
            raise MegatronFailed(f"exit code {process.returncode}\n{errors}")
        return [
            [json.loads(file.read_text()) for file in sorted((Path(folder) / f"job{i}").glob("rank*.json"), key=_rank)]
            for i in range(len(jobs))
        ]


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank"))


def run_mcore(
    mode: str, mesh: dict[str, Any], hf_dir: str | Path, *, timeout: float = 240, **job: Any
) -> dict[str, Any]:
    """Run one job; returns `{"ranks": [what each rank reported], "logits": …, "mtp_logits": …}` (None: not computed).

    `mesh` holds any of tp, pp, vpp, ep, etp, layout, first, last. `hf_dir` holds `config.json`, and the weights for
    `save` and `load="hf"`. `vocab`, the padded size, defaults to Megatron-LM's own padding. The modes:

    - `names`: every rank's names and shapes, live and sharded.
    - `forward`: `load` ("torch_dist", "mp_rank" or "hf"), `dir` (the iteration's own directory), `tokens` (a
      safetensors file). Parameters are NaN before they are loaded, and what stays so is a failure. `torch_dist`:
      `ranks[i]["not_requested"]` names what the checkpoint holds and no rank asked for.
    - `save`: the Hugging Face weights, to `out/torch_dist` and `out/mp_rank` as `formats` says; with `tokens` the
      logits too.

    `mcore_worker.Job` has all further fields. Raises MegatronFailed with what the worker wrote.
    """
    return run_mcore_many([{"mode": mode, "mesh": mesh, "hf_dir": hf_dir, **job}], timeout=timeout)[0]


def run_mcore_many(jobs: Sequence[dict[str, Any]], *, timeout: float = 600) -> list[dict[str, Any]]:
    """`run_mcore` for several jobs, given as dicts of its arguments, in one worker.

    Importing Megatron-Core takes four seconds, a job on a tiny model one. The first failure ends the whole batch.
    """
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="mcore-out-") as scratch:
        complete = []
        for number, job in enumerate(jobs):
            config = json.loads((Path(job["hf_dir"]) / "config.json").read_text())
            vocab = padded_vocab(config["vocab_size"], job.get("mesh", {}).get("tp", 1))
            complete.append({"vocab": vocab, "out": f"{scratch}/{number}", **job})
        results = []
        for ranks in run_jobs(complete, timeout=timeout):
            found: dict[str, Any] = {}
            for rank in ranks:
                if "logits" in rank:
                    found = load_file(rank["logits"])
            results.append({"ranks": ranks, "logits": found.get("logits"), "mtp_logits": found.get("mtp_logits")})
        return results


# ---- goldens: what Megatron-Core itself prints for tiny models; `python mcore.py DIRECTORY` writes them anew ---------

_BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1003, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 48, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
_DENSE_MESHES: dict[str, dict[str, Any]] = {
    "tp1": {}, "tp2": {"tp": 2}, "tp4": {"tp": 4}, "tp2pp2": {"tp": 2, "pp": 2}, "pp2vpp2": {"pp": 2, "vpp": 2},
}  # fmt: skip
_MOE_MESHES: dict[str, dict[str, Any]] = {
    **_DENSE_MESHES, "ep2": {"ep": 2}, "tp2ep2etp1": {"tp": 2, "ep": 2, "etp": 1}, "tp2etp1": {"tp": 2, "etp": 1},
}  # fmt: skip
_FEW = ("tp1", "tp2", "tp2pp2", "pp2vpp2")
_UNEVEN: dict[str, dict[str, Any]] = {
    "pp2first1": {"pp": 2, "first": 1},
    "pp4layout": {"pp": 4, "layout": "E|t*2|t*2|L"},
    "pp2vpp2layout": {"pp": 2, "vpp": 2, "layout": "Et|t|t|tL"},
}

# name → (configuration, meshes, layers of multi-token prediction)
GOLDENS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]], int]] = {
    "llama": ({"model_type": "llama"}, {**_DENSE_MESHES, **_UNEVEN}, 0),
    "llama_tied": (
        {"model_type": "llama", "tie_word_embeddings": True}, {**{k: _DENSE_MESHES[k] for k in _FEW}, **_UNEVEN}, 0,
    ),
    "mistral": ({"model_type": "mistral", "head_dim": 32}, _DENSE_MESHES, 0),
    "qwen2": ({"model_type": "qwen2"}, _DENSE_MESHES, 0),
    "qwen3": ({"model_type": "qwen3", "head_dim": 32}, _DENSE_MESHES, 0),
    "mixtral": ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, _MOE_MESHES, 0),
    "qwen2_moe": ({"model_type": "qwen2_moe", **_MOE, "shared_expert_intermediate_size": 80}, _MOE_MESHES, 0),
    "qwen2_moe_mixed": (
        {"model_type": "qwen2_moe", **_MOE, "shared_expert_intermediate_size": 80, "mlp_only_layers": [0]},
        {k: _MOE_MESHES[k] for k in _FEW},
        0,
    ),
    "qwen3_moe": ({"model_type": "qwen3_moe", "head_dim": 32, **_MOE}, _MOE_MESHES, 0),
    "deepseek_v3": ({"model_type": "deepseek_v3", **_MLA}, _MOE_MESHES, 0),
    "deepseek_v3_no_q_lora": (
        {"model_type": "deepseek_v3", **_MLA, "q_lora_rank": None}, {k: _MOE_MESHES[k] for k in ("tp1", "tp2")}, 0,
    ),
    "deepseek_v3_mtp": ({"model_type": "deepseek_v3", **_MLA}, {k: _MOE_MESHES[k] for k in _FEW}, 1),
}  # fmt: skip


def _golden_mesh(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Every rank's names and shapes (ranks that are alike share an entry), and the global tensors they are parts of."""
    live: list[dict[str, Any]] = []
    tensors: dict[str, dict[str, Any]] = {}
    objects: set[str] = set()
    extra: set[str] = set()
    for rank in ranks:
        chunks: dict[str, Any] = {}
        for key, chunk in rank["chunks"].items():
            chunks[key] = {
                name: f"{value[1]} {value[0]}" for name, value in chunk["state_dict"].items() if isinstance(value, list)
            }
            extra |= {f"{key}: {name}" for name, value in chunk["state_dict"].items() if not isinstance(value, list)}
            for name, entries in chunk["sharded"].items():
                for entry in entries:
                    if "object" in entry:
                        objects.add(entry["object"])
                        continue
                    tensor = tensors.setdefault(name, {"shape": entry["shape"], "chunks": []})
                    box = [entry["offset"], [1] * entry["axes_prepended"] + entry["local"]]
                    if box not in tensor["chunks"]:
                        tensor["chunks"].append(box)
        where = f"tp{rank['tp']} pp{rank['pp']} ep{rank['ep']} etp{rank['etp']}"
        for other in live:
            if other["chunks"] == chunks:
                other["ranks"].append(where)
                break
        else:
            live.append({"ranks": [where], "chunks": chunks})
    for tensor in tensors.values():
        tensor["chunks"].sort()
    return {"state_dict": live, "none": sorted(extra), "torch_dist": tensors, "objects": sorted(objects)}


def write_goldens(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for family, (config, meshes, mtp) in GOLDENS.items():
            config = {**_BASE, **config}
            (Path(scratch) / "config.json").write_text(json.dumps(config))
            jobs = [
                {"mode": "names", "hf_dir": scratch, "out": scratch, "mesh": mesh, "mtp": mtp,
                 "vocab": padded_vocab(config["vocab_size"], mesh.get("tp", 1))}
                for mesh in meshes.values()
            ]  # fmt: skip
            golden: dict[str, Any] = {"config": config, "mtp": mtp, "none": [], "objects": [], "meshes": {}}
            for (name, mesh), ranks in zip(meshes.items(), run_jobs(jobs), strict=True):
                found = _golden_mesh(ranks)
                # The objects and the empty entries: once is enough, the former do not depend on the mesh.
                none, objects = found.pop("none"), found.pop("objects")
                if name == "tp1":
                    golden |= {"none": none, "objects": objects}
                assert objects == golden["objects"], (family, name)
                golden["meshes"][name] = {"mesh": mesh, **found}
            (directory / f"{family}.json").write_text(_compact(golden) + "\n")


def _compact(value: Any, depth: int = 0) -> str:
    """JSON with one tensor a line: indented down to where a value fits into a line."""
    flat = json.dumps(value)
    if not isinstance(value, (dict, list)) or not value or (len(flat) <= 110 and depth > 1):
        return flat
    inner = " " * (depth + 1)
    if isinstance(value, dict):
        body = [f"{inner}{json.dumps(key)}: {_compact(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(body) + "\n" + " " * depth + "}"
    if all(isinstance(item, (list, str)) for item in value):
        return flat  # boxes or names
    return "[\n" + ",\n".join(inner + _compact(item, depth + 1) for item in value) + "\n" + " " * depth + "]"


if __name__ == "__main__":
    write_goldens(Path(sys.argv[1]))
