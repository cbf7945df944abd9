"""What stands below the fields of a settings model in its source, so that who is asked for a value
is told what it is.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


@cache
def of_fields(model: type[BaseModel]) -> Mapping[str, str]:
    """Texts by field, those of base classes included; a field without one is absent, as all are
    without source. Reads files, once.
    """
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            found |= _written_in(cls)
    return found


def _written_in(cls: type) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (
        OSError,
        TypeError,
        ValueError,
        SyntaxError,
    ):  # made by a program, or its file is not there
        return {}
    if not isinstance(definition, ast.ClassDef):
        return {}
    return {
        field.target.id: inspect.cleandoc(text.value.value).replace("\n", " ")
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
