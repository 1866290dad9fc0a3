"""The picture of runs: loss above, MFU (or tokens/s) below, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..converter.errors import ConfigError, ConvertError, SourceError
from .tracking import read_lines

__all__ = ["draw", "drawing", "read_run", "written"]

Run = dict[str, list[dict[str, Any]]]


def read_run(path: Path) -> Run:
    """A run's lines by kind. Steps that were taken again after a resume count as the last time.

    Raises SourceError when there are none.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise SourceError(f"{path}: has no metrics.jsonl.", hint="Give the directory of a run (`dir`).")
    try:
        lines = read_lines(file)
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: cannot be read: {error}") from error
    run: Run = {"start": [], "train": [], "eval": []}
    for line in lines:
        kind = line.get("kind")
        if kind in run and isinstance(line.get("step"), int):
            run[kind].append(line)
    for kind in ("train", "eval"):
        last = {line["step"]: line for line in run[kind]}
        run[kind] = [last[step] for step in sorted(last)]
    if not run["train"]:
        raise SourceError(f"{file}: there is no step in it.")
    return run


def draw(runs: Sequence[Path], out: Path) -> Path:
    """Write the picture; its suffix says as what. Raises SourceError, ConfigError and ConvertError."""
    pyplot = drawing()
    found = [(_name(path), read_run(path)) for path in runs]
    share = all("mfu" in line for _, run in found for line in run["train"])
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="tight")
    for index, (name, run) in enumerate(found):
        _draw_run(above, below, name, run, f"C{index}", share)
    above.set_ylabel("loss")
    below.set_ylabel("MFU (%)" if share else "tokens/s")
    below.set_xlabel("step")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    above.legend(frameon=False)
    return written(figure, out)


def drawing() -> Any:
    """matplotlib's pyplot, without a window. Raises ConfigError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("matplotlib is not installed.", hint='pip install "areal-convert[train]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def written(figure: Any, out: Path) -> Path:
    """The file of a figure, which is closed. Raises ConvertError when it cannot be written."""
    from matplotlib import pyplot

    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ConvertError(f"{out}: cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
    return out


def _name(path: Path) -> str:
    return (path if path.is_dir() else path.parent).resolve().name


def _draw_run(above: Any, below: Any, name: str, run: Mapping[str, Any], colour: str, share: bool) -> None:
    steps = [line["step"] for line in run["train"]]
    above.plot(steps, [line["loss"] for line in run["train"]], color=colour, label=name)
    if run["eval"]:
        points = [line["step"] for line in run["eval"]], [line["eval_loss"] for line in run["eval"]]
        above.plot(*points, "o--", color=colour, markerfacecolor="none", label=f"{name}, evaluation")
    speed = [100 * line["mfu"] if share else line["tokens_per_second"] for line in run["train"]]
    below.plot(steps, speed, color=colour)
    for step, text in _resumes(run["start"]):
        for axes in (above, below):
            axes.axvline(step, color=colour, linestyle=":", linewidth=1)
        place = {"xycoords": ("data", "axes fraction"), "fontsize": 8, "color": colour}
        above.annotate(text, (step, 0.97), rotation=90, va="top", ha="right", **place)


def _resumes(starts: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Where the run went on, and on which engine when that is another one."""
    found, before = [], None
    for start in starts:
        backend = start.get("backend")
        if start["step"] > 0:
            found.append((start["step"], f"{before} → {backend}" if before not in (None, backend) else "resumed"))
        before = backend
    return found
