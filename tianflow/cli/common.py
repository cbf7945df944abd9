"""What commands share: arguments that several of them take, and errors as a person sees them.

Exit codes: 0 done; 1 the run failed, refused or was not found; 2 bad usage or config; 129, 130 and
143 interrupted.
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

from tianflow.errors import CheckpointError, ConfigError, RunError, TianflowError

RUNS = Path("runs")


def complete_config(incomplete: str) -> list[str]:
    """Names of shipped configs, and TOML files and folders, that begin so: for the shell."""
    from tianflow.config.loading import shipped

    begun = glob.escape(incomplete)
    files = [name for end in (".toml", "/") for name in sorted(glob.glob(f"{begun}*{end}"))]  # noqa: PTH207 - text that the shell goes on with
    return [name for name in (*shipped(), *files) if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Runs in ``runs`` that begin so and have told where they answer: for the shell."""
    return sorted(
        path.parent.name
        for path in RUNS.glob("*/control.json")
        if path.parent.name.startswith(incomplete)
    )


def complete_kept(incomplete: str) -> list[str]:
    """Runs in ``runs`` that begin so, whether they go on or not, by name or, where a path is begun,
    by directory: for the shell.
    """
    begun = f"{RUNS}/" if incomplete.startswith(f"{RUNS}/") else ""
    found = (begun + path.parent.name for path in sorted(RUNS.glob("*/config.toml")))
    return [name for name in found if name.startswith(incomplete)]


ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A TOML file, or the name of a config that comes with tianflow.",
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Settings that replace those of the config."),
]
RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run that is going on; not needed when it is the only one.",
        autocompletion=complete_run,
    ),
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Where runs are kept.")]
KeptArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT|RUN",
        help="A checkpoint, or a run, whose newest one is taken.",
        autocompletion=complete_kept,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

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
"""What the system refuses without naming a file: no space, no descriptors, no memory, no processes.
"""


@contextmanager
def exit_codes() -> Iterator[None]:
    """Errors that were raised on purpose, and what the system refuses, become lines on stderr and
    an exit code; the rest are bugs and show their trace.
    """
    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(130) from None
    except ConfigError as error:
        for problem in error.problems:
            complain(" ".join(str(problem).split("\n")))
        raise typer.Exit(2) from None
    except RunError as error:
        complain("\n".join(part for part in (error.details.rstrip(), str(error)) if part))
        raise typer.Exit(1) from None
    except TianflowError as error:
        complain(str(error))
        # a request that was itself at fault says so in `bad`; the client is not imported only to
        # name its error
        raise typer.Exit(
            2 if isinstance(error, CheckpointError) or getattr(error, "bad", False) else 1
        ) from None
    except OSError as error:
        if error.filename is None and error.errno not in REFUSALS:
            raise
        where = "" if error.filename is None else f"{str(error.filename)!r}: "
        complain(f"{where}{error.strerror or error}")
        raise typer.Exit(1) from None


def open_standard_streams() -> None:
    """Open those that whoever started this has closed, on nothing: files would get their numbers,
    and what is printed go into these.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def complain(text: str) -> None:
    """A line on stderr."""
    typer.echo(text, err=True)
