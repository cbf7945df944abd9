"""``tianflow env-server``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tianflow.cli.common import exit_codes

if TYPE_CHECKING:
    from types import FrameType

    from tianflow.channels.keys import Keys
    from tianflow.envs.server import EnvServer, ServerStatistics

ADDRESS = "tcp://127.0.0.1:5700"


def env_server(
    env: Annotated[
        str, typer.Argument(metavar="ID", help="A registered environment id, or module:attribute.")
    ],
    kwargs: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Arguments of the environment.")
    ] = None,
    *,
    num_envs: Annotated[
        int, typer.Option("--num-envs", min=1, help="Number of environments to lend.")
    ] = 8,
    listen: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="Address; port * for any free one.")
    ] = ADDRESS,
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", metavar="FILE", help="Key file; written if it does not exist."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Connections of other machines without a key.")
    ] = False,
    wrappers: Annotated[
        list[str] | None,
        typer.Option(
            "--wrapper", metavar="module:attribute", help="Wrapper function, the innermost first."
        ),
    ] = None,
) -> None:
    """Serve environments over TCP to vector environments elsewhere.

    The server runs until SIGINT or SIGTERM. One process steps all its environments in turn: start
    one for each core.
    """
    with exit_codes():
        from tianflow import logs
        from tianflow.channels.keys import read_or_make_keys, require_address, require_keys
        from tianflow.config.loading import parse_overrides
        from tianflow.config.model import EnvSettings
        from tianflow.envs.make import make_single
        from tianflow.envs.server import EnvServer

        logs.configure()
        address = require_address(listen, path="--listen", listen=True)
        keys = None if key_file is None else read_or_make_keys(key_file)
        require_keys(address, keys, insecure=insecure, path="--listen")
        settings = EnvSettings(
            id=env, kwargs=parse_overrides(kwargs or ()), wrappers=tuple(wrappers or ())
        )
        server = EnvServer(
            name=env,
            make=lambda: make_single(settings),
            num_envs=num_envs,
            address=address,
            keys=keys,
        )
        try:
            code = _serve(server, keys)
        finally:
            server.close()
    raise typer.Exit(code)


def _serve(server: EnvServer, keys: Keys | None) -> int:
    """Serve until a signal: the exit code. A second signal interrupts a step."""
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    secured = "no key" if keys is None else f"key {keys.fingerprint}"
    typer.echo(f"listening at {server.address}: {server.free} environments, {secured}")
    server.serve()
    typer.echo(_summary(server.statistics()))
    return 128 + received[0]


def _summary(statistics: ServerStatistics) -> str:
    found = statistics.connections
    return (
        f"{statistics.steps} steps for {statistics.welcomed} clients; "
        f"{statistics.abandoned} clients lost, {statistics.refused} refused; "
        f"{found.accepted} connections, {found.strangers} without a handshake, "
        f"{found.refused_keys} with another key, {found.cut} cut off, "
        f"{sum(found.malformed.values())} closed for malformed messages"
    )
