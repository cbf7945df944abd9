"""`RunHandle`: a run in another process, for a Python program, and the functions that make it.

A handle asks the HTTP server of the run, and reads the directory of the run after its end. It holds
no state of the run, so several handles of one run agree.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from tianflow import errors, plugins
from tianflow.errors import (
    ConfigError,
    Problem,
    RequestError,
    RunError,
    RunNotFoundError,
    RunTimeoutError,
    StateConflictError,
    TianflowError,
)
from tianflow.rundir.control_file import ControlFile
from tianflow.rundir.history import LIMIT, Row, read_rows
from tianflow.rundir.history import NAME as HISTORY
from tianflow.rundir.summary import ended_document, read_summary
from tianflow.server.common import client
from tianflow.server.common.client import StreamedEvent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tianflow.config.model import Config
    from tianflow.policy import LoadedPolicy

POLL_S = 0.2
"""Seconds between two looks at a run of another program."""
BUSY_S = 30.0
"""Seconds for which a service may be busy with the start or the end of a run."""
PAUSED_S = 5.0
"""Seconds between two checks whether a run that is waited for is paused."""
DELIVERY_S = 5.0
"""Seconds that the end of a wait allows for the callbacks of the last events."""
TAIL = 4096
"""Bytes of output that explain why a process ended."""
_BOOT = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "from tianflow.cli.background import main; gc.enable(); code = main(); "
    "gc.collect(); gc.freeze(); sys.exit(code)"  # it ends sooner, see `tianflow.__main__`
)
_REFUSALS: Mapping[str, type[TianflowError]] = {
    kind.__name__: kind
    for kind in (errors.CheckpointError, errors.EnvironmentFailedError, StateConflictError)
}
"""Errors that a process may report by name, besides `ConfigError` and `RunError`."""
KINDS = {
    name.rpartition("-")[0]: name
    for name in (
        "update-finished",
        "episodes-finished",
        "environment-failed",
        "evaluation-finished",
        "host-exited",
        "settings-changed",
    )
}
"""Kinds of events by their short names."""

Callback = Callable[[StreamedEvent], object]


def kind_named(name: str) -> str:
    """The kind of events that a program calls ``name``: ``"evaluation"``, or its full name.

    Raises:
        ConfigError: no kind has this name.
    """
    kind = KINDS.get(name, name)
    if kind not in {*KINDS.values(), "lost"}:
        message = "is not a kind of events"
        raise ConfigError([Problem("kind", name, message, ", ".join((*KINDS, "lost")))])
    return kind


def flat_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """History rows without nesting, by the names of sinks.

    Every row has ``t`` (seconds since the run began), ``time`` (Unix seconds) and ``state``. The
    newest evaluation of a row is ``eval/...``.
    """
    from tianflow.observability.sinks.base import points

    found = []
    for row in rows:
        values: dict[str, Any] = {"t": row["t"], "time": row["time"], "state": row["state"]}
        for point in points(row):
            values |= point.values
        found.append(values)
    return found


def as_arrays(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[np.float64]]:
    """Columns of flat rows as float64 ``[rows]``; NaN where a row lacks a number."""
    import numpy as np

    names = dict.fromkeys(
        name for row in rows for name, value in row.items() if not isinstance(value, str)
    )
    return {name: np.array([row.get(name, np.nan) for row in rows], np.float64) for name in names}


class RunHandle:
    """A run in another process. `tianflow.start` and `tianflow.attach` return it.

    Methods may be called from any thread, in a script and in a notebook. They block for one request
    at most, except `wait` and `events`.

    A handle of `tianflow.start` is a context manager: leaving it stops the run with a last
    checkpoint and waits for its end. A handle of `tianflow.attach` leaves the run as it is.

    Attributes:
        id: name of the run.
        directory: absolute path of the run's directory; None for a run at an address.
    """

    def __init__(
        self,
        name: str,
        *,
        directory: Path | None = None,
        manager: ControlFile | None = None,
        process: BackgroundProcess | None = None,
    ) -> None:
        self.id, self.directory = name, directory
        self._manager, self._process = manager, process
        self._last: ControlFile | None = None
        self._callbacks: list[tuple[str, Callback]] = []
        self._delivery: threading.Thread | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        where = self.directory if self._manager is None else self._manager.address
        return f"RunHandle({self.id!r}, {str(where)!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._process is None:
            return
        self._process.release()
        if kind is None:
            self.wait()
        else:  # the error of the block is the one to show
            self._process.ended.wait()

    # Reading
    # ----------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The run document, as `tianflow status RUN --json` prints it.

        ``state`` is starting, running, paused, draining, stopping, done, stopped or failed; pending
        in the queue of a service; crashed after a process that left no summary. A run that has
        ended has its ``summary``, too.

        Raises:
            RunNotFoundError: the directory of the run does not exist any more.
            RequestError: the run does not answer.
        """
        contact = self._contact()
        if contact is not None:
            try:
                found = self._read(contact)
            except RequestError as error:
                if error.status or self._contact() is not None:
                    raise
            else:
                left = None if found.get("ended") is None else self._left()
                return (left or {}) | found
        if (left := self._left()) is not None and not self._crashed():
            return left
        self._require_directory()
        reason = "its process ended without a summary"
        return {"id": self.id, "state": "crashed", "reasons": [reason]}

    @overload
    def metrics(self, *, arrays: Literal[False] = False) -> list[dict[str, Any]]: ...
    @overload
    def metrics(self, *, arrays: Literal[True]) -> dict[str, NDArray[np.float64]]: ...
    def metrics(
        self, *, arrays: bool = False
    ) -> list[dict[str, Any]] | dict[str, NDArray[np.float64]]:
        """The history of the run, oldest row first, also after its end.

        A row is a plain dict of numbers by the names of the sinks, such as
        ``"rollout/ep_rew_mean"``, ``"train/loss"``, ``"eval/mean_reward"`` and
        ``"balance/staleness/mean"``. ``t`` is in seconds since the run began. A row is written
        about once a second; at most 2,000 rows cover the whole run.

        Args:
            arrays: columns instead of rows: ``{name: float64 [rows]}``, NaN where a row lacks a
                number.

        Raises:
            RunNotFoundError: the directory of the run does not exist any more.
            RequestError: the run does not answer.
        """
        if self.directory is not None:
            self._require_directory()
            rows = read_rows(self.directory / HISTORY)
        else:
            rows = self._ask("GET", f"/history?points={LIMIT}")["history"]
        found = flat_rows(rows)
        return as_arrays(found) if arrays else found

    def events(self, *, follow: bool = True) -> Iterator[StreamedEvent]:
        """Events of the run: those that it retains (1,024), then later ones until it ends.

        A broken connection is resumed. A run that has ended has no events; those of a run in the
        queue of a service begin with its start.

        Args:
            follow: whether later events are waited for.

        Raises:
            RequestError: the run does not answer.
        """
        contact = self._contact()
        while follow and contact is not None and contact is not self._last:  # a service
            if self._read(contact).get("state") != "pending":
                break
            time.sleep(client.PAUSE_S)
            contact = self._contact()
        if contact is None:
            return
        yield from client.listen(contact, again=self._reconnected, follow=follow)

    def policy(self, *, trust: bool | Collection[str] | None = None) -> LoadedPolicy:
        """The policy of the newest checkpoint.

        Args:
            trust: True for a run whose modules may run here, or the modules that may. None: True
                for a run that this program started, else False, as for `tianflow.load_policy`.

        Raises:
            CheckpointError: there is no checkpoint yet, or it is damaged.
            ConfigError: its policy needs a module that is not trusted.
            RunNotFoundError: the directory of the run is not on this machine, or does not exist any
                more.
        """
        from tianflow.policy import load

        if self.directory is None:
            raise RunNotFoundError(
                f"run {self.id!r} is known by its address only; load_policy needs a copy of its "
                "directory"
            )
        self._require_directory()
        trusted = self._process is not None if trust is None else trust
        return load(self.directory, runs_dir=self.directory.parent, trust=trusted)

    # Control
    # ----------------------------------------------------------------------------------------------

    def set(self, values: Mapping[str, object] | None = None, **sections: object) -> int:
        """Change live settings of one section: all of them, or none.

        Args:
            values: ``{"balance.max_staleness": 4}``, or nested tables.
            sections: ``balance={"max_staleness": 4}``.

        Returns:
            The generation of the settings in force.

        Raises:
            ConfigError: a setting or value is refused, or several sections are named; nothing
                changed.
            StateConflictError: the run has ended or is ending.
            RequestError: the run does not answer.
        """
        tables = live_tables(values, sections)
        resources = {client.resource(section) for section in tables}
        if len(resources) != 1:
            message = "a change is atomic only within one section"
            raise ConfigError([Problem(" and ".join(tables), None, message, "one section a call")])
        changes = {key: value for table in tables.values() for key, value in table.items()}
        answer = self._ask("PATCH", f"/{resources.pop()}", changes)
        return int(answer.get("generation", 0))

    def pause(self) -> str:
        """Pause after the current update. Returns the state that follows.

        Raises:
            StateConflictError: the run has ended or is ending.
            RequestError: the run does not answer.
        """
        return self._act("pause")

    def resume(self) -> str:
        """Continue after `pause`. Returns and raises as `pause`."""
        return self._act("resume")

    def drain(self) -> str:
        """Sample nothing new, train on what is there, then end. Returns and raises as `pause`."""
        return self._act("drain")

    def checkpoint(self) -> str:
        """Request a checkpoint after the current update. Returns and raises as `pause`."""
        return self._act("checkpoint")

    def stop(self) -> str:
        """Request the end with a last checkpoint; `wait` waits for it. Returns and raises as
        `pause`.
        """
        return self._act("stop")

    def wait(self, timeout: float | None = None) -> Mapping[str, Any]:
        """Wait until the run has ended. Ctrl-C ends the wait and leaves the run as it is.

        A wait without a timeout warns (RuntimeWarning) if the run is paused. Callbacks have seen
        the events of the run then, unless they need more than five seconds.

        Args:
            timeout: in seconds; None: no limit.

        Returns:
            The summary, as ``summary.json`` holds it; the run document for a run at an address.

        Raises:
            RunTimeoutError: the run has not ended in time; it continues. It is a TimeoutError.
            RunError: the run failed (its first error), or its process was killed.
            RunNotFoundError: the run has ended, and its directory does not exist any more.
            RequestError: the service of the run does not answer.
        """
        began = time.monotonic()
        noted, next_check = timeout is not None, began + POLL_S
        while not self._over():
            now = time.monotonic()
            if timeout is not None and now - began >= timeout:
                raise RunTimeoutError(f"run {self.id!r} has not ended after {timeout:g} s")
            if not noted and now >= next_check:
                noted, next_check = self._note_if_paused(), now + PAUSED_S
            left = POLL_S if timeout is None else min(POLL_S, began + timeout - now)
            if self._process is None:
                time.sleep(max(0.0, left))
            else:
                self._process.ended.wait(max(0.0, left))
        if self._delivery is not None and self._delivery is not threading.current_thread():
            self._delivery.join(DELIVERY_S)
        return self._outcome()

    def on(self, kind: str, callback: Callback) -> None:
        """Call ``callback(event)`` for every event of a kind, until the run ends.

        One thread of this handle, named after the run, calls all callbacks, one after the other.
        The first `on` starts it, with the events that the run retains. An exception in a callback
        goes to `threading.excepthook`; the run and the other callbacks continue.

        Args:
            kind: ``"evaluation"``, ``"update"``, ``"episodes"``, ``"settings"``, ``"host"``,
                ``"environment"``, or the full name of the kind. ``"lost"``: events were lost.
            callback: receives a `StreamedEvent`.

        Raises:
            ConfigError: no kind has this name.
        """
        with self._lock:
            self._callbacks.append((kind_named(kind), callback))
            if self._delivery is None:
                self._delivery = threading.Thread(
                    target=self._deliver, name=f"events of {self.id}", daemon=True
                )
                self._delivery.start()

    def _deliver(self) -> None:
        for event in self.events():
            with self._lock:
                wanted = [call for kind, call in self._callbacks if kind == event.kind]
            for callback in wanted:
                try:
                    callback(event)
                except Exception as error:  # noqa: BLE001 - a callback of the user's may raise anything
                    found = (type(error), error, error.__traceback__, threading.current_thread())
                    threading.excepthook(threading.ExceptHookArgs(found))

    # Finding the run
    # ----------------------------------------------------------------------------------------------

    def _contact(self) -> ControlFile | None:
        """Where the run answers; None if it does not run."""
        if self._manager is not None:
            return self._manager
        assert self.directory is not None
        own = ControlFile.read(self.directory)
        if own is not None and own.alive:
            self._last = own
            return own
        manager = client.service(self.directory.parent)
        if manager is not None and self._is_known(contact := replace(manager, run=self.id)):
            return contact
        moved = not self.directory.exists() and self._last is not None and self._last.alive
        return self._last if moved else None

    @staticmethod
    def _is_known(contact: ControlFile) -> bool:
        """False if a service answers that it does not know the run. Without an answer it may."""
        try:
            client.request(contact, "GET")
        except RequestError as error:
            return error.status != 404
        return True

    def _reconnected(self, server: ControlFile, error: RequestError | None) -> ControlFile | None:
        if self.directory is None:
            return None if error is None else server
        return client.reconnected(self.directory.parent, server, error)

    def _ask(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        contact = self._contact()
        if contact is None:
            raise self._ended_error()
        try:
            return client.request(contact, method, path, body)
        except RequestError as error:
            if error.problems:
                raise ConfigError(error.problems) from None
            if error.status == 409:
                raise StateConflictError(str(error)) from None
            if not error.status and self._contact() is None:
                raise self._ended_error() from None
            raise

    def _read(self, contact: ControlFile) -> dict[str, Any]:
        """The run document. A server that is busy is asked again for `BUSY_S`."""
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                return client.request(contact, "GET")
            except RequestError as error:
                if error.status not in client.BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)
            contact = self._contact() or contact

    def _act(self, action: str) -> str:
        return str(self._ask("POST", f"/{action}").get("state", action))

    # After the end
    # ----------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        """True once the run has ended, or does not exist any more."""
        if self._process is not None:
            return self._process.ended.is_set()
        contact = self._contact()
        if contact is not None and contact.pid and contact is self._last:
            return False
        if contact is not None:  # a service
            return self._read(contact).get("ended") is not None
        return self._last is None or not self._last.alive or self._left() is not None

    def _note_if_paused(self) -> bool:
        try:
            state = self.status().get("state")
        except TianflowError:  # the wait itself finds out whether the run has ended
            return False
        if state != "paused":
            return False
        message = f"run {self.id!r} is paused: the wait ends after resume() or stop()"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return True

    def _outcome(self) -> Mapping[str, Any]:
        if self._process is not None and self._process.failure is not None:
            raise self._process.failure
        if self.directory is None:
            return self._outcome_at_address()
        self._require_directory()
        summary = None if self._crashed() else read_summary(self.directory)
        if summary is None:
            output = "" if self._process is None else self._process.output
            raise RunError(
                "coordinator",
                "its process ended without a summary, as after a kill or a lack of memory; "
                f"resume={self.id!r} continues it",
                output,
            )
        if summary.get("state") == "failed":
            component, _, reason = str(summary.get("error") or "run: it failed").partition(": ")
            raise RunError(component, reason)
        return summary

    def _outcome_at_address(self) -> Mapping[str, Any]:
        document = self._ask("GET", "")
        if document.get("state") == "failed":
            raise RunError("run", "; ".join(document.get("reasons") or ["it failed"]))
        return document

    def _left(self) -> dict[str, Any] | None:
        """The document of a run that has ended, from its directory."""
        return None if self.directory is None else ended_document(self.directory)

    def _crashed(self) -> bool:
        """True if a control file is left of a process that does not exist any more."""
        assert self.directory is not None
        own = ControlFile.read(self.directory)
        return own is not None and not own.alive

    def _require_directory(self) -> None:
        if self.directory is not None and not self.directory.is_dir():
            raise RunNotFoundError(
                f"the directory of run {self.id!r}, {str(self.directory)!r}, does not exist any "
                "more; if it was moved, attach the run at its new path"
            )

    def _ended_error(self) -> TianflowError:
        try:
            state = self.status()["state"]
        except TianflowError as error:
            return error
        return StateConflictError(
            f"run {self.id!r} has ended ({state}); resume={self.id!r} continues it"
        )


