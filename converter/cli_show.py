"""What commands print for people. Every function makes lines; colours vanish where the output is no terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from .human import count_text, plural, ranks_text, seconds_text, size_text

if TYPE_CHECKING:
    from .convert import Planned, Result
    from .diffing import Difference, Values
    from .errors import ConvertError, Problem
    from .execute import Limits
    from .explaining import Explanation, Place
    from .inspecting import Inspection
    from .verify import Comparison

SHOWN = 20
"""Entries of a list that a person is shown; `--json` has them all."""


def head(text: str) -> str:
    return click.style(text, bold=True)


def dim(text: str) -> str:
    return click.style(text, dim=True)


def rows(pairs: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Aligned `name  value` lines; a list has a line for each entry, empty values none."""
    for name, value in pairs:
        values = value if isinstance(value, list) else [value]
        for n, line in enumerate(v for v in values if v not in (None, "")):
            label = name if n == 0 else ""
            yield f"  {dim(label.ljust(13))} {line}"


def some(names: Sequence[str], shown: int = SHOWN, indent: str = "    ") -> Iterator[str]:
    """The first of a list, and how many more there are."""
    yield from (f"{indent}{name}" for name in names[:shown])
    if len(names) > shown:
        yield f"{indent}… and {len(names) - shown:,} more (--json lists all)"


def problem_lines(problems: Sequence[Problem], shown: int = 40) -> Iterator[str]:
    yield from some([str(p) for p in problems], shown, "  - ")


def error_text(error: ConvertError) -> str:
    """An error as the user sees it: what it is, all of its problems, what to do."""
    return f"{click.style('error:', fg='red', bold=True)} {error}"


# ------------------------------------------------------------------------------------------------ plan and convert


def plan_lines(planned: Planned, memory: Mapping[str, int]) -> Iterator[str]:
    """What a plan will do."""
    r = planned.report()
    yield head(f"{r['family']}: {r['source']['format']} → {r['target']['format']} ({r['target']['mesh']})")
    largest = ", ".join(f"{f['name']} {size_text(f['bytes'])}" for f in r["largest_files"][:3])
    each = r["bytes_per_rank"]
    ranks = f"{size_text(each['min'])} to {size_text(each['max'])} each" if r["ranks"] > 1 else ""
    only = ranks_text(r["only_ranks"] or ())
    padding = f", {size_text(r['bytes_filled'])} of padding" if r["bytes_filled"] else ""
    whole = r["whole"] or {}
    vocab = r["dialect"].get("vocab")
    padded = vocab and vocab["true"] != vocab["stored"]
    yield from rows(
        [
            ("source", r["source"]["path"]),
            ("parameters", f"{count_text(r['parameters'])} in {plural(r['atoms'], 'atom')}"),
            ("only rank", f"{only}: the files of the others are not made" if only else ""),
            ("moves", f"{size_text(r['bytes_read'])} read, {size_text(r['bytes_written'])} written{padding}"),
            ("of the whole", f"{size_text(whole['bytes_read'])}, {plural(whole['files'], 'file')}" if whole else ""),
            ("vocabulary", f"{vocab['true']:,} padded to {vocab['stored']:,}" if padded else ""),
            ("casts", _casts(r)),
            ("left behind", _drops(planned.source.drops)),
            ("ranks", f"{r['ranks']:,}, {ranks}" if ranks else ""),
            ("files", f"{r['files']:,}; largest: {largest}"),
            ("peak memory", f"about {size_text(memory['peak'])} ({size_text(memory['buffers'])} of buffers)"),
            ("planned in", seconds_text(r["planning_seconds"])),
            ("notes", list(r["notes"])),
        ]
    )


def _casts(report: Mapping[str, Any]) -> str:
    if not report["casts"]:
        return "none: every value keeps its bits"
    casts = ", ".join(f"{plural(n, 'atom')} {kind}" for kind, n in report["casts"].items())
    worst = {"narrow": "values are rounded", "dequant": "quantised values are read as what they stand for"}
    rounded = worst.get(report["exactness"], "every value stays equal")
    return f"{casts} ({rounded})"


def _drops(drops: Mapping[str, str]) -> list[str]:
    """Reasons with the number of names, most frequent first."""
    reasons: dict[str, list[str]] = {}
    for name, reason in drops.items():
        reasons.setdefault(reason, []).append(name)
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    return [f"{reason}: {n[0]}" if len(n) == 1 else f"{reason}: {len(n):,} names ({n[0]}, …)" for reason, n in ordered]


