"""A plain client of a run's control server, for the command line: finds the run, asks, and tells
refusals readably.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tianflow import plugins
from tianflow.errors import ConfigError, Problem, TianflowError
from tianflow.rundir.control_file import NAME, SERVICE, ControlFile

RESOURCES = {
    section: section
    for section in ("actors", "balance", "evaluation", "learner", "replay", "weights")
} | {"algorithm": "learner"}
"""Where the live settings of each section are read and changed."""

ALL = tuple(dict.fromkeys(RESOURCES.values()))
MERGE_PATCH = "application/merge-patch+json"
_BAD_REQUESTS = {400, 413, 415, 422}


class RunNotFoundError(TianflowError):
    """No such run is going on, or the wish does not say which one is meant."""


class RequestError(TianflowError):
    """The run refused, or did not answer. ``bad`` is True when the request itself was at fault;
    ``problems`` are its fields that were.
    """

    def __init__(
        self, message: str, *, bad: bool = False, problems: Sequence[Problem] = ()
    ) -> None:
        self.bad, self.problems = bad, tuple(problems)
        super().__init__(message)


def running(runs_dir: Path) -> dict[str, ControlFile]:
    """The control files of all runs under ``runs_dir`` that are going on, by id."""
    found = [ControlFile.read(path.parent) for path in sorted(runs_dir.glob(f"*/{NAME}"))]
    return {file.run: file for file in found if file is not None and file.alive}


def broken_off(runs_dir: Path) -> list[str]:
    """Runs under ``runs_dir`` whose process is gone though they have not ended: it was killed, or
    the machine was.
    """
    found = {
        path.parent.name: ControlFile.read(path.parent)
        for path in sorted(runs_dir.glob(f"*/{NAME}"))
    }
    return [name for name, file in found.items() if file is not None and not file.alive]


def service(runs_dir: Path) -> ControlFile | None:
    """Where the service that holds the runs in ``runs_dir`` answers; None when there is none."""
    found = ControlFile.read(runs_dir, SERVICE)
    return found if found is not None and found.alive else None


def find(runs_dir: Path, run: str | None) -> ControlFile:
    """The control file of ``run``, or of the one run that is going on. A service answers for those
    that wait or have ended.

    Raises:
        RunNotFoundError: naming the runs that are going on.
    """
    here = running(runs_dir)
    names, where = ", ".join(here) or "none", str(runs_dir)
    if run is None:
        if len(here) == 1:
            return next(iter(here.values()))
        wish = (
            "name one"
            if here
            else "start one with `tianflow train`, or say with --runs-dir where runs are kept"
        )
        raise RunNotFoundError(f"{len(here)} runs are going on in {where!r} ({names}): {wish}")
    if run in here:
        return here[run]
    if (holder := service(runs_dir)) is not None and _knows(holder, run):
        return replace(holder, run=run)
    known = run not in {"", ".", ".."} and (runs_dir / run).is_dir()
    nearest = plugins.nearest(run, tuple(here))
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    is_ = "has ended" if known else "is not known"
    if run in broken_off(runs_dir):
        is_ = f"was broken off (tianflow train --resume {run} goes on from its newest checkpoint)"
    raise RunNotFoundError(f"run {run!r} {is_}; going on in {where!r}: {names}{hint}")


def request(
    contact: ControlFile, method: str, path: str = "", body: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Ask for ``/api/v1/runs/{id}{path}``; the answer's JSON object. A body is sent as a merge
    patch.

    The generation of settings, which comes as entity tag, is added under ``generation``.

    Raises:
        RequestError: with the problem document in words, or why there was no answer.
    """
    return ask(contact, method, f"/api/v1/runs/{contact.run}{path}", body)


