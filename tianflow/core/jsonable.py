"""TODO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def json_ready(value: object) -> Any:
    """``value`` with plain containers, and None for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_ready(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
