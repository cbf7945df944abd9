"""The console: a page for a person with a browser, which shows runs as they go on and changes them
through the API.

Plain ES modules, one style sheet and no build step; they lie beside this file. Nothing of a run is
in them, so they are given to whoever
asks: a browser cannot send a token when it opens a page. The page asks the API with the token that
its address carries after ``#``, which no browser sends anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from aiohttp import web

PAGE = "index.html"
FOLDER = "/console/"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
FILES = (
    "actions.js",
    "api.js",
    "app.js",
    "audit.js",
    "charts.js",
    "console.css",
    "diagnosis.js",
    "dom.js",
    "fields.js",
    "icon.svg",
    "panels.js",
    "polling.js",
    "rows.js",
    "run.js",
    "runs.js",
    "scales.js",
    "settings.js",
    "staleness.js",
    "submit.js",
    "words.js",
)
"""What the page asks for, each at a path of its own: nothing else in the directory, or outside of
it, can be named.
"""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' "
    "data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for "
    "'script'; trusted-types 'none'"
)
"""What a browser lets the page do: its own files and this server's API. No text can become markup
or script, whoever wrote it.
"""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
PATHS = frozenset({"/", *(FOLDER + name for name in FILES)})
"""Where it is; none of it needs a token."""


def routes() -> list[web.RouteDef]:
    """The page, and each file that it needs."""
    return [web.get(path, give) for path in sorted(PATHS)]


async def give(request: web.Request) -> web.Response:
    """The file at the path of ``request``."""
    name = request.path.removeprefix("/").removeprefix(FOLDER.removeprefix("/")) or PAGE
    found = await asyncio.to_thread(contents)
    return web.Response(
        body=found[name], content_type=TYPES[Path(name).suffix], charset="utf-8", headers=HEADERS
    )


@cache
def contents() -> Mapping[str, bytes]:
    """Every file by name, read once. Blocks."""
    folder = Path(__file__).parent
    return {name: (folder / name).read_bytes() for name in (PAGE, *FILES)}
