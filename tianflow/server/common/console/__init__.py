"""Serves the console: a page that shows runs and changes them through the API.

The page consists of plain ES modules and one style sheet in this directory, without a build step.
The files hold no data of a run and need no token, because a browser cannot send one when it opens a
page. The page calls the API with the token after ``#`` in its address, which browsers do not send.
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
    "columns.js",
    "compare.js",
    "config.js",
    "console.css",
    "diagnosis.js",
    "dom.js",
    "editor.js",
    "ending.js",
    "fields.js",
    "flat.js",
    "icon.svg",
    "learning.js",
    "lists.css",
    "log.js",
    "panels.js",
    "polling.js",
    "print.css",
    "rates.js",
    "removal.js",
    "results.js",
    "rows.js",
    "run.js",
    "runs.js",
    "scales.js",
    "settings.js",
    "staleness.js",
    "submit.js",
    "toml.js",
    "words.js",
)
"""Files of the page, each with a path of its own; no other file can be requested."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' "
    "data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for "
    "'script'; trusted-types 'none'"
)
"""Content security policy: only the page's own files and this server's API. A text can never become
markup or script.
"""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
PATHS = frozenset({"/", *(FOLDER + name for name in FILES)})
"""Paths of the console, which need no token."""


def routes() -> list[web.RouteDef]:
    """Routes of the page and its files."""
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
    """All files by name, read once. Blocks."""
    folder = Path(__file__).parent
    return {name: (folder / name).read_bytes() for name in (PAGE, *FILES)}
