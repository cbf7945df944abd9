"""Paths of the repository that tests read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


def cases(name: str) -> dict[str, Any]:
    """The handed cases of ``tests/data/NAME.json``, by their own name."""
    found: list[dict[str, Any]] = json.loads((DATA / f"{name}.json").read_text())["cases"]
    return {case["name"]: case for case in found}
