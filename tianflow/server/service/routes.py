"""The HTTP application of a service: accepts submissions, lists runs, and forwards requests to the
runs.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import re
import secrets
import time
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from aiohttp import web

from tianflow.config import loading as config_loading
from tianflow.config import rules as config_rules
from tianflow.config.imports import require_allowed
from tianflow.config.model import Config, HttpSettings
from tianflow.config.relevance import relevant
from tianflow.errors import ConfigError, Problem, StateConflictError
from tianflow.planning.initial import find_source
from tianflow.rundir.audit_log import NAME, read_page
from tianflow.rundir.checkpoints import CheckpointStore
from tianflow.server.common import console, history, pages
from tianflow.server.common import live_settings as settings
from tianflow.server.common.auth import Guard, guarded
from tianflow.server.common.bodies import read_in_time
from tianflow.server.common.openapi import RUN
from tianflow.server.common.problems import ProblemError, add_safe_headers, answers, json_response
from tianflow.server.common.sse import EventStreams
from tianflow.server.common.throttle import Throttle, throttled
from tianflow.server.run.app import ACTIONS, MAX_BODY, PARTS, href
from tianflow.server.service import metrics, openapi, rows
from tianflow.server.service.on_disk import RunsListed, RunsOnDisk
from tianflow.server.service.refusals import store_answers
from tianflow.server.service.relay import Relays
from tianflow.server.service.run_client import NoAnswerError, RunClient, unreachable
from tianflow.server.service.run_manager import ManagedRun, RunManager
from tianflow.server.service.run_process import SHOWN_TAIL, RunFiles
from tianflow.server.service.store import (
    ReusedKeyError,
    RunRecord,
    RunStore,
    StoreError,
    TakenError,
)

PAGE, LARGEST_PAGE = 50, 500
"""Number of runs in one answer: the default of ``limit``, and the maximum."""
DEEPEST = 32
"""Maximum levels of a submitted config; arguments of an environment may be nested."""
DISK_S = 5.0
"""Seconds between two looks for runs on disk that the store does not know."""
READY_S = 0.5
"""Seconds that /readyz waits for the store."""
KEY = "Idempotency-Key"
RUNS = "/api/v1/runs"
CONFIGS = "/api/v1/configs"
CHECKS = ("settings", "environment")
"""Values of ``check``, for a submission that is only checked. environment: it is made, too."""
FREE = tuple(
    f"{where}.{setting}"
    for where in ("config", "overrides")
    for setting in (
        "env.kwargs",
        "env.set",
        "evaluation.env.kwargs",
        "evaluation.env.set",
        "evaluation.further",
        "network.kwargs",
        "metrics.kwargs",
    )
)
"""Arguments of a user's code in a submission, which receives 2.0 as a float."""
ONE_CONFIG = "an object of sections, the name of a shipped config, or toml with the text of a file"


def make_app(
    *,
    manager: RunManager,
    store: RunStore,
    client: RunClient,
    guard: Guard,
    http: HttpSettings,
    allowed: Collection[str],
    check: Callable[[Config], Awaitable[None]],
) -> web.Application:
    """The application of a service.

    Args:
        manager: of the runs.
        store: records of the runs.
        client: of the runs.
        guard: of all routes.
        http: limits.
        allowed: modules whose objects a submitted config may name.
        check: raises ConfigError if a run of a submitted config would fail at its start.
    """
    requests: Counter[int] = Counter()
    throttle = Throttle(per_s=http.max_requests_per_s)
    middlewares = [
        answers(requests),
        throttled(throttle),
        guarded(guard, max_body=MAX_BODY),
        read_in_time,
        store_answers,
    ]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app.on_response_prepare.append(add_safe_headers)
    handlers = ServiceHandlers(
        manager=manager,
        store=store,
        client=client,
        requests=requests,
        allowed=allowed,
        check=check,
        max_streams=http.max_streams,
    )
    app.add_routes(handlers.routes())
    return app


