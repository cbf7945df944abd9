"""Attacks that a run withstands: environments that attack their process, hostile texts, other users
of the machine, and shells without what a process usually has.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.e2e import harness
from tests.e2e.harness import ROOT, SMALL, LiveRun, assignment, until
from tests.e2e.test_serve import service
from tests.e2e.troubles import ATTACKS, RESULTS
from tianflow.core.process_table import carries, processes
from tianflow.rundir.checkpoints import CheckpointStore

CHROMIUM = shutil.which("chromium")
TROUBLES = "tests.e2e.troubles"
EVIL = "</script><img src=x onerror=window.hit=1><script>window.hit=1</script>\x1b[2J"
STRANGER = 65534
"""The user and group ``nobody``."""
PATIENCE_MS = 1000.0 * harness.PATIENCE_S
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="it needs root to become another user")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


# Environments
# --------------------------------------------------------------------------------------------------


# Shells
# --------------------------------------------------------------------------------------------------

LIMITED = "ulimit -n 64; ulimit -v 3000000; umask 077; unset HOME; export LC_ALL=C; exec "
CLOSED = 'exec "$@" <&- >&- 2>&-'
NAMESPACE = """set -e
mount -t tmpfs -o size=4k,ro tmpfs /dev/shm
mount --bind "$RUNS" /mnt
mount --bind /tmp /tmp
mount -o remount,bind,ro /tmp
! touch /tmp/x 2>/dev/null
exec "$@"
"""


def trained(folder: Path, before: tuple[str, ...], *, runs: Path | None = None) -> None:
    """Train a short run behind the command ``before``. It must end whole, with nothing left.

    ``runs``: how the child process calls ``folder``.
    """
    mark = uuid.uuid4().hex
    settings = {
        **SMALL,
        "actors.count": 1,
        "actors.hosts": 1,
        "run.name": "held",
        "run.max_updates": 5,
        "evaluation.episodes": 1,
    }
    train = (sys.executable, "-m", "tianflow", "train", "cartpole_ppo", "--plain")
    overrides = [assignment(path, value) for path, value in settings.items()]
    done = subprocess.run(
        [*before, *train, "--runs-dir", str(runs or folder), *overrides],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "controllers"))),
            "OMP_NUM_THREADS": "1",
            "TIANFLOW_TEST": mark,
            "RUNS": str(folder),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    said = f"{done.stdout}\n{done.stderr}"
    assert 0 == done.returncode, said
    assert "Traceback" not in said
    directory = folder / "held"
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    assert ("done", 5, 5) == (summary["state"], summary["updates"], summary["checkpoint"])
    assert CheckpointStore(directory / "checkpoints", keep=1).newest() is not None
    assert 0o600 == stat.S_IMODE((directory / "config.toml").stat().st_mode)
    until(
        "no process is left",
        lambda: not any(carries(p.pid, "TIANFLOW_TEST", mark) for p in processes()),
    )


def test_few_descriptors_little_memory_no_home_ascii_and_an_odd_path(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*[f"a b'ü{'x' * 140}{part}" for part in range(4)])
    folder.mkdir(parents=True)
    assert len(str(folder)) > 600
    trained(folder, ("bash", "-c", f'{LIMITED} "$@"', "bash"))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert {} == {path: oct(mode) for path, mode in modes.items() if mode & 0o077}


@as_root
def test_a_namespace_of_processes_without_shared_memory_and_with_a_read_only_tmp(
    tmp_path: Path,
) -> None:
    namespaces = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
    trained(tmp_path, (*namespaces, "bash", "-c", NAMESPACE, "bash"), runs=Path("/mnt"))


@as_root
def test_a_user_other_than_root_with_closed_standard_streams(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp())
    os.chown(folder, STRANGER, STRANGER)
    # the interpreter may lie where that user may not look; it may then read, and nothing else
    reads = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    user = (f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups")
    try:
        trained(folder, ("setpriv", *user, *reads, "bash", "-c", CLOSED, "bash"))
        assert {STRANGER} == {path.stat().st_uid for path in folder.rglob("*")}
    finally:
        shutil.rmtree(folder)


# The service
# --------------------------------------------------------------------------------------------------


# The console
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium (Debian package of that name) is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    yield page
    context.close()


def test_the_console_of_a_service_shows_the_error_of_a_run_as_text(
    tmp_path: Path, page: Page
) -> None:
    name = f"{TROUBLES}:MarkedEnv"
    with service(tmp_path / "runs", "--allow-import", TROUBLES) as served:
        served.submit("a", env__id=name, env__kwargs={"label": EVIL}, env__max_failures=0)
        served.until("it has failed", lambda: served.run("a").get("state") == "failed")
        page.goto(f"{served.control.address}/#token={served.control.token}")
        shows_as_text(page)
        page.goto(f"{served.control.address}/#/runs/a")
        shows_as_text(page)
        for part in ("#config", "#log pre"):  # open beside a failure
            expect(page.locator(part)).to_contain_text("window.hit=1", timeout=PATIENCE_MS)
        page.goto(f"{served.control.address}/#/compare?run=a&run={quote(EVIL)}")
        expect(page.locator(".head .error")).to_contain_text("window.hit", timeout=PATIENCE_MS)
        nothing_ran(page)


def shows_as_text(page: Page) -> None:
    expect(page.locator("body")).to_contain_text("window.hit=1", timeout=PATIENCE_MS)
    nothing_ran(page)


def nothing_ran(page: Page) -> None:
    assert (None, 0) == (page.evaluate("window.hit ?? null"), page.locator("img[src=x]").count())


# One run, its secrets and its console
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live() -> Iterator[LiveRun]:
    """A run whose directory others can reach, for the last tests, because it goes on until all tests
    have ended.
    """
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        with harness.run(folder / "runs", actors__count=1, actors__hosts=1) as live:
            live.until_training(more=5)
            yield live
    finally:
        shutil.rmtree(folder)


def secrets(live: LiveRun) -> tuple[str, str]:
    control = live.control
    assert control is not None
    return control.token, control.read_token


def test_tokens_lie_in_one_file_of_the_owner_only(live: LiveRun) -> None:
    tokens = secrets(live)
    live.act("checkpoint")
    told = subprocess.run(
        [sys.executable, "-m", "tianflow", "report", str(live.directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=True,
    )
    texts = {"what report says": told.stdout + told.stderr}
    parts = ("", "/events?follow=false", "/audit", "/history", "/components", "/diagnosis")
    paths = ("/metrics", "/openapi.json", *(f"/api/v1/runs/{live.name}{part}" for part in parts))
    texts |= {path: live.request(path)[1] for path in paths}
    for path in live.folder.rglob("*"):
        if path.is_file() and path != live.control_file:
            texts[str(path)] = path.read_bytes().decode("latin-1")
    for pid in (live.process.pid, *live.descendants()):
        for name in ("cmdline", "environ", "comm"):
            texts[f"{name} of {pid}"] = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    assert all(texts[path] for path in paths)
    assert len(texts) >= 20
    assert [] == [name for name, text in texts.items() if any(token in text for token in tokens)]
    for private in ("control.json", "config.toml"):
        assert 0o600 == stat.S_IMODE((live.directory / private).stat().st_mode)


ATTEMPTS = """
import ctypes, encodings.idna, json, os, signal, sys, urllib.error, urllib.request
directory, address, pids, user = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
os.setgroups([]), os.setgid(user), os.setuid(user)
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
def attach(pid):
    if ptrace(16, pid, None, None) != 0:
        raise PermissionError
