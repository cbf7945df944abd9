"""Conversion of Python values to JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def json_ready(value: object) -> Any:
    """``value`` in plain containers, with None for numbers that JSON lacks (NaN, infinity).

    A dataclass becomes an object with its fields. A field that avoids a keyword by an underscore
    (``return_``) is written without it.
    """
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_ready(item) for item in value]
    if is_dataclass(value):
        return {
            field.name.rstrip("_"): json_ready(getattr(value, field.name))
            for field in fields(value)
        }
    return str(value)


class JsonDocument:
    """Base of dataclasses that are public as JSON, by `json_ready`; their schema is made from them.

    Docstrings below fields are the schema's descriptions.
    """

    __slots__ = ()
    __pydantic_config__ = {"use_attribute_docstrings": True, "allow_inf_nan": False}  # noqa: RUF012 - pydantic's name
