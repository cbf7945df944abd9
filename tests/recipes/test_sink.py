"""The recipe for a sink: one file and one entry point."""

from __future__ import annotations

import json
from pathlib import Path

from tests.recipes.package import UserPackage
from tests.recipes.training import UPDATES, train

LINES = '''
    """Sink ``lines``: one line of JSON for each evaluation and each row of a run's history."""

    import json

    from tianflow.observability.sinks.base import points


    class Lines:
        def __init__(self, *, run, name: str = "lines.jsonl"):
            self._file = (run.directory / name).open("w", encoding="utf-8")

        def write(self, row):
            for point in points(row):
                self._file.write(json.dumps({"step": point.step, **point.values}) + "\\n")

        def close(self):
            self._file.close()
'''


def test_an_installed_sink_gets_the_history_of_a_run(
    user_package: UserPackage, tmp_path: Path
) -> None:
    user_package.write("lines", LINES)
    user_package.entry_point("tianflow.sinks", "lines", "lines:Lines")
    finished = train(
        tmp_path, metrics={"sinks": ["lines"], "kwargs": {"lines": {"name": "rows.jsonl"}}}
    )
    lines = (finished.directory / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert UPDATES == rows[-1]["train/n_updates"]
    assert finished.summary["env_steps"] == rows[-1]["step"]
    assert [finished.summary["evaluation"]["mean_return"]] == [
        row["eval/mean_reward"] for row in rows if "eval/mean_reward" in row
    ]
