"""``tianflow config list`` and ``tianflow config explain``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tianflow.cli.common import echo, exit_codes

if TYPE_CHECKING:
    from tianflow.config.describe import Setting


def list_configs() -> None:
    """Print the shipped configs, each with a summary."""
    from tianflow.config.loading import shipped, summary_of

    found = shipped()
    width = max(map(len, found))
    for name, path in found.items():
        echo(f"{name:{width}}  {summary_of(path.read_text(encoding='utf-8'))}")


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Section, algorithm or setting; all sections if omitted."
        ),
    ] = None,
) -> None:
    """Explain settings: meaning, accepted values, default.

    A setting that is marked live can change while the run trains.
    """
    from tianflow.config.describe import find

    with exit_codes():
        echo("\n".join(_sections() if name is None else map(_lines, find(name))))


def _lines(setting: Setting) -> str:
    facts = [
        setting.accepted,
        f"default {setting.default}" if setting.default else "required",
        *(["live"] if setting.live else []),
    ]
    return "\n    ".join(part for part in (setting.path, setting.meaning, "; ".join(facts)) if part)


def _sections() -> Iterator[str]:
    from tianflow.config.model import Config, algorithm_names

    for section, field in Config.model_fields.items():
        if section == "algorithm":
            yield (
                f"{section:11} Algorithm and its settings. Settings by name: "
                f"{', '.join(algorithm_names())}, or module:attribute."
            )
        else:
            meaning = (field.annotation.__doc__ if field.annotation else "") or ""
            yield f"{section:11} {meaning}".rstrip()