def result_line(result: Result) -> str:
    """One line on what a conversion did."""
    planned, report = result.planned, result.planned.report()
    size = sum(f.size for f in planned.files)
    phases = {"plan": planned.seconds} | result.seconds
    times = ", ".join(f"{phase} {seconds_text(s)}" for phase, s in phases.items())
    moved = plural(len(result.digests), "piece" if planned.ranks else "atom")
    checked = f"{moved} not verified"
    if result.verified:
        casts = sum(report["casts"].values())
        how = "bitwise equal" if not casts else f"equal to the cast values ({casts:,} cast, {report['exactness']})"
        checked = f"{moved} read back, {how}"
    resumed = f", {result.resumed:,} of them done before" if result.resumed else ""
    source = f"{report['source']['path']} ({report['source']['format']})"
    only = f", rank {ranks_text(planned.ranks)} only" if planned.ranks else ""
    target = f"{result.path} ({planned.format}, {planned.mesh}{only})"
    files = plural(len(planned.files), "file")
    fetched = fetched_text(result.fetched)
    return (
        f"{report['family']}: {source} → {target}: {size_text(size)} in {files}; {checked}{resumed}{fetched}; {times}"
    )


def fetched_text(fetched: Mapping[str, int]) -> str:
    """What went over the wire, as the end of a clause; empty for what lies on this machine."""
    if not fetched:
        return ""
    tries = fetched["retries"]
    again = f", {tries:,} {'retry' if tries == 1 else 'retries'}" if tries else ""
    return f"; {size_text(fetched['bytes'])} fetched in {plural(fetched['requests'], 'request')}{again}"


def result_notes(result: Result) -> Iterator[str]:
    """What a person should know beside the summary."""
    yield from (f"note: {note}" for note in result.planned.source.notes)
    yield from (f"left behind: {line}" for line in _drops(result.planned.source.drops))
    if result.left_behind:
        yield f"not carried over: {', '.join(result.left_behind[:SHOWN])}"


def memory_estimate(planned: Planned, limits: Limits) -> dict[str, int]:
    """Bytes at the peak of running a plan: buffers of all workers on top of what the process holds now."""
    import resource

    largest = max((a.nbytes for a in planned.moves.atoms), default=0)
    buffers = 4 * limits.workers * min(limits.chunk, largest)
    if planned.source.fetched():
        buffers += min(limits.ahead, sum(a.nbytes for a in planned.moves.atoms))
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak": now + buffers, "buffers": buffers, "now": now}


# ------------------------------------------------------------------------------------------------ inspect


def inspection_lines(found: Inspection) -> Iterator[str]:
    """What a directory is."""
    model = dict(found.model)
    tied = model.pop("tied_head", 0)
    sizes = ", ".join(f"{name.replace('_', ' ')} {size:,}" for name, size in model.items())
    held = [
        f"{name}: {plural(h.tensors, 'tensor')}, {count_text(h.elements)} elements, {size_text(h.bytes)}"
        for name, h in found.dtypes.items()
    ]
    yield head(f"{found.path}: {found.format}" + (f", {found.family}" if found.family else ""))
    yield from rows(
        [
            ("weights in", str(found.where) if found.where != found.path else ""),
            ("seen", ", ".join(found.because)),
            ("config", found.config_from),
            ("model", f"{sizes}, {'tied' if tied else 'untied'} head" if sizes else ""),
            (
                "parameters",
                f"{count_text(found.parameters)} in {plural(found.atoms, 'atom')}" if found.parameters else "",
            ),
            ("stored as", held),
            ("quantisation", found.quantization.get("says", "none announced")),
            ("dialect", _plain(found.dialect)),
            ("facts", _plain(found.facts)),
            ("files", f"{found.files:,}, {size_text(found.file_bytes)}"),
            ("side files", ", ".join(found.side_files)),
            ("not carried", ", ".join(found.not_carried[:SHOWN])),
            (
                "no weights",
                [f"{reason}: {left.count:,} ({left.examples[0]}, …)" for reason, left in found.left.items()],
            ),
            ("notes", found.notes),
        ]
    )
    if found.problems:
        yield head(click.style(plural(len(found.problems), "problem"), fg="red"))
        yield from problem_lines(found.problems)
    else:
        yield f"  {click.style('no problems', fg='green')}"


