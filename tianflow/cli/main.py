"""The command line. Every command is thin: it reads its arguments, calls one function, and turns
errors into exit codes.

Exit codes: 0 done; 1 the run failed, refused or was not found; 2 bad usage or config; 129, 130 and
143 interrupted. Nothing that computes or serves is imported before a command needs it.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tianflow.cli.common import (
    RUNS,
    AsJson,
    ConfigArgument,
    Overrides,
    RunArgument,
    RunsDir,
    complain,
    complete_config,
    complete_kept,
    complete_run,
    exit_codes,
    open_standard_streams,
)
from tianflow.cli.config import explain, list_configs
from tianflow.cli.eval import evaluate
from tianflow.cli.events import events
from tianflow.cli.export import export
from tianflow.cli.report import report
from tianflow.cli.serve import serve, submit
from tianflow.cli.simulate import simulate
from tianflow.cli.status import console, status, top

if TYPE_CHECKING:
    from tianflow.config.model import Config

app = typer.Typer(
    name="tianflow",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        from tianflow import __version__

        typer.echo(f"tianflow {__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_tell_version, help="Say which version this is."
        ),
    ] = False,
) -> None:
    """Asynchronous, balanced and controllable training for distributed reinforcement learning."""


config_app = typer.Typer(help="Look at configs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")


def main() -> None:
    """Entry point of the ``tianflow`` script. Configs may name modules of the folder that it is
    called in.
    """
    open_standard_streams()
    with suppress(FileNotFoundError):  # the folder may be gone
        sys.path.append(str(Path.cwd()))  # last, so that it hides nothing
    app()


def _show_warnings() -> None:
    """What is worth knowing before a run has a screen: that its newest checkpoint is
    skipped, say.
    """
    from tianflow.logs import configure

    configure(level="WARNING")


def _load(source: str, overrides: list[str] | None) -> Config:
    from tianflow.config.loading import load_config

    return load_config(source, overrides or ())


@app.command()
def train(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help="A TOML file or a shipped name; not needed with --resume.",
            autocompletion=complete_config,
        ),
    ] = None,
    overrides: Overrides = None,
    *,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|CHECKPOINT",
            help="Go on from a run's newest checkpoint, or this one.",
            autocompletion=complete_kept,
        ),
    ] = None,
    runs_dir: RunsDir = RUNS,
    http: Annotated[
        bool, typer.Option("--http/--no-http", help="Serve control and metrics beside the run.")
    ] = True,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain lines instead of a live screen.")
    ] = False,
    json_line: Annotated[
        bool, typer.Option("--json", help="End with one line of JSON that holds the result.")
    ] = False,
    require_target: Annotated[
        bool,
        typer.Option("--require-target", help="Exit with 1 unless the target return was reached."),
    ] = False,
    until_eof: Annotated[
        bool,
        typer.Option(
            "--until-eof", help="Stop when standard input ends: whoever started this is gone."
        ),
    ] = False,
) -> None:
    """Train a policy as CONFIG says."""
    with exit_codes():
        _show_warnings()
        settings = _training_config(config, overrides or [], resume, runs_dir)
        from tianflow.cli import train as training
        from tianflow.config import rules as config_rules

        for sentence in [*config_rules.advice(settings), *_used_up(settings, resume, runs_dir)]:
            complain(f"note: {sentence}")

        code = training.run(
            settings,
            resume=resume,
            runs_dir=runs_dir,
            http=http and settings.http.enabled,
            plain=plain,
            json_line=json_line,
            require_target=require_target,
            until_eof=until_eof,
        )
    raise typer.Exit(code)


def _used_up(config: Config, resume: str | None, runs_dir: Path) -> list[str]:
    """What a run that is resumed has reached already."""
    from tianflow.config.rules import used_up
    from tianflow.errors import CheckpointError
    from tianflow.rundir.checkpoints import CheckpointStore, resolve

    if resume is None:
        return []
    with suppress(CheckpointError, LookupError):  # whoever resumes it says what is wrong with it
        return used_up(config, CheckpointStore.load(resolve(resume, runs_dir)).manifest)
    return []


def _training_config(
    config: str | None, overrides: list[str], resume: str | None, runs_dir: Path
) -> Config:
    """The config given, or that of the run which is resumed."""
    if config is not None and "=" in config and not Path(config).exists():
        overrides = [config, *overrides]
        config = None
    if config is not None:
        return _load(config, overrides)
    if resume is None:
        raise typer.BadParameter("is required, unless --resume names a run", param_hint="CONFIG")
    from tianflow.config.loading import load_config, settings_in_force
    from tianflow.rundir.checkpoints import CheckpointStore, resolve

    # A run goes on with what was in force last, also when no checkpoint has seen it; a checkpoint
    # with what was in force then.
    checkpoint, last = resolve(resume, runs_dir), settings_in_force(resume, runs_dir)
    return load_config(last or CheckpointStore.load(checkpoint).manifest["config"], overrides)


@app.command()
def validate(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Find everything that is wrong with CONFIG.

    And what it will cost. Nothing is started.
    """
    with exit_codes():
        from tianflow.observability.sinks.outlet import require_sinks
        from tianflow.planning.validation import require_valid

        settings = _load(config, overrides)
        require_sinks(settings)
        validation = require_valid(settings)
    spec = validation.spec
    if spec is not None:
        leaves = ", ".join(
            f"{leaf.name or 'observation'} {leaf.dtype}{list(leaf.shape)}"
            for leaf in spec.observation
        )
        typer.echo(
            f"environment: {spec.id}, {spec.num_envs} of them, {leaves}; {spec.action.kind} "
            f"actions, {spec.autoreset} autoreset"
        )
    for sentence in validation.advice:
        typer.echo(f"note: {sentence}")
    typer.echo(f"{config}: valid")


