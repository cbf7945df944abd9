"""``tianflow serve``, ``submit`` and ``delete``: the service over many runs, and a client of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tianflow.cli.common import (
    RUNS,
    AsJson,
    ConfigOrAlgorithm,
    Env,
    Overrides,
    RunsDir,
    echo,
    exit_codes,
    print_error,
)
from tianflow.errors import printable

if TYPE_CHECKING:
    from tianflow.errors import ConfigError, RequestError, TianflowError
    from tianflow.rundir.control_file import ControlFile
    from tianflow.server.common.auth import Tokens
    from tianflow.server.run.server import Server

PORT = 8080
Address = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Address of a service; its token is $TIANFLOW_TOKEN."),
]


def serve(
    *,
    runs_dir: RunsDir = RUNS,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = PORT,
    limit: Annotated[
        int | None,
        typer.Option(
            "--max-runs",
            min=1,
            help="Number of concurrent runs; default: one for every two cores.",
        ),
    ] = None,
    allowed_imports: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-import",
            metavar="MODULE",
            help="Module whose objects a submitted config may name; may be repeated.",
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Host name of the service, besides localhost.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="File of the tokens; created if it is missing."
        ),
    ] = None,
    tokens: Annotated[
        bool,
        typer.Option(
            "--token/--no-token", help="Access by token; otherwise from this machine only."
        ),
    ] = True,
    max_streams: Annotated[
        int, typer.Option(min=0, help="Maximum number of open event streams.")
    ] = 128,
    max_connections: Annotated[
        int,
        typer.Option(min=1, help="Maximum number of connections, besides event streams."),
    ] = 256,
) -> None:
    """Serve many runs over HTTP.

    The service starts as many as there is room for, and resumes them after a restart.
    """
    with exit_codes():
        from tianflow import logs
        from tianflow.config.model import HttpSettings
        from tianflow.server.service.service import ServiceSettings, run

        logs.configure()
        settings = ServiceSettings(
            runs_dir=runs_dir,
            http=HttpSettings(
                host=host,
                port=port,
                allowed_hosts=tuple(allowed_hosts or ()),
                max_streams=max_streams,
                max_connections=max_connections,
            ),
            limit=limit or max(1, (os.cpu_count() or 1) // 2),
            allowed=tuple(allowed_imports or ()),
            token_file=token_file,
            tokens=tokens,
        )
        code = run(settings, lambda server, tokens: _announce(server, tokens, settings.limit))
    raise typer.Exit(code)


def _announce(server: Server, tokens: Tokens, limit: int) -> None:
    # The part after # stays in the browser. A log may be read by others, so it gets no token.
    page = (
        f"{server.address}/#token={tokens.control}"
        if tokens.control and sys.stderr.isatty()
        else f"{server.address}/"
    )
    runs = "run" if limit == 1 else "runs"
    echo(f"serving at {server.address}, {limit} {runs} at once; console: {page}", err=True)


def submit(
    config: ConfigOrAlgorithm,
    overrides: Overrides = None,
    *,
    env: Env = None,
    runs_dir: RunsDir = RUNS,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Submit CONFIG, or ALGORITHM --env ID, to a running service.

    The service trains it when there is room. ALGORITHM uses the preset for that environment, or
    else defaults for its kind; the environment is then made here once.
    """
    import secrets

    with exit_codes():
        from tianflow.errors import ConfigError, RequestError
        from tianflow.server.common import client

        if env is None:
            body = {"config": _tables(config), "overrides": _paths(overrides or [])}
        else:
            body = {"config": _tables_for(config, env, overrides or []), "overrides": {}}
        # a proxy may repeat the request: with the key, the service starts only one run
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        service = _service(runs_dir, address)
        try:
            answer = client.send(
                service,
                "POST",
                "/api/v1/runs",
                body,
                content_type="application/json",
                headers=headers,
                timeout_s=client.SUBMISSION_S,
            )
        except (RequestError, ConfigError) as error:
            raise _user_paths(error) from error
    echo(json.dumps(answer) if as_json else f"{answer['id']}: {answer['state']}")


def delete(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Ended run of a service.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="No question.")] = False,
    runs_dir: RunsDir = RUNS,
    address: Address = None,
) -> None:
    """Delete an ended RUN of a service, with its directory.

    Checkpoints, history, settings and log are lost. A run that is active is refused.
    """
    from urllib.parse import quote

    with exit_codes():
        from tianflow.server.common import client

        service = _service(runs_dir, address)
        if not yes:
            question = f"delete run {run!r} with its checkpoints, history and log?"
            typer.confirm(printable(question), abort=True)
        answer = client.send(service, "DELETE", f"/api/v1/runs/{quote(run, safe='')}")
    echo(f"{answer['id']}: {answer['state']}")


def _user_paths(error: RequestError | ConfigError) -> TianflowError:
    """Convert the paths of ``error`` from those of the request body to those that a user writes."""
    from tianflow.errors import ConfigError, Problem

    found = [
        Problem(
            p.path.removeprefix("overrides.").removeprefix("config."),
            p.value,
            p.message,
            p.accepted,
            p.nearest,
        )
        for p in error.problems
    ]
    return ConfigError(found) if found else error


def _service(runs_dir: Path, address: str | None) -> ControlFile:
    from tianflow.errors import RunNotFoundError
    from tianflow.server.common import client

    if address is not None:
        return client.at_address(address)
    found = client.service(runs_dir)
    if found is None:
        advice = "start one with `tianflow serve`, or name one with --address"
        raise RunNotFoundError(f"no service is active in {str(runs_dir)!r}: {advice}")
    return found


def _tables(config: str) -> Any:
    """The config as tables, or a shipped name. The service checks it, because plug-ins may be
    installed only there.
    """
    from tianflow.config.loading import read_tables, shipped

    return config if not Path(config).is_file() and config in shipped() else read_tables(config)


def _tables_for(algorithm: str, env: str, overrides: list[str]) -> Any:
    """The settings of ``train ALGORITHM --env ID``, as tables."""
    import tomllib

    from tianflow.config.loading import to_toml
    from tianflow.planning.starting import origin, start_config

    settings = start_config(algorithm, env, overrides, report=print_error)
    print_error(origin(settings))
    return tomllib.loads(to_toml(settings))


def _paths(overrides: list[str]) -> dict[str, object]:
    from tianflow.config.loading import parse_overrides

    return parse_overrides(overrides)