class ServiceHandlers:
    """The handlers of all routes.

    Args:
        manager: of the runs.
        store: records of the runs.
        client: of the runs.
        requests: answered requests by status.
        allowed: modules whose objects a config may name.
        check: of submitted configs.
        max_streams: maximum number of event streams.
    """

    def __init__(
        self,
        *,
        manager: RunManager,
        store: RunStore,
        client: RunClient,
        requests: Mapping[int, int],
        allowed: Collection[str],
        check: Callable[[Config], Awaitable[None]],
        max_streams: int,
    ) -> None:
        self._manager, self._store, self._client, self._requests, self._allowed = (
            manager,
            store,
            client,
            requests,
            allowed,
        )
        self._check = check
        self._disk = RunsOnDisk(manager.files.runs)
        self._on_disk = RunsListed()
        self._looked_at = float("-inf")
        self._streams, self._relays = EventStreams(limit=max_streams), Relays(client=client)

    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        parts = "|".join((*PARTS, *settings.RESOURCES))
        return [
            *console.routes(),
            web.get("/livez", self.livez),
            web.get("/readyz", self.readyz),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.openapi),
            web.get(CONFIGS, self.list_configs),
            web.get(RUNS, self.list_runs),
            web.post(RUNS, self.submit),
            web.get(RUN, self.show_run),
            web.delete(RUN, self.delete),
            web.get(f"{RUN}/log", self.log),
            web.get(f"{RUN}/events", self.events, allow_head=False),
            web.get(f"{RUN}/{{part:{parts}}}", self.show_part),
            web.patch(f"{RUN}/{{part:{'|'.join(settings.RESOURCES)}}}", self.change),
            web.post(f"{RUN}/{{action:{'|'.join(ACTIONS)}}}", self.act),
        ]

    async def livez(self, _request: web.Request) -> web.Response:
        """200: the event loop responds."""
        return json_response({"alive": True})

    async def readyz(self, _request: web.Request) -> web.Response:
        """200 while the service accepts work, else 503 with the reason."""
        try:
            async with asyncio.timeout(READY_S):
                await self._manager.query(self._store.counts)
            reason = "the service is stopping" if self._manager.stopping.is_set() else ""
        except TimeoutError:
            reason = f"the store of runs did not answer within {READY_S:g} s"
        except StoreError as error:
            reason = str(error)
        if reason:
            retry = {"Retry-After": "1"}
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"The service accepts no work: {reason}.",
                kind="not-ready",
                headers=retry,
                reasons=[reason],
            )
        return json_response({"ready": True})

    async def metrics(self, request: web.Request) -> web.Response:
        """Metrics of the service and all active runs, as Prometheus text or OpenMetrics."""
        accept = request.headers.get("Accept", "")
        contacts = [
            managed.contact
            for managed in self._manager.active.values()
            if managed.contact is not None
        ]
        exposed = await asyncio.gather(
            *(self._client.metrics(contact, accept) for contact in contacts)
        )
        counts = await self._manager.query(self._store.counts)
        collector = metrics.ServiceCollector(
            counts=counts, restarts=self._manager.restarts, requests=self._requests
        )
        body, content_type = await asyncio.to_thread(metrics.exposition, collector, exposed, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def openapi(self, _request: web.Request) -> web.Response:
        """The OpenAPI document of the service."""
        return json_response(
            await asyncio.to_thread(openapi.document, parts=PARTS, actions=ACTIONS)
        )

    async def list_runs(self, request: web.Request) -> web.Response:
        """Short documents of runs, newest first, one page at a time."""
        limit = pages.whole_number(request, "limit", PAGE, minimum=1, maximum=LARGEST_PAGE)
        before = pages.whole_number(request, "before", None, minimum=1, maximum=pages.FURTHEST)
        records = await self._manager.query(self._store.page, before=before, limit=limit + 1)
        shown = records[:limit]
        next_page = (
            f"{RUNS}?limit={limit}&before={shown[-1].number}" if len(records) > limit else None
        )
        active = dict(self._manager.active)
        runs = await asyncio.to_thread(
            lambda: [self._short(record, active.get(record.id)) for record in shown]
        )
        on_disk = await self._listed_on_disk() if before is None else RunsListed()
        return json_response(
            {
                "runs": runs,
                "next": next_page,
                "on_disk": on_disk.runs,
                "on_disk_more": on_disk.more,
                "can_submit": True,
            }
        )

    def _short(self, record: RunRecord, managed: ManagedRun | None) -> dict[str, Any]:
        """The short document of a run. Waits for the disk."""
        summary = self._manager.files.summary(record.id) if record.ended is not None else None
        return rows.short(record, managed, summary)

    async def _listed_on_disk(self) -> RunsListed:
        """Runs on disk that the store does not know. The directory is read at intervals: a console
        asks every two seconds.
        """
        now = time.monotonic()
        if now - self._looked_at >= DISK_S:
            self._looked_at = now
            # a run is stored before it has a directory, so the store is read last
            found = await asyncio.to_thread(self._disk.names)
            known = await self._manager.query(self._store.names)
            only = [name for name in found if name not in known]
            self._on_disk = await asyncio.to_thread(self._disk.listed, only)
        return self._on_disk

    async def submit(self, request: web.Request) -> web.Response:
        """Submit a run: 201 with its location. The same `Idempotency-Key` with the same body gives
        the same run. A config whose run would fail at its start is refused, if that is known within
        `submission_checks.ANSWER_S`. With ``check`` in the query, the config is only checked: 200.
        """
        key, body = _key(request), await request.read()
        if (check := request.query.get("check")) is not None:
            return await self._check_only(request, body, check)
        if self._manager.stopping.is_set():
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "The service is stopping.",
                headers={"Retry-After": "5"},
            )
        config = await asyncio.to_thread(self._checked, request, body)
        name = config.run.name or _new_name(config.algorithm.name)
        tables = config.model_dump(mode="json")
        tables["run"]["name"] = name
        digest = hashlib.sha256(body).hexdigest()
        if await asyncio.to_thread(self._manager.files.run(name).exists):
            known = await self._manager.query(self._store.get, name)
            if known is None or key is None:
                raise StateConflictError(f"run {name!r} exists already; choose another run.name")
        # a repeated submission gets its run, whatever has become of the environment meanwhile
        if key is None or await self._manager.query(self._store.by_key, key) is None:
            with _paths_below_config():
                await self._check(config)
        try:
            record, new = await self._manager.query(
                self._store.add,
                name,
                config=tables,
                source=f"http:{request.remote}",
                now=time.time(),
                key=key,
                body=digest,
            )
        except TakenError as error:
            raise StateConflictError(str(error)) from error
        except ReusedKeyError as error:
            raise ProblemError(
                HTTPStatus.UNPROCESSABLE_ENTITY, f"{str(error).capitalize()}.", kind="reused-key"
            ) from error
        if new:
            self._manager.wake()
        answer = rows.short(record, self._manager.active.get(record.id))
        return json_response(answer, HTTPStatus.CREATED, headers={"Location": href(record.id)})

    async def _check_only(self, request: web.Request, body: bytes, check: str) -> web.Response:
        """200 for a config that a submission would accept. Nothing is stored."""
        if check not in CHECKS:
            raise ProblemError(HTTPStatus.BAD_REQUEST, f"check must be {' or '.join(CHECKS)}.")
        config = await asyncio.to_thread(self._checked, request, body)
        if check == "environment":
            with _paths_below_config():
                await self._check(config)
        return json_response(
            {
                "valid": True,
                "environment": config.env.id,
                "algorithm": config.algorithm.name,
                "advice": config_rules.advice(config),
            }
        )

    async def list_configs(self, _request: web.Request) -> web.Response:
        """The shipped configs, as text."""
        return json_response({"configs": await asyncio.to_thread(_shipped)})

    async def show_run(self, request: web.Request) -> web.StreamResponse:
        """The full document of a run; from the store if the run is not active, and from its files
        if the store does not know it.
        """
        found = await self._find_any(request)
        if isinstance(found, str):
            return json_response(await asyncio.to_thread(self._disk.document, found))
        record, managed = found
        if managed is not None and managed.contact is not None:
            return await self._client.forward(managed.contact, request, "")
        summary = await asyncio.to_thread(self._manager.files.summary, record.id)
        return json_response(rows.full(record, managed, summary))

    async def delete(self, request: web.Request) -> web.Response:
        """Delete an ended run: 200. Repeating it is not an error."""
        name = request.match_info["run"]
        if await self._manager.query(self._store.get, name) is None:
            if await self._manager.query(self._store.deletion, name) is None:
                raise await self._missing(name)
        else:
            await self._manager.delete(name, f"http:{request.remote}")
        return json_response({"id": name, "action": "delete", "state": "deleted"})

    async def log(self, request: web.Request) -> web.Response:
        """The end of the output of the run's process."""
        record, _ = await self._find(request)
        text = await asyncio.to_thread(self._manager.files.tail, record.id, SHOWN_TAIL)
        return web.Response(text=text)

    async def show_part(self, request: web.Request) -> web.StreamResponse:
        """One part of a run. Settings, audit log, checkpoints and history of a finished run are
        read from its files.
        """
        part = request.match_info["part"]
        found = await self._find_any(request)
        if isinstance(found, str):
            return await self._part_on_disk(found, part, request)
        record, managed = found
        if managed is not None and managed.contact is not None:
            return await self._client.forward(managed.contact, request, f"/{part}")
        if part == "history":
            return await history.answer(self._manager.files.run(record.id), request)
        if part == "config":
            in_force = await asyncio.to_thread(self._manager.files.settings, record.id)
            return json_response({"config": relevant(rows.settings(record, in_force))})
        if part == "audit":
            before, limit = pages.requested(request)
            page = await asyncio.to_thread(
                read_page, self._manager.files.run(record.id) / NAME, before=before, limit=limit
            )
            return json_response({"audit": page.records, "next": page.next})
        if part != "checkpoints":
            raise _unavailable(record, managed)
        return json_response(
            {part: await asyncio.to_thread(_checkpoints, self._manager.files, record.id)}
        )

    async def _part_on_disk(self, name: str, part: str, request: web.Request) -> web.Response:
        """A part of a run that the store does not know, from its files."""
        if part == "history":
            return await history.answer_with(lambda: self._disk.rows(name), request)
        if part == "config":
            return json_response({"config": await asyncio.to_thread(self._disk.settings, name)})
        if part != "audit":
            raise await self._missing(name)
        before, limit = pages.requested(request)
        page = await asyncio.to_thread(lambda: self._disk.audit(name, before=before, limit=limit))
        return json_response({"audit": page.records, "next": page.next})

    async def change(self, request: web.Request) -> web.StreamResponse:
        """Change live settings of an active run."""
        record, managed = await self._find(request)
        if managed is None or managed.contact is None:
            raise _unavailable(record, managed)
        part = request.match_info["part"]
        if request.content_type == settings.MERGE_PATCH:  # the run refuses other types
            patch = settings.parse(await request.read())
            settings.check_depth(part, patch)
            # in a thread, because it may import a module
            await asyncio.to_thread(require_allowed, {part: patch}, self._allowed)
        return await self._client.forward(managed.contact, request, f"/{part}")

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Events of a run as they happen."""
        record, managed = await self._find(request)
        if managed is None or managed.contact is None:
            raise _unavailable(record, managed)
        with self._streams.reserve():
            try:
                async with self._relays.reading(managed.contact) as relay:
                    return await self._streams.write(relay, request)
            except NoAnswerError as error:
                raise unreachable(managed.contact, error) from error

    async def act(self, request: web.Request) -> web.StreamResponse:
        """Request an action: 202 with the resulting state. Repeating an action is not an error."""
        record, managed = await self._find(request)
        action = request.match_info["action"]
        if managed is not None and managed.contact is not None:
            try:
                return await self._client.forward(managed.contact, request, f"/{action}")
            except ProblemError:
                if action != "stop":
                    raise
                record, managed = await self._find(request)  # the run may have ended meanwhile
        if action == "stop":
            state = await self._manager.stop(record, f"http:{request.remote}")
        elif action == "resume" and managed is None:
            state = await self._manager.resume(record)
        else:
            raise _unavailable(record, managed)
        answer = {"id": record.id, "action": action, "state": state}
        return json_response(answer, HTTPStatus.ACCEPTED, headers={"Location": href(record.id)})

    async def _find(self, request: web.Request) -> tuple[RunRecord, ManagedRun | None]:
        """The record of the run, and its `ManagedRun` if it is active. Raises 404."""
        name = request.match_info["run"]
        record = await self._manager.query(self._store.get, name)
        if record is None:
            raise await self._missing(name)
        return record, self._manager.active.get(name)

    async def _find_any(self, request: web.Request) -> tuple[RunRecord, ManagedRun | None] | str:
        """As `_find`; the name of a run that is on disk and not in the store."""
        name = request.match_info["run"]
        record = await self._manager.query(self._store.get, name)
        if record is not None:
            return record, self._manager.active.get(name)
        if await asyncio.to_thread(self._disk.has, name):
            return name
        raise await self._missing(name)

    async def _missing(self, name: str) -> Exception:
        """404 for a run that the store does not know. 409 if it is on disk: it can be read there,
        and this service neither asks nor changes it.
        """
        if await asyncio.to_thread(self._disk.has, name):
            return StateConflictError(await asyncio.to_thread(self._disk.refusal, name))
        more = ""
        deletion = await self._manager.query(self._store.deletion, name)
        if deletion is not None:
            when = dt.datetime.fromtimestamp(deletion.time, dt.UTC).isoformat(timespec="seconds")
            more = f" It was deleted by {deletion.source} at {when}."
        return ProblemError(HTTPStatus.NOT_FOUND, f"Run {name!r} does not exist.{more}")

    def _checked(self, request: web.Request, body: bytes) -> Config:
        """Validate a submitted config. Waits for files. Raises ConfigError with paths below
        ``config``.
        """
        if request.content_type != "application/json":
            raise ProblemError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body must have the type application/json."
            )
        document = settings.parse(body, free=FREE)
        settings.check_depth("config", document, DEEPEST)
        problems = list(_shape(document))
        if problems:
            raise ConfigError(problems)
        assert isinstance(document, dict)
        source, overrides = document.get("config"), document.get("overrides", {})
        if source is None:
            source = _tables(document["toml"])
            settings.check_depth("toml", source, DEEPEST)
        with _paths_below_config():
            require_allowed(overrides, self._allowed)
            if isinstance(source, str):
                config = config_loading.load_shipped(source, overrides)
            else:
                require_allowed(source, self._allowed)
                config = config_loading.load_config(source, overrides)
            if config.run.init_from is not None:
                find_source(config.run.init_from, self._manager.files.runs)
            return config


def _shape(document: object) -> Any:
    if not isinstance(document, dict) or not {"config", "toml"} & set(document):
        yield Problem("config", None, "is missing", ONE_CONFIG)
        return
    for key in sorted(set(document) - {"config", "toml", "overrides"}):
        yield Problem(key, document[key], "is not a known key", "config, toml, overrides")
    if {"config", "toml"} <= set(document):
        yield Problem("toml", None, "is given beside config", "one of config and toml")
    if "config" in document and not isinstance(document["config"], dict | str):
        yield Problem("config", document["config"], "is not a valid config", ONE_CONFIG)
    if "toml" in document and not isinstance(document["toml"], str):
        yield Problem("toml", document["toml"], "is not a text", "the text of a config file")
    overrides = document.get("overrides", {})
    if not isinstance(overrides, dict):
        yield Problem(
            "overrides",
            overrides,
            "are not valid overrides",
            'an object such as {"balance.max_staleness": 2}',
        )
        return
    for path in overrides:
        if "." not in path:
            yield Problem(
                f"config.{path}", overrides[path], "is not the path of a setting", "section.key"
            )


def _tables(text: str) -> dict[str, Any]:
    """The tables of a config file that was submitted as ``text``. Raises ConfigError with the line
    of the mistake.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem("toml", None, f"is not TOML: {error}")]) from error