def ask(
    contact: ControlFile,
    method: str,
    path: str,
    body: Mapping[str, object] | None = None,
    *,
    content_type: str = MERGE_PATCH,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """As `request`, for any ``path`` and type of body."""
    who = f"run {contact.run!r}" if contact.run else "the service"
    sent = {
        "Authorization": f"Bearer {contact.token}",
        "Accept": "application/json",
        **(headers or {}),
    }
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        sent["Content-Type"] = content_type
    wish = urllib.request.Request(contact.address + path, data=data, headers=sent, method=method)  # noqa: S310 - the address is that of our own control file
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # a proxy in the environment is not meant for the machine itself
    try:
        with opener.open(wish, timeout=10.0) as answer:
            found, tag = json.loads(answer.read() or b"{}"), answer.headers.get("ETag", "")
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error.code, error.read()) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise RequestError(f"{who} at {contact.address} does not answer: {reason}") from error
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RequestError(f"{who} at {contact.address} answered something that is no JSON object")
    return found | ({"generation": tag.strip('"')} if tag else {})


def all_runs(holder: ControlFile) -> Iterator[dict[str, Any]]:
    """Every run of a service in short, newest first. Raises `RequestError`."""
    path: str | None = "/api/v1/runs"
    while path:
        answer = ask(holder, "GET", path)
        yield from answer["runs"]
        path = answer.get("next")


def resource(section: str) -> str:
    """The resource that holds the live settings of ``section``. Raises `ConfigError` when it has
    none.
    """
    if section in RESOURCES:
        return RESOURCES[section]
    known = tuple(RESOURCES)
    message = "has no settings that change while a run goes on"
    raise ConfigError(
        [
            Problem(
                section,
                None,
                message,
                "one of " + ", ".join(known),
                plugins.nearest(section, known),
            )
        ]
    )


def settings(contact: ControlFile, section: str) -> dict[str, Any]:
    """Live settings of ``section``, by name."""
    answer = request(contact, "GET", f"/{resource(section)}")
    answer.pop("generation", None)
    return answer


def get(runs_dir: Path, wish: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Live settings by name, and the one of them that was asked for, or "".

    ``wish`` is ``[RUN] [SECTION[.KEY]]``; without a section they are those of all sections, named
    ``SECTION.KEY``.

    Raises:
        TianflowError: there is no such run, section or setting, or the run does not answer.
    """
    name = wish[-1] if wish else ""
    is_run = name not in RESOURCES and (name in running(runs_dir) or (runs_dir / name).is_dir())
    if not wish or (len(wish) == 1 and is_run):
        contact = find(runs_dir, name or None)
        return {
            f"{_section(part, key)}.{key}": value
            for part in ALL
            for key, value in settings(contact, part).items()
        }, ""
    section, _, key = name.partition(".")
    resource(section)
    values = settings(find(runs_dir, wish[0] if len(wish) == 2 else None), section)
    if key and key not in values:
        hint = (
            f"; did you mean {nearest!r}?"
            if (nearest := plugins.nearest(key, tuple(values)))
            else ""
        )
        raise RequestError(
            f"there is no {name}; accepted: one of {', '.join(sorted(values))}{hint}", bad=True
        )
    return ({key: values[key]} if key else values), key


def _section(part: str, key: str) -> str:
    """The section that ``key`` of the resource ``part`` belongs to."""
    from tianflow.config.model import LIVE  # a tenth of a second, which most commands do not need

    return "algorithm" if part == "learner" and key not in LIVE["learner"] else part


def change(contact: ControlFile, name: str, values: Mapping[str, object]) -> dict[str, Any]:
    """Change settings of the resource ``name`` by a merge patch, whole or not at all."""
    return request(contact, "PATCH", f"/{name}", values)


def _knows(holder: ControlFile, run: str) -> bool:
    try:
        return bool(ask(holder, "GET", f"/api/v1/runs/{urllib.parse.quote(run, safe='')}"))
    except RequestError:
        return False


def _refusal(status: int, body: bytes) -> RequestError:
    """An RFC 9457 problem document in words: one line, and one more for every field that is
    named.
    """
    bad = status in _BAD_REQUESTS
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        return RequestError(f"refused with status {status}", bad=bad)
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
    return RequestError(message, bad=bad, problems=problems)


def _problem(error: Mapping[str, Any]) -> Problem:
    texts = {key: str(error.get(key) or "") for key in ("path", "message", "accepted", "nearest")}
    return Problem(
        texts["path"], error.get("value"), texts["message"], texts["accepted"], texts["nearest"]
    )
