"""Rules for values that every form of a config can represent: TOML, JSON, and messages.

A value that one form lacks would change on its way: an infinity becomes null in JSON.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tianflow.errors import ConfigError, Problem

LARGEST = 2**63 - 1
"""Largest integer that messages between processes can hold."""

TOO_LARGE = "is too large"
"""Message of a problem with a larger integer."""


def unportable(path: str, value: object, *, null: bool = True) -> Iterator[Problem]:
    """Problems of all values below ``path`` that TOML, JSON or a message cannot represent. Other
    Python objects are not checked.

    Args:
        path: of the value.
        value: a table, a list or a single value.
        null: None is accepted outside lists, as "the default".
    """
    if value is None and not null:
        yield Problem(path, None, "is null, which TOML cannot represent", "a value, or no entry")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from unportable(f"{path}.{key}" if path else str(key), item, null=null)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from unportable(f"{path}.{index}", item, null=False)
    elif isinstance(value, int) and not -LARGEST - 1 <= value <= LARGEST:
        number = f"a number of {value.bit_length()} bits"
        yield Problem(path, number, TOO_LARGE, f"at most {LARGEST}")
    elif isinstance(value, float) and not math.isfinite(value):
        message = "is not finite, which JSON cannot represent"
        yield Problem(path, value, message, "a finite number, or a text that its receiver reads")
    elif isinstance(value, dt.date | dt.time):
        message = "is a date or a time, which JSON cannot represent"
        yield Problem(path, str(value), message, "its text in quotes")


def unportable_settings(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """`unportable` for all settings by section. A setting may be None, an entry of it may not."""
    for section, settings in tables.items():
        for key, value in settings.items():
            yield from unportable(f"{section}.{key}", value, null=value is None)


def require_portable(tables: Mapping[str, Any]) -> None:
    """Raise ConfigError with the problems of all values of ``tables``, by path."""
    problems = list(unportable("", tables))
    if problems:
        raise ConfigError(problems)
