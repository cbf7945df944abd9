"""Shared parts of the commands: arguments that several take, and errors as messages with exit
codes.

Exit codes: 0 success; 1 the run failed, refused or does not exist; 2 invalid usage or config; 129,
130 and 143 interrupted.
"""

from __future__ import annotations

import errno
import glob
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tianflow.errors import CheckpointError, ConfigError, RunError, TianflowError, printable

RUNS = Path("runs")


def complete_config(incomplete: str) -> list[str]:
    """Shell completion: shipped configs, TOML files and directories that start with
    ``incomplete``.
    """
    from tianflow.config.loading import shipped

    prefix = glob.escape(incomplete)
    files = [name for end in (".toml", "/") for name in sorted(glob.glob(f"{prefix}*{end}"))]  # noqa: PTH207 - text, as the shell expects
    return [name for name in (*shipped(), *files) if name.startswith(incomplete)]


def complete_config_or_algorithm(incomplete: str) -> list[str]:
    """Shell completion: as `complete_config`, after the installed algorithms."""
    from tianflow.config.model import algorithm_names

    algorithms = [name for name in algorithm_names() if name.startswith(incomplete)]
    return algorithms + complete_config(incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Shell completion: active runs in ``runs`` that start with ``incomplete``."""
    return sorted(
        path.parent.name
        for path in RUNS.glob("*/control.json")
        if path.parent.name.startswith(incomplete)
    )


def complete_any_run(incomplete: str) -> list[str]:
    """Shell completion: all runs in ``runs`` that start with ``incomplete``, by name, or by
    directory if a path was started.
    """
    prefix = f"{RUNS}/" if incomplete.startswith(f"{RUNS}/") else ""
    found = (prefix + path.parent.name for path in sorted(RUNS.glob("*/config.toml")))
    return [name for name in found if name.startswith(incomplete)]


ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="TOML file, or name of a shipped config.",
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Settings that override those of CONFIG."),
]
ConfigOrAlgorithm = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG|ALGORITHM",
        help="TOML file, or name of a shipped config; with --env, an algorithm.",
        autocompletion=complete_config_or_algorithm,
    ),
]
Env = Annotated[
    str | None,
    typer.Option(
        "--env",
        metavar="ID",
        help="Environment for ALGORITHM: a registered id, or module:attribute.",
    ),
]
RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="Active run; optional if only one is active.",
        autocompletion=complete_run,
    ),
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Directory of the runs.")]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT|RUN",
        help="Checkpoint, or run with its newest checkpoint; RUN@best: with its best one.",
        autocompletion=complete_any_run,
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Permission to import the modules that the checkpoint names."),
]
Best = Annotated[
    bool, typer.Option("--best", help="The run's checkpoint with the best evaluation.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON output.")]


def best_of(run: str) -> str:
    """The name of the best checkpoint of ``run``."""
    from tianflow.rundir.checkpoints import BEST

    return run if run.endswith(BEST) else run + BEST


REFUSALS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
    }
)
"""Refusals of the operating system that name no file: disk space, descriptors, memory,
processes.
"""


@contextmanager
def exit_codes() -> Iterator[None]:
    """Convert expected errors, and refusals of the operating system, to messages on stderr and an
    exit code. Other errors are bugs and show their traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        print_error("interrupted")
        raise typer.Exit(130) from None
    except ConfigError as error:
        for problem in error.problems:
            print_error(" ".join(str(problem).split("\n")))
        raise typer.Exit(2) from None
    except RunError as error:
        print_error("\n".join(part for part in (error.details.rstrip(), str(error)) if part))
        raise typer.Exit(1) from None
    except TianflowError as error:
        print_error(str(error))
        # a `bad` attribute says whether the request was at fault; importing the
        # classes would cost start-up time
        raise typer.Exit(
            2 if isinstance(error, CheckpointError) or getattr(error, "bad", False) else 1
        ) from None
    except OSError as error:
        if error.filename is None and error.errno not in REFUSALS:
            raise
        where = "" if error.filename is None else f"{str(error.filename)!r}: "
        print_error(f"{where}{error.strerror or error}")
        raise typer.Exit(1) from None


def open_standard_streams() -> None:
    """Open closed standard streams on the null device. Otherwise a file would get the descriptor of
    a stream, and receive its output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)  # a child process has standard streams, too
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Write text, which may be foreign, to stdout or stderr."""
    typer.echo(printable(text), err=err, nl=nl)


def print_error(text: str) -> None:
    """Write a line to stderr."""
    echo(text, err=True)
