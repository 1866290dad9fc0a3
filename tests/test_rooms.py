"""Every word in its room: who may import whom, where files are opened, where foreign tensor names stand.

DESIGN: imports go one way (`mappings ← converter ← engines`); foreign tensor names stand only in `mappings/`; nothing
imports torch to move bytes. The lists below say where the code really does what; they may shrink.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

IO_ROOMS = {"rawio", "workdir", "formats", "remote", "sync"}
"""Where files are opened and mapped (`open`, `os.open`, `mmap`): tensor bytes, the unfinished target, the formats, what
of a place elsewhere is kept on this machine, and a hub's journal and shared memory."""

SMALL_FILES = {"carried", "cli", "convert", "drawing", "live", "manifest", "sidefiles"}
"""Where small files are read or written whole, besides."""

TORCH_ROOMS = {"live", "live_source", "loading", "loading_targets"}
"""Where torch is touched: a live module, never a checkpoint."""

PURE = {"errors", "mesh", "slots", "layout", "placement", "dtypes", "roots"}
"""The planner: the standard library only."""


def files(*parts: str) -> list[Path]:
    return [path for part in parts for path in sorted((ROOT / part).rglob("*.py"))]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(path: Path) -> str:
    """The first name below the part: `rawio`, or `formats` for all that is in there."""
    return path.relative_to(ROOT).parts[1].removesuffix(".py")


def imports(node: ast.AST, *, late: bool = True) -> Iterator[str]:
    """What is imported, relative names with their dots. Without `late`, only as the module itself is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not late:
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield "." * child.level + (child.module or "")
            if child.level and not child.module:
                yield from ("." * child.level + alias.name for alias in child.names)
        yield from imports(child, late=late)


def foreign(path: Path, *, late: bool = True) -> set[str]:
    """Imported packages that are not the standard library's."""
    tops = {name.partition(".")[0] for name in imports(tree(path), late=late) if not name.startswith(".")}
    return tops - sys.stdlib_module_names


def calls(path: Path) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)}


def strays(found: dict[Path, set[str]]) -> dict[str, set[str]]:
    """Those files that broke a rule, and how."""
    return {str(path.relative_to(ROOT)): what for path, what in found.items() if what}


# ------------------------------------------------------------------------------------------------ imports


def test_mappings_import_nothing_but_each_other() -> None:
    found = {}
    for path in files("mappings"):
        found[path] = foreign(path) | {name for name in imports(tree(path)) if name.startswith("..")}
    assert strays(found) == {}


def test_the_converter_imports_mappings_and_no_engine() -> None:
    found = {}
    for path in files("converter"):
        above = "." * len(path.relative_to(ROOT).parts)  # the whole package, seen from this file
        reached = {name.removeprefix(above) for name in imports(tree(path)) if name.startswith(above)}
        found[path] = {name for name in reached if name.partition(".")[0] != "mappings"}
    assert strays(found) == {}


def test_the_package_imports_itself_relatively_and_no_tool_and_no_test() -> None:
    aside = {path.stem for path in files("tools", "tests")} - {"__init__"}
    ours = {"areal_convert", "converter", "mappings", "engines", "tools", "tests"}
    found = {path: foreign(path) & (ours | aside) for path in files("mappings", "converter", "engines")}
    assert strays(found) == {}


def test_what_the_converter_needs_of_others() -> None:
    found = {}
    for path in files("converter"):
        allowed = set() if room(path) in PURE else {"numpy", "xxhash", "ml_dtypes", "isal"}
        if room(path).startswith("cli"):
            allowed |= {"click", "rich"}
        if room(path) in TORCH_ROOMS:
            allowed |= {"torch"}
        if room(path) == "remote":
            allowed |= {"huggingface_hub", "fsspec", "botocore"}
        if room(path) == "sync":  # a running server's memory, process groups, HTTP
            allowed |= {"torch", "requests", "fastapi", "anyio", "starlette"}
        if path.is_relative_to(ROOT / "converter/sync/server"):
            allowed |= {"transformers", "uvicorn", "prometheus_client", "pydantic"}
        if path.name == "vllm_gloo.py":  # runs inside vLLM's workers
            allowed |= {"vllm"}
        if path.name == "bridge.py":  # Megatron-Bridge's run_config.yaml
            allowed |= {"yaml"}
        found[path] = foreign(path) - allowed
    assert strays(found) == {}


