"""HTTP client of runs and services: finds a run, sends requests, follows its event stream, and
turns refusals into messages.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tianflow import plugins
from tianflow.config.portable import require_portable
from tianflow.errors import ConfigError, Problem, RequestError, RunNotFoundError
from tianflow.rundir.control_file import NAME, SERVICE, ControlFile

RESOURCES = {
    section: section
    for section in (
        "actors",
        "balance",
        "env",
        "evaluation",
        "inference",
        "learner",
        "replay",
        "weights",
    )
} | {"algorithm": "learner"}
"""HTTP resource of the live settings of each section."""

ALL = tuple(dict.fromkeys(RESOURCES.values()))
MERGE_PATCH = "application/merge-patch+json"
ANSWER_S = 10.0
"""Timeout of a request, in seconds."""
SUBMISSION_S = 60.0
"""Timeout of a submission, in seconds: the service makes the environment before it answers."""
SILENCE_S = 45.0
"""Timeout of an event stream: three heartbeats of the server."""
LONGEST_LINE = 2**20
PAUSE_S = 1.0
"""Seconds before a broken event stream is connected again."""
TRIES = 30
"""Consecutive connections without an event, after which `listen` fails."""
TOKEN = "TIANFLOW_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the token of a service that is named by its address."""
BUSY = frozenset({429, 503})
"""Statuses of a server that answers soon: a service starts the run, or the run ends."""
_BAD_REQUESTS = {400, 413, 415, 422}
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores a proxy in the environment: requests go to this machine or to a given service."""


@dataclass(frozen=True, slots=True)
class StreamedEvent:
    """One event of a run.

    Attributes:
        number: counts from 1 in each process of the run; 0 for a loss that the client noticed.
        kind: such as ``"evaluation-finished"``.
        data: fields of the event in `tianflow.core.events`; ``at`` is its Unix time in seconds.
            Updates and episodes of a quarter of a second are one event with their ``count``.
    """

    number: int
    kind: str
    data: Mapping[str, Any]


# Finding a run
# --------------------------------------------------------------------------------------------------


def running(runs_dir: Path) -> dict[str, ControlFile]:
    """Control files of the active runs under ``runs_dir``, by id."""
    found = [ControlFile.read(path.parent) for path in sorted(runs_dir.glob(f"*/{NAME}"))]
    return {file.run: file for file in found if file is not None and file.alive}


def crashed(runs_dir: Path) -> list[str]:
    """Runs under ``runs_dir`` that did not end, but whose process does not exist any more."""
    found = {
        path.parent.name: ControlFile.read(path.parent)
        for path in sorted(runs_dir.glob(f"*/{NAME}"))
    }
    return [name for name, file in found.items() if file is not None and not file.alive]


def service(runs_dir: Path) -> ControlFile | None:
    """Control file of the service that manages ``runs_dir``; None if no service is active."""
    found = ControlFile.read(runs_dir, SERVICE)
    return found if found is not None and found.alive else None


def at_address(address: str, token: str | None = None) -> ControlFile:
    """Contact of the service, or server of a run, at ``address``. ``token`` None: `TOKEN`.

    Raises:
        ConfigError: ``address`` is not an HTTP address.
    """
    if not address.startswith(("http://", "https://")):
        accepted = "an address such as http://127.0.0.1:8080"
        raise ConfigError([Problem("--address", address, "is not an HTTP address", accepted)])
    given = os.environ.get(TOKEN, "") if token is None else token
    return ControlFile(
        run="", pid=0, start_time=None, address=address.rstrip("/"), token=given, read_token=given
    )


def find(runs_dir: Path, run: str | None) -> ControlFile:
    """Control file of ``run``, or of the only active run.

    The service answers for its pending and finished runs.

    Raises:
        RunNotFoundError: naming the active runs.
    """
    active = running(runs_dir)
    names, where = ", ".join(active) or "none", str(runs_dir)
    if run is None:
        if len(active) == 1:
            return next(iter(active.values()))
        advice = (
            "name one"
            if active
            else "start one with `tianflow train`, or name the directory of runs with --runs-dir"
        )
        raise RunNotFoundError(f"{len(active)} runs are active in {where!r} ({names}): {advice}")
    if run in active:
        return active[run]
    if (manager := service(runs_dir)) is not None and knows(manager, run):
        return replace(manager, run=run)
    known = run not in {"", ".", ".."} and (runs_dir / run).is_dir()
    nearest = plugins.nearest(run, tuple(active))
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    resume, report = f"`tianflow train --resume {run}`", f"`tianflow report {run}`"
    ended = f"has ended ({resume} continues it, {report} shows it)"
    problem = ended if known else "does not exist"
    if run in crashed(runs_dir):
        problem = f"crashed (continue with `tianflow train --resume {run}`)"
    raise RunNotFoundError(f"run {run!r} {problem}; active in {where!r}: {names}{hint}")


def knows(manager: ControlFile, run: str) -> bool:
    """True if the service started a run of this name."""
    document = _document(manager, run)
    return bool(document) and not document.get("on_disk")


def shows(manager: ControlFile, run: str) -> bool:
    """True if the console of the service has a page for this run. It reads runs on disk, too."""
    return bool(_document(manager, run))


def _document(manager: ControlFile, run: str) -> dict[str, Any]:
    """The service's document of a run; {} without one."""
    try:
        return send(manager, "GET", f"/api/v1/runs/{urllib.parse.quote(run, safe='')}")
    except RequestError:
        return {}


