"""Result documents: JSON of a fixed shape, and a table in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib.harness import BenchmarkError, Outcome, Sample, Spread, spread
from benchmarks.lib.machine import ROOT

SCHEMA = 2
RESULTS = ROOT / "benchmarks" / "results"

_NUMBER = (int, float)
_SPREAD: dict[str, Any] = {
    "median": (*_NUMBER, None),
    "low": (*_NUMBER, None),
    "high": (*_NUMBER, None),
    "count": (int,),
    "asked": (int,),
}
_SHAPE: dict[str, Any] = {
    "schema": (int,),
    "benchmark": (str,),
    "title": (str,),
    "quick": (bool,),
    "began": (str,),
    "seconds": _NUMBER,
    "machine": {
        "cpu": (str,),
        "cores": (int,),
        "cores_of_machine": (int,),
        "gpus": [(str,)],
        "memory_gib": _NUMBER,
        "system": (str,),
        "python": (str,),
        "packages": (dict,),
        "revision": (str,),
        "modified": (bool,),
        "threads": (dict,),
    },
    "settings": (dict,),
    "seeds": [(int,)],
    "notes": [(str,)],
    "load": {
        "foreign_cores_median": _NUMBER,
        "foreign_cores_highest": _NUMBER,
        "stolen_cores_highest": _NUMBER,
    },
    "values": [{"side": (str,), "name": (str,), "unit": (str,), "warm_up": (bool,), **_SPREAD}],
    "ratios": [
        {
            "name": (str,),
            "aim": (*_NUMBER, None),
            "forecast": (*_NUMBER, None),
            "samples": [(*_NUMBER, None)],
            **_SPREAD,
        }
    ],
    "samples": [
        {
            "side": (str,),
            "round": (int,),
            "values": (dict,),
            "seconds": _NUMBER,
            "foreign_cores": _NUMBER,
            "stolen_cores": _NUMBER,
        }
    ],
}


def document(
    outcome: Outcome, *, machine: Mapping[str, object], began: str, quick: bool
) -> dict[str, Any]:
    """Build the JSON-ready document of ``outcome``. ``began``: ISO 8601."""
    benchmark = outcome.benchmark
    loads = [sample.load for sample in outcome.samples]
    return {
        "schema": SCHEMA,
        "benchmark": benchmark.name,
        "title": benchmark.title,
        "quick": quick,
        "began": began,
        "seconds": round(outcome.seconds, 1),
        "machine": dict(machine),
        "settings": dict(benchmark.settings),
        "seeds": list(benchmark.seeds),
        "notes": list(benchmark.notes),
        "load": {
            "foreign_cores_median": spread([load.foreign_cores for load in loads]).median or 0.0,
            "foreign_cores_highest": max((load.foreign_cores for load in loads), default=0.0),
            "stolen_cores_highest": max((load.stolen_cores for load in loads), default=0.0),
        },
        "values": _values(outcome),
        "ratios": _ratios(outcome),
        "samples": [_sample(sample) for sample in (*outcome.warm_ups, *outcome.samples)],
    }


def _values(outcome: Outcome) -> list[dict[str, Any]]:
    """Return one entry for each side and value. A value that only the warm-up measured is marked,
    and its spread has one sample.
    """
    found = []
    for side in outcome.benchmark.names:
        apart = next((sample.values for sample in outcome.warm_ups if sample.side == side), {})
        for name, unit in outcome.benchmark.units.items():
            samples = outcome.values(side, name)
            only_apart = not samples and name in apart
            if samples or only_apart:
                figures = spread([apart[name]] if only_apart else samples)
                found.append(
                    {
                        "side": side,
                        "name": name,
                        "unit": unit,
                        "warm_up": only_apart,
                        **asdict(figures),
                    }
                )
    return found


def _ratios(outcome: Outcome) -> list[dict[str, Any]]:
    found = []
    for ratio in outcome.benchmark.ratios:
        needed = ratio.sides or outcome.benchmark.names
        samples = [
            ratio.of(values)
            for values in outcome.rounds()
            if not outcome.interrupted or values.keys() >= set(needed)
        ]
        entry = {
            "name": ratio.name,
            "aim": ratio.aim,
            "forecast": ratio.forecast,
            "samples": samples,
        }
        found.append(entry | asdict(spread(samples)))
    return found


def _sample(sample: Sample) -> dict[str, Any]:
    load = sample.load
    return {
        "side": sample.side,
        "round": sample.round,
        "values": dict(sample.values),
        "seconds": round(sample.seconds, 3),
        "foreign_cores": load.foreign_cores,
        "stolen_cores": load.stolen_cores,
    }


def check(found: object, shape: object = None, path: str = "") -> None:
    """Check that ``found`` has the shape of a result document.

    Raises:
        BenchmarkError: names the first place that differs.
    """
    shape = _SHAPE if shape is None else shape
    if isinstance(shape, dict):
        if not isinstance(found, dict) or found.keys() != shape.keys():
            keys = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise BenchmarkError(
                f"{path or 'the document'} has the keys {keys} (expected {sorted(shape)})"
            )
        for key, part in shape.items():
            check(found[key], part, f"{path}.{key}" if path else key)
    elif isinstance(shape, list):
        if not isinstance(found, list):
            raise BenchmarkError(f"{path} is not a list")
        for index, item in enumerate(found):
            check(item, shape[0], f"{path}[{index}]")
    else:
        assert isinstance(shape, tuple)
        allowed = tuple(kind for kind in shape if kind is not None)
        fits = (
            found is None
            if None in shape and found is None
            else isinstance(found, allowed) and isinstance(found, bool) == (bool in allowed)
        )
        if not fits:
            raise BenchmarkError(f"{path} is {found!r} (expected {_kinds(shape)})")


def _kinds(shape: tuple[type | None, ...]) -> str:
    return " or ".join("null" if kind is None else kind.__name__ for kind in shape)


def write(found: dict[str, Any], directory: Path) -> Path:
    """Write ``found`` as ``<benchmark>.json`` and its table as ``<benchmark>.md``. A quick run gets
    a name of its own.
    """
    check(found)
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"{found['benchmark']}{'-quick' if found['quick'] else ''}.json"
    target.write_text(
        json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
    target.with_suffix(".md").write_text(table(found), encoding="utf-8")
    return target


def table(found: Mapping[str, Any]) -> str:
    """Format the document as Markdown that is also readable on a terminal."""
    parts = [f"# {found['benchmark']}: {found['title']}", _head(found)]
    if found["quick"]:
        parts.append("**Quick run: it proves that the benchmark works. Its numbers mean nothing.**")
    if found["ratios"]:
        parts.append(
            grid(
                ("ratio", "median", "low – high", "aim", ""),
                [_ratio_row(ratio) for ratio in found["ratios"]],
            )
        )
    parts.append(
        grid(
            ("side", "what", "median", "low – high", "n"),
            [_value_row(value) for value in found["values"]],
        )
    )
    parts.append(
        "\n".join(f"- {note}" for note in (*found["notes"], _settings_line(found["settings"])))
    )
    return "\n\n".join(parts) + "\n"


def _head(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    packages = ", ".join(
        f"{name} {version}"
        for name, version in machine["packages"].items()
        if version != "not installed"
    )
    seeds = f", seeds {', '.join(map(str, found['seeds']))}" if found["seeds"] else ""
    load = found["load"]
    return (
        f"{machine['cpu']}, "
        f"{', '.join((f'{_cores(machine)} cores', *machine['gpus'], machine['system']))}; "
        f"Python {machine['python']}, {packages}; "
        f"revision {machine['revision']}{' with changes' if machine['modified'] else ''}; "
        f"{found['began']}, {found['seconds']:.0f} s{seeds}. Sides alternate; "
        f"other processes used {load['foreign_cores_median']:.2f} cores (median), "
        f"{load['foreign_cores_highest']:.2f} at most."
    )


def _cores(machine: Mapping[str, Any]) -> str:
    """Return the number of usable cores, with the machine's total if they differ."""
    may, has = machine["cores"], machine["cores_of_machine"]
    return str(may) if may == has else f"{may} of {has}"


