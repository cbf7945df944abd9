"""A thread that watches one coordinator: its metrics, its run document and ``/livez``."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Self

from benchmarks.lib.live_run import Answer, LiveRun, waited_for_cpu
from benchmarks.lib.node_faults.recovery import Look, look_at
from benchmarks.lib.storm.judges import Finding, Findings, MetricsJudge
from benchmarks.lib.storm.observers import LIVE_LIMIT_S, Metronome, Tally

EVERY_S = 0.2


class Watcher:
    """Watches and judges a coordinator until the context ends.

    Args:
        live: the run.
        life: number of the coordinator, from 1.
        replay: the run learns from replay.
        findings: where broken promises go.
        tally: where counts and times go.
    """

    def __init__(
        self, *, live: LiveRun, life: int, replay: bool, findings: Findings, tally: Tally
    ) -> None:
        self._live, self._life = live, life
        self._findings, self._tally = findings, tally
        self._metrics = MetricsJudge(replay=replay)
        self._over, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._guarded, daemon=True)
        self._error: BaseException | None = None
        self.looks: list[Look] = []
        """Every look so far. Other threads may read it at any time."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def expect_end(self) -> None:
        """From now on the coordinator may end, so no answer is expected."""
        self._ending.set()

    def _guarded(self) -> None:
        metronome = Metronome()
        try:
            while not self._over.wait(EVERY_S):
                self._look()
                self._probe(metronome)
        except BaseException as error:  # noqa: BLE001 - it is raised where the context ends
            self._error = error
        finally:
            metronome.close()

    def _answered(self, what: str, answer: Answer) -> bool:
        self._tally.answered(what, answer.seconds)
        if answer.status == 200:
            return True
        if self._live.alive and not self._ending.is_set():
            detail = f"{answer.status or 'no answer'}: {answer.body[:300].decode(errors='replace')}"
            self._findings.report("answer", what, detail)
        return False

    def _look(self) -> None:
        answer = self._live.request(self._live.resource(""))
        if not self._answered("run document", answer):
            return
        document = answer.json()
        self._findings.add(judge_document(document))
        answer, scrape = self._live.scrape()
        if self._answered("/metrics", answer) and scrape is not None:
            self._findings.add(self._metrics.judge(scrape))
            actors = document["actors"]["reporting"]
            self.looks.append(look_at(scrape, life=self._life, actors=actors))

    def _probe(self, metronome: Metronome) -> None:
        metronome.take()
        pid = self._live.process.pid
        waited = waited_for_cpu(pid)
        answer = self._live.request("/livez")
        late = metronome.take()
        waited = max(0.0, waited_for_cpu(pid) - waited)
        if not self._answered("/livez", answer):
            return
        own = max(0.0, answer.seconds - late - waited)
        self._tally.measured("/livez without waits for a core", own)
        if own > LIVE_LIMIT_S:
            detail = (
                f"took {answer.seconds:.2f} s; the prober was {late:.2f} s late, and the "
                f"coordinator waited {waited:.2f} s for a core"
            )
            self._findings.report("slow", "/livez", detail)

    def newest(self, since: float) -> Look | None:
        """Return the newest look, if it is not older than ``since`` (monotonic time)."""
        return self.looks[-1] if self.looks and self.looks[-1].at >= since else None

    def wait_for_look(self, within_s: float) -> Look:
        """Return a look that begins after this call. TimeoutError without one."""
        now = time.monotonic()
        while (found := self.newest(now)) is None:
            if time.monotonic() > now + within_s:
                raise TimeoutError(f"no metrics within {within_s:g} s")
            time.sleep(EVERY_S / 4)
        return found


def judge_document(document: Mapping[str, Any]) -> list[Finding]:
    """The account of trajectories closes in the run document, too."""
    counts = document["trajectories"]
    ends = counts["trained"] + counts["inserted"] + sum(counts["dropped"].values()) + counts["open"]
    if counts["begun"] == ends:
        return []
    detail = f"{counts['begun']} begun, {ends} trained, inserted, dropped or open"
    return [Finding("account", "run document", detail)]