def connect(path, method):
    urllib.request.urlopen(urllib.request.Request(address + path, method=method), timeout=10)
attempts = {
    "the history": lambda: open(f"{directory}/history.jsonl").close(),
    "the tokens": lambda: open(f"{directory}/control.json").close(),
    "the settings": lambda: open(f"{directory}/config.toml").close(),
    "a new file": lambda: open(f"{directory}/x", "w").close(),
    "another history": lambda: open(f"{directory}/history.jsonl", "a").close(),
    "a rename": lambda: os.rename(f"{directory}/checkpoints", f"{directory}/x"),
    "the runs": lambda: connect("/api/v1/runs", "GET"),
    "a stop": lambda: connect(f"/api/v1/runs/{os.path.basename(directory)}/stop", "POST"),
}
for pid in pids:
    attempts |= {
        f"a signal to {pid}": lambda pid=pid: os.kill(pid, signal.SIGTERM),
        f"descriptors of {pid}": lambda pid=pid: os.listdir(f"/proc/{pid}/fd"),
        f"variables of {pid}": lambda pid=pid: open(f"/proc/{pid}/environ").read(),
        f"memory of {pid}": lambda pid=pid: open(f"/proc/{pid}/mem", "rb").close(),
        f"a trace of {pid}": lambda pid=pid: attach(pid),
    }
done = []
for name, attempt in attempts.items():
    try:
        attempt()
        done.append(name)
    except (PermissionError, urllib.error.HTTPError):
        pass
print(json.dumps(done))
"""


@as_root
def test_another_user_of_the_machine_gets_no_token_and_no_process(live: LiveRun) -> None:
    control = live.control
    assert control is not None
    pids = [live.process.pid, *live.descendants()]
    assert len(pids) >= 4
    arguments = (str(live.directory), control.address, json.dumps(pids), str(STRANGER))
    told = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, *arguments],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert "" == told.stderr
    assert ["the history"] == json.loads(told.stdout)  # it can be reached, so the rest is refused
    names = {f"socket:[{line.split()[6]}]" for line in abstract_listeners()}
    assert set() == names & {name for pid in pids for name in harness._open_files(pid)}
    live.until_training()


def abstract_listeners() -> list[str]:
    """Sockets without a file, to which every user may connect."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return [line for line in lines if line.partition(" @")[2] and line.split()[3] == "00010000"]


