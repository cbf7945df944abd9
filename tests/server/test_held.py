"""Raw requests that no client library sends. No path, header, framing or body gets around a token,
changes a run, or costs more than a refusal.

Each test sends a table of requests to one server, each on a connection of its own.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_limits import Door, answer, opened

NO_ANSWER = 0
REFUSED = frozenset({NO_ANSWER, 400, 401, 403, 404, 405, 413, 414, 415, 421, 422, 431, 501, 505})
"""An answer that a hostile request may get. No answer: the server closed the connection."""
BAD = frozenset({NO_ANSWER, 400})


@dataclass(frozen=True)
class Held:
    """A server, and what it guards. ``run``: the address of a run, or where one would be."""

    door: Door
    directory: Path
    run: str

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.door.port}"

    @property
    def control(self) -> str:
        return self.door.tokens.control

    @property
    def read(self) -> str:
        return self.door.tokens.read

    def request(
        self, target: str, *lines: str, method: str = "GET", body: bytes = b"", token: str = ""
    ) -> bytes:
        """A request with a Host header, and with ``token`` as bearer if it is not empty."""
        head = [f"{method} {target} HTTP/1.1", f"Host: {self.host}", *lines]
        if token:
            head.append(f"Authorization: Bearer {token}")
        if body:
            head.append(f"Content-Length: {len(body)}")
        return ("\r\n".join(head) + "\r\n\r\n").encode("latin-1", "surrogateescape") + body

    async def status(self, data: bytes, *, cut: bool = False) -> int:
        """The status of the answer to ``data``. ``cut``: the server waits for more, which never
        comes.
        """
        async with self.door.connected() as (reader, writer):
            writer.write(data)
            if cut:
                writer.write_eof()
            try:
                status, _, body = await answer(reader)
            except (EOFError, ConnectionError, ValueError):
                return NO_ANSWER
            assert b"Traceback" not in body
            return status

    async def state(self) -> object:
        """What a request might change: the list of runs, the settings of the run, the files."""
        found = []
        for path in ("/api/v1/runs", f"{self.run}/balance"):
            data = self.request(path, token=self.control)
            async with self.door.connected() as (reader, writer):
                writer.write(data)
                status, headers, body = await answer(reader)
                found.append((status, headers.get("etag"), json.loads(body)))
        files = {path: path.stat().st_size for path in self.directory.rglob("*") if path.is_file()}
        return found, {path: size for path, size in files.items() if "sqlite" not in path.name}

    async def refuses(
        self,
        requests: Mapping[str, bytes],
        allowed: Iterable[int] = REFUSED,
        cut: Sequence[str] = (),
    ) -> dict[str, int]:
        """Send ``requests``, and return those that were not refused. Nothing may change."""
        before = await self.state()
        found = {name: await self.status(data, cut=name in cut) for name, data in requests.items()}
        assert before == await self.state()
        return {name: status for name, status in found.items() if status not in allowed}


@pytest.fixture(params=["train", "serve"])
async def held(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Held]:
    async with opened(request.param, tmp_path) as door:
        yield Held(door, tmp_path, "/api/v1/runs/fake")


@pytest.fixture(autouse=True)
def _nothing_unexpected(caplog: pytest.LogCaptureFixture) -> Iterable[None]:
    yield
    assert [] == [record for record in caplog.get_records("call") if record.exc_info]


# Without a token
# --------------------------------------------------------------------------------------------------

TARGETS = (
    "/api/v1/runs",
    "/API/V1/RUNS",
    "/api/v1/Runs",
    "/api/v1/runs/",
    "/api/v1/runs/.",
    "//api/v1/runs",
    "/api//v1/runs",
    "/./api/v1/runs",
    "/x/../api/v1/runs",
    "/livez/../api/v1/runs",
    "/livez/%2e%2e/api/v1/runs",
    "/livez%2f..%2fapi/v1/runs",
    "/console/../api/v1/runs",
    "/metrics/../api/v1/runs",
    "/api/v1/%72uns",
    "/%61pi/v1/runs",
    "/api%2fv1%2fruns",
    "/api%252fv1%252fruns",
    "/api/v1/runs%2f",
    "/api/v1/runs%20",
    "/api/v1/runs%00",
    "/livez%00/api/v1/runs",
    "/%c0%af/api/v1/runs",
    "/livez;/api/v1/runs",
    "/api/v1/runs;/livez",
    "/api/v1/runs?/livez",
    "/api/v1/runs#/livez",
    "\\api\\v1\\runs",
    "/\\api/v1/runs",
    "/api/v1/runs?token={control}",
    "/api/v1/runs?access_token={control}",
    "/api/v1/runs?Authorization=Bearer%20{control}",
    "http://{host}/api/v1/runs",
    "http://x:{control}@{host}/api/v1/runs",
    "HTTP://{host}/api/v1/runs",
    "https://{host}/api/v1/runs",
    "http://example.com/api/v1/runs",
    "api/v1/runs",
    "*",
    "/openapi.json",
    "{run}",
    "{run}/events",
    "{run}/log",
    "{run}/history",
    "{run}/balance",
    "{run}/checkpoints",
    "{run}/../fake/balance",
    "{run}/%62alance",
)


async def test_no_spelling_of_a_path_gets_around_the_token(held: Held) -> None:
    def target(text: str) -> str:
        return text.format(control=held.control, host=held.host, run=held.run)

    assert {} == await held.refuses({text: held.request(target(text)) for text in TARGETS})


def headers(held: Held) -> dict[str, tuple[str, ...]]:
    """Headers that carry no valid token where a token must be."""
    control = held.control
    basic = base64.b64encode(f":{control}".encode()).decode()
    wrong = "Authorization: Bearer wrong"
    return {
        "none": (),
        "a cookie": (f"Cookie: token={control}; Authorization=Bearer {control}",),
        "a proxy's": (f"Proxy-Authorization: Bearer {control}",),
        "another name": (f"X-Authorization: Bearer {control}", f"X-Auth-Token: {control}"),
        "a name with a space": (f"Authorization : Bearer {control}",),
        "a name with an underscore": (f"HTTP_Authorization: Bearer {control}",),
        "forwarded for this machine": ("X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1"),
        "forwarded": ('Forwarded: for=127.0.0.1;host=localhost;proto="https"',),
        "another address": ("X-Original-URL: /livez", "X-Rewrite-URL: /livez"),
        "a forwarded user": ("X-Remote-User: root", "Remote-User: root"),
        "another method": ("X-HTTP-Method-Override: HEAD",),
        "an upgrade": ("Connection: Upgrade", "Upgrade: websocket"),
        "the host dropped": ("Connection: Authorization",),
        "empty": ("Authorization:",),
        "no token": ("Authorization: Bearer",),
        "a blank token": ("Authorization: Bearer \t ",),
        "no scheme": (f"Authorization: {control}",),
        "another scheme": (f"Authorization: Token {control}",),
        "basic": (f"Authorization: Basic {basic}",),
        "quoted": (f'Authorization: Bearer "{control}"',),
        "a list": (f"Authorization: Bearer wrong, Bearer {control}",),
        "a longer token": (f"Authorization: Bearer {control}x",),
        "a shorter token": (f"Authorization: Bearer {control[:-1]}",),
        "both tokens": (f"Authorization: Bearer {control}{held.read}",),
        "another case": (f"Authorization: Bearer {control.swapcase()}",),
        "a second one": (wrong, f"Authorization: Bearer {control}"),
        "a folded one": (wrong, f" {control}"),
        "a NUL": (f"Authorization: Bearer {control}\0",),
        "bytes beyond ASCII": ("Authorization: Bearer \xff\xfe",),
        "a huge one": (f"Authorization: Bearer {'x' * 20_000}",),
    }


async def test_no_header_stands_for_the_token(held: Held) -> None:
    found = {
        f"{method} {name}": held.request(path, *lines, method=method)
        for name, lines in headers(held).items()
        for method, path in (("GET", "/api/v1/runs"), ("POST", f"{held.run}/stop"))
    }
    assert {} == await held.refuses(found, {400, 401})


METHODS = (
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "PROPFIND",
    "MKCOL",
    "LOCK",
    "LINK",
)


async def test_the_read_token_is_403_for_every_method_that_may_change(held: Held) -> None:
    paths = ("/", "/livez", "/metrics", "/api/v1/runs", held.run, f"{held.run}/stop")
    found = {
        f"{method} {path}": held.request(path, method=method, token=held.read)
        for method in METHODS
        for path in (*paths, f"{held.run}/balance")
    }
    assert {} == await held.refuses(found, {403})
    spelled = {
        method: held.request(f"{held.run}/stop", method=method, token=held.read)
        for method in ("post", "Post", "GE\tT", "", "STOP", "CONNECT", "GET POST")
    }
    assert {} == await held.refuses(spelled)
    overridden = held.request(
        f"{held.run}/stop",
        "X-HTTP-Method-Override: POST",
        "X-Method-Override: POST",
        token=held.read,
    )
    assert {} == await held.refuses({"an overridden method": overridden}, {404, 405})


# Names and origins
# --------------------------------------------------------------------------------------------------

HOSTS = (
    "",
    "example.com",
    "{host}.example.com",
    "127.0.0.1.example.com",
    "localhost.example.com",
    "{host}@example.com",
    "example.com@{host}",
    "127.0.0.1 example.com",
    "example.com#{host}",
    "0.0.0.0",
    "127.1",
    "2130706433",
    "0x7f000001",
    "[::ffff:127.0.0.1]",
    "[::1",
    "127.0.0.1\0",
    "localhost\x7f",
)


async def test_a_host_that_is_not_this_machine_is_refused(held: Held) -> None:
    found = {
        name: held.request("/livez", token=held.control).replace(
            f"Host: {held.host}".encode(), f"Host: {name.format(host=held.host)}".encode()
        )
        for name in HOSTS
    }
    found["missing"] = held.request("/livez").replace(f"Host: {held.host}\r\n".encode(), b"")
    found["missing in HTTP/1.0"] = b"GET /livez HTTP/1.0\r\n\r\n"
    found["a second one first"] = held.request("/livez").replace(
        b"Host:", b"Host: example.com\r\nHost:"
    )
    assert {} == await held.refuses(found, {400, 421})


ORIGINS = (
    "",
    "null",
    "file://",
    "http://example.com",
    "http://{host}.example.com",
    "http://{host}@example.com",
    "http://example.com/{host}",
    "http://example.com#{host}",
    "http://localhost",
    "http://127.0.0.1:1",
    "http://[",
    "{host}",
    "javascript:{host}",
    "http://example.com, http://{host}",
)


async def test_a_page_of_another_origin_is_refused_with_any_token(held: Held) -> None:
    found = {
        f"{name} {method}": held.request(
            f"{held.run}/{'stop' if method == 'POST' else 'balance'}",
            f"Origin: {name.format(host=held.host)}",
            method=method,
            token=held.control,
        )
        for name in ORIGINS
        for method in ("GET", "POST")
    }
    assert {} == await held.refuses(found, {403})


# Framing
# --------------------------------------------------------------------------------------------------


def framings(held: Held) -> dict[str, bytes]:
    """Requests whose length two readers may understand differently, with another behind them."""
    smuggled = held.request(f"{held.run}/stop", method="POST", token=held.control)

    def post(*lines: str, then: bytes = b"") -> bytes:
        path, kind = held.door.path, f"Content-Type: {held.door.content_type}"
        request = held.request(path, kind, *lines, method=held.door.method, token=held.control)
        return request + then

    chunked = "Transfer-Encoding: chunked"
    end = b"0\r\n\r\n"
    return {
        "both lengths": post(chunked, "Content-Length: 4", then=end + smuggled),
        "both lengths, the other way": post("Content-Length: 5", chunked, then=end + smuggled),
        "chunked twice": post(chunked, chunked, then=end + smuggled),
        "chunked not last": post("Transfer-Encoding: chunked, identity", then=end + smuggled),
        "an unknown coding": post("Transfer-Encoding: xchunked", then=end + smuggled),
        "a coding with a tab": post("Transfer-Encoding:\x0bchunked", then=end + smuggled),
        "two lengths": post("Content-Length: 2", "Content-Length: 0", then=b"{}" + smuggled),
        "a list of lengths": post("Content-Length: 2, 0", then=b"{}" + smuggled),
        "a negative length": post("Content-Length: -1", then=smuggled),
        "a signed length": post("Content-Length: +2", then=b"{}"),
        "a hexadecimal length": post("Content-Length: 0x2", then=b"{}"),
        "a length with an underscore": post("Content-Length: 0_2", then=b"{}"),
        "a length beyond 64 bits": post("Content-Length: " + "9" * 30, then=b"{}"),
        "a length of 5,000 digits": post("Content-Length: " + "9" * 5000, then=b"{}"),
        "too great a length": post("Content-Length: 50", then=b"{}"),
        "a chunk beyond 64 bits": post(chunked, then=b"F" * 17 + b"\r\n{}\r\n" + end + smuggled),
        "a negative chunk": post(chunked, then=b"-2\r\n{}\r\n" + end + smuggled),
        "a chunk that is longer": post(chunked, then=b"1\r\n{}\r\n" + end + smuggled),
        "a chunk without an end": post(chunked, then=b"2\r\n{}"),
        "a chunk with a bare feed": post(chunked, then=b"2\n{}\n0\n\n" + smuggled),
        "a length that is no number": post("Content-Length: two", then=b"{}"),
    }


async def test_a_length_that_can_be_read_in_two_ways_is_refused_with_all_behind_it(
    held: Held,
) -> None:
    cut = ("too great a length", "a chunk without an end")
    assert {} == await held.refuses(framings(held), {*BAD, 413, 501}, cut)


def heads(held: Held) -> dict[str, bytes]:
    """Requests whose first line or headers are not HTTP/1.1."""
    whole = held.request("/api/v1/runs")
    line, rest = whole.split(b"\r\n", 1)
    return {
        "no version": b"GET /livez\r\n\r\n",
        "HTTP/0.9": b"GET /api/v1/runs HTTP/0.9\r\n" + rest,
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/9.9": b"GET /livez HTTP/9.9\r\n" + rest,
        "another protocol": b"GET /livez ICE/1.0\r\n" + rest,
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
        "a pickle": b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x02os\x94.\r\n\r\n",
        "nothing": b"\r\n\r\n",
        "binary": bytes(range(256)) + b"\r\n\r\n",
        "a space in the target": b"GET /livez /api HTTP/1.1\r\n" + rest,
        "a NUL in the target": b"GET /api/v1/runs\0 HTTP/1.1\r\n" + rest,
        "a long target": b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n" + rest,
        "a header without a colon": line + b"\r\nnothing\r\n" + rest,
        "a header without a name": line + b"\r\n: x\r\n" + rest,
        "a name with a space": line + b"\r\na b: x\r\n" + rest,
        "a NUL in a value": line + b"\r\na: x\0y\r\n" + rest,
        "a return in a value": line + b"\r\na: x\ry\r\n" + rest,
        "a long header": line + b"\r\na: " + b"x" * 100_000 + b"\r\n" + rest,
        "10,000 headers": line + b"\r\n" + b"a: x\r\n" * 10_000 + rest,
        "half a head": whole[:-4],
    }


async def test_what_is_not_http_is_refused(held: Held) -> None:
    cut = ("half a head", "nothing")
    assert {} == await held.refuses(heads(held), {*BAD, 401, 414, 431, 505}, cut)


# Bodies
# --------------------------------------------------------------------------------------------------

DIGITS = b"9" * 5000
BODIES: Mapping[str, bytes] = {
    "nothing": b" ",
    "half": b'{"max_staleness": ',
    "a list": b"[]",
    "null": b"null",
    "text": b'"x"',
    "nested lists": b"[" * 30_000,
    "nested objects": b'{"a":' * 9_000 + b"1" + b"}" * 9_000,
    "nested settings": b'{"max_staleness": ' + b"[" * 500 + b"]" * 500 + b"}",
    "5,000 digits": b'{"max_staleness": ' + DIGITS + b"}",
    "a fraction of 5,000 digits": b'{"max_staleness": 0.1' + DIGITS + b"}",
    "an exponent of 5,000 digits": b'{"max_staleness": 1e' + DIGITS + b"}",
    "an infinite number": b'{"max_staleness": 1e999}',
    "NaN": b'{"max_staleness": NaN}',
    "Infinity": b'{"max_staleness": -Infinity}',
    "a lone surrogate": b'{"max_staleness": "\\ud800"}',
    "a lone surrogate as a key": b'{"\\udfff": 1}',
    "a NUL": b'{"max_staleness": "\\u0000"}',
    "bytes that are not UTF-8": b'{"max_staleness": "\xff\xfe"}',
    "a surrogate in bytes": b'{"max_staleness": "\xed\xa0\x80"}',
    "UTF-16": '{"max_staleness": "x"}'.encode("utf-16"),
    "a comment": b'{"max_staleness": 4 /* x */}',
    "SQL": b'{"max_staleness": "1; DROP TABLE runs; --"}',
    "attributes": b'{"__class__": {"__init__": {"__globals__": 1}}}',
    "a template": b'{"max_staleness": "{0.__class__}${7*7}{{7*7}}%n%s"}',
    "an empty key": b'{"": 1}',
    "a path as a key": b'{"../../balance/max_staleness": 1}',
}


async def test_a_hostile_document_is_refused_and_changes_nothing(held: Held) -> None:
    kind = f"Content-Type: {held.door.content_type}"
    found = {
        name: held.request(
            held.door.path, kind, method=held.door.method, body=body, token=held.control
        )
        for name, body in BODIES.items()
    }
    assert {} == await held.refuses(found, {400, 422})


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "identity, x", "\xff"])
async def test_a_coding_that_the_server_does_not_know_is_not_taken_for_json(
    held: Held, coding: str
) -> None:
    data = held.request(
        held.door.path,
        f"Content-Type: {held.door.content_type}",
        f"Content-Encoding: {coding}",
        method=held.door.method,
        body=b"\x1b\x03\x00x",
        token=held.control,
    )
    assert {} == await held.refuses({coding: data}, {400, 415, 422})


async def test_of_two_changes_for_one_generation_one_is_made_each_of_100_times(
    tmp_path: Path,
) -> None:
    async with opened("train", tmp_path) as door:
        held = Held(door, tmp_path, "/api/v1/runs/fake")
        for generation in range(1, 101):
            lines = (f"Content-Type: {door.content_type}", f'If-Match: "{generation}"')
            changes = [
                held.request(
                    door.path,
                    *lines,
                    method="PATCH",
                    body=json.dumps({"max_staleness": value + generation % 2}).encode(),
                    token=held.control,
                )
                for value in (2, 4)
            ]
            assert [200, 412] == sorted(await asyncio.gather(*map(held.status, changes)))


# Names of runs and configs
# --------------------------------------------------------------------------------------------------

NAMES = (
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc/passwd",
    "a\\b",
    "a\0b",
    "a\nb",
    "a\r\nSet-Cookie: x",
    "a b",
    "-a",
    "~",
    "$HOME",
    "%2e%2e",
    "é",
    "\u202ea",
    "\ud800",
    "x" * 65,
    "x' OR '1'='1",
    "x'; DROP TABLE runs; --",
    "<script>alert(1)</script>",
)


def quoted(name: str) -> str:
    return "".join(f"%{byte:02x}" for byte in name.encode("utf-8", "surrogatepass"))


async def test_an_address_of_a_run_that_is_no_name_is_404(held: Held) -> None:
    for token, allowed in ((held.control, {400, 404, 405}), ("", {400, 401})):
        found = {
            f"{name!r} {action}": held.request(
                f"/api/v1/runs/{quoted(name)}{action}", method=method, token=token
            )
            for name in NAMES
            if name
            for method, action in (("GET", ""), ("GET", "/checkpoints"), ("POST", "/stop"))
        }
        assert {} == await held.refuses(found, allowed)


def submission(held: Held, config: object) -> bytes:
    body = json.dumps({"config": config}).encode()
    kind = "Content-Type: application/json"
    return held.request("/api/v1/runs", kind, method="POST", body=body, token=held.control)


def _named(name: object) -> dict[str, Any]:
    return {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}, "run": {"name": name}}


CONFIGS = (
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "cartpole_ppo.toml",
    "./cartpole_ppo",
    "cartpole_ppo\0",
    "cartpole_ppo/",
    "CARTPOLE_PPO",
    "file:///etc/passwd",
    "http://127.0.0.1/x",
    "~/x",
    "*",
    "\ud800",
    "x" * 5000,
)


@pytest.mark.parametrize(
    ("values", "config"),
    [((*NAMES[1:], 1, True, [], {"a": 1}), _named), (CONFIGS, lambda name: name)],
    ids=["run names", "config names"],
)
async def test_a_submission_with_a_name_that_is_none_is_refused(
    tmp_path: Path, values: tuple[object, ...], config: Callable[[object], object]
) -> None:
    async with opened("serve", tmp_path) as door:
        held = Held(door, tmp_path, "/api/v1/runs/fake")
        found = {repr(value)[:40]: submission(held, config(value)) for value in values}
        assert {} == await held.refuses(found, {400, 404, 422})
