"""Configurations from YAML files and command lines, and back.

    read_config("run.yaml", ["engine.optimizer.lr=1e-4", "eval_data=null"])

OmegaConf reads (interpolation as in `${seed}`, `${oc.env:HOME}`; `???` for what has to be given), our own types check:
everything that is wrong is told at once, with the field's full name.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from ...converter.errors import ConfigError, Problem, Problems
from .fields import build
from .run import RunConfig

__all__ = ["dump_config", "read_config", "to_dict"]

T = TypeVar("T")


@overload
def read_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig: ...
@overload
def read_config(path: str | Path | None, overrides: Sequence[str], cls: type[T]) -> T: ...
def read_config(path: str | Path | None = None, overrides: Sequence[str] = (), cls: type[Any] = RunConfig) -> Any:
    """A configuration from a YAML file, over it `key=value` (values as in YAML: `null`, `[a, b]`, `{x: 1}`).

    `+key=value` is the same: there is nothing to add to a typed configuration, only fields to set. Raises ConfigError
    for a file that cannot be read, and naming every field that is unknown (with the nearest known), of another type or
    out of range, and every interpolation that leads nowhere.
    """
    from omegaconf import OmegaConf

    given = _read_file(Path(path)) if path is not None else OmegaConf.create({})
    given = OmegaConf.merge(given, _overrides(overrides))
    missing = Problems()
    for name in _awaited(OmegaConf.to_container(given)):
        missing.add(name, "is required and not given", f"{name}=…")
    missing.raise_as(ConfigError, "The configuration is not complete.")
    return build(cls, _resolved(OmegaConf.merge(OmegaConf.create(_escaped(to_dict(cls()))), given)))


def _awaited(value: Any, where: str = "") -> Iterator[str]:
    """Names of the fields that say `???`."""
    if value == "???":
        yield where
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _awaited(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for n, item in enumerate(value):
            yield from _awaited(item, f"{where}[{n}]")


def to_dict(config: Any) -> dict[str, Any]:
    """Plain data: every field with its value, defaults included."""
    return dataclasses.asdict(config)


def dump_config(config: Any) -> str:
    """YAML that `read_config` reads back as an equal configuration."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_escaped(to_dict(config))))


def _escaped(value: Any) -> Any:
    r"""Texts that are no interpolations though they look it: `${` becomes `\${`, and a backslash before it two."""
    if isinstance(value, str) and "${" in value:
        head, *rest = value.split("${")
        text = head
        for piece in rest:
            slashes = len(text) - len(text.rstrip("\\"))
            text += "\\" * slashes + "\\${" + piece
        return text
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value


def _read_file(path: Path) -> Any:
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no text in UTF-8.") from error
    try:
        found = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: is no YAML.", [Problem(str(path), " ".join(str(error).split()))]) from error
    except OSError:  # a number
        found = None
    if not isinstance(found, DictConfig):
        raise ConfigError(f"{path}: is no mapping of fields to values.", hint="engine: {path: MODEL}")
    return found


def _overrides(given: Sequence[str]) -> Any:
    """`a.b=c` as nested data, later ones over earlier ones."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems, merged = Problems(), OmegaConf.create({})
    for text in given:
        name, equals, _ = text.partition("=")
        name = name.lstrip("+").strip()
        if not equals or not name or not all(name.split(".")) or name.startswith("~"):
            problems.add(repr(text), "is no override", "field=value, engine.optimizer.lr=1e-4")
            continue
        try:
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([text.lstrip("+").strip()]))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            problems.add(
                repr(text), f"its value is no YAML: {' '.join(str(error).split())}", "quote it: 'key=\"a: b\"'"
            )
    problems.raise_as(ConfigError, "The command line has mistakes.")
    return merged


def _resolved(config: Any) -> Mapping[str, Any]:
    """Plain data, interpolations replaced. Each that leads nowhere is a problem."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems = Problems()

    def visit(node: Any, where: str) -> Any:
        if OmegaConf.is_list(node):
            keys: Any = range(len(node))
            return [child(node, key, f"{where}[{key}]") for key in keys]
        return {str(key): child(node, key, f"{where}.{key}" if where else str(key)) for key in node}

    def child(node: Any, key: Any, where: str) -> Any:
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            problems.add(where, str(error).splitlines()[0])
            return None
        return visit(value, where) if OmegaConf.is_config(value) else value

    found = visit(config, "")
    problems.raise_as(ConfigError, "The configuration cannot be resolved.")
    return found
