"""What ``tianflow diagnose`` prints: the diagnosis of a run that is going on, for a person or as
JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tianflow.cli import client
from tianflow.config.model import LIVE


def ask(runs_dir: Path, run: str | None, *, as_json: bool = False) -> str:
    """The diagnosis of ``run``, or of the only one in ``runs_dir``.

    Raises:
        TianflowError: there is no such run, or it does not answer.
    """
    document = client.request(client.find(runs_dir, run), "GET", "/diagnosis")
    return json.dumps(document) if as_json else "\n".join(lines(document))


def _commands(run: str, suggested: Mapping[str, float]) -> list[str]:
    """What is suggested, ready to be typed: a command for each section, and what only a new run can
    take.
    """
    live: dict[str, list[str]] = {}
    later: list[str] = []
    for path, value in suggested.items():
        section, _, key = path.partition(".")
        (live.setdefault(section, []) if key in LIVE.get(section, ()) else later).append(
            f"{path}={value:.15g}"
        )
    said = [f"try: tianflow set {run} {' '.join(assignments)}" for assignments in live.values()]
    return said + ([f"in a new run: {' '.join(later)}"] if later else [])


def lines(document: Mapping[str, Any]) -> list[str]:
    """Verdict, advice, what to set, and the shares behind it."""
    who = f" ({document['component']})" if document["component"] else ""
    said = [
        f"{document['id']}: {document['verdict']}{who} for {document['for_s']:.0f} s",
        f"  {document['advice']}",
    ]
    said += [f"  {line}" for line in _commands(document["id"], document["suggested"])]
    for role, shares in document["shares"].items():
        largest = sorted(shares.items(), key=lambda item: -item[1])
        said.append(
            f"  {role} over {document['window_s']:.0f} s: "
            + ", ".join(f"{state} {share:.0%}" for state, share in largest)
        )
    return said
