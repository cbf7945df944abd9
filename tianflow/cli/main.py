"""The command line. Every command is thin: it reads its arguments, calls one function, and converts
errors to exit codes.

Exit codes: 0 success; 1 the run failed, refused or does not exist; 2 invalid usage or config; 129,
130 and 143 interrupted. A command imports what it needs only when it runs.
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
    ConfigOrAlgorithm,
    Env,
    Overrides,
    RunArgument,
    RunsDir,
    complete_any_run,
    complete_config_or_algorithm,
    complete_run,
    echo,
    exit_codes,
    open_standard_streams,
    print_error,
)
from tianflow.cli.config import explain, list_configs
from tianflow.cli.env_server import env_server
from tianflow.cli.eval import evaluate
from tianflow.cli.events import events
from tianflow.cli.export import export
from tianflow.cli.node import node
from tianflow.cli.report import report
from tianflow.cli.serve import delete, serve, submit
from tianflow.cli.simulate import simulate
from tianflow.cli.status import console, nodes, status, top

if TYPE_CHECKING:
    from tianflow.api import FinishedRun
    from tianflow.config.model import Config
    from tianflow.interfaces import BatchJob

app = typer.Typer(
    name="tianflow",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    if requested:
        from tianflow import __version__

        echo(f"tianflow {__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Version of tianflow."
        ),
    ] = False,
) -> None:
    """Train reinforcement-learning policies with distributed actors."""


config_app = typer.Typer(
    help="Show, list and explain configs.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(config_app, name="config")


def main() -> None:
    """Entry point of the ``tianflow`` script. Configs may name modules in the current directory."""
    open_standard_streams()
    with suppress(FileNotFoundError):  # the directory may not exist any more
        sys.path.append(str(Path.cwd()))  # last, so that it hides nothing
    app()


def _show_warnings() -> None:
    """Log warnings that precede the screen of a run, for example that the newest checkpoint is
    skipped.
    """
    from tianflow.logs import configure

    configure(level="WARNING")


def _load(source: str, overrides: list[str] | None, env: str | None = None) -> Config:
    """The settings of a config, or of an algorithm on ``env``, whose origin is printed."""
    if env is not None:
        from tianflow.planning.starting import origin, start_config

        config = start_config(source, env, overrides or (), report=print_error)
        print_error(origin(config))
        return config
    from tianflow.config.loading import load_config

    return load_config(source, overrides or ())


@app.command()
def train(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG|ALGORITHM",
            help="TOML file or shipped name, optional with --resume; with --env, an algorithm.",
            autocompletion=complete_config_or_algorithm,
        ),
    ] = None,
    overrides: Overrides = None,
    *,
    env: Env = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|CHECKPOINT",
            help="Checkpoint to continue from, or run: its newest checkpoint.",
            autocompletion=complete_any_run,
        ),
    ] = None,
    runs_dir: RunsDir = RUNS,
    http: Annotated[
        bool, typer.Option("--http/--no-http", help="HTTP server for control and metrics.")
    ] = True,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain lines instead of a live screen.")
    ] = False,
    json_line: Annotated[
        bool, typer.Option("--json", help="Result as one line of JSON at the end.")
    ] = False,
    require_target: Annotated[
        bool,
        typer.Option("--require-target", help="Exit code 1 unless the target return is reached."),
    ] = False,
    until_eof: Annotated[
        bool,
        typer.Option("--until-eof", help="End of standard input as a signal to stop."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Script of the job, which is not submitted (slurm)."),
    ] = False,
) -> None:
    """Train a policy from CONFIG, or by ALGORITHM --env ID.

    ALGORITHM uses the preset for that environment, or else defaults for its kind.
    """
    with exit_codes():
        _show_warnings()
        settings = _training_config(config, overrides or [], env, resume, runs_dir)
        from tianflow import api
        from tianflow.config import rules as config_rules

        used = api.used_up_run(settings, resume, runs_dir)
        for sentence in [*config_rules.advice(settings), *(used[0] if used else ())]:
            print_error(f"note: {sentence}")
        if used:
            raise typer.Exit(
                _show_used_up(used[1], json_line=json_line, require_target=require_target)
            )

        job = api.batch_job(
            settings,
            resume,
            runs_dir,
            _passed_on(http=http, json_line=json_line, require_target=require_target),
        )
        if dry_run or job is not None:
            raise typer.Exit(
                _submit(job, settings, resume, runs_dir, dry_run=dry_run, until_eof=until_eof)
            )
        from tianflow.cli import train as training

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


def _passed_on(**options: bool) -> tuple[str, ...]:
    """Options of ``train`` for a process that another machine starts."""
    words = {
        "--no-http": not options["http"],
        "--json": options["json_line"],
        "--require-target": options["require_target"],
    }
    return tuple(word for word, given in words.items() if given)


def _submit(
    job: BatchJob | None,
    settings: Config,
    resume: str | None,
    runs_dir: Path,
    *,
    dry_run: bool,
    until_eof: bool,
) -> int:
    """Submit the job of a run and follow it, or print its script; the exit code."""
    from tianflow.cli import batch
    from tianflow.planning.initial import check_source
    from tianflow.planning.resuming import require_resume
    from tianflow.planning.validation import require_valid

    if job is None or dry_run:
        batch.require_batch(job, settings.placement.launcher)
        assert job is not None
        echo(job.script, nl=False)
        return 0
    if until_eof:
        batch.refuse_eof()
    spec = require_valid(settings, report=print_error).spec
    # a job may wait for hours before it is refused
    if resume is not None and spec is not None:
        require_resume(settings, spec, resume, runs_dir)
    if resume is None:
        for note in check_source(settings, spec, runs_dir):
            print_error(note)
    return batch.follow(job, runs_dir=runs_dir)


def _show_used_up(used: FinishedRun, *, json_line: bool, require_target: bool) -> int:
    """Show a run that has nothing to do, and its exit code."""
    from tianflow.cli.screen import summary_text

    summary = used.summary
    typer.echo(json.dumps(summary) if json_line else summary_text(summary))
    return 1 if require_target and not summary.get("target_reached") else 0


def _training_config(
    config: str | None, overrides: list[str], env: str | None, resume: str | None, runs_dir: Path
) -> Config:
    """The given config, that of an algorithm on an environment, or that of the resumed run."""
    if config is not None and "=" in config and not Path(config).exists():
        overrides = [config, *overrides]
        config = None
    if env is not None and (config is None or resume is not None):
        what = "needs an algorithm" if config is None else "starts a new run; omit --resume"
        raise typer.BadParameter(what, param_hint="--env")
    if config is not None:
        return _load(config, overrides, env)
    if resume is None:
        raise typer.BadParameter(
            "is missing; name a config, or a run with --resume", param_hint="CONFIG"
        )
    from tianflow.config.loading import load_config, read_revision, settings_in_force
    from tianflow.planning.resuming import older_defaults
    from tianflow.rundir.checkpoints import CheckpointStore, resolve

    # A run continues with the newest settings in force, on disk or in its newest checkpoint: a full
    # disk may have taken only one of them. A checkpoint that is named has its own.
    last = settings_in_force(resume, runs_dir)
    checkpoint = CheckpointStore.load(resolve(resume, runs_dir))
    checkpoint.require_resumable()
    manifest = checkpoint.manifest
    if last is not None and read_revision(last) < manifest.get("revision", 0):
        print_error(f"note: {last} is older than the newest checkpoint; those settings are used")
        last = None
    return load_config(last or manifest["config"], [*older_defaults(manifest), *overrides])


@app.command()
def validate(
    config: ConfigOrAlgorithm,
    overrides: Overrides = None,
    *,
    env: Env = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Check CONFIG, or ALGORITHM with --env, and report every problem.

    It also reports the costs of the settings. No run is started. --runs-dir is for run.init_from.
    """
    with exit_codes():
        from tianflow.errors import ConfigError
        from tianflow.observability.sinks.outlet import require_sinks
        from tianflow.planning import validation
        from tianflow.planning.initial import check_source

        settings = _load(config, overrides, env)
        found = validation.validate(settings, report=print_error)
        problems, notes = list(found.problems), found.advice
        try:
            require_sinks(settings)
        except ConfigError as error:
            problems += error.problems
        try:
            notes += check_source(settings, None if problems else found.spec, runs_dir)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
    spec = found.spec
    if spec is not None:
        leaves = ", ".join(
            f"{leaf.name or 'observation'} {leaf.dtype}{list(leaf.shape)}"
            for leaf in spec.observation
        )
        echo(
            f"environment: {spec.num_envs} x {spec.id}, {leaves}; {spec.action.kind} "
            f"actions, {spec.autoreset} autoreset"
        )
    for sentence in notes:
        echo(f"note: {sentence}")
    echo(f"{config}: valid")


