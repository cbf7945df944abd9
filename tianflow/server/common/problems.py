"""Errors as RFC 9457 problem documents, without tracebacks."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from tianflow.core.jsonable import json_ready
from tianflow.errors import ConfigError, Problem, StateConflictError
from tianflow.logs import logger

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SAFE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
MOST_PROBLEMS = 32
"""Maximum number of problems in one answer."""
_log = logger("service")


class ProblemError(Exception):
    """An error answer. ``kind`` names its type; without one the status is enough. ``more`` are
    extra members of the document.
    """

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        *,
        kind: str = "",
        headers: Mapping[str, str] | None = None,
        **more: object,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.kind, self.headers, self.more = (
            status,
            detail,
            kind,
            dict(headers or {}),
            more,
        )

    def response(self) -> web.Response:
        """The answer, as ``application/problem+json``."""
        document: dict[str, Any] = {
            "type": f"/problems/{self.kind}" if self.kind else "about:blank",
            "title": self.kind.replace("-", " ").capitalize() or self.status.phrase,
            "status": self.status.value,
            "detail": self.detail,
        }
        return json_response(
            document | self.more,
            self.status,
            headers=self.headers,
            content_type="application/problem+json",
        )


def json_response(
    body: object,
    status: HTTPStatus = HTTPStatus.OK,
    *,
    headers: Mapping[str, str] | None = None,
    content_type: str = "application/json",
) -> web.Response:
    """``body`` as JSON; NaN and infinities become null."""
    text = json.dumps(json_ready(body), allow_nan=False)
    return web.Response(text=text, status=status, headers=headers, content_type=content_type)


def invalid_settings(error: ConfigError) -> ProblemError:
    """422: each refused setting with path, value, reason, accepted values and nearest name."""
    errors = [_error(problem) for problem in error.problems[:MOST_PROBLEMS]]
    unlisted = len(error.problems) - len(errors)
    detail = "The request was refused as a whole."
    if unlisted:
        detail += f" The first {len(errors)} problems are listed; there are {unlisted} more."
    return ProblemError(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        detail,
        kind="invalid-settings",
        errors=errors,
    )


def _error(problem: Problem) -> dict[str, object]:
    value = problem.value
    number = isinstance(value, float) and json_ready(value) is None
    return {
        "path": problem.path,
        "value": str(value) if number else value,
        "message": problem.message,
        "accepted": problem.accepted,
        "nearest": problem.nearest,
    }


def answers(requests: Counter[int]) -> Any:
    """The outermost middleware: converts every error to a problem document, and counts answers in
    ``requests`` by status.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except ProblemError as error:
            response = error.response()
        except ConfigError as error:
            response = invalid_settings(error).response()
        except StateConflictError as error:
            response = ProblemError(
                HTTPStatus.CONFLICT, str(error), kind="state-conflict"
            ).response()
        except web.HTTPException as error:
            response = _known(error).response()
        except Exception:  # noqa: BLE001 - the boundary: logged with a traceback, answered without one
            response = _unexpected(request).response()
        requests[response.status] += 1
        return response

    return answer


async def add_safe_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Add headers that forbid caching and content sniffing."""
    response.headers.update(SAFE)


def _known(error: web.HTTPException) -> ProblemError:
    headers = {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}
    details = {
        404: "This path does not exist.",
        405: "This path does not accept the method.",
        413: "The body is too large.",
    }
    return ProblemError(
        HTTPStatus(error.status), details.get(error.status, error.reason), headers=headers
    )


def _unexpected(request: web.Request) -> ProblemError:
    number = uuid.uuid4().hex
    _log.exception("a request failed", id=number, method=request.method, path=request.path)
    return ProblemError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "Unexpected error; the log has the details under this id.",
        kind="internal-error",
        id=number,
    )
