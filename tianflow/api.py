"""The Python API: `train`, `start`, `attach`, `open_run`, `load_policy`. It assembles a run, its
launcher, the recorder and the control server.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import os
import secrets
import shutil
import time
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tianflow import handle, plugins
from tianflow.config import loading as config_loading
from tianflow.config import rules as config_rules
from tianflow.config import spaces
from tianflow.config.model import Config, algorithm_names
from tianflow.coordinator import Run
from tianflow.core.jsonable import json_ready
from tianflow.core.payloads import Version
from tianflow.errors import CheckpointError, ConfigError, Problem, RunError, RunTimeoutError
from tianflow.handle import RunHandle
from tianflow.hosts import event_loop as loops
from tianflow.interfaces import RunOrder, SubmitsRuns
from tianflow.logs import logger, report_death
from tianflow.observability.rates import RunRates
from tianflow.observability.recorder import recorded
from tianflow.observability.run_document import describe
from tianflow.observability.sinks.outlet import require_sinks
from tianflow.planning import starting, validation
from tianflow.planning.initial import PATH, InitialState, find_source, initial_state
from tianflow.planning.layouts import draw_layout, trajectory_layout
from tianflow.planning.machine import load_launcher, require_machine
from tianflow.planning.resuming import check_resume
from tianflow.rundir.checkpoints import Checkpoint, CheckpointStore, resolve
from tianflow.rundir.control_file import ControlFile
from tianflow.rundir.history import NAME as HISTORY
from tianflow.rundir.history import read_rows
from tianflow.rundir.lock import lock_directory
from tianflow.rundir.summary import summary_of_used_up
from tianflow.server.common.client import StreamedEvent
from tianflow.server.common.event_feed import EventRecord, Feed

if TYPE_CHECKING:
    from tianflow.core.payloads import EnvironmentSpec, TrajectoryLayout
    from tianflow.interfaces import BatchJob, Launcher, RunControl
    from tianflow.policy import LoadedPolicy

log = logger("api")

Overrides = Sequence[str] | Mapping[str, object]
RUNS = Path("runs")
STDIN = 0
EVENTS_AT_ONCE = 64
"""Maximum number of events that a reader takes in one turn of the loop."""
EVENTS_S = 15.0
"""Seconds after which a reader without events looks again."""


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
    loops.require_none("train", instead="run = tianflow.start(...); summary = run.wait()")
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
            accepted = ", ".join(algorithm_names()) + ", or module:attribute"
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


def start(
    config: str | Path | Mapping[str, object] | Config,
    overrides: Overrides = (),
    *,
    env: str | None = None,
    resume: str | Path | None = None,
    runs_dir: str | Path = RUNS,
) -> RunHandle:
    """Start a run in the background and return its handle, once the run has started.

    The run has a process of its own, and always serves control and metrics, for the handle, the
    command line and the console. It imports modules from `sys.path` of this program. It does not
    outlive this program: when the program exits, also by a kill, the run stops with a last
    checkpoint, and ``resume`` continues it. Runs of a service (`tianflow serve`) outlive programs.

        with tianflow.start("cartpole_ppo") as run:  # leaving the block stops the run
            run.on("evaluation", lambda event: print(event.data["mean_return"]))
            run.set(balance={"max_staleness": 4})
            summary = run.wait()

    Args:
        config: as for `train`.
        overrides: as for `train`.
        env: as for `train`.
        resume: a run or checkpoint to continue. A run that has reached its limits is not started
            again; its handle is returned.
        runs_dir: directory of all runs.

    Raises:
        ConfigError: the config is refused; nothing was started.
        CheckpointError: the checkpoint to resume does not exist, or is damaged.
        RunError: the process of the run died before the run started.
    """
    settings = load_settings(config, overrides, env=env)
    if (used := used_up_run(settings, resume, Path(runs_dir))) is not None:
        for sentence in used[0]:
            log.warning(sentence)
        directory = used[1].directory.absolute()
        return RunHandle(directory.name, directory=directory)
    return handle.start_process(settings, resume=resume, runs_dir=Path(runs_dir))


def attach(
    run: str | Path | None = None,
    *,
    runs_dir: str | Path = RUNS,
    address: str | None = None,
    token: str | None = None,
) -> RunHandle:
    """A handle of a run that exists: active, paused, pending in a service, or ended.

    The address and the token of a run are found as the command line finds them, in the directory
    of the run or in that of its service.

    Args:
        run: name of the run, or the path of its directory; None: the only active run.
        runs_dir: directory of all runs.
        address: of a service on another machine, such as ``"http://127.0.0.1:8080"``.
        token: for ``address``; None: the environment variable ``TIANFLOW_TOKEN``.

    Raises:
        RunNotFoundError: no run matches, or several do.
        ConfigError: ``address`` is not an HTTP address.
        RequestError: the service refuses the request, or does not answer.
    """
    return handle.attach(run, runs_dir=Path(runs_dir), address=address, token=token)


@contextlib.asynccontextmanager
async def open_run(
    config: str | Path | Mapping[str, object] | Config,
    overrides: Overrides = (),
    *,
    env: str | None = None,
    resume: str | Path | None = None,
    runs_dir: str | Path = RUNS,
    http: bool = False,
) -> AsyncIterator[OpenRun]:
    """A run on the event loop of this program, for code that is asynchronous itself.

    The run continues while the context is open; leaving it stops the run with a last checkpoint.

        async with tianflow.open_run("cartpole_ppo") as run:
            await run.set(balance={"max_staleness": 4})
            summary = await run.wait()

    Arguments and errors are those of `train`. Code that blocks the loop blocks the run; `start`
    has a process for the run instead.
    """
    settings = await asyncio.to_thread(load_settings, config, overrides, env=env)
    prepared = await asyncio.to_thread(prepare, settings, resume, Path(runs_dir))
    async with (
        opened(prepared, http=http) as session,
        _watched(session) as run,
        _stopped_on_exit(session, "open_run"),
    ):
        yield run


@contextlib.asynccontextmanager
async def _watched(session: Session) -> AsyncIterator[OpenRun]:
    """The run with its speeds and events, which are received until it ends."""
    control = session.run.control
    rates, feed = RunRates(read=control.statistics), Feed(events=control.events, clock=time.time)
    run = OpenRun(session, rates, feed)
    tasks = [asyncio.create_task(part.run(lambda: None)) for part in (rates, feed)]
    for task in tasks:
        report_death(task, log, "the handle of a run no longer receives its numbers or events")

    def end(_finished: object) -> None:
        for task in tasks:
            task.cancel()

    session.finished.add_done_callback(end)
    try:
        await asyncio.sleep(0)  # the first step; cancelled before it, they would not clean up
        yield run
    finally:
        session.finished.remove_done_callback(end)
        end(None)
        await asyncio.wait([*tasks, *run.deliveries])


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


class OpenRun:
    """A run on this program's event loop, from `tianflow.open_run`.

    It has the methods of `RunHandle`, with `await`. They work until the context is left.

    Attributes:
        id: name of the run.
        directory: absolute path of the run's directory.
        balance: live settings of the section, as ``await run.balance.set(max_staleness=4)``;
            ``algorithm``, ``learner`` and ``actors`` are the same for their sections.
        control: what servers and screens use.
    """

    def __init__(self, session: Session, rates: RunRates, feed: Feed) -> None:
        self._session, self._rates, self._feed = session, rates, feed
        self.deliveries: set[asyncio.Task[None]] = set()
        """Tasks of callbacks; they end with the events."""
        self.id, self.directory = session.run.id, session.run.directory
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

    async def status(self) -> dict[str, Any]:
        """The run document; see `RunHandle.status`."""
        statistics = self._rates.sample()
        found: dict[str, Any] = json_ready(describe(statistics, self.control.config, self._rates))
        return found

    async def metrics(self) -> list[dict[str, Any]]:
        """The history of the run as flat rows; see `RunHandle.metrics`."""
        rows = await asyncio.to_thread(read_rows, self.directory / HISTORY)
        return handle.flat_rows(rows)

    async def events(self) -> AsyncIterator[StreamedEvent]:
        """Events of the run: those retained (1,024), then later ones until it ends."""
        number = 0
        while True:
            closed = self._feed.closed
            lost, frames = self._feed.since(number, EVENTS_AT_ONCE)
            if lost:
                yield StreamedEvent(0, "lost", {"count": lost, "reason": "they were read too late"})
            for frame in frames:
                assert isinstance(frame, EventRecord)
                number = frame.number
                yield StreamedEvent(number, frame.kind, frame.data)
            if closed and not frames:
                return
            if not frames:
                await self._feed.wait(number, EVENTS_S)

    async def set(self, values: Mapping[str, object] | None = None, **sections: object) -> int:
        """Change live settings, of several sections if need be: all of them, or none. Arguments and
        errors as for `RunHandle.set`. The new generation.
        """
        return self.control.change(handle.live_tables(values, sections), source="python")

    async def pause(self) -> str:
        """Pause after the current update. Returns the state that follows.

        Raises:
            StateConflictError: the run has ended or is ending.
        """
        return self.control.pause(source="python")

    async def resume(self) -> str:
        """Continue after `pause`. Returns and raises as `pause`."""
        return self.control.resume(source="python")

    async def drain(self) -> str:
        """Sample nothing new, train on what is there, then end. Returns and raises as `pause`."""
        return self.control.drain(source="python")

    async def checkpoint(self) -> str:
        """Request a checkpoint after the current update. Returns and raises as `pause`."""
        return self.control.request_checkpoint(source="python")

    async def stop(self) -> str:
        """Request the end with a last checkpoint; `wait` waits for it. Returns and raises as
        `pause`.
        """
        return self.control.stop(source="python")

    async def wait(self, timeout: float | None = None) -> Mapping[str, Any]:  # noqa: ASYNC109 - as for RunHandle
        """Wait until the run has ended; its summary. Cancelling the wait leaves the run as it is.

        Args:
            timeout: in seconds; None: no limit.

        Raises:
            RunTimeoutError: the run has not ended in time; it continues.
            RunError: the run failed.
        """
        done, _ = await asyncio.wait({self._session.finished}, timeout=timeout)
        if not done:
            raise RunTimeoutError(f"run {self.id!r} has not ended after {timeout:g} s")
        await asyncio.shield(self._session.finished)
        return self._session.run.snapshot.summary()

    async def policy(self) -> LoadedPolicy:
        """The policy of the newest checkpoint. Raises CheckpointError without one."""
        return await asyncio.to_thread(load_policy, self.directory, trust=True)

    def on(self, kind: str, callback: Callable[[StreamedEvent], object]) -> None:
        """Call ``callback(event)`` on this event loop for every event of a kind; it must not block.

        An exception in it goes to the exception handler of the loop; the run continues. Kinds as
        for `RunHandle.on`.

        Raises:
            ConfigError: no kind has this name.
        """
        task = asyncio.get_running_loop().create_task(
            self._deliver(handle.kind_named(kind), callback)
        )
        self.deliveries.add(task)
        task.add_done_callback(self.deliveries.discard)

    async def _deliver(self, kind: str, callback: Callable[[StreamedEvent], object]) -> None:
        async for event in self.events():
            if event.kind != kind:
                continue
            try:
                callback(event)
            except Exception as error:  # noqa: BLE001 - a callback of the user's may raise anything
                message = f"a callback for {kind!r} of run {self.id!r} failed"
                asyncio.get_running_loop().call_exception_handler(
                    {"message": message, "exception": error}
                )


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
    from tianflow.policy import load

    return load(checkpoint, runs_dir=Path(runs_dir), trust=trust)


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
    launcher = load_launcher(config)
    require_machine(config, launcher)
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


def _new_name(config: Config) -> str:
    """A name of a run: its algorithm and the time."""
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%d-%H%M%S")
    return f"{config.algorithm.name}-{stamp}-{secrets.token_hex(2)}"


def batch_job(
    config: Config, resume: str | None, runs_dir: Path, arguments: tuple[str, ...]
) -> BatchJob | None:
    """The job of a run whose launcher gives it to a batch system; None for other launchers.

    Args:
        config: of the run.
        resume: run or checkpoint to continue from.
        runs_dir: directory of all runs.
        arguments: of ``tianflow train``, beside config, ``--resume`` and ``--runs-dir``.

    Raises:
        ConfigError: the launcher does not exist, or the job cannot be described.
        CheckpointError: ``resume`` does not exist, or the directory of the run is taken.
    """
    launcher = load_launcher(config)
    if not isinstance(launcher, SubmitsRuns):
        return None
    runs_dir = runs_dir.absolute()
    checkpoint = None if resume is None else _resumed(config, resume, runs_dir)
    if checkpoint is not None:
        checkpoint.require_resumable()
        _require_same_source(config, checkpoint)
        resume = str(checkpoint.path)
    if checkpoint is not None and _continues(config, checkpoint, runs_dir):
        name = checkpoint.path.parent.parent.name
    else:
        name = config.run.name or _new_name(config)
        _require_free(runs_dir / name)
    contact = ControlFile.read(runs_dir / name)
    if contact is not None and contact.alive:
        raise CheckpointError(f"run {name!r} is active at {contact.address}; stop it first")
    order = RunOrder(config, name, runs_dir, resume, arguments)
    return launcher.job(order)


def _require_free(directory: Path) -> None:
    """Refuse a directory that has the files of a run."""
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(
            f"{str(directory)!r} exists; choose another run.name, or continue that run: "
            f"--resume {directory.name}"
        )


def _directory(
    config: Config, checkpoint: Checkpoint | None, runs_dir: Path
) -> tuple[str, Path, int]:
    """The name of the run, its directory, and the descriptor that locks the directory. A resumed
    run continues in its own directory if the checkpoint lies there.
    """
    continues = checkpoint is not None and _continues(config, checkpoint, runs_dir)
    if checkpoint is not None and continues:
        directory = checkpoint.path.parent.parent
        run_id = directory.name
    else:
        run_id = config.run.name or _new_name(config)
        directory = runs_dir / run_id
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        held = lock_directory(directory)
        stack.callback(os.close, held)
        if not continues:  # a resumed run writes them once its learner works
            _require_free(directory)
            config_loading.write_config(directory, config)
        stack.pop_all()
    return run_id, directory, held
