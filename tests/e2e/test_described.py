"""Both servers beside real training answer whatever their document allows, and refuse whatever it
does not: drawn by Schemathesis.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import run
from tests.e2e.test_serve import service
from tests.support.effort import FACTOR

pytestmark = [pytest.mark.e2e, pytest.mark.beside(lanes=2), pytest.mark.timeout(900)]
pytest.importorskip("schemathesis", reason="schemathesis, of the extra dev, is not installed")
EXAMPLES = max(2, FACTOR // 2)
"""Drawn for each operation, besides those at the edges of its schema; more of them for a long look.
"""
REQUESTS_PER_S = 100
"""Half of what a service takes from one address: who asks more often is told so instead, whatever
was asked.
"""
LEFT_OUT = "/(stop|drain|actors)$"
"""Whose number may rise to thousands of processes, and what ends the run that all others are asked
of.
"""
CONFIG = """
[parameters]
"path.run" = "{run}"
"query.follow" = "false"
"header.If-Match" = "*"

# what fits a schema may still be refused beside other settings, and a service that has much to do takes no more runs
[[operations]]
include-method = "PATCH"
[operations.checks.positive_data_acceptance]
expected-statuses = ["2xx", 404, 409, 422, 429]
[[operations]]
include-path = "/api/v1/runs"
[operations.checks.positive_data_acceptance]
expected-statuses = ["2xx", 404, 409, 422, 429, 503]
"""
ANY_UPDATE = {"learner__max_nonfinite_updates": 10**9}
"""A learning rate may be drawn that ruins the network, which otherwise ends the run."""
log = logging.getLogger(__name__)


def schemathesis(folder: Path, address: str, token: str, run: str) -> None:
    """Every check on data of both kinds: at the edges of the schemas, drawn, and in sequences that
    follow links.
    """
    (folder / "schemathesis.toml").write_text(CONFIG.format(run=run))
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    arguments = (
        "--checks",
        "all",
        "--mode",
        "all",
        "--max-examples",
        str(EXAMPLES),
        "--generation-deterministic",
        "--no-color",
    )
    found = subprocess.run(
        [
            *(
                sys.executable,
                "-c",
                program,
                "run",
                f"{address}/openapi.json",
                "--header",
                f"Authorization: Bearer {token}",
            ),
            *(
                *arguments,
                "--rate-limit",
                f"{REQUESTS_PER_S}/s",
                "--exclude-path-regex",
                LEFT_OUT,
                "--warnings",
                "off",
            ),
        ],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=600.0,
        check=False,
    )
    log.info("%s", found.stdout[-600:])
    assert 0 == found.returncode, f"{found.stdout[-12000:]}\n{found.stderr[-2000:]}"


def test_a_run_answers_as_its_document_says_and_goes_on(tmp_path: Path) -> None:
    with run(tmp_path / "runs", http__max_requests_per_s=5000.0, **ANY_UPDATE) as live:
        live.until_training(more=3)
        assert live.control is not None
        schemathesis(tmp_path, live.control.address, live.control.token, live.name)
        live.act("resume")
        assert live.process.poll() is None, live.output()
        assert "Traceback" not in live.stderr, live.output()


def test_a_service_answers_as_its_document_says_and_its_run_goes_on(tmp_path: Path) -> None:
    with service(tmp_path / "runs", "--max-runs", "1") as served:
        served.submit("a", **ANY_UPDATE)
        served.until_training("a")
        schemathesis(tmp_path, served.control.address, served.control.token, "a")
        assert served.run("a")["state"] in {"running", "paused"}
        assert "Traceback" not in (said := served.said()), said