def _plain(values: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return " ".join(f"{k} {v}" for k, v in value.items())
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    return "; ".join(f"{name} {text(value)}" for name, value in values.items())


# ------------------------------------------------------------------------------------------------ verify and diff


def comparison_lines(found: Comparison) -> Iterator[str]:
    """Whether two checkpoints are the same weights."""
    if found.same:
        yield f"{click.style('same', fg='green', bold=True)}: {plural(found.equal, 'atom')}, bit for bit"
        return
    yield f"{click.style('different', fg='red', bold=True)}: {plural(found.equal, 'atom')} equal"
    yield from section("other values", found.differ)
    yield from section("other types", [f"{name}: {a} and {b}" for name, (a, b) in found.dtypes.items()])
    yield from section(f"only in {found.a.path}", found.only_a)
    yield from section(f"only in {found.b.path}", found.only_b)
    yield from section("copies that differ within one checkpoint", found.inconsistent)
    if found.differ:
        yield dim("`areal-convert diff` tells by how much.")


def section(title: str, names: Sequence[str]) -> Iterator[str]:
    """A titled list; nothing when it is empty."""
    if names:
        yield f"  {head(title)} ({len(names):,})"
        yield from some(names)


def difference_lines(found: Difference) -> Iterator[str]:
    """What differs, and by how much."""
    a, b = found.a.path, found.b.path
    word = click.style("same", fg="green", bold=True) if found.same else click.style("different", fg="red", bold=True)
    yield f"{word}: {plural(found.equal, 'atom')} equal, {len(found.values):,} with other values"
    yield from section("config", [f"{key}: {x!r} and {y!r}" for key, (x, y) in found.config.items()])
    yield from section(
        "config, about the file only", [f"{k}: {x!r} and {y!r}" for k, (x, y) in found.about_file.items()]
    )
    yield from section(f"stored names only in {a}", found.names_a)
    yield from section(f"stored names only in {b}", found.names_b)
    yield from section(f"atoms only in {a}", found.only_a)
    yield from section(f"atoms only in {b}", found.only_b)
    yield from section("shapes", [f"{name}: {list(x)} and {list(y)}" for name, (x, y) in found.shapes.items()])
    yield from section("types", [f"{name}: {x} and {y}" for name, (x, y) in found.dtypes.items()])
    worst = sorted(found.values.items(), key=lambda item: -(item[1].max_abs or 0))
    yield from section("values, furthest apart first", [f"{name}: {_apart(v)}" for name, v in worst])
    yield from section(f"problems of {a}", [str(p) for p in found.problems_a])
    yield from section(f"problems of {b}", [str(p) for p in found.problems_b])


def _apart(v: Values) -> str:
    nan = f", {v.nan:,} NaN on one side" if v.nan else ""
    if v.max_abs is None:
        return f"{v.bits:,} of {v.elements:,} differ in bits{nan or ', none in value'}"
    at = f" at {list(v.at)}" if v.at is not None else ""
    return f"max abs {v.max_abs:.3g}{at}, max rel {v.max_rel:.3g}, {v.values:,} of {v.elements:,} differ{nan}"


# ------------------------------------------------------------------------------------------------ explain and archs


def explanation_lines(found: Explanation, shown: int) -> Iterator[str]:
    """Every place of a tensor, and at most `shown` of each kind for an atom."""
    from .explaining import AXES

    yield head(f"{found.name}: {found.source} → {found.target} ({found.mesh})")
    for way in found.ways:
        axes = " × ".join(f"{letter} {size:,}" for letter, size in way.axes.items())
        yield ""
        yield f"{head(way.atom)}  {axes}  {dim(way.exactness)}"
        for title, places in (("from", way.sources), ("to", way.targets)):
            for place in places[:shown]:
                yield from _place_lines(title, place, way.axes)
            if len(places) > shown:
                yield f"  … and {len(places) - shown:,} more places (--json lists all, --limit shows more)"
    letters = sorted({letter for way in found.ways for letter in way.axes})
    yield ""
    yield dim("axes: " + ", ".join(f"{letter} {AXES.get(letter, '?')}" for letter in letters))


def _place_lines(title: str, place: Place, axes: Mapping[str, int]) -> Iterator[str]:
    rank = "" if place.rank is None else f"rank {place.rank}" + (f" ({place.coordinates})" if place.coordinates else "")
    shape = f"[{', '.join(map(str, place.shape))}]" if place.shape is not None else ""
    copy = f"copy {place.copy}" if place.copy else ""
    yield "  " + "  ".join(x for x in (f"{title:<4}", rank, place.tensor, shape, dim(place.pattern), copy) if x)
    box = [f"{v}[{n}]" for v, n in place.counted.items()]
    for axis, (lo, hi) in place.indices.items():
        box.append(f"{axis}[:]" if (lo, hi) == (0, axes[axis]) else f"{axis}[{lo}:{hi}]")
    strides = " ".join(f"{axis} {stride:,}" for axis, stride in place.strides.items())
    yield f"       {' '.join(box)}  {place.dtype}, {size_text(place.bytes)}"
    yield dim(f"       {place.file} at byte {place.offset:,}, strides in bytes {strides}")


def archs_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Families and formats."""
    yield head("families")
    width = max(map(len, report["families"]))
    for name, family in report["families"].items():
        lacks = [f for f in report["formats"] if f not in family["formats"]]
        without = dim(f"  (not {', '.join(lacks)})") if lacks else ""
        yield f"  {name:<{width}}  {family['about']}{without}"
    yield head("formats")
    width = max(map(len, report["formats"]))
    for name, about in report["formats"].items():
        yield f"  {name:<{width}}  {about}"