def live_tables(
    values: Mapping[str, object] | None, sections: Mapping[str, object]
) -> dict[str, Mapping[str, object]]:
    """Live settings by section, from dotted names, nested tables or keywords.

    Raises:
        ConfigError: there are none, or a name is not the path of a setting.
    """
    from tianflow.config.loading import nested

    flat: dict[str, object] = {}
    for name, value in {**(values or {}), **sections}.items():
        if isinstance(value, Mapping) and "." not in name:
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    if not flat:
        raise ConfigError([Problem("set", None, "names no setting", '{"section.key": value}')])
    return dict(nested(flat))


class BackgroundProcess:
    """The process of a run that this program started.

    Its standard input is a pipe that this program holds, so the end of the program ends the run
    with a last checkpoint. The process has a session of its own: Ctrl-C reaches this program only.

    Args:
        order: settings, resume and runs_dir; see `tianflow.cli.background`.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.ended = threading.Event()
        """Set after the end of the process."""
        self.failure: RunError | None = None
        """The first error of the run, known once it has ended."""
        self.output = ""
        """End of its standard output and error, known once it has ended."""
        self._written = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the reading thread
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and our own module
            [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._written,
            start_new_session=True,
        )
        self._first: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="process of a run", daemon=True).start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; the reading thread reports why

    def started(self) -> Path:
        """Wait until the run has started; its directory.

        Raises:
            TianflowError: it is refused, or its process died.
        """
        try:
            answer = self._first.get()
        except BaseException:  # Ctrl-C: the run has not begun, and nothing holds its handle
            self._process.kill()
            raise
        if "refused" in answer:
            self.ended.wait()
            raise _refusal(answer["refused"])
        if "directory" not in answer:
            raise self.failure or RunError(
                "start",
                f"the process of the run ended with code {self._process.returncode} before the run "
                "started",
                self.output,
            )
        return Path(answer["directory"])

    def release(self) -> None:
        """Request the end with a last checkpoint."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return

    def _read(self) -> None:
        """Read answers until the process ends."""
        assert self._process.stdout is not None
        first: dict[str, Any] | None = None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "failed" in answer:
                self.failure = RunError(**answer["failed"])
            elif first is None:
                first = answer
                self._first.put(answer)
        self._process.wait()
        size = self._written.seek(0, 2)
        self._written.seek(max(0, size - TAIL))
        self.output = self._written.read().decode(errors="replace").strip()
        for stream in (self._written, self._process.stdout):
            stream.close()
        self.release()
        self.ended.set()
        if first is None:
            self._first.put({})


