"""The HTTP application of a run: state, control and settings. It uses `RunControl` only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from tianflow.config.model import HttpSettings
from tianflow.config.relevance import relevant
from tianflow.core.jsonable import json_ready
from tianflow.interfaces import RunControl
from tianflow.observability.prometheus.prometheus import Exporter
from tianflow.observability.rates import RunRates
from tianflow.observability.run_document import describe, describe_components, describe_nodes
from tianflow.server.common import console, history, openapi, pages
from tianflow.server.common import live_settings as settings
from tianflow.server.common.auth import Guard, guarded
from tianflow.server.common.bodies import read_in_time
from tianflow.server.common.event_feed import Feed
from tianflow.server.common.openapi import RUN
from tianflow.server.common.problems import ProblemError, add_safe_headers, answers, json_response
from tianflow.server.common.sse import EventStreams
from tianflow.server.common.throttle import Throttle, throttled

MAX_BODY = 64 * 1024
"""Maximum bytes of a request's body; every patch is many times smaller."""
PARTS = ("components", "config", "diagnosis", "audit", "checkpoints", "history", "nodes")
ACTIONS = ("pause", "resume", "drain", "checkpoint", "stop")


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A run with its rates and events."""

    run: RunControl
    rates: RunRates
    feed: Feed


def make_app(*, runs: Mapping[str, ServedRun], guard: Guard, http: HttpSettings) -> web.Application:
    """The application for ``runs``, by id; each request reads the mapping again."""
    requests: Counter[int] = Counter()
    exporter = Exporter(
        runs=lambda: [served.run.statistics() for served in runs.values()], requests=requests
    )
    throttle = Throttle(per_s=http.max_requests_per_s)
    middlewares = [
        answers(requests),
        throttled(throttle),
        guarded(guard, max_body=MAX_BODY),
        read_in_time,
    ]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app.on_response_prepare.append(add_safe_headers)
    app.add_routes(
        RunHandlers(
            runs=runs, exporter=exporter, streams=EventStreams(limit=http.max_streams)
        ).routes()
    )
    return app


class RunHandlers:
    """The handlers of all routes.

    Args:
        runs: by id.
        exporter: of metrics.
        streams: of events.
    """

    def __init__(
        self, *, runs: Mapping[str, ServedRun], exporter: Exporter, streams: EventStreams
    ) -> None:
        self._runs, self._exporter, self._streams = runs, exporter, streams
        self._trial = asyncio.Lock()
        """Held while a change is tried on a new environment: clients start one of them at most."""

    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            *console.routes(),
            web.get("/livez", self.livez),
            web.get("/readyz", self.readyz),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.openapi),
            web.get("/api/v1/runs", self.list_runs),
            web.get(RUN, self.show_run),
            web.get(f"{RUN}/events", self.events, allow_head=False),
            web.get(f"{RUN}/{{part:{'|'.join(PARTS)}}}", self.show_part),
            web.post(f"{RUN}/{{action:{'|'.join(ACTIONS)}}}", self.act),
            web.get(f"{RUN}/{{resource:{'|'.join(settings.RESOURCES)}}}", self.show_settings),
            web.patch(f"{RUN}/{{resource:{'|'.join(settings.RESOURCES)}}}", self.patch_settings),
        ]

    async def livez(self, _request: web.Request) -> web.Response:
        """200 while the coordinator's last tick is recent."""
        stuck = [name for name, served in self._runs.items() if not served.run.alive]
        if stuck:
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"The coordinator of {', '.join(stuck)} does not respond.",
                headers={"Retry-After": "1"},
            )
        return json_response({"alive": True})

    async def readyz(self, _request: web.Request) -> web.Response:
        """200 when training can proceed, else 503 with the reasons."""
        statistics = [served.run.statistics() for served in self._runs.values()]
        reasons = [
            reason for run in statistics if not run.ready for reason in run.reasons or (run.state,)
        ]
        if reasons:
            detail = f"Training cannot proceed: {'; '.join(reasons)}."
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                detail,
                kind="not-ready",
                headers={"Retry-After": "1"},
                reasons=reasons,
            )
        return json_response({"ready": True})

    async def metrics(self, request: web.Request) -> web.Response:
        """Metrics as Prometheus text or OpenMetrics."""
        body, content_type = self._exporter.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def openapi(self, _request: web.Request) -> web.Response:
        """The OpenAPI document of this server."""
        configs = {name: served.run.config for name, served in self._runs.items()}
        return json_response(
            await asyncio.to_thread(openapi.document, configs, parts=PARTS, actions=ACTIONS)
        )

    async def list_runs(self, _request: web.Request) -> web.Response:
        """Short documents of all runs."""
        statistics = {name: served.run.statistics() for name, served in self._runs.items()}
        runs = [
            {"id": name, "state": run.state, "ready": run.ready, "href": href(name)}
            for name, run in statistics.items()
        ]
        return json_response({"runs": runs})

    async def show_run(self, request: web.Request) -> web.Response:
        """The full document of a run."""
        served = self._served(request)
        return json_response(describe(served.rates.sample(), served.run.config, served.rates))

    async def show_part(self, request: web.Request) -> web.Response:
        """Components, nodes, settings, diagnosis, audit log, checkpoints or history."""
        run, part = self._served(request).run, request.match_info["part"]
        if part == "history":
            return await history.answer(run.directory, request)
        if part == "config":
            return json_response({"config": relevant(run.config.model_dump(mode="json"))})
        if part == "components":
            return json_response({"components": describe_components(run.statistics())})
        if part == "nodes":
            return json_response({"nodes": describe_nodes(run.statistics())})
        if part == "diagnosis":
            return json_response({"id": run.id, **json_ready(run.statistics().diagnosis)})
        if part == "audit":
            before, limit = pages.requested(request)
            page = await run.read_audit(before=before, limit=limit)
            return json_response({"audit": page.records, "next": page.next})
        return json_response({"checkpoints": run.checkpoints()})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Events of a run as server-sent events."""
        return await self._streams.answer(self._served(request).feed, request)

    async def act(self, request: web.Request) -> web.Response:
        """Request an action: 202 with the resulting state. Repeating an action is not an error."""
        run, action = self._served(request).run, request.match_info["action"]
        methods = {
            "pause": run.pause,
            "resume": run.resume,
            "drain": run.drain,
            "checkpoint": run.request_checkpoint,
            "stop": run.stop,
        }
        state = methods[action](source=f"http:{request.remote}")
        return json_response(
            {"id": run.id, "action": action, "state": state},
            HTTPStatus.ACCEPTED,
            headers={"Location": href(run.id)},
        )

    async def show_settings(self, request: web.Request) -> web.Response:
        """Live settings of one resource."""
        return settings.show(self._served(request).run, request.match_info["resource"])

    async def patch_settings(self, request: web.Request) -> web.Response:
        """Change live settings by a merge patch."""
        run, resource = self._served(request).run, request.match_info["resource"]
        return await settings.patch(run, resource, request, trial=self._trial)

    def _served(self, request: web.Request) -> ServedRun:
        name = request.match_info["run"]
        served = self._runs.get(name)
        if served is None:
            raise ProblemError(
                HTTPStatus.NOT_FOUND,
                f"Run {name!r} does not exist; runs: {', '.join(self._runs) or 'none'}.",
            )
        return served


def href(name: str) -> str:
    """Path of a run."""
    return f"/api/v1/runs/{name}"