def test_the_console_runs_no_markup_and_the_token_stays_in_its_tab(
    live: LiveRun, page: Page
) -> None:
    control = live.control
    assert control is not None
    page.goto(f"{control.address}/#token={control.token}")
    state = page.locator(".head .state")
    expect(state).to_have_text("running", timeout=PATIENCE_MS)
    assert control.token not in page.url
    storage = "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])"
    kept, lasting, cookie = json.loads(page.evaluate(storage))
    assert ([control.token], {}, "") == (list(kept.values()), lasting, cookie)
    page.go_back()
    assert control.token not in page.url
    evil = quote(EVIL)
    for address in (
        f"?x={evil}",
        f"#{evil}",
        f"#/runs/{evil}",
        f"#token={control.token}&run={evil}",
    ):
        page.goto(f"{control.address}/{address}")
        page.reload()
        nothing_ran(page)
    shows_as_text(page)


class OtherPage(http.server.BaseHTTPRequestHandler):
    """A page of another origin, which frames the console and sends requests to its server."""

    target = ""

    def do_GET(self) -> None:
        body = f"<title>other</title><iframe src='{self.target}/'></iframe>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


REQUESTS = """async ([run, token]) => {
  const found = [];
  const ask = async (path, init) => {
    try { const answer = await fetch(run + path, init); found.push([answer.type, answer.status]); }
    catch (error) { found.push([String(error), 0]); }
  };
  const headers = { Authorization: `Bearer ${token}` };
  await ask("", {});
  await ask("", { headers });
  await ask("/stop", { method: "POST", headers });
  await ask("/stop", { method: "POST", mode: "no-cors" });
  await ask("/stop?token=" + token, { method: "POST", mode: "no-cors" });
  return found;
}"""


def events_handled(page: Page) -> bool:
    """True, after what the browser has reported meanwhile is known here."""
    page.wait_for_timeout(20)
    return True


def test_a_page_of_another_origin_cannot_frame_or_ask(live: LiveRun, page: Page) -> None:
    control = live.control
    assert control is not None
    handler = type("Handler", (OtherPage,), {"target": control.address})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        try:
            page.goto(f"http://127.0.0.1:{other.server_port}/")
            found = page.evaluate(
                REQUESTS, [f"{control.address}/api/v1/runs/{live.name}", control.token]
            )
            assert [0] * 5 == [status for _, status in found], found
            (frame,) = page.main_frame.child_frames
            until(
                "the frame is an error page",
                lambda: events_handled(page) and frame.url == "chrome-error://chromewebdata/",
                tell=lambda: frame.url,
            )
        finally:
            other.shutdown()
    assert "running" == live.status()["state"]


@pytest.mark.beside
def test_a_run_goes_on_through_every_attack_of_its_environment(tmp_path: Path) -> None:
    ways = [*ATTACKS, *RESULTS]
    with harness.run(
        tmp_path / "runs",
        env__id=f"{TROUBLES}:HostileEnv",
        env__kwargs={"folder": str(tmp_path), "ways": ways},
        env__num_envs=1,
        env__step_timeout_s=3.0,
        algorithm__minibatch_size=16,
        run__max_restarts=100,
    ) as live:
        live.until("every attack", lambda: all((tmp_path / way).exists() for way in ways))
        live.until("a ready run", live.ready)
        live.until_training(more=20)
        metrics = live.metrics()
        assert 0.0 == metrics["staleness_violations_total",]
        for reason in ("env_error", "env_hang"):
            assert 1.0 <= metrics["trajectories_dropped_total", reason]
        for number in (signal.SIGSEGV, signal.SIGKILL):
            assert f"signal {number:d}" in live.stderr
        assert 130 == live.interrupt()
        assert live.result["checkpoint"] == live.result["updates"]


@pytest.mark.beside
def test_a_service_that_is_stopped_and_killed_or_hangs_up_leaves_nothing(tmp_path: Path) -> None:
    with service(tmp_path / "runs") as served:
        served.submit("a", actors__count=1, actors__hosts=1)
        served.until_training("a")
        served.process.send_signal(signal.SIGSTOP)
        assert -signal.SIGKILL == served.stop(signal.SIGKILL)
        served.nothing_left()
    with service(tmp_path / "runs", mark=served.mark) as again:
        again.until_training("a")
        assert -signal.SIGHUP == again.stop(signal.SIGHUP)