def _refusal(refused: Mapping[str, Any]) -> TianflowError:
    if refused["problems"]:
        return ConfigError([Problem(**problem) for problem in refused["problems"]])
    return _REFUSALS.get(refused["kind"], TianflowError)(refused["message"])


def start_process(config: Config, *, resume: str | Path | None, runs_dir: Path) -> RunHandle:
    """Start a run in a process of its own, and wait until it has started.

    Raises:
        ConfigError: the config is refused; nothing was started.
        CheckpointError: the checkpoint to resume does not exist, or is damaged.
        RunError: the process of the run died.
    """
    process = BackgroundProcess(
        {
            "config": json.loads(config.model_dump_json()),
            "resume": None if resume is None else str(resume),
            "runs_dir": str(runs_dir.absolute()),
        }
    )
    directory = process.started()
    return RunHandle(directory.name, directory=directory, process=process)


def attach(
    run: str | Path | None, *, runs_dir: Path, address: str | None, token: str | None
) -> RunHandle:
    """A handle of a run that exists; see `tianflow.attach`."""
    if address is not None:
        manager = client.at_address(address, token)
        name = _only_run(manager) if run is None else str(run)
        contact = replace(manager, run=name)
        client.request(contact, "GET")  # refused, or unknown
        return RunHandle(name, manager=contact)
    if run is None:
        run = client.find(runs_dir, None).run
    path = Path(run) if isinstance(run, Path) or "/" in run else runs_dir / run
    directory = path.absolute()
    if not (directory / "config.toml").is_file():
        _require_queued(directory)
    return RunHandle(directory.name, directory=directory)


def _require_queued(directory: Path) -> None:
    """Raise RunNotFoundError, which names runs that exist, unless the run of ``directory`` has none
    because it is in the queue of a service.
    """
    parent, name = directory.parent, directory.name
    try:
        client.find(parent, name)
    except RunNotFoundError as error:
        runs = [path.parent.name for path in parent.glob("*/config.toml")]
        end = plugins.missing(name, runs, heading=f"runs in {str(parent)!r}, ended ones too")
        raise RunNotFoundError(f"run {name!r} {end}") from error


def _only_run(manager: ControlFile) -> str:
    names = [str(run["id"]) for run in client.send(manager, "GET", "/api/v1/runs")["runs"]]
    if len(names) != 1:
        known = ", ".join(names) or "none"
        raise RunNotFoundError(f"{len(names)} runs are at {manager.address} ({known}): name one")
    return names[0]