def _settings_line(settings: Mapping[str, object]) -> str:
    return "Settings: " + "; ".join(f"{name} = {value}" for name, value in settings.items()) + "."


def _ratio_row(ratio: Mapping[str, Any]) -> tuple[str, ...]:
    aim = "" if ratio["aim"] is None else f"≥ {number(ratio['aim'])}"
    if ratio["forecast"] is not None:
        aim = f"{aim} forecast {number(ratio['forecast'])}".strip()
    verdict = ""
    if ratio["aim"] is not None:
        verdict = (
            "met" if ratio["median"] is not None and ratio["median"] >= ratio["aim"] else "missed"
        )
    return (ratio["name"], number(ratio["median"]), _range(ratio), aim, verdict)


def _value_row(value: Mapping[str, Any]) -> tuple[str, ...]:
    what = (
        f"{value['name'].replace('_', ' ')} "
        f"[{value['unit']}]{' (warm-up)' if value['warm_up'] else ''}"
    )
    count = (
        str(value["count"])
        if value["count"] == value["asked"]
        else f"{value['count']} of {value['asked']}"
    )
    return (value["side"], what, number(value["median"]), _range(value), count)


def _range(figures: Mapping[str, Any]) -> str:
    return (
        "–" if figures["low"] is None else f"{number(figures['low'])} – {number(figures['high'])}"
    )


def number(value: float | None) -> str:
    """Format with three significant digits and thousands separators. A missing value is a dash."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with padded columns. Text columns are left-aligned, numbers are
    right-aligned.
    """
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    left = sum(name in ("ratio", "side", "what", "") for name in head[:2])

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|"
        + "|".join(
            "-" * (width + 2) if i < left else "-" * (width + 1) + ":"
            for i, width in enumerate(widths)
        )
        + "|"
    )
    return "\n".join([line(head), rule, *(line(row) for row in rows)])


__all__ = ["RESULTS", "SCHEMA", "Spread", "check", "document", "grid", "number", "table", "write"]
