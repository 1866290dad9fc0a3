"""What `areal_convert.converter` offers, and that importing it costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import areal_convert.converter as converter

HEAVY = ("torch", "numpy", "ml_dtypes", "xxhash", "rich", "safetensors", "transformers")


def test_every_public_name_is_there() -> None:
    for name in converter.__all__:
        assert getattr(converter, name) is not None, name
    assert set(converter.__all__) <= set(dir(converter))


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(str(converter.__file__)).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = [alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(seen) == sorted(converter.__all__)


def test_functions_are_not_hidden_by_the_modules_of_the_same_name() -> None:
    code = (
        "import areal_convert.converter.convert, areal_convert.converter.plan, areal_convert.converter.verify\n"
        "from areal_convert.converter import convert, inspect, plan, verify\n"
        "assert all(map(callable, (convert, inspect, plan, verify)))\n"
        "from areal_convert.converter.convert import Options, run\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'konvert'"):
        _ = converter.konvert


@pytest.mark.parametrize("module", ["areal_convert.converter", "areal_convert.converter.cli"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_planning_and_converting_need_no_torch(tmp_path: Path) -> None:
    code = "import sys\nfrom areal_convert.converter import convert, diff, explain, inspect, plan, verify\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr
