"""The recipe for a route: a handler and its description."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recipes.repository import Repository


@pytest.mark.e2e
def test_a_view_of_a_run_is_served_and_described(tmp_path: Path) -> None:
    copy = Repository(tmp_path)
    app, described = "tianflow/server/run/app.py", "tianflow/server/common/openapi.py"
    copy.edit(app, "PARTS = (", '"pace", ')
    copy.edit(
        app,
        'request.match_info["part"]\n',
        '        if part == "pace":\n'
        '            return json_response({"updates": run.statistics().ledger.updates})\n',
    )
    copy.edit(
        described,
        "    answers = {\n",
        '        "pace": ("Updates so far", schemas.struct(updates=schemas.NUMBER)),\n',
    )
    found = copy.serve("/api/v1/runs/served/pace", "/openapi.json")
    status, text = found["/api/v1/runs/served/pace"]
    assert 200 == status, text
    assert json.loads(text)["updates"] > 0
    operation = json.loads(found["/openapi.json"][1])["paths"]["/api/v1/runs/{run}/pace"]["get"]
    assert "Updates so far" == operation["summary"]
