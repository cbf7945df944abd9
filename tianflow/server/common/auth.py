"""Who may do what: tokens, and checks that a request was meant for this server and does not come
from a foreign web page.
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
from tianflow.server.common.problems import Handler, ProblemError

OPEN = frozenset({"/livez", "/readyz"}) | console.PATHS
OPEN_ON_LOOPBACK = frozenset({"/metrics"})
READ_METHODS = frozenset({"GET", "HEAD"})
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine for itself, also where a port is passed on from one address to another, as
into a container.
"""


@dataclass(frozen=True, slots=True)
class Tokens:
    """``control`` allows everything, ``read`` looking. Both empty: nobody is asked for one."""

    control: str
    read: str

    def __post_init__(self) -> None:
        if bool(self.control) != bool(self.read) or (self.control and self.control == self.read):
            raise ValueError(
                "either two different tokens or none: one alone would open what the other guards"
            )

    @classmethod
    def make(cls) -> Tokens:
        """Two new random ones."""
        return cls(secrets.token_urlsafe(32), secrets.token_urlsafe(32))


NO_TOKENS = Tokens("", "")


class Guard:
    """Lets a request through, or says why not.

    Args:
        tokens: what is asked for.
        loopback: True when only this machine can connect.
        allowed_hosts: names that the server is known by, besides localhost and the address a
            connection came in at.

    Raises:
        ConfigError: no tokens although other machines can connect.
    """

    def __init__(
        self, *, tokens: Tokens, loopback: bool, allowed_hosts: tuple[str, ...] = ()
    ) -> None:
        if not tokens.control and not loopback:
            message = "without a token, everyone who can reach this address could control the run"
            raise ConfigError(
                [
                    Problem(
                        "http.host",
                        None,
                        message,
                        "tokens, or an address that only this machine reaches, such as 127.0.0.1",
                    )
                ]
            )
        self._tokens, self._loopback = tokens, loopback
        self._allowed = frozenset(host.lower() for host in allowed_hosts)

    def check(self, request: web.Request) -> None:
        """Pass, or raise `ProblemError`: 400, 401, 403 or 421."""
        self._check_host(request)
        self._check_origin(request)
        self._check_token(request)

    def _check_host(self, request: web.Request) -> None:
        host = _hostname(f"//{request.headers.get('Host', '')}")
        if not host:
            raise ProblemError(HTTPStatus.BAD_REQUEST, "A Host header is needed.")
        local = request.get_extra_info("sockname") or ("",)
        # A name that merely resolves to this machine is refused: a web page could have made it do
        # so (DNS rebinding).
        if host not in LOCAL_NAMES | self._allowed | {str(local[0]).lower()}:
            raise ProblemError(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"This server is not {host!r}; http.allowed_hosts names what it may be called.",
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
            HTTPStatus.FORBIDDEN, "A page of another origin may not use this server."
        )

    def _check_token(self, request: web.Request) -> None:
        reading = request.method in READ_METHODS
        is_open = request.path in OPEN or (self._loopback and request.path in OPEN_ON_LOOPBACK)
        if not self._tokens.control or (reading and is_open):
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # Both comparisons always run: the time taken says nothing about which one failed where.
        control = _same(given.strip(), self._tokens.control)
        read = _same(given.strip(), self._tokens.read)
        if scheme.lower() != "bearer" or not (control or read):
            raise ProblemError(
                HTTPStatus.UNAUTHORIZED,
                "A token is needed, as `Authorization: Bearer TOKEN`; control.json holds it.",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if not (control or reading):
            raise ProblemError(HTTPStatus.FORBIDDEN, "This token allows looking only.")


def guarded(guard: Guard, *, max_body: int) -> Any:
    """The middleware that asks ``guard`` first, and refuses a body announced as longer than
    ``max_body`` bytes unread.
    """

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        guard.check(request)
        if (request.content_length or 0) > max_body:
            raise ProblemError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A body may have {max_body} bytes."
            )
        return await handler(request)

    return checked


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def _hostname(url: str) -> str:
    return (_split(url).hostname or "").rstrip(".")


def _split(url: str) -> SplitResult:
    """Its parts, all empty if it is none: anybody may send anything."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