def _shipped() -> list[dict[str, str]]:
    """Name, first sentence and text of each shipped config. Waits for the disk."""
    texts = {
        name: path.read_text(encoding="utf-8") for name, path in config_loading.shipped().items()
    }
    return [
        {"name": name, "summary": config_loading.summary_of(text), "toml": text}
        for name, text in sorted(texts.items())
    ]


@contextmanager
def _paths_below_config() -> Iterator[None]:
    """Name problems by their paths in the body of a submission."""
    try:
        yield
    except ConfigError as error:
        problems = [
            Problem(
                f"config.{problem.path}",
                problem.value,
                problem.message,
                problem.accepted,
                problem.nearest,
            )
            for problem in error.problems
        ]
        raise ConfigError(problems) from error


def _unavailable(record: RunRecord, managed: ManagedRun | None) -> Exception:
    """Why the run cannot answer this request now."""
    if managed is not None or record.state == "running":
        why = managed.problem if managed is not None else "it waits for capacity"
        return ProblemError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"Run {record.id!r}: {why}.",
            headers={"Retry-After": "1"},
        )
    why = f": {record.reason}" if record.state == "failed" and record.reason else ""
    return StateConflictError(f"run {record.id!r} is {record.state}{why}")


def _checkpoints(files: RunFiles, name: str) -> list[Any]:
    return list(CheckpointStore(files.run(name) / "checkpoints", keep=1).list())


def _new_name(algorithm: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", algorithm.rpartition(":")[2])
    return f"{stem}-{dt.datetime.now(dt.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _key(request: web.Request) -> str | None:
    key = request.headers.get(KEY)
    if key is not None and re.fullmatch(openapi.A_KEY, key) is None:
        raise ProblemError(HTTPStatus.BAD_REQUEST, f"{KEY} must have 1 to 255 ASCII characters.")
    return key