@app.command("check-env")
def check_env(
    env: Annotated[
        str | None, typer.Argument(metavar="ENV", help="Registered id, or module:attribute.")
    ] = None,
    kwargs: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Arguments of the environment.")
    ] = None,
    *,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="CONFIG", help="Config whose environment is checked instead."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of random steps.")] = 300,
    as_json: AsJson = False,
) -> None:
    """Check whether an environment can be used for training.

    It also measures the time of a step.
    """
    if (env is None) == (config is None):
        raise typer.BadParameter("give either ENV or --config", param_hint="ENV")
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
    echo(json.dumps(report.document()) if as_json else "\n".join(report.lines()))
    raise typer.Exit(0 if report.usable else 1)


@app.command("doctor")
def examine(*, runs_dir: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """Check this machine and installation.

    Each problem comes with advice.
    """
    from dataclasses import asdict

    from tianflow.cli import doctor

    findings = doctor.examine(runs_dir)
    if as_json:
        echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            echo(
                f"{finding.level:8}{finding.name}: {finding.value}"
                + (f" -> {finding.advice}" if finding.advice else "")
            )
    raise typer.Exit(1 if any(finding.level == "problem" for finding in findings) else 0)


@config_app.command("show")
def config_show(
    config: ConfigOrAlgorithm,
    overrides: Overrides = None,
    *,
    env: Env = None,
    resolved: Annotated[
        bool,
        typer.Option(
            "--resolved", help="All settings, not only those that differ from the defaults."
        ),
    ] = False,
) -> None:
    """Print CONFIG, or ALGORITHM --env ID, as TOML.

    Overrides are part of it.
    """
    with exit_codes():
        from tianflow.config.loading import to_toml

        echo(to_toml(_load(config, overrides, env), only_changed=not resolved), nl=False)


config_app.command("list")(list_configs)
config_app.command("explain")(explain)


app.command("eval")(evaluate)


app.command()(export)


app.command()(report)
app.command()(simulate)


app.command("env-server")(env_server)
app.command()(node)
app.command()(serve)
app.command()(submit)
app.command()(delete)
app.command()(status)
app.command()(nodes)
app.command()(top)
app.command()(console)


@app.command()
def diagnose(run: RunArgument = None, *, runs_dir: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """Report the bottleneck of RUN and its remedy."""
    from tianflow.cli import status as run_status

    with exit_codes():
        echo(run_status.ask(runs_dir, run, as_json=as_json))


app.command()(events)


@app.command("get")
def get_settings(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [SECTION[.KEY]]",
            help="A run, and one section or setting, e.g. balance.max_staleness; default: all.",
            autocompletion=complete_run,
        ),
    ] = None,
    *,
    runs_dir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Print live settings of RUN.

    Beside a schedule stands its value in force. JSON output has settings only.
    """
    from tianflow.config.loading import toml_value
    from tianflow.server.common import client

    if len(words or ()) > 2:
        raise typer.BadParameter(
            "give at most a run and a section", param_hint="[RUN] [SECTION[.KEY]]"
        )
    with exit_codes():
        found = client.get(runs_dir, words or [])
    if as_json:
        echo(json.dumps(found.values[found.key] if found.key else found.values))
        return
    for name, value in found.values.items():
        text = "null" if value is None else toml_value(value)
        now = f"  # now {found.in_force[name]:.6g}" if name in found.in_force else ""
        echo((text if found.key else f"{name} = {text}") + now)


@app.command("set")
def set_settings(
    words: Annotated[
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
    """Change settings of an active RUN.

    All settings are changed, or none if one is refused.
    """
    from tianflow.config.loading import nested, parse_overrides
    from tianflow.server.common import client

    run, assignments = (None, words) if "=" in words[0] else (words[0], words[1:])
    with exit_codes():
        changes = nested(parse_overrides(assignments))
        if not changes:
            raise typer.BadParameter("give at least one setting", param_hint="section.key=value")
        resources = {client.resource(section) for section in changes}
        if len(resources) != 1:
            problem = (
                f"names several sections ({' and '.join(changes)}), but a change is atomic only "
                "within one; change one section at a time"
            )
            raise typer.BadParameter(problem, param_hint="section.key=value")
        values = {key: value for section in changes.values() for key, value in section.items()}
        contact = client.find(runs_dir, run)
        answer = client.change(contact, resources.pop(), values)
    echo(f"{contact.run}: {', '.join(assignments)}, generation {answer.get('generation', '?')}")


@app.command()
def scale(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] actors=COUNT",
            help="Number of actors.",
            autocompletion=complete_run,
        ),
    ],
    *,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Change the number of actors of RUN."""
    from tianflow.server.common import client

    name, equals, count = words[-1].partition("=")
    if len(words) > 2 or name != "actors" or not equals or not count.isdecimal():
        raise typer.BadParameter(
            f"{words[-1]!r} is not actors=COUNT with a whole number", param_hint="actors=COUNT"
        )
    with exit_codes():
        contact = client.find(runs_dir, words[0] if len(words) == 2 else None)
        answer = client.change(contact, "actors", {"count": int(count)})
    echo(f"{contact.run}: {count} actors, generation {answer.get('generation', '?')}")


def _act(action: str, run: str | None, runs_dir: Path, note: str = "") -> None:
    from tianflow.server.common import client

    with exit_codes():
        contact = client.find(runs_dir, run)
        answer = client.request(contact, "POST", f"/{action}")
    echo(f"{contact.run}: {answer.get('state', action)}{note}")


@app.command()
def pause(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """Pause RUN after the current update."""
    _act("pause", run, runs_dir)


@app.command()
def resume(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """Continue a paused RUN."""
    _act("resume", run, runs_dir)


@app.command()
def drain(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """Stop sampling in RUN and train on the open trajectories."""
    _act("drain", run, runs_dir)


@app.command()
def checkpoint(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """Request a checkpoint of RUN."""
    _act("checkpoint", run, runs_dir, note=", writes a checkpoint after the current update")


@app.command()
def stop(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """Stop RUN cleanly, with a last checkpoint."""
    _act("stop", run, runs_dir)


if __name__ == "__main__":
    main()
