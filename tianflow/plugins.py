"""Lookup of plug-ins by entry-point name or by ``module:attribute``."""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Collection
from functools import cache
from importlib.metadata import entry_points

from tianflow.errors import ConfigError, Problem

MOST_LISTED = 5
"""Number of known names in a message."""


@cache
def _installed(group: str) -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=group)}


def names(group: str) -> tuple[str, ...]:
    """Names installed in the entry-point ``group``, sorted."""
    return tuple(sorted(_installed(group)))


def install_line(extra: str) -> str:
    """The command that installs an extra of tianflow in a checkout of its repository."""
    return f'pip install -c constraints.txt -e ".[{extra}]"'


def nearest(word: str, known: tuple[str, ...], *, cutoff: float = 0.5) -> str:
    """The known word most similar to ``word``, or "" if none is similar enough.

    ``cutoff`` is the least similarity, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    found = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return found[0] if found else ""


def missing(word: str, known: Collection[str], *, heading: str) -> str:
    """The end of a sentence about ``word``, which is not one of ``known``: the nearest one, and
    under ``heading`` at most `MOST_LISTED`, those that are most similar.
    """
    close = nearest(word, tuple(known))
    hint = f" (did you mean {close!r}?)" if close else ""
    listed = sorted(known)
    if more := max(0, len(listed) - MOST_LISTED):
        listed = difflib.get_close_matches(word, listed, n=MOST_LISTED, cutoff=0.0)
    names = ", ".join(listed) or "none"
    return f"does not exist{hint}; {heading}: {names}{f' and {more} more' if more else ''}"


def raised_at(error: BaseException) -> str:
    """File and line of the innermost call outside of tianflow and PyTorch, as the end of a message:
    " (FILE, line N)". Empty if ``error`` passed through no such call.
    """
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("tianflow", "torch"):
            place = f" ({frame.f_code.co_filename}, line {line})"
    return place


def load(group: str, name: str, *, path: str) -> object:
    """The object that ``name`` refers to in ``group``.

    Raises:
        ConfigError: at ``path``; lists the installed names and the nearest one, or the reason why
            the import failed.
    """
    known = _installed(group)
    target = known.get(name, name)
    if ":" not in target:
        accepted = "one of " + ", ".join(sorted(known)) + ", or module:attribute"
        raise ConfigError(
            [Problem(path, name, "is not an installed name", accepted, nearest(name, tuple(known)))]
        )
    return load_object(target, path=path, given=name)


def load_object(target: str, *, path: str, given: str | None = None) -> object:
    """Import ``module:attribute``.

    Raises:
        ConfigError: at ``path``; gives the reason why the import failed.
    """
    module_name, _, attribute = target.partition(":")
    given = given or target
    if module_name == "__main__" or not attribute:
        message = "other processes cannot import it: move it to a module of its own"
        raise ConfigError([Problem(path, given, message, "module:attribute")])
    try:
        found: object = importlib.import_module(module_name)
    # A user's module may raise anything, and a script may exit. Both become the message.
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in (
            module_name,
            module_name.partition(".")[0],
        )
        accepted = (
            "a module in the current directory, in PYTHONPATH, or installed" if missing else ""
        )
        raise ConfigError(
            [Problem(path, given, f"cannot import {module_name!r}: {error!r}", accepted)]
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = tuple(name for name in dir(found) if not name.startswith("_"))
            raise ConfigError(
                [
                    Problem(
                        path,
                        given,
                        f"{module_name!r} has no attribute {attribute!r}",
                        "",
                        nearest(part, public),
                    )
                ]
            )
        found = getattr(found, part)
    return found
