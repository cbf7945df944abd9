"""Scripts and styles of a page that needs no server: the console's chart modules in one script.

The console is the one place that draws charts. A page from a file cannot import modules, so each
module becomes a function here, and its imports become assignments.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path

import tianflow
from tianflow.core.jsonable import json_ready
from tianflow.report.markup import Markup, element

CONSOLE = Path(tianflow.__file__).parent / "server" / "common" / "console"
MODULES = ("dom", "scales", "charts", "learning", "rates", "panels", "rows", "staleness")
"""Each after those that it imports."""
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:class|const|function) (\w+)", re.MULTILINE)


def bundled(program: Path) -> Markup:
    """The chart modules and ``program``, which imports from them, as one script."""
    parts = [_module(name, (CONSOLE / f"{name}.js").read_text("utf-8")) for name in MODULES]
    code = "\n".join(['"use strict";', *parts, _linked(program.read_text("utf-8"))])
    if re.search("</script|<!--", code, re.IGNORECASE):
        raise ValueError(f"{program.name} would end its own script element")
    return Markup(code)


def _module(name: str, source: str) -> str:
    exports = ", ".join(_EXPORT.findall(source))
    body = re.sub(r"^export ", "", _linked(source), flags=re.MULTILINE)
    return f"const {name}_module = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();"


def _linked(source: str) -> str:
    return _IMPORT.sub(r"const \1 = \2_module;", source)


def policy(script: Markup) -> str:
    """A Content-Security-Policy that allows ``script`` and nothing from elsewhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def data(value: object, key: str) -> Markup:
    """``value`` as JSON in an element with the id ``key``. No text in it can end the element."""
    text = json.dumps(json_ready(value), allow_nan=False, separators=(",", ":"))
    return element("script", Markup(text.replace("<", "\\u003c")), type="application/json", id=key)


@cache
def chart_styles() -> str:
    """The rules for charts in the console's style sheet."""
    text = (CONSOLE / "console.css").read_text("utf-8")
    return text.partition("/* Charts */")[2].partition("\n/* Settings */")[0]
