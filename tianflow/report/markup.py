"""HTML from Python: text becomes markup in one place only, and is escaped there."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_UNWRITABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""Characters that a document may not hold: control characters, and halves of surrogate pairs."""
_VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is markup already. Only this module and constants of the program make it."""

    __slots__ = ()


def escaped(text: object) -> Markup:
    """``text`` escaped for an element or a quoted attribute."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNWRITABLE.sub("\ufffd", str(text)), quote=True))


def _attribute(value: object) -> str:
    return html.escape(_UNWRITABLE.sub(chr(0xFFFD), str(value)), quote=True)


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. Children other than `Markup` are text. ``class_`` becomes class and
    ``http_equiv`` http-equiv; an attribute that is None is omitted.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{joined(children)}</{name}>")


def joined(children: Iterable[object]) -> Markup:
    """The children in their order."""
    return Markup("".join(map(escaped, children)))
