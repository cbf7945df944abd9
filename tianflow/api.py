"""The Python API: `train`, `open_run`, `load_policy`. It assembles a run, its launcher, the
recorder and the control server.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import inspect
import json
import os
import secrets
import shutil
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tianflow import plugins
from tianflow.config import imports, spaces
from tianflow.config import loading as config_loading
from tianflow.config import rules as config_rules
from tianflow.config.model import BUILT_IN_ALGORITHMS, Config
from tianflow.coordinator import Run
from tianflow.core import devices
from tianflow.core.payloads import Version
from tianflow.errors import CheckpointError, ConfigError, Problem, RunError
from tianflow.hosts import event_loop as loops
from tianflow.logs import logger
from tianflow.observability.recorder import recorded
from tianflow.observability.sinks.outlet import require_sinks
from tianflow.planning import starting, validation
from tianflow.planning.initial import PATH, InitialState, find_source, initial_state
from tianflow.planning.layouts import draw_layout, trajectory_layout
from tianflow.planning.resuming import check_resume, saved_settings
from tianflow.rundir.checkpoints import Checkpoint, CheckpointStore, resolve
from tianflow.rundir.lock import lock_directory
from tianflow.rundir.summary import summary_of_used_up

if TYPE_CHECKING:
    from tianflow.core.payloads import EnvironmentSpec, TrajectoryLayout
    from tianflow.interfaces import Launcher, RunControl
    from tianflow.policy import LoadedPolicy

log = logger("api")

Overrides = Sequence[str] | Mapping[str, object]
RUNS = Path("runs")
STDIN = 0


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has ended. ``summary`` has the contents of ``summary.json``."""

    directory: Path
    summary: Mapping[str, Any]

    @property
    def policy(self) -> LoadedPolicy:
        """The policy of its newest checkpoint."""
        return load_policy(self.directory, trust=True)


def train(
    config: str | Path | Mapping[str, object] | Config,
    overrides: Overrides = (),
    *,
    env: str | None = None,
    resume: str | Path | None = None,
    runs_dir: str | Path = RUNS,
    http: bool = False,
) -> FinishedRun:
    """Train until the run ends. Blocks; works inside and outside a main guard.

    Args:
        config: a TOML file, a shipped name such as ``"cartpole_ppo"``, a table, or a `Config`. With
            ``env``, the name of an algorithm.
        overrides: ``{"balance.max_staleness": 1}`` or ``["balance.max_staleness=1"]``.
        env: an environment. The settings are those of the preset for this algorithm and
            environment, or else defaults for this kind of environment.
        resume: a run or checkpoint to continue.
        runs_dir: directory of all runs.
        http: whether to serve control and metrics beside the run.

    Raises:
        ConfigError: the config is refused; nothing was started.
        RunError: the run failed; its first error.
        KeyboardInterrupt: Ctrl-C; the run has stopped with a last checkpoint. A second Ctrl-C stops
            at once.
        RuntimeError: an event loop is running here, as in a notebook; nothing was started.
    """
    loops.require_none(
        "train", instead="async with tianflow.open_run(...) as run: summary = await run.wait()"
    )
    settings = load_settings(config, overrides, env=env)
    if (used := used_up_run(settings, resume, Path(runs_dir))) is not None:
        for sentence in used[0]:
            log.warning(sentence)
        return used[1]
    prepared = prepare(settings, resume, Path(runs_dir))

    async def whole() -> FinishedRun:
        async with opened(prepared, http=http) as session:
            async with _stopped_on_exit(session, "interrupt"):
                await asyncio.wait({session.finished})
            return FinishedRun(session.run.directory, session.run.snapshot.summary())

    return loops.run(whole())


def load_settings(
    config: str | Path | Mapping[str, object] | Config,
    overrides: Overrides = (),
    *,
    env: str | None = None,
) -> Config:
    """The settings that `train` uses for these arguments.

    Raises:
        ConfigError: the config is refused.
    """
    if env is not None:
        if not isinstance(config, str):
            message = "is not the name of an algorithm, and with env an algorithm is expected"
            accepted = ", ".join(BUILT_IN_ALGORITHMS)
            raise ConfigError([Problem("config", None, message, accepted)])
        return starting.start_config(config, env, overrides)
    return config if isinstance(config, Config) else config_loading.load_config(config, overrides)


