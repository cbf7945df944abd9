"""Targets file of Prometheus: ``python dashboards/targets.py [RUNS_DIR]`` writes the addresses of
active runs. Repeat it after each start of a run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tianflow.rundir.control_file import NAME, SERVICE, ControlFile
from tianflow.server.service.run_process import RunFiles

TARGETS = Path(__file__).parent / "prometheus" / "targets" / "runs.json"


def addresses(runs_dir: Path) -> list[str]:
    """``host:port`` of every active run under ``runs_dir``. A service that holds runs there has its
    own address instead of theirs.
    """
    service = ControlFile.read(runs_dir, SERVICE)
    held = service is not None and service.alive
    directories = [path.parent for path in sorted(runs_dir.glob(f"*/{NAME}"))]
    alone = [
        path for path in directories if not (held and RunFiles(runs_dir).log(path.name).exists())
    ]
    files = [service, *(ControlFile.read(path) for path in alone)]
    return [
        file.address.removeprefix("http://") for file in files if file is not None and file.alive
    ]


def write(runs_dir: Path, targets: Path) -> list[str]:
    """Replace ``targets`` by the addresses in one step: Prometheus watches the file."""
    found = addresses(runs_dir)
    temporary = targets.with_suffix(".new")
    temporary.write_text(json.dumps([{"targets": found}]) + "\n", encoding="utf-8")
    temporary.replace(targets)
    return found


if __name__ == "__main__":
    written = write(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"), TARGETS)
    sys.stdout.write(f"{TARGETS}: {', '.join(written) or 'no active run'}\n")