@app.command("check-env")
def check_env(
    env: Annotated[
        str | None, typer.Argument(metavar="ENV", help="A registered id, or module:attribute.")
    ] = None,
    kwargs: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Arguments of the environment.")
    ] = None,
    *,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="CONFIG", help="Take the environment of this config instead."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Random steps to take.")] = 300,
    as_json: AsJson = False,
) -> None:
    """Say whether an environment can be trained in.

    And how fast it steps.
    """
    if (env is None) == (config is None):
        raise typer.BadParameter("either ENV or --config", param_hint="ENV")
    with exit_codes():
        from tianflow.config.loading import parse_overrides
        from tianflow.config.model import EnvSettings
        from tianflow.envs import checking

        settings = (
            EnvSettings(id=env, kwargs=parse_overrides(kwargs or ()))
            if env is not None
            else _load(config or "", None).env
        )
        report = checking.check(settings, steps=steps)
    typer.echo(json.dumps(report.document()) if as_json else "\n".join(report.lines()))
    raise typer.Exit(0 if report.usable else 1)


@app.command("doctor")
def examine(*, runs_dir: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """Say what this machine and installation give a run.

    And what to do where something is missing.
    """
    from dataclasses import asdict

    from tianflow.cli import doctor

    findings = doctor.examine(runs_dir)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            typer.echo(
                f"{finding.level:8}{finding.name}: {finding.value}"
                + (f" -> {finding.advice}" if finding.advice else "")
            )
    raise typer.Exit(1 if any(finding.level == "problem" for finding in findings) else 0)


@config_app.command("show")
def config_show(
    config: ConfigArgument,
    overrides: Overrides = None,
    *,
    resolved: Annotated[
        bool,
        typer.Option(
            "--resolved", help="Show every setting, not only what differs from the defaults."
        ),
    ] = False,
) -> None:
    """Print CONFIG as TOML, overrides included."""
    with exit_codes():
        from tianflow.config.loading import to_toml

        typer.echo(to_toml(_load(config, overrides), only_changed=not resolved), nl=False)


config_app.command("list")(list_configs)
config_app.command("explain")(explain)


app.command("eval")(evaluate)


app.command()(export)


app.command()(report)
app.command()(simulate)


app.command()(serve)
app.command()(submit)
app.command()(status)
app.command()(top)
app.command()(console)


@app.command()
def diagnose(run: RunArgument = None, *, runs_dir: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """Say what holds RUN back, by how much, and what would help."""
    from tianflow.cli import status as diagnosing

    with exit_codes():
        typer.echo(diagnosing.ask(runs_dir, run, as_json=as_json))


app.command()(events)


@app.command("get")
def get_settings(
    wish: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [SECTION[.KEY]]",
            help="Which settings, e.g. balance.max_staleness; or all of them.",
            autocompletion=complete_run,
        ),
    ] = None,
    *,
    runs_dir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Print live settings of RUN."""
    from tianflow.cli import client
    from tianflow.config.loading import toml_value

    if len(wish or ()) > 2:
        raise typer.BadParameter("at most a run and a section", param_hint="[RUN] [SECTION[.KEY]]")
    with exit_codes():
        found, key = client.get(runs_dir, wish or [])
    if as_json:
        typer.echo(json.dumps(found[key] if key else found))
        return
    for name, value in found.items():
        text = "null" if value is None else toml_value(value)
        typer.echo(text if key else f"{name} = {text}")


@app.command("set")
def set_settings(
    wish: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] section.key=value",
            help="Live settings of one section.",
            autocompletion=complete_run,
        ),
    ],
    *,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Change settings of RUN while it goes on.

    All of them, or none when one is refused.
    """
    from tianflow.cli import client
    from tianflow.config.loading import nested, parse_overrides

    run, assignments = (None, wish) if "=" in wish[0] else (wish[0], wish[1:])
    with exit_codes():
        changes = nested(parse_overrides(assignments))
        if not changes:
            raise typer.BadParameter("at least one setting", param_hint="section.key=value")
        resources = {client.resource(section) for section in changes}
        if len(resources) != 1:
            asked = (
                f"settings of one section at a time, not of {' and '.join(changes)}: a "
                "change "
                "is made as a whole only there"
            )
            raise typer.BadParameter(asked, param_hint="section.key=value")
        values = {key: value for section in changes.values() for key, value in section.items()}
        contact = client.find(runs_dir, run)
        answer = client.change(contact, resources.pop(), values)
    typer.echo(
        f"{contact.run}: {', '.join(assignments)}, generation {answer.get('generation', '?')}"
    )


@app.command()
def scale(
    wish: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] actors=COUNT",
            help="How many actors there should be.",
            autocompletion=complete_run,
        ),
    ],
    *,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Change the number of actors of RUN."""
    from tianflow.cli import client

    name, equals, count = wish[-1].partition("=")
    if len(wish) > 2 or name != "actors" or not equals or not count.isdecimal():
        raise typer.BadParameter(
            f"{wish[-1]!r} is not actors=COUNT with a whole number", param_hint="actors=COUNT"
        )
    with exit_codes():
        contact = client.find(runs_dir, wish[0] if len(wish) == 2 else None)
        answer = client.change(contact, "actors", {"count": int(count)})
    typer.echo(f"{contact.run}: {count} actors, generation {answer.get('generation', '?')}")


def _act(action: str, run: str | None, runs_dir: Path, said: str = "") -> None:
    from tianflow.cli import client

    with exit_codes():
        contact = client.find(runs_dir, run)
        answer = client.request(contact, "POST", f"/{action}")
    typer.echo(f"{contact.run}: {answer.get('state', action)}{said}")


@app.command()
def pause(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """Let RUN hold at the next boundary."""
    _act("pause", run, runs_dir)


@app.command()
def resume(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """Let a paused RUN go on."""
    _act("resume", run, runs_dir)


@app.command()
def drain(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """Begin nothing new in RUN, and train on what is there."""
    _act("drain", run, runs_dir)


@app.command()
def checkpoint(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """Let RUN write a checkpoint now."""
    _act("checkpoint", run, runs_dir, said=", writes a checkpoint at the next boundary")


@app.command()
def stop(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """End RUN cleanly, with a last checkpoint."""
    _act("stop", run, runs_dir)


if __name__ == "__main__":
    main()