def test_whatever_the_package_imports_is_declared() -> None:
    """In pyproject.toml, under the name that the registry knows."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = project["dependencies"] + [line for lines in project["optional-dependencies"].values() for line in lines]
    declared = {re.split(r"[^\w-]", line)[0].lower() for line in listed}
    named = {
        "ml_dtypes": "ml-dtypes",
        "yaml": "pyyaml",
        "megatron": "megatron-core",
        "huggingface_hub": "huggingface-hub",
        "botocore": "s3fs",  # which brings it
        "torch_memory_saver": "torch-memory-saver",
        "prometheus_client": "prometheus-client",
        **dict.fromkeys(("anyio", "pydantic", "starlette"), "fastapi"),  # which brings them
    }
    found = {p: {named.get(x, x) for x in foreign(p)} - declared for p in files("mappings", "converter", "engines")}
    found[ROOT / "converter/sync/dialects/vllm_gloo.py"] -= {"vllm"}  # of whoever runs it
    assert strays(found) == {}


def test_the_command_line_stands_on_top() -> None:
    found = {
        path: {name for name in imports(tree(path)) if re.match(r"\.*cli(_|$)", name)}
        for path in files("converter")
        if not room(path).startswith("cli")
    }
    assert strays(found) == {}


def test_megatron_is_imported_in_its_engine_only() -> None:
    found = {
        path: foreign(path) & {"megatron"}
        for path in files("mappings", "converter", "engines")
        if not path.relative_to(ROOT).as_posix().startswith("engines/megatron")
    }
    assert strays(found) == {}


def test_process_groups_are_the_engines_and_the_syncs() -> None:
    found = {}
    for path in files("mappings", "converter"):
        if room(path) == "sync":
            continue
        named = {ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
        found[path] = {x for x in named | set(imports(tree(path))) if x.startswith("torch.distributed")}
    assert strays(found) == {}


def test_the_engines_api_is_plain() -> None:
    """Configurations and checks: nothing foreign as they are imported, and no engine at any time (the base class hands
    `connect_engine` on to `syncing`)."""
    found = {}
    for path in files("engines/api"):
        above = {name for name in imports(tree(path)) if name.startswith("..")} - {"...converter.errors", "..syncing"}
        found[path] = foreign(path, late=False) | (foreign(path) - {"omegaconf", "torch", "yaml"}) | above
    assert strays(found) == {}


def test_imports_go_round_in_no_circle() -> None:
    """Modules of the converter, as they are imported (what a function imports later does not count)."""
    modules = {".".join(p.relative_to(ROOT / "converter").with_suffix("").parts): p for p in files("converter")}
    needs: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name.split(".")[:-1]
        needs[name] = set()
        for imported in imports(tree(path), late=False):
            level = len(imported) - len(imported.lstrip("."))
            if 0 < level <= len(package) + 1:
                target = ".".join([*package[: len(package) + 1 - level], *imported.lstrip(".").split(".")])
                needs[name] |= {target} & modules.keys()
    while leaves := [name for name, wanted in needs.items() if not wanted & needs.keys()]:
        for name in leaves:
            del needs[name]
    assert needs == {}


# ------------------------------------------------------------------------------------------------ what importing costs


def _loaded_by(*modules: str) -> set[str]:
    code = (
        f"import sys\nfrom importlib import import_module\nfor m in {modules!r}: import_module(m)\nprint(*sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return {name.partition(".")[0] for name in out.split()}


HEAVY = {
    "torch",
    "transformers",
    "megatron",
    "safetensors",
    "ml_dtypes",
    "huggingface_hub",
    "yaml",
    "fsspec",
    "botocore",
}


def test_no_module_imports_torch_as_it_is_imported() -> None:
    assert strays({path: foreign(path, late=False) & HEAVY for path in files("mappings", "converter")}) == {}


def test_torch_is_not_loaded_by_all_our_modules_together() -> None:
    names = [
        "areal_convert." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in files("mappings", "converter")
    ]
    assert "areal_convert.converter.convert" in names
    assert _loaded_by(*names) & HEAVY == set()


def test_the_planner_loads_the_standard_library_only() -> None:
    loaded = _loaded_by("areal_convert.mappings.deepseek_v3", *(f"areal_convert.converter.{name}" for name in PURE))
    assert loaded & (HEAVY | {"numpy", "xxhash", "click", "rich"}) == set()


def test_the_package_itself_loads_nothing() -> None:
    """`areal-convert --help` must answer at once."""
    loaded = _loaded_by("areal_convert.converter", "areal_convert.mappings")
    assert loaded & (HEAVY | {"numpy", "xxhash", "click", "rich"}) == set()


# ------------------------------------------------------------------------------------------------ files


def test_files_are_opened_in_their_rooms() -> None:
    found = {}
    for path in files("mappings", "converter"):
        opened = {
            c for c in calls(path) if c in ("open", "mmap") or c.endswith((".open", ".fdopen", ".mmap", "memmap"))
        }
        if room(path) == "cli":
            opened -= {"os.open"}  # stdout to /dev/null, when nobody reads it any more
        found[path] = set() if room(path) in IO_ROOMS else opened
    assert strays(found) == {}


def test_small_files_are_read_and_written_in_their_rooms() -> None:
    whole = (".read_text", ".read_bytes", ".write_text", ".write_bytes")
    found = {
        path: {call for call in calls(path) if call.endswith(whole)}
        for path in files("mappings", "converter")
        if path.is_relative_to(ROOT / "mappings") or room(path) not in IO_ROOMS | SMALL_FILES
    }
    assert strays(found) == {}


def test_no_file_may_run_code() -> None:
    """Pickles are read by our own machine, never by Python's or torch's."""
    dangerous = {"eval", "exec", "torch.load", "np.load", "numpy.load", "__import__", "compile", "yaml.load"}
    unpicklers = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
    found = {}
    for path in files("mappings", "converter"):
        found[path] = (calls(path) & dangerous) | ({n.partition(".")[0] for n in imports(tree(path))} & unpicklers)
    assert strays(found) == {}


# ------------------------------------------------------------------------------------------------ foreign names

FOREIGN = re.compile(
    r"self_attn|[qkvo]_proj|(gate|up|down)_proj|layernorm\.|embed_tokens|lm_head|block_sparse_moe|e_score_correction"
    r"|(?<!tie_)word_embeddings|linear_(qkv|fc1|fc2|proj|[qkv]+_)|local_experts|output_layer|decoder\.layers|eh_proj"
    r"|tok_embeddings|feed_forward|attention\.w[qkvo]|ffn_norm|router\.gate"
)
"""Words of Hugging Face's, Megatron's and Archon's tensor names."""


def _texts(path: Path) -> set[str]:
    """Strings that are no documentation."""
    nodes = list(ast.walk(tree(path)))
    plain = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in plain]
    return {node.value for node in constants if isinstance(node.value, str)}


def test_foreign_tensor_names_stand_in_mappings_only() -> None:
    assert strays({path: {t for t in _texts(path) if FOREIGN.search(t)} for path in files("converter")}) == {}
