"""Finding what a name stands for: an installed entry point, or ``module:attribute``."""

from __future__ import annotations

import difflib
import importlib
from functools import cache
from importlib.metadata import entry_points

from tianflow.errors import ConfigError, Problem


@cache
def _installed(group: str) -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=group)}


def names(group: str) -> tuple[str, ...]:
    """Names installed under the entry-point ``group``, sorted."""
    return tuple(sorted(_installed(group)))


def nearest(word: str, known: tuple[str, ...], *, cutoff: float = 0.5) -> str:
    """The known word most like ``word``, or "" when none is close: as like as ``cutoff``, of 0 to
    1, the share of letters in common.
    """
    found = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return found[0] if found else ""


def load(group: str, name: str, *, path: str) -> object:
    """The object that ``name`` stands for in ``group``.

    Raises:
        ConfigError: naming ``path``, with the installed names and the nearest one, or why the
            import failed.
    """
    known = _installed(group)
    target = known.get(name, name)
    if ":" not in target:
        accepted = "one of " + ", ".join(sorted(known)) + ", or module:attribute"
        raise ConfigError(
            [Problem(path, name, "no such name", accepted, nearest(name, tuple(known)))]
        )
    return load_object(target, path=path, given=name)


def load_object(target: str, *, path: str, given: str | None = None) -> object:
    """Import ``module:attribute``.

    Raises:
        ConfigError: naming ``path`` and why the import failed.
    """
    module_name, _, attribute = target.partition(":")
    given = given or target
    if module_name == "__main__" or not attribute:
        message = "must be importable by other processes: put it in a module of its own"
        raise ConfigError([Problem(path, given, message, "module:attribute")])
    try:
        found: object = importlib.import_module(module_name)
    except (
        Exception,
        SystemExit,
    ) as error:  # a user's module may raise anything, and a script may end; it becomes the message
        missing = isinstance(error, ModuleNotFoundError) and error.name in (
            module_name,
            module_name.partition(".")[0],
        )
        accepted = (
            "a module of the folder that tianflow is called in, of PYTHONPATH, or installed"
            if missing
            else ""
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
                        f"{module_name!r} has no {attribute!r}",
                        "",
                        nearest(part, public),
                    )
                ]
            )
        found = getattr(found, part)
    return found
