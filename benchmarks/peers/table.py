"""Short table of the comparison with peers: ``python -m benchmarks.peers.table [FILE ...]`` prints
one line for each side.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import results
from benchmarks.peers import comparison

FILES = ("peers_cartpole.json", "peers_pong.json", "peers_served.json")
COLUMNS = {
    "time_to_target": "time to target, s",
    "start_to_target": "since the start, s",
    "steps_to_target": "env steps to it",
    "env_steps_per_s": "env steps/s",
    "return": "return",
    "evaluated": "100 episodes after",
    "lag_mean": "lag, mean",
    "lag_max": "lag, max",
    "cores": "cores",
    "cpu_per_step": "CPU a step, ms",
    "batch_requests": "requests a batch",
    "wait_p50": "answer p50, s",
    "wait_p99": "answer p99, s",
    "peak_pss": "peak memory, MiB",
}
"""Values in the order of the columns. A column without any value is omitted."""


def compact(found: Mapping[str, Any]) -> str:
    """Format the document's values as Markdown: median (low – high), and the number of rounds with
    a value if some are missing.
    """
    by_side: dict[str, dict[str, Mapping[str, Any]]] = {}
    for value in found["values"]:
        by_side.setdefault(value["side"], {})[value["name"]] = value
    shown = [
        name
        for name in COLUMNS
        if any(values.get(name, {}).get("count") for values in by_side.values())
    ]
    rows = [(side, *(_cell(values, name) for name in shown)) for side, values in by_side.items()]
    return results.grid(("side", *(COLUMNS[name] for name in shown)), rows)


def _cell(values: Mapping[str, Mapping[str, Any]], name: str) -> str:
    if comparison.NOT_INSTALLED in values:
        return "not installed"
    value = values.get(name)
    if value is None:
        return ""
    if not value["count"]:
        return "–"
    low, middle, high = (results.number(value[key]) for key in ("low", "median", "high"))
    spread = "" if value["asked"] == 1 else f" ({low} – {high})"
    return (
        f"{middle}{spread}"
        if value["count"] == value["asked"]
        else f"{middle}{spread}, {value['count']} of {value['asked']}"
    )


def main(given: Sequence[str] | None = None) -> int:
    """Print a table for each file. Return 1 if a file does not exist."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.table", description=__doc__)
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="result files (default: those that `make bench-peers` writes)",
    )
    missing = False
    for file in parser.parse_args(given).files or [results.RESULTS / name for name in FILES]:
        if not file.exists():
            print(f"{file} does not exist; run `make bench-peers`", file=sys.stderr)
            missing = True
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        results.check(found)
        print(f"{found['title']}\n\n{compact(found)}\n")
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())