def used_up_run(
    config: Config, resume: str | Path | None, runs_dir: Path
) -> tuple[tuple[str, ...], FinishedRun] | None:
    """A run that cannot continue because it has reached its limits, with a sentence for each of
    them; None if it can.

    Raises:
        CheckpointError: the checkpoint does not exist, or is torn.
    """
    if resume is None:
        return None
    checkpoint = CheckpointStore.load(resolve(str(resume), runs_dir))
    checkpoint.require_resumable()
    used = config_rules.used_up(config, checkpoint.manifest)
    if not used:
        return None
    summary = summary_of_used_up(checkpoint, next(iter(used)))
    return tuple(used.values()), FinishedRun(checkpoint.path.parent.parent, summary)


@contextlib.asynccontextmanager
async def open_run(
    config: str | Path | Mapping[str, object] | Config,
    overrides: Overrides = (),
    *,
    env: str | None = None,
    resume: str | Path | None = None,
    runs_dir: str | Path = RUNS,
    http: bool = False,
) -> AsyncIterator[RunHandle]:
    """A run that continues while the context is open; leaving it stops the run. Arguments as for
    `train`.
    """
    settings = await asyncio.to_thread(load_settings, config, overrides, env=env)
    prepared = await asyncio.to_thread(prepare, settings, resume, Path(runs_dir))
    async with opened(prepared, http=http) as session, _stopped_on_exit(session, "open_run"):
        yield RunHandle(session)


@contextlib.asynccontextmanager
async def _stopped_on_exit(session: Session, reason: str) -> AsyncIterator[None]:
    """Stop the run with a last checkpoint when the block ends, also by an error or cancellation."""
    try:
        yield
    finally:
        if not session.finished.done():
            session.run.lifecycle.end("stopped", reason)
            await asyncio.wait({session.finished})


class LiveSection:
    """Live settings of one section: ``await run.balance.set(max_staleness=4)``."""

    def __init__(self, run: RunControl, section: str) -> None:
        self._run, self._section = run, section

    async def set(self, **values: object) -> int:
        """Put values in force: all of them, or none. The new generation. Raises ConfigError,
        StateConflictError.
        """
        changes = {self._section: values}
        await asyncio.to_thread(validation.require_settable, self._run.config, changes)
        return self._run.change(changes, source="python")


