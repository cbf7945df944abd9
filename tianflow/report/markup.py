"""HTML and SVG from Python: text becomes markup in one place only, and is escaped there."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_UNWRITABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""What no document may hold: control characters, and halves of surrogate pairs."""
_VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is markup already: only `element`, `joined` and constants of the program
    make it.
    """

    __slots__ = ()


def escaped(text: object) -> Markup:
    """``text`` as it reads, in an element or a quoted attribute."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNWRITABLE.sub("\ufffd", str(text)), quote=True))


def _attribute(value: object) -> str:
    return html.escape(_UNWRITABLE.sub(chr(0xFFFD), str(value)), quote=True)


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. Children that are no `Markup` are text. ``class_`` is class, ``stroke_width``
    stroke-width; None is left out.
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
    """One after the other."""
    return Markup("".join(map(escaped, children)))