# Requests
# --------------------------------------------------------------------------------------------------


def request(
    contact: ControlFile, method: str, path: str = "", body: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Send a request to ``/api/v1/runs/{id}{path}`` and return the JSON object of the answer.

    A body is sent as a merge patch. The entity tag, the generation of settings, is added as
    ``generation``.

    Raises:
        RequestError: the run refused, with its problem document as text, or did not answer.
    """
    return send(contact, method, contact.path(path), body)


def send(
    contact: ControlFile,
    method: str,
    path: str,
    body: Mapping[str, object] | None = None,
    *,
    content_type: str = MERGE_PATCH,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """As `request`, for any ``path`` and type of body. ``timeout_s``: by default `ANSWER_S`.

    Raises:
        ConfigError: JSON cannot represent a value of ``body``; nothing was sent.
        RequestError: the run refused the request, or did not answer.
    """
    require_portable(body or {})
    sent = {"Accept": "application/json", **(headers or {})}
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        sent["Content-Type"] = content_type
    limit = ANSWER_S if timeout_s is None else timeout_s
    with _opened(contact, method, path, sent, data, timeout=limit) as answer:
        text, tag = answer.read(), answer.headers.get("ETag", "")
    try:
        found = json.loads(text or b"{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RequestError(
            f"{_name(contact)} sent an answer that is not a JSON object; check the address"
        )
    return found | ({"generation": tag.strip('"')} if tag else {})


@contextmanager
def _opened(
    contact: ControlFile,
    method: str,
    path: str,
    headers: Mapping[str, str],
    data: bytes | None = None,
    *,
    timeout: float,
) -> Iterator[http.client.HTTPResponse]:
    """An answer, open for reading.

    Raises:
        RequestError: it is a refusal, it does not arrive, or its connection breaks.
    """
    request = urllib.request.Request(  # noqa: S310 - the address is that of our own control file
        contact.address + path,
        data=data,
        headers={**contact.authorization, **headers},
        method=method,
    )
    try:
        with _OPENER.open(request, timeout=timeout) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error.code, error.read()) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        message = f"{_name(contact)} does not answer: {reason}"
        if method != "GET" and isinstance(getattr(error, "reason", error), TimeoutError):
            message += f" after {timeout:g} s; it may do what was asked: see `tianflow status`"
        raise RequestError(message) from error


def _name(contact: ControlFile) -> str:
    return f"{f'run {contact.run!r}' if contact.run else 'the service'} at {contact.address}"


def all_runs(manager: ControlFile) -> Iterator[dict[str, Any]]:
    """Short documents of all runs of a service, newest first, then those of runs that are only on
    disk. Raises `RequestError`.
    """
    path: str | None = "/api/v1/runs"
    on_disk: list[dict[str, Any]] = []
    while path:
        answer = send(manager, "GET", path)
        yield from answer["runs"]
        on_disk += answer.get("on_disk", ())
        path = answer.get("next")
    yield from ({**run, "on_disk": True} for run in on_disk)


# Events
# --------------------------------------------------------------------------------------------------


def stream(contact: ControlFile, number: int, *, follow: bool) -> Iterator[StreamedEvent]:
    """Events of a run after ``number``, over one connection.

    Raises:
        RequestError: the run refused, the connection broke, or an event is invalid.
    """
    path = contact.path(f"/events?follow={str(follow).lower()}")
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(number)}
    with _opened(contact, "GET", path, headers, timeout=SILENCE_S) as answer:
        try:
            yield from parse(answer)
        except ValueError as error:
            raise RequestError(f"{_name(contact)} sent an invalid event: {error}") from error


def listen(
    contact: ControlFile,
    *,
    again: Callable[[ControlFile, RequestError | None], ControlFile | None],
    follow: bool,
    pause: float = PAUSE_S,
) -> Iterator[StreamedEvent]:
    """Events that the run retains; with ``follow`` also later ones, until it ends.

    A broken connection is resumed after the last event.

    Args:
        contact: of the run.
        again: returns where to connect next, from the last contact and its error. None: the run
            has ended.
        follow: whether later events are waited for.
        pause: seconds before each retry.

    Raises:
        RequestError: the run refuses the request, or does not answer.
    """
    server: ControlFile | None = contact
    number = failures = 0
    while server is not None:
        error = None
        try:
            for event in stream(server, number, follow=follow):
                number, failures = event.number, 0
                yield event
        except RequestError as caught:
            if caught.status and caught.status not in BUSY:
                raise
            error = caught
        if not follow and error is None:
            return
        failures += 1
        if not follow or failures >= TRIES:
            raise error or RequestError(
                f"run {server.run!r} at {server.address} closes its event stream"
            )
        time.sleep(pause)
        before, server = server, again(server, error)
        if number and server is not None and not _same_process(server, before):
            number = 0
            yield StreamedEvent(
                0, "lost", {"count": None, "reason": "the run continues in another process"}
            )


def reconnected(
    runs_dir: Path, server: ControlFile, error: RequestError | None
) -> ControlFile | None:
    """Where to connect next; None if the run has ended.

    A service that starts the run is busy (503) until the run answers for itself.
    """
    busy = error is not None and error.status in BUSY
    return running(runs_dir).get(server.run) or (server if busy and server.alive else None)


def _same_process(one: ControlFile, other: ControlFile) -> bool:
    return (one.pid, one.start_time) == (other.pid, other.start_time)


def parse(answer: http.client.HTTPResponse) -> Iterator[StreamedEvent]:
    """Parse server-sent events (HTML standard, section 9.2); a truncated last event is ignored.

    Raises:
        ValueError: an event without number or JSON object, or a line longer than `LONGEST_LINE`.
    """
    fields: dict[str, str] = {}
    while line := answer.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise ValueError("a line of the stream is too long")
        text = line.decode("utf-8").rstrip("\r\n")
        if text:  # a comment is a field without a name
            name, _, value = text.partition(":")
            fields[name] = value.removeprefix(" ")
        elif "data" in fields:
            data = json.loads(fields["data"])
            if not isinstance(data, dict):
                raise ValueError("the data of an event is not a JSON object")
            yield StreamedEvent(int(fields.get("id", "")), fields.get("event", "message"), data)
            fields = {}


# Live settings
# --------------------------------------------------------------------------------------------------


def resource(section: str) -> str:
    """HTTP resource of the live settings of ``section``. Raises `ConfigError` if it has none."""
    if section in RESOURCES:
        return RESOURCES[section]
    known = tuple(RESOURCES)
    message = "does not name a section with live settings"
    accepted, nearest = "one of " + ", ".join(known), plugins.nearest(section, known)
    raise ConfigError([Problem(section, None, message, accepted, nearest)])


def settings(contact: ControlFile, section: str) -> dict[str, Any]:
    """Live settings of ``section``, by name."""
    answer = request(contact, "GET", f"/{resource(section)}")
    answer.pop("generation", None)
    return answer


SCHEDULING = ("algorithm", "learner", "replay")
"""Sections with settings that may follow a schedule."""


class FoundSettings(NamedTuple):
    """Live settings of a run.

    Attributes:
        values: by name, as they are set.
        key: the single requested setting, or "".
        in_force: values of those that follow a schedule, by name.
    """

    values: dict[str, Any]
    key: str
    in_force: dict[str, float]


def get(runs_dir: Path, words: Sequence[str]) -> FoundSettings:
    """The live settings that ``words`` name.

    ``words`` is ``[RUN] [SECTION[.KEY]]``; without a section the settings of all sections are
    named ``SECTION.KEY``.

    Raises:
        TianflowError: the run, section or setting does not exist, or the run does not answer.
    """
    name = words[-1] if words else ""
    is_run = name not in RESOURCES and (name in running(runs_dir) or (runs_dir / name).is_dir())
    if not words or (len(words) == 1 and is_run):
        contact = find(runs_dir, name or None)
        found = {
            f"{_section(part, key)}.{key}": value
            for part in ALL
            for key, value in settings(contact, part).items()
        }
        return FoundSettings(found, "", schedules_in_force(contact))
    section, _, key = name.partition(".")
    resource(section)
    contact = find(runs_dir, words[0] if len(words) == 2 else None)
    values = settings(contact, section)
    if key and key not in values:
        nearest = plugins.nearest(key, tuple(values))
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        raise RequestError(
            f"{name} is not a live setting; accepted: one of {', '.join(sorted(values))}{hint}",
            bad=True,
        )
    shown = {key: values[key]} if key else values
    in_force = schedules_in_force(contact) if section in SCHEDULING else {}
    part = RESOURCES[section]
    names = {name: f"{_section(part, name)}.{name}" for name in shown if in_force}
    return FoundSettings(
        shown, key, {name: in_force[path] for name, path in names.items() if path in in_force}
    )


def schedules_in_force(contact: ControlFile) -> dict[str, float]:
    """Values in force of the settings that follow a schedule, by path. Values before the first
    update, and those of a run that is not active, are absent.
    """
    found = request(contact, "GET").get("settings")
    schedules = found.get("schedules") if isinstance(found, Mapping) else None
    return {
        str(path): state["value"]
        for path, state in (schedules if isinstance(schedules, Mapping) else {}).items()
        if isinstance(state, Mapping) and isinstance(state.get("value"), int | float)
    }


def _section(part: str, key: str) -> str:
    """The section that ``key`` of the resource ``part`` belongs to."""
    from tianflow.config.model import LIVE  # a tenth of a second, which most commands do not need

    return "algorithm" if part == "learner" and key not in LIVE["learner"] else part


def change(contact: ControlFile, name: str, values: Mapping[str, object]) -> dict[str, Any]:
    """Change settings of the resource ``name`` by a merge patch, all or none."""
    return request(contact, "PATCH", f"/{name}", values)


# Refusals
# --------------------------------------------------------------------------------------------------


def _refusal(status: int, body: bytes) -> RequestError:
    """Convert an RFC 9457 problem document to text: one line, and one per refused field."""
    bad = status in _BAD_REQUESTS
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        return RequestError(f"refused with status {status}", bad=bad, status=status)
    title, detail = (
        str(document.get("title") or f"refused with status {status}"),
        str(document.get("detail") or ""),
    )
    errors = document.get("errors")
    problems = (
        [_problem(error) for error in errors if isinstance(error, dict)]
        if isinstance(errors, list)
        else []
    )
    message = "\n".join([f"{title}: {detail}" if detail else title, *map(str, problems)])
    return RequestError(message, bad=bad, problems=problems, status=status)


def _problem(error: Mapping[str, Any]) -> Problem:
    texts = {key: str(error.get(key) or "") for key in ("path", "message", "accepted", "nearest")}
    return Problem(
        texts["path"], error.get("value"), texts["message"], texts["accepted"], texts["nearest"]
    )
