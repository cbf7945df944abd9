"""``tianflow node``: this machine as a node of a run elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from tianflow.cli.common import exit_codes
from tianflow.core.program import NODE_ROLES


def node(
    join_file: Annotated[
        Path,
        typer.Argument(metavar="JOIN_FILE", help="File join.toml in the directory of the run."),
    ],
    *,
    cores: Annotated[
        str | None,
        typer.Option("--cores", metavar="0-15", help="CPU numbers for its hosts; default: all."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="N", help="Its name; default: of the machine.")
    ] = None,
    roles: Annotated[
        str,
        typer.Option("--roles", metavar="R,...", help="Roles: actors, replay or both."),
    ] = ",".join(NODE_ROLES),
    once: Annotated[
        bool, typer.Option("--once", help="End with the run, instead of waiting for the next one.")
    ] = False,
    in_job: Annotated[
        bool,
        typer.Option("--in-job", help="At SIGTERM, wait for the end of the run.", hidden=True),
    ] = False,
    parent: Annotated[
        int | None,
        typer.Option(
            "--leave-with", metavar="PID", help="Parent process to end with.", hidden=True
        ),
    ] = None,
) -> None:
    """Lend the cores of this machine to a run elsewhere.

    The run has placement.launcher = "nodes". Its actors work here and, with cluster.replay =
    "nodes", its replay shards. SIGTERM or Ctrl-C lets the actors hand over what they have.
    """
    with exit_codes():
        from tianflow import logs
        from tianflow.core.allocator import retain_memory
        from tianflow.core.program import NODE_NAME
        from tianflow.errors import ConfigError, Problem
        from tianflow.hosts import event_loop
        from tianflow.launchers.node import NodeProcess, default_name

        logs.configure()
        retain_memory()  # for the weights and the encoded trajectories that it relays
        chosen = default_name() if name is None else name
        if not NODE_NAME.fullmatch(chosen):
            accepted = "letters, digits, '.', '_' and '-', at most 64"
            raise ConfigError([Problem("--name", chosen, "is not a name of a node", accepted)])
        offered = parse_roles(roles)
        if cores is not None:
            os.sched_setaffinity(0, parse_cores(cores))

        async def run() -> None:
            process = NodeProcess(
                join_file=join_file,
                name=chosen,
                cores=len(os.sched_getaffinity(0)),
                once=once,
                roles=offered,
            )
            loop = asyncio.get_running_loop()
            # A batch system sends SIGTERM to every process of a job, so the run is stopping, too.
            loop.add_signal_handler(
                signal.SIGTERM, process.end_with_run if in_job else process.leave
            )
            loop.add_signal_handler(signal.SIGINT, process.leave)

            def follow_parent() -> None:
                if parent is not None and os.getppid() != parent:
                    process.leave()

            loop.add_signal_handler(signal.SIGCONT, follow_parent)  # its launcher asked for it
            follow_parent()
            await process.run()

        event_loop.run(run())


def parse_roles(text: str) -> list[str]:
    """The roles of ``text``, such as ``actors,replay``. ConfigError if one is not known."""
    from tianflow.errors import ConfigError, Problem

    found = [part.strip() for part in text.split(",")]
    if not set(found) <= set(NODE_ROLES):
        accepted = f"{', '.join(NODE_ROLES)}, or both with a comma"
        raise ConfigError([Problem("--roles", text, "are not roles of a node", accepted)])
    return sorted(set(found))


def parse_cores(text: str) -> set[int]:
    """The CPU numbers of ``text``, such as ``0-3,8``. ConfigError if this process may not use
    them.
    """
    from tianflow.errors import ConfigError, Problem

    usable, found = os.sched_getaffinity(0), set[int]()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or not (last if dash else first).isdecimal():
            found = set()
            break
        found |= set(range(int(first), int(last or first) + 1))
    if not found or not found <= usable:
        accepted = f"numbers from {min(usable)} to {max(usable)}, such as 0-3 or 0,2"
        raise ConfigError([Problem("--cores", text, "are not cores of this machine", accepted)])
    return found
