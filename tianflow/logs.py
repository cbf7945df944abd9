"""Logging: structlog over the ``tianflow`` logger of the standard library.

The root logger stays untouched. Library code logs through `logger`; only a program's main function
calls `configure`. Without `configure`, records go to the handlers of the surrounding program, with
the bound values as extra attributes.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any, TextIO

import structlog
from structlog.stdlib import (
    BoundLogger,
    ExtraAdder,
    ProcessorFormatter,
    add_log_level,
    filter_by_level,
    render_to_log_kwargs,
)
from structlog.typing import EventDict, Processor

from tianflow.errors import printable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

ROOT = "tianflow"
logging.getLogger(ROOT).addHandler(logging.NullHandler())
_PROCESSORS: list[Processor] = [
    filter_by_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    render_to_log_kwargs,
]


def logger(name: str, **bound: object) -> BoundLogger:
    """The logger ``tianflow.<name>``, with ``bound`` (``component="actor-3"``, ``run=…``) in each
    record.
    """
    wrapped: BoundLogger = structlog.wrap_logger(
        logging.getLogger(f"{ROOT}.{name}"),
        processors=_PROCESSORS,
        wrapper_class=BoundLogger,
        context_class=dict,
    )
    return wrapped.bind(**bound)


_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def details_of(record: logging.LogRecord) -> dict[str, object]:
    """The bound values of a record, and its exception as ``exception``."""
    found = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
    if record.exc_info and record.exc_info[1] is not None:
        found["exception"] = "".join(traceback.format_exception(record.exc_info[1]))
    return found


def log_foreign(name: str, level: int, event: str, values: Mapping[str, str]) -> None:
    """Log a record of another process in the logger ``tianflow.<name>``.

    Values whose names every record has are dropped: logging refuses them, or means its own.
    """
    own = _OF_EVERY_RECORD | {"event"}
    extra = {name: value for name, value in values.items() if name not in own}
    logging.getLogger(f"{ROOT}.{name}").log(level, "%s", event, extra=extra)


def report_death(task: asyncio.Task[Any], log: BoundLogger, message: str, **bound: object) -> None:
    """Log ``message`` as soon as ``task`` ends with an exception, with its traceback.

    For tasks that are awaited only at the end of a run: an exception would be unknown until then.
    """

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            details = "".join(traceback.format_exception(error))
            log.error(message, error=f"{type(error).__name__}: {error}", details=details, **bound)

    task.add_done_callback(ended)


def configure(
    *, stream: TextIO | None = None, level: str = "INFO", as_json: bool | None = None
) -> None:
    """Write tianflow's log records to ``stream``.

    A terminal gets readable lines; any other stream gets one JSON object per line.

    Args:
        stream: destination; None: standard error.
        level: lowest severity, by its name in `logging`.
        as_json: output format; None: chosen from ``stream``.
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
    shared.append(structlog.processors.format_exc_info)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[ProcessorFormatter.remove_processors_meta, _printable, renderer],
        )
    )
    # Loggers from structlog.get_logger use the same output.
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


def _printable(_logger: object, _name: str, values: EventDict) -> EventDict:
    """Escape text of environments and clients, which may control a terminal."""
    return {
        name: printable(value) if isinstance(value, str) else value
        for name, value in values.items()
    }


class _TianflowHandler(logging.StreamHandler[TextIO]):
    """Handler of tianflow. A second `configure` replaces it and leaves other handlers in place."""
