"""Main function of the process that `tianflow.start` makes for a run. It is not a command.

Standard input has the order, one line of JSON, and its end is the request to stop. The first
standard output has answers, each a line of JSON: ``directory`` once the run has started, or
``refused``; ``failed`` with the first error. Other output goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tianflow import api, logs
from tianflow.config.loading import load_config
from tianflow.core.jsonable import json_ready
from tianflow.errors import ConfigError, RunError, TianflowError
from tianflow.hosts import event_loop as loops
from tianflow.rundir.summary import EOF

if TYPE_CHECKING:
    from io import TextIOWrapper

STDIN, STDOUT, STDERR = 0, 1, 2


def main() -> int:
    """Run the order of standard input; the exit code."""
    answers = os.fdopen(os.dup(STDOUT), "w", encoding="utf-8")
    os.dup2(STDERR, STDOUT)  # an environment may print
    logs.configure(level="WARNING")
    order = json.loads(_first_line())
    try:
        config = load_config(order["config"], ())
        prepared = api.prepare(config, order["resume"], Path(order["runs_dir"]))
        loops.run(_run(prepared, answers))
    except RunError as error:
        _answer(answers, failed=_failure(error))
        return 1
    except TianflowError as error:
        _answer(answers, refused=_refusal(error))
        return 2
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything when it is imported
        found = RunError("start", f"{type(error).__name__}: {error}", traceback.format_exc())
        _answer(answers, failed=_failure(found))
        return 1
    return 0


def _first_line() -> bytes:
    """The first line of standard input, without a buffer: the loop watches the descriptor."""
    line = bytearray()
    while (byte := os.read(STDIN, 1)) not in {b"", b"\n"}:
        line += byte
    return bytes(line)


async def _run(prepared: api.Prepared, answers: TextIOWrapper) -> None:
    loop = asyncio.get_running_loop()
    async with api.opened(prepared, http=True) as session:

        def stop(reason: str) -> None:
            if not session.finished.done():
                session.run.lifecycle.end("stopped", reason)

        def read() -> None:
            if not os.read(STDIN, 4096):
                loop.remove_reader(STDIN)
                stop(EOF)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, signal.Signals(number).name)
        loop.add_reader(STDIN, read)
        _answer(answers, directory=str(session.run.directory))
        await asyncio.wait({session.finished})


def _answer(answers: TextIOWrapper, **answer: object) -> None:
    try:
        answers.write(json.dumps(json_ready(answer), default=str) + "\n")
        answers.flush()
    except BrokenPipeError:  # the program that ordered the run has ended
        return


def _failure(error: RunError) -> dict[str, str]:
    return {"component": error.component, "summary": error.summary, "details": error.details}


def _refusal(error: TianflowError) -> dict[str, Any]:
    problems = error.problems if isinstance(error, ConfigError) else ()
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "problems": [
            {name: getattr(problem, name) for name in type(problem).__slots__}
            for problem in problems
        ],
    }