class RunHandle:
    """An open run: its control, its live settings, and its end."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.control: RunControl = session.run.control
        self.balance = LiveSection(self.control, "balance")
        self.algorithm = LiveSection(self.control, "algorithm")
        self.learner = LiveSection(self.control, "learner")
        self.actors = LiveSection(self.control, "actors")
        self.env = LiveSection(self.control, "env")

    @property
    def run(self) -> Run:
        """The parts of the run, for tests and tools. They may change between releases."""
        return self._session.run

    async def wait(self) -> Mapping[str, Any]:
        """Wait until the run has ended; its summary. Cancelling the wait leaves the run as it is.
        Raises RunError if the run failed.
        """
        await asyncio.shield(self._session.finished)
        return self._session.run.snapshot.summary()


def load_policy(
    checkpoint: str | Path, *, runs_dir: str | Path = RUNS, trust: bool | Collection[str] = False
) -> LoadedPolicy:
    """The policy of a checkpoint (a run's name or directory, or a checkpoint's): ``action, state =
    policy.act(obs)``. ``"RUN@best"`` is the best checkpoint of a run, ``"RUN"`` the newest.

    Nothing is imported that the checkpoint names, except plug-ins that are installed. ``trust`` is
    True for a checkpoint whose modules may run, or the modules that may.

    Raises:
        CheckpointError: the checkpoint does not exist, or is torn.
        ConfigError: its policy needs a module that is not trusted.
    """
    from tianflow.policy import LoadedPolicy

    # an environment may change the working directory
    found = CheckpointStore.load(resolve(str(checkpoint), Path(runs_dir)).absolute())
    tables, described = found.manifest["config"], found.manifest.get("environment")
    if not isinstance(tables, Mapping):
        raise CheckpointError(f"the manifest of {str(found.path)!r} has no settings")
    needed = {"algorithm", "network"} if described is not None else {"algorithm", "network", "env"}
    imports.require_trusted({name: tables.get(name) for name in needed}, trust)
    config = Config.model_validate(saved_settings(found.manifest))
    if described is None:  # written before manifests described the environment
        spec = validation.require_environment(config)
    else:
        spec = spaces.from_json(described)
        validation.require_fit(config, spec)
    return LoadedPolicy(config=config, spec=spec, arrays=found.read(), trust=trust)


@dataclass(slots=True)
class Session:
    """An open run: the task of its launcher, and the address and token of its server."""

    run: Run
    finished: asyncio.Task[None]
    address: str
    token: str = ""


@contextlib.asynccontextmanager
async def opened(prepared: Prepared, *, http: bool) -> AsyncIterator[Session]:
    """Make the run, serve it, launch it. Every failure of the run becomes RunError."""
    config = prepared.config
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(os.close, prepared.held)
        slots = prepared.launcher.slots(config=config, layout=prepared.layout, draws=prepared.draws)
        stack.callback(slots.close)
        initial = prepared.initial
        run = Run(
            run_id=prepared.run_id,
            directory=prepared.directory,
            config=config,
            spec=prepared.spec,
            layout=prepared.layout,
            slots=slots,
            capabilities=prepared.launcher.capabilities,
            resumed=prepared.checkpoint,
            revision=prepared.revision,
            settings_stored=prepared.settings_stored,
        )
        if initial is not None:
            run.control.audit_log.add(
                "config", "init_from", checkpoint=str(initial.source), fit=asdict(initial.fit)
            )
        address = token = ""
        if http:
            from tianflow.server.common.auth import Tokens
            from tianflow.server.run.server import serve

            tokens = Tokens.make()
            address = (
                await stack.enter_async_context(
                    serve(run.control, config.http, tokens, run.directory)
                )
            ).address
            token = tokens.control
        await stack.enter_async_context(recorded(run.control))
        finished = asyncio.get_running_loop().create_task(
            prepared.launcher.launch(run, slots), name="run"
        )
        try:
            yield Session(run, finished, address, token)
        finally:
            if not finished.done():
                finished.cancel()
            await asyncio.gather(finished, return_exceptions=True)
    if run.lifecycle.first_error is not None:
        raise run.lifecycle.first_error
    if not finished.cancelled() and (error := finished.exception()) is not None:
        raise _as_run_error(error) from error


def _as_run_error(error: BaseException) -> RunError:
    if isinstance(error, RunError):
        return error
    return RunError(
        "coordinator",
        f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(error)),
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that was checked and made before the run starts. ``held`` locks the directory.

    ``revision`` and ``settings_stored``: see `Run`. ``initial``: parameters of another run, with
    which this one starts; ``checkpoint`` holds them.
    """

    config: Config
    checkpoint: Checkpoint | None
    spec: EnvironmentSpec
    layout: TrajectoryLayout
    draws: TrajectoryLayout | None
    launcher: Launcher
    run_id: str
    directory: Path
    held: int
    revision: int = 0
    settings_stored: bool = True
    initial: InitialState | None = None


