"""Access control: tokens, and checks of the Host and Origin headers against requests from foreign
web pages.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import SplitResult, urlsplit

from aiohttp import web

from tianflow.errors import ConfigError, Problem
from tianflow.server.common import console
from tianflow.server.common.connections import note_authorised
from tianflow.server.common.problems import Handler, ProblemError

OPEN = frozenset({"/livez", "/readyz"}) | console.PATHS
OPEN_ON_LOOPBACK = frozenset({"/metrics"})
READ_METHODS = frozenset({"GET", "HEAD"})
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names by which this machine calls itself. They also hold when a port is forwarded, for example
into a container.
"""


@dataclass(frozen=True, slots=True)
class Tokens:
    """``control`` allows everything, ``read`` reading only. Both empty: access without a token."""

    control: str
    read: str

    def __post_init__(self) -> None:
        if bool(self.control) != bool(self.read) or (self.control and self.control == self.read):
            raise ValueError(
                "two different tokens are required, or none: a single token would allow everything"
            )

    @classmethod
    def make(cls) -> Tokens:
        """Generate two random tokens."""
        return cls(secrets.token_urlsafe(32), secrets.token_urlsafe(32))


NO_TOKENS = Tokens("", "")


class Guard:
    """Checks whether a request is allowed.

    Args:
        tokens: the accepted tokens.
        loopback: True when only this machine can connect.
        allowed_hosts: names of the server, besides localhost and the address of the connection.

    Raises:
        ConfigError: other machines can connect, but there are no tokens.
    """

    def __init__(
        self, *, tokens: Tokens, loopback: bool, allowed_hosts: tuple[str, ...] = ()
    ) -> None:
        if not tokens.control and not loopback:
            message = "would let every machine that reaches this address control the run"
            raise ConfigError(
                [
                    Problem(
                        "http.host",
                        None,
                        message,
                        "tokens, or a loopback address such as 127.0.0.1",
                    )
                ]
            )
        self._tokens, self._loopback = tokens, loopback
        self._allowed = frozenset(host.lower() for host in allowed_hosts)

    def check(self, request: web.Request) -> None:
        """Raise `ProblemError` (400, 401, 403 or 421) if the request is not allowed."""
        self._check_host(request)
        self._check_origin(request)
        if self._check_token(request):
            note_authorised(request)

    def _check_host(self, request: web.Request) -> None:
        host = _hostname(f"//{request.headers.get('Host', '')}")
        if not host:
            raise ProblemError(
                HTTPStatus.BAD_REQUEST, "The Host header is missing, or is not NAME or NAME:PORT."
            )
        local = request.get_extra_info("sockname") or ("",)
        # Other names that resolve to this machine are refused, because a web page can create such
        # a name (DNS rebinding).
        if host not in LOCAL_NAMES | self._allowed | {str(local[0]).lower()}:
            raise ProblemError(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"{host!r} is not a name of this server; add it to http.allowed_hosts.",
            )

    def _check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        if (
            origin is None
            or _split(origin).netloc.lower() == request.headers["Host"].lower()
            or _hostname(origin) in self._allowed
        ):
            return
        raise ProblemError(
            HTTPStatus.FORBIDDEN, "Web pages of another origin may not use this server."
        )

    def _check_token(self, request: web.Request) -> bool:
        """True if the request has a valid token, or none is required of any."""
        if not self._tokens.control:
            return True
        reading = request.method in READ_METHODS
        is_open = request.path in OPEN or (self._loopback and request.path in OPEN_ON_LOOPBACK)
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # Both comparisons always run, so that the duration does not reveal which one failed.
        control = _same(given.strip(), self._tokens.control)
        read = _same(given.strip(), self._tokens.read)
        valid = scheme.lower() == "bearer" and (control or read)
        if reading and is_open:
            return valid
        if not valid:
            raise ProblemError(
                HTTPStatus.UNAUTHORIZED,
                f"The token is {'wrong' if given else 'missing'}; send `Authorization: Bearer "
                "TOKEN`. It is in control.json in the directory of the run, or in service.json in "
                "the directory of the service's runs.",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if not (control or reading):
            raise ProblemError(
                HTTPStatus.FORBIDDEN, "This token allows reading only; use the control token."
            )
        return True


def guarded(guard: Guard, *, max_body: int) -> Any:
    """Middleware that checks each request with ``guard``, and refuses a body with a declared length
    of more than ``max_body`` bytes.
    """

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        guard.check(request)
        if (request.content_length or 0) > max_body:
            raise ProblemError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body exceeds {max_body} bytes."
            )
        return await handler(request)

    return checked


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def _hostname(url: str) -> str:
    """The host of a URL; empty if it has none, or names a user or a port that is not a number."""
    parts = _split(url)
    try:
        unusual = parts.username is not None or (parts.port or 0) < 0
    except ValueError:  # of the port
        unusual = True
    return "" if unusual else (parts.hostname or "").rstrip(".")


def _split(url: str) -> SplitResult:
    """Parts of a URL; all empty if it is not valid."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
