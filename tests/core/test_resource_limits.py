"""What the system refuses is one sentence: the limit, what needed more, and what to raise."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tianflow.core.resource_limits import MOST_OPEN_FILES, permit_open_files, refusal


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (errno.EMFILE, resource.RLIMIT_NOFILE, "the limit is 4096 open files; raise it to at"),
        (errno.EFBIG, resource.RLIMIT_FSIZE, "the limit is 4096 bytes in a file; raise it to at"),
        (errno.ENOMEM, resource.RLIMIT_AS, "the limit is 4096 bytes of address space; raise it"),
    ],
)
def test_a_refusal_names_its_limit(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: int, said: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", {kind: (4096, 8192)}.__getitem__)
    sentence = refusal(OSError(code, os.strerror(code)), "no room for slots", nbytes=5000)
    assert f"no room for slots: {os.strerror(code)}: {said}" in sentence


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 4096, 4096),
        (1024, 2**20, MOST_OPEN_FILES),
        (1024, resource.RLIM_INFINITY, MOST_OPEN_FILES),
        (2**20, 2**20, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
        (4096, 4096, None),
    ],
)
def test_a_process_permits_itself_more_open_files_and_never_fewer(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, then: int | None
) -> None:
    made = []
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_NOFILE: (soft, hard)}.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: made.append(limits))
    permit_open_files()
    assert made == ([] if then is None else [(then, hard)])


def test_a_refusal_without_a_limit_is_what_the_system_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert "'file': File too large" == refusal(OSError(errno.EFBIG, "File too large"), "'file'")
    assert "'file': No space left on device" == refusal(
        OSError(errno.ENOSPC, "No space left on device"), "'file'"
    )


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (("-n", "24"), "the limit is 24 open files; raise it (`ulimit -n`)"),
        (("-f", "100"), "bytes of shared memory: File too large: the limit is 102400 bytes in a"),
        (("-v", "1000000"), "the limit is 1024000000 bytes of address space; raise it to at least"),
    ],
)
def test_a_run_under_a_limit_of_the_shell_ends_with_one_sentence(
    tmp_path: Path, limit: tuple[str, str], said: str
) -> None:
    """Without a trace."""
    run = "train cartpole_ppo --plain run.max_updates=1 evaluation.episodes=1"
    script = f"ulimit {' '.join(limit)}; exec {sys.executable} -m tianflow {run}"
    ended = subprocess.run(
        ["bash", "-c", f"{script} --runs-dir {tmp_path}"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "controllers"))),
            "OPENBLAS_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert 1 == ended.returncode
    assert said in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