def prepare(
    config: Config,
    resume: str | Path | None,
    runs_dir: Path,
    *,
    report: Callable[[str], None] = validation.log.warning,
) -> Prepared:
    """Do everything that reads files, imports what the config names, or makes an environment. It
    blocks, so it must not run on a loop. ``report`` is called while an environment takes long.
    """
    runs_dir = runs_dir.absolute()  # a user's code may change the working directory later
    checkpoint = None if resume is None else _resumed(config, str(resume), runs_dir)
    source = None
    if config.run.init_from is not None and checkpoint is None:
        source = find_source(config.run.init_from, runs_dir)
    _require_device("learner.device", config.learner.device)
    _require_gpus_for_ranks(config)
    if config.central:
        _require_device("inference.device", config.inference.device)
        _require_policy_on_device(config)
    require_sinks(config)
    if checkpoint is not None:
        checkpoint.require_resumable()
        _require_same_source(config, checkpoint)
    spec = validation.require_valid(config, report=report).spec
    assert spec is not None
    if checkpoint is not None and (problems := check_resume(config, spec, checkpoint.manifest)):
        raise ConfigError(problems)
    initial = None if source is None else initial_state(config, spec, source)
    for note in () if initial is None else initial.notes():
        report(note)
    layout, draws = trajectory_layout(config, spec), draw_layout(config, spec)
    # A live change may name a controller, which must not be imported on the loop.
    for controller in plugins.names("tianflow.controllers"):
        with contextlib.suppress(ConfigError):
            plugins.load("tianflow.controllers", controller, path="balance.controller")
    launcher = _launcher(config)
    launcher.prepare()
    run_id, directory, held = _directory(config, checkpoint, runs_dir)
    stored = checkpoint is None or not _continues(config, checkpoint, runs_dir)
    revision = 0 if checkpoint is None else _revision(config, checkpoint, directory)
    try:
        if initial is not None:
            checkpoint = _first_checkpoint(directory, run_id, config, spec, initial)
        elif checkpoint is not None and _branches(config, checkpoint):
            checkpoint = CheckpointStore.copy(checkpoint, directory / "checkpoints")
    except CheckpointError:
        shutil.rmtree(directory, ignore_errors=True)  # of a new run: it was empty before
        os.close(held)
        raise
    return Prepared(
        config,
        checkpoint,
        spec,
        layout,
        draws,
        launcher,
        run_id,
        directory,
        held,
        revision=revision,
        settings_stored=stored,
        initial=initial,
    )


def _resumed(config: Config, resume: str, runs_dir: Path) -> Checkpoint:
    """The checkpoint that a run continues.

    A deterministic run repeats bit for bit from a barrier only. So it continues at the newest
    barrier, and repeats the updates after it, unless ``resume`` names a checkpoint.
    """
    checkpoint = CheckpointStore.load(resolve(resume, runs_dir).absolute())
    every, number = config.run.barrier_updates, checkpoint.version.number
    if not config.run.deterministic or number % every == 0:
        return checkpoint
    named = checkpoint.path.resolve() in {
        path.resolve() for path in (Path(resume), runs_dir / resume)
    }
    store = CheckpointStore(checkpoint.path.parent, keep=1)
    barrier = None if named else store.newest_barrier(checkpoint.version, every)
    if barrier is None:
        message = (
            f"the checkpoint of version {number} is not at a barrier (every {every} updates), so "
            "the run continues, but not bit for bit like one that was never interrupted"
        )
        log.warning(message)
        return checkpoint
    message = (
        f"the run continues at its barrier of version {barrier.version.number}, to stay bit for "
        f"bit; updates up to {number} are computed again"
    )
    log.warning(message)
    return barrier


def _continues(config: Config, checkpoint: Checkpoint, runs_dir: Path) -> bool:
    """True if a run that is resumed from ``checkpoint`` continues in the checkpoint's run."""
    own = checkpoint.path.parent.parent.parent.resolve() == runs_dir.resolve()
    return own and not _branches(config, checkpoint)


def _branches(config: Config, checkpoint: Checkpoint) -> bool:
    """True if the settings name another run than that of ``checkpoint``.

    A directory that was renamed still has the name in its settings.
    """
    saved = checkpoint.manifest["config"]
    before = saved.get("run", {}).get("name") if isinstance(saved, Mapping) else None
    return config.run.name not in (None, before, checkpoint.path.parent.parent.name)


def _revision(config: Config, checkpoint: Checkpoint, directory: Path) -> int:
    """The revision of ``config``: newer than that of every record of other settings."""
    manifest = checkpoint.manifest
    stored = config_loading.read_revision(directory / config_loading.CONFIG_FILE)
    newest = max(stored, int(manifest.get("revision", 0)))
    same = json.loads(config.model_dump_json()) == manifest["config"]
    return newest if same and newest == manifest.get("revision", 0) else newest + 1


def _require_same_source(config: Config, checkpoint: Checkpoint) -> None:
    """Refuse ``run.init_from`` beside a resume. A run that had it still has it in its settings; its
    checkpoint counts, and the source may be gone.
    """
    source, saved = config.run.init_from, checkpoint.manifest["config"]
    before = saved.get("run", {}).get("init_from") if isinstance(saved, Mapping) else None
    if source in (None, before):
        return
    message = "is for a new run, and --resume continues the parameters of its checkpoint"
    raise ConfigError([Problem(PATH, source, message, "one of the two")])


