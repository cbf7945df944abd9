"""Logging: structlog over the standard library's ``tianflow`` logger. The root logger is never
touched.

A library logs through `logger`; only a program's main calls `configure`. Without it, records go
wherever the surrounding program sends them, with the bound values as extra attributes.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.stdlib import (
    BoundLogger,
    ExtraAdder,
    ProcessorFormatter,
    add_log_level,
    filter_by_level,
    render_to_log_kwargs,
)
from structlog.typing import Processor

ROOT = "tianflow"
logging.getLogger(ROOT).addHandler(logging.NullHandler())
_PROCESSORS: list[Processor] = [
    filter_by_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    render_to_log_kwargs,
]


def logger(name: str, **bound: object) -> BoundLogger:
    """The logger ``tianflow.<name>``, with ``bound`` (``component="actor-3"``, ``run=…``) in each
    of its lines.
    """
    made: BoundLogger = structlog.wrap_logger(
        logging.getLogger(f"{ROOT}.{name}"),
        processors=_PROCESSORS,
        wrapper_class=BoundLogger,
        context_class=dict,
    )
    return made.bind(**bound)


def configure(
    *, stream: TextIO | None = None, level: str = "INFO", as_json: bool | None = None
) -> None:
    """Write what tianflow logs to ``stream``: lines for people on a terminal, else one JSON object
    a line.

    Args:
        stream: where to; None: standard error.
        level: least severity, by its name in `logging`.
        as_json: True or False instead of looking at ``stream``.
    """
    stream = stream or sys.stderr
    terminal = stream.isatty()
    plain = not terminal if as_json is None else as_json
    renderer: Processor = (
        structlog.processors.JSONRenderer(default=str)
        if plain
        else structlog.dev.ConsoleRenderer(colors=terminal)
    )
    handler = _TianflowHandler(stream)
    shared: list[Processor] = [
        add_log_level,
        ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso" if plain else "%H:%M:%S", utc=plain),
    ]
    if plain:
        shared.append(structlog.processors.format_exc_info)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    # What asks structlog itself for a logger goes the same way.
    structlog.configure(
        processors=_PROCESSORS,
        wrapper_class=BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    root = logging.getLogger(ROOT)
    for old in [handler for handler in root.handlers if isinstance(handler, _TianflowHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False


class _TianflowHandler(logging.StreamHandler[TextIO]):
    """Ours, so that configuring twice replaces it and nobody else's."""