def _first_checkpoint(
    directory: Path, run_id: str, config: Config, spec: EnvironmentSpec, initial: InitialState
) -> Checkpoint:
    """Write the checkpoint that a new run with ``run.init_from`` starts from, at version 0.

    The run does not need its source any more, neither after a lost learner nor at a resume.
    """
    manifest = {
        "run": run_id,
        "env_steps": 0,
        "samples": 0,
        "episodes": 0,
        "elapsed_s": 0.0,
        "trained_s": 0.0,
        "config": json.loads(config.model_dump_json()),
        "environment": spaces.to_json(spec),
        "init_from": {"source": str(initial.source), "fit": asdict(initial.fit)},
    }
    store = CheckpointStore(directory / "checkpoints", keep=config.checkpoint.keep)
    return store.load(store.publish_data(initial.data, version=Version(0, 0), manifest=manifest))


def _launcher(config: Config) -> Launcher:
    """The launcher that ``config`` names. ConfigError if the name is unknown."""
    factory: Any = plugins.load(
        "tianflow.launchers", config.placement.launcher, path="placement.launcher"
    )
    return cast("Launcher", factory())


def _require_device(path: str, device: str) -> None:
    """Refuse a GPU that this machine does not have. This is not a rule of configs: a policy that
    was trained on a GPU may be loaded here.
    """
    if device.startswith("cuda") and not devices.HAS_GPU:
        message = "this machine has no NVIDIA GPU"
        raise ConfigError([Problem(path, device, message, "auto, cpu, or a machine with a GPU")])
    number, count = device.removeprefix("cuda:"), devices.GPUS
    if number.isdecimal() and count and int(number) >= count:
        message = f"this machine has {count} GPU{'s' * (count > 1)}, which are numbered from 0"
        raise ConfigError([Problem(path, device, message, f"cuda:0 to cuda:{count - 1}")])


def _require_gpus_for_ranks(config: Config) -> None:
    """Refuse more ranks than GPUs if the learner is to run on GPUs."""
    ranks, count = config.learner.ranks, devices.GPUS
    if ranks > 1 and config.learner.device.startswith("cuda") and count and ranks > count:
        message = f"each rank needs a GPU, and this machine has {count}"
        accepted = f"1 to {count}, or learner.device = cpu"
        raise ConfigError([Problem("learner.ranks", ranks, message, accepted)])


def _require_policy_on_device(config: Config) -> None:
    """Refuse a plug-in algorithm whose policy exists on a CPU only, if servers would ask for
    another device.
    """
    device, name = config.inference.device, config.algorithm.name
    if device == "cpu" or not devices.HAS_GPU or name in BUILT_IN_ALGORITHMS:
        return
    factory: Any = plugins.load("tianflow.algorithms", name, path="algorithm.name")
    try:
        inspect.signature(factory.make_policy).bind(config, None, None)
    except TypeError:
        message = f"make_policy of {name} takes no device, so its policy works on a CPU only"
        raise ConfigError([Problem("inference.device", device, message, "cpu")]) from None


def _directory(
    config: Config, checkpoint: Checkpoint | None, runs_dir: Path
) -> tuple[str, Path, int]:
    """The name of the run, its directory, and the descriptor that locks the directory. A resumed
    run continues in its own directory if the checkpoint lies there.
    """
    continues = checkpoint is not None and _continues(config, checkpoint, runs_dir)
    if checkpoint is not None and continues:
        directory, taken = checkpoint.path.parent.parent, False
        run_id = directory.name
    else:
        stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%d-%H%M%S")
        run_id = config.run.name or f"{config.algorithm.name}-{stamp}-{secrets.token_hex(2)}"
        directory = runs_dir / run_id
        taken = directory.exists() and any(directory.iterdir())
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        held = lock_directory(directory)
        stack.callback(os.close, held)
        if taken:
            raise CheckpointError(
                f"{str(directory)!r} exists; choose another run.name, or continue that run: "
                f"--resume {run_id}"
            )
        if not continues:  # a resumed run writes them once its learner works
            config_loading.write_config(directory, config)
        stack.pop_all()
    return run_id, directory, held
