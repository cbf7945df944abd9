"""A storm over one run: its coordinator lives, is struck, ends, and resumes, again and again."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from benchmarks.lib.live_run import (
    FORK_SERVER,
    LiveRun,
    Scrape,
    cpu_seconds,
    descriptors,
    private_mib,
    until,
)
from benchmarks.lib.oracle import parse
from benchmarks.lib.storm import environment
from benchmarks.lib.storm.clock import WallClock
from benchmarks.lib.storm.disk import SmallDisk
from benchmarks.lib.storm.ends import ENDS, INTERRUPT, End, carry_out, judge
from benchmarks.lib.storm.faults import Injector
from benchmarks.lib.storm.judges import (
    Findings,
    OracleJudge,
    ReadinessJudge,
    bound_spans,
    compare_with_ledger,
    judge_resume,
)
from benchmarks.lib.storm.observers import BOUNDS, Conditions, Observers, Tally
from benchmarks.lib.storm.plan import COORDINATOR, Fault, Size, rounds
from tianflow.errors import CheckpointError
from tianflow.rundir.checkpoints import CheckpointStore

START_S = 120.0
"""Longest time from the start of a coordinator to its first update, on a loaded machine."""
PATIENCE_S = 10.0
JUDGED_UPDATES = 5
"""Updates under each bound in the calm life. The first of a learner is not judged."""
MEETING_S = 10.0
"""Time in which a process reaches the moment at which it is to hang."""
HANG_MARGIN_S = 10.0
"""Time beyond its limit in which a hanging process is gone, on a loaded machine."""
UNREADY_AFTER_S = 8.0
"""A host may be silent for 3 s and one report before ``/readyz`` says so. The rest is margin."""
WRITTEN_S = 4.0
"""Time in which acknowledged settings must be on disk, once the disk takes them."""
QUIET_S = 1.0
MEMORY_MARGIN_MIB, DESCRIPTOR_MARGIN = 64.0, 16
STALENESS_EDGES = (0, 1, 2, 4, 8, 16)
NAME = "storm"


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a storm takes place.

    Attributes:
        runs: directory of runs.
        scratch: directory for logs, requests and the record of the oracle. It never fills.
        clock: wall clock of the run; None: the storm leaves the clock alone.
        disk: file system of ``runs``, if a filler can fill it.
    """

    runs: Path
    scratch: Path
    clock: WallClock | None
    disk: SmallDisk | None


class BrokenLifeError(Exception):
    """Raised when a coordinator cannot go on. The finding is already reported."""


class Storm:
    """A storm over one run.

    Args:
        replay: the run learns from replay.
        seconds: length of the storm, from the first update on.
        seed: of the plan.
        size: lengths of its parts.
        stage: where it takes place.
        log: called with each finding and each step.
    """

    def __init__(
        self,
        *,
        replay: bool,
        seconds: float,
        seed: int,
        size: Size,
        stage: Stage,
        log: Callable[[str], None],
    ) -> None:
        self._shards = 2 if replay else 0
        self._seconds, self._size, self._stage, self._log = seconds, size, stage, log
        self._dice, self._seed = random.Random(seed), seed
        self._rounds = rounds(seed, size, replay=replay)
        self._began = time.monotonic()
        self._deadline = math.inf
        self.conditions, self.tally = Conditions(), Tally()
        self.findings = Findings(
            now=self._elapsed, context=self.conditions.describe, log=lambda text: log(f"! {text}")
        )
        self.readiness = ReadinessJudge(UNREADY_AFTER_S, size.ready_after_s)
        self.oracle = OracleJudge(highest_bound=max(BOUNDS))
        self._requests = stage.scratch / "requests"
        self._record = stage.scratch / "record"
        self._requests.mkdir()
        self._record.touch()
        self._ends: list[End] = []
        self._acknowledged: dict[str, int] = {}
        self._checkpoint: tuple[int, int] | None = None
        self._step_timeout_s = size.step_timeouts[0]

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> None:
        """Run the storm to its end, and one last calm life after it."""
        while time.monotonic() < self._deadline:
            self._live(calm=False)
        self._live(calm=True)

    # One life
    # ----------------------------------------------------------------------------------------------

    def _live(self, *, calm: bool) -> None:
        """Start or resume the coordinator, strike the run, and end it."""
        life = self.conditions.life = self.conditions.life + 1
        timeouts = self._size.step_timeouts
        self._step_timeout_s = timeouts[(life - 1) % len(timeouts)]
        end = INTERRUPT if calm else self._next_end()
        lines = _count_lines(self._record)
        live = self._start(resume=life > 1)
        self._log(f"life {life} begins, env.step_timeout_s = {self._step_timeout_s:g}")
        try:
            self._until_training(live)
            self._deadline = min(self._deadline, time.monotonic() + self._seconds)
            if life > 1:
                self._judge_resume(live)
            observers = self._observers(live)
            with observers:
                self._struck(live, observers, calm=calm, end=end)
            self._judge_record(observers, lines)
            time.sleep(WRITTEN_S)
            if not end.amid:
                carry_out(end, live, self._stage.disk)
            self.tally.measured(f"end by {end.by}", judge(end, live, self.findings))
            self.tally.count(end.name)
        except BrokenLifeError:
            self._log("the life is broken off")
        finally:
            self.tally.count("lives")
            live.kill_all()
            if self._stage.disk is not None:
                self._stage.disk.empty()
        self._judge_left(live)
        self._log(f"life {life}, end: {end.name}")

    def _next_end(self) -> End:
        """Deal out every end once, in an order of the seed; then again."""
        if not self._ends:
            self._ends = [end for end in ENDS if self._stage.disk is not None or not end.disk]
            self._dice.shuffle(self._ends)
        return self._ends.pop()

    def _start(self, *, resume: bool) -> LiveRun:
        stage = self._stage
        temporary = stage.scratch / "tmp"
        temporary.mkdir(exist_ok=True)
        timeout = f"env.step_timeout_s={self._step_timeout_s}"
        if resume:
            arguments: tuple[str, ...] = ("--resume", NAME, timeout)
        else:
            config = stage.scratch / "storm.toml"
            config.write_text(self._config(), encoding="utf-8")
            arguments = (str(config), timeout)
        return LiveRun(
            name=NAME,
            runs=stage.runs,
            logs=stage.scratch,
            arguments=arguments,
            environment={
                **(stage.clock.environment if stage.clock else {}),
                environment.FOLDER: str(self._requests),
                "TMPDIR": str(temporary),
            },
        )

    def _config(self) -> str:
        algorithm = "StormReplayOracle" if self._shards else "StormOracle"
        batch = "batch_size = 32" if self._shards else "batch_trajectories = 2"
        replay = f"[replay]\nshards = {self._shards}\ncapacity = 4000\nmin_size = 64\n"
        return f"""[env]
id = "benchmarks.lib.storm.environment:StormEnv"
num_envs = 2
kwargs = {{ seconds = 0.002, length = 12 }}
start_timeout_s = {self._size.start_timeout_s}
[algorithm]
name = "benchmarks.lib.storm.environment:{algorithm}"
record = {json.dumps(str(self._record))}
update_s = 0.01
{batch}
[actors]
count = 4
hosts = 4
rollout_steps = 8
[balance]
max_staleness = {max(BOUNDS)}
min_fragment_steps = 1
straggler_patience = {PATIENCE_S}
{replay if self._shards else ""}[placement]
affinity = "none"
[evaluation]
episodes = 2
num_envs = 2
every_s = {self._size.evaluate_every_s}
timeout_s = {self._size.evaluation_timeout_s}
[checkpoint]
every_s = 2.0
[run]
name = "{NAME}"
seed = {self._seed}
grace_s = 5.0
max_restarts = 100000
restart_window_s = 2.0
[metrics]
interval_s = 0.5
"""

    def _until_training(self, live: LiveRun) -> None:
        def look() -> bool:
            self._require_alive(live)
            _, scrape = live.scrape()
            return scrape is not None and scrape.value("learner_updates_total") > 0

        try:
            until("the run trains", look, within_s=START_S, poll_s=0.1)
        except TimeoutError as error:
            self._give_up(live, "does not train", str(error))

    def _require_alive(self, live: LiveRun) -> None:
        if not live.alive:
            detail = f"exit code {live.process.returncode}, {_last_line(live.stderr)}"
            self.findings.report("end", "by itself", detail, live.stderr[-4000:])
            raise BrokenLifeError

    def _give_up(self, live: LiveRun, subject: str, detail: str) -> Never:
        document = live.request(live.resource("")).json()
        states = {key: document.get(key) for key in ("state", "ready", "reasons")}
        evidence = f"{json.dumps(document)}\n{live.table()}\n{live.stderr[-4000:]}"
        self.findings.report("no recovery", subject, f"{detail}; {states}", evidence)
        raise BrokenLifeError

    def _observers(self, live: LiveRun) -> Observers:
        return Observers(
            live=live,
            replay_shards=self._shards,
            findings=self.findings,
            tally=self.tally,
            conditions=self.conditions,
            readiness=self.readiness,
            seed=self._dice.randrange(2**32),
        )

    # Faults
    # ----------------------------------------------------------------------------------------------

    def _struck(self, live: LiveRun, observers: Observers, *, calm: bool, end: End) -> None:
        """Rounds of faults between two quiet moments, at which record and ledger are compared."""
        before, first = self._quiet_scrape(live)
        opened, memory = descriptors(live.process.pid), private_mib(live.process.pid)
        deadline = time.monotonic() + (0.0 if calm else self._dice.uniform(*self._size.life_s))
        while time.monotonic() < min(deadline, self._deadline):
            self._round(live, observers)
        time.sleep(self._size.settle_s if calm else 0.0)
        if end.disk == "was full":
            self._fill_for_a_while()
        observers.stop_changes()
        if calm:
            self._train_under_each_bound(live, observers)
        after, last = self._quiet_scrape(live)
        uses = [
            parse(line)
            for line in _lines_from(self._record, first, last)
            if " of " not in line  # reported by the judge of the record
        ]
        lost = sum(
            after.series[key] - before.series.get(key, 0.0)
            for key in after.series
            if key.startswith("component_restarts_total{component=learner,")
        )
        found = compare_with_ledger(
            uses, before, after, lost_learners=int(lost), labels=STALENESS_EDGES
        )
        self.findings.add(found)
        for name in observers.unknown:
            self._acknowledged.pop(name, None)
        self._acknowledged |= observers.acknowledged
        self._judge_growth(live, opened, memory)
        if end.amid:
            self._kill_amid(live, observers)

    def _train_under_each_bound(self, live: LiveRun, observers: Observers) -> None:
        """Change the bound to each of its values, and wait for updates that the judge of the record
        judges by it. The two clients may have set a bound for a moment only.
        """
        for bound in BOUNDS:
            patch = observers.change("balance", bound)
            if patch is None:
                self._give_up(live, f"a change to bound {bound}", "the run refuses it")
            recorded: int | None = None

            def look(generation: int = patch.generation) -> bool:
                nonlocal recorded
                self._require_alive(live)
                if recorded is None:
                    if any(generation <= found for _, found in observers.generations[-1:]):
                        recorded = _count_lines(self._record)
                    return False
                return _count_lines(self._record) >= recorded + JUDGED_UPDATES

            try:
                within_s = self._size.recover_s
                until(f"updates at bound {bound}", look, within_s=within_s, poll_s=0.1)
            except TimeoutError as error:
                self._give_up(live, f"training at bound {bound}", str(error))

    def _fill_for_a_while(self) -> None:
        """Let clients change settings while the disk is full."""
        disk = self._stage.disk
        assert disk is not None
        self.conditions.begin("disk")
        disk.fill()
        time.sleep(self._size.short_s[0])
        disk.empty()
        self.conditions.end("disk")

    def _kill_amid(self, live: LiveRun, observers: Observers) -> None:
        """Kill the coordinator at a random moment of a round."""
        time.sleep(WRITTEN_S)
        observers.expect_end()
        kill = threading.Timer(self._dice.uniform(0.0, self._size.spread_s), live.process.kill)
        kill.start()
        self._injector(live).strike(next(self._rounds))
        kill.join()

    def _injector(self, live: LiveRun) -> Injector:
        return Injector(
            live=live,
            folder=self._requests,
            clock=self._stage.clock,
            disk=self._stage.disk,
            conditions=self.conditions,
            tally=self.tally,
        )

    def _round(self, live: LiveRun, observers: Observers) -> None:
        injector = self._injector(live)
        faults = next(self._rounds)
        self._log(f"{self._elapsed():.0f} s: {', '.join(fault.name for fault in faults)}")
        injector.strike(faults)
        self._require_alive(live)
        over = time.monotonic()
        # a stopped fork server kills nothing, and a stopped coordinator watches nothing
        watchers = {f"stop {FORK_SERVER}", f"stop {COORDINATOR}"}
        stops = [fault.seconds for fault in faults if fault.name in watchers]
        for fault, host in injector.hangs:
            self._judge_hang(live, observers, fault, host, margin=HANG_MARGIN_S + sum(stops))
        self._recovered(live, observers, over)
        self.tally.count("rounds")
        time.sleep(self._size.settle_s)
        self._require_alive(live)

    def _judge_hang(
        self, live: LiveRun, observers: Observers, fault: Fault, host: str, *, margin: float
    ) -> None:
        """A process whose environment hangs is replaced when its time is up."""
        waiting = f"waiting for {fault.name}"
        self.conditions.begin(waiting)
        try:
            with suppress(TimeoutError):  # nothing may have reached the moment
                until(
                    "it hangs",
                    lambda: environment.hung(self._requests, host),
                    within_s=MEETING_S,
                )
            if environment.withdraw(self._requests, host, fault.detail):
                self.tally.count(f"unmet {fault.name}")
            for pid in environment.hung(self._requests, host):
                self._wait_for_replacement(live, observers, fault, host, pid=pid, margin=margin)
            environment.forget(self._requests, host)
        finally:
            self.conditions.end(waiting)

    def _wait_for_replacement(
        self,
        live: LiveRun,
        observers: Observers,
        fault: Fault,
        host: str,
        *,
        pid: int,
        margin: float,
    ) -> None:
        """Report a process that hangs for longer than it may, and kill it."""
        if fault.detail == environment.UPDATE:
            return  # it ends by itself; `_recovered` sees the next update
        limit = hang_limit(fault, host, self._size, step_timeout_s=self._step_timeout_s)
        since = environment.hung_since(self._requests, host, pid)
        deadline = since + limit + margin
        while _lives(live, pid, host) and time.monotonic() < deadline:
            time.sleep(0.1)
        late = (observers.last_seen(pid) or since) - since - limit
        self.tally.measured("hang beyond its limit", late)
        if late > margin or _lives(live, pid, host):
            detail = f"{host} hangs for {limit + late:.0f} s, its limit is {limit:g} s"
            self.findings.report("unwatched hang", fault.name, detail, live.stderr[-4000:])
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _recovered(self, live: LiveRun, observers: Observers, over: float) -> None:
        """Wait until every role is back, the run is ready, and it trains."""
        began = time.monotonic()

        def look() -> bool:
            self._require_alive(live)
            ready = live.request("/readyz").status == 200
            return ready and observers.whole and observers.updated > began

        try:
            until("ready, whole and training", look, within_s=self._size.recover_s, poll_s=0.1)
        except TimeoutError as error:
            self._give_up(live, "the run", str(error))
        self.tally.measured("recovery", time.monotonic() - over)

    # Judging a life
    # ----------------------------------------------------------------------------------------------

    def _quiet_scrape(self, live: LiveRun) -> tuple[Scrape, int]:
        """Pause the run, wait until nothing moves, and let it go on. Return what was seen then: the
        metrics, and the number of recorded updates.
        """
        live.request(live.resource("pause"), "POST")
        self.conditions.paused = True
        used, since = cpu_seconds(live.process.pid), time.monotonic()
        before: tuple[float, ...] = ()

        def look() -> tuple[Scrape, int] | None:
            nonlocal before
            self._require_alive(live)
            _, scrape = live.scrape()
            if scrape is None:
                return None
            lines = _count_lines(self._record)
            now = (
                lines,
                scrape.value("learner_updates_total"),
                scrape.value("trajectories_committed_total"),
            )
            same, before = now == before, now
            return (scrape, lines) if same else None

        try:
            found = until("a paused run is quiet", look, within_s=START_S, poll_s=QUIET_S)
        except TimeoutError as error:
            self._give_up(live, "a pause", str(error))
        took = time.monotonic() - since
        self.tally.measured("CPU while paused", (cpu_seconds(live.process.pid) - used) / took)
        live.request(live.resource("resume"), "POST")
        self.conditions.paused = False
        return found

    def _judge_growth(self, live: LiveRun, opened: int, memory: float) -> None:
        """A life does not use up descriptors or memory."""
        more = descriptors(live.process.pid) - opened
        self.tally.measured("descriptors gained", more)
        if more > DESCRIPTOR_MARGIN:
            self.findings.report("growth", "descriptors", f"{opened} and then {opened + more}")
        grown = private_mib(live.process.pid) - memory
        self.tally.measured("memory gained", grown)
        if grown > MEMORY_MARGIN_MIB:
            self.findings.report("growth", "memory", f"{memory:.0f} MiB, then {grown:.0f} more")

    def _judge_record(self, observers: Observers, lines: int) -> None:
        patches = [patch for patch in observers.patches if patch.resource == "balance"]
        spans = bound_spans(patches, observers.generations, time.monotonic())
        self.findings.add(self.oracle.judge(_lines_from(self._record, lines), spans))

    def _judge_resume(self, live: LiveRun) -> None:
        """A resumed run has what was acknowledged, and goes on from its newest checkpoint."""
        in_force = {
            **live.request(live.resource("balance")).json(),
            **live.request(live.resource("actors")).json(),
        }
        learner = live.request(live.resource("")).json()["versions"]["learner"]
        self.findings.add(
            judge_resume(
                acknowledged=self._acknowledged,
                in_force=in_force,
                checkpoint=self._checkpoint,
                version=(learner["lineage"], learner["number"]),
            )
        )
        self.tally.count("resumes")

    def _judge_left(self, live: LiveRun) -> None:
        """The log has no traceback, and the temporary directory is empty."""
        text = live.stderr
        if "Traceback" in text:
            place = text.index("Traceback")
            error = next(
                (line for line in text[place:].splitlines() if line and line[0] not in " T"), "?"
            )
            evidence = text[place : place + 4000]
            self.findings.report("traceback", error[:200], "on standard error", evidence)
        for path in self._requests.iterdir():
            path.unlink()
        left = sorted(path.name for path in (self._stage.scratch / "tmp").iterdir())
        if left:
            self.findings.report("left", "temporary files", ", ".join(left))
        self._checkpoint = None
        with suppress(CheckpointError):
            newest = CheckpointStore(live.directory / "checkpoints", keep=1).newest()
            if newest is not None:
                self._checkpoint = newest.version.lineage, newest.version.number


def hang_limit(fault: Fault, host: str, size: Size, *, step_timeout_s: float) -> float:
    """Return for how many seconds an environment of ``host`` may hang until its process is killed.

    A reset may be the first one, which has the time of a constructor.
    """
    if fault.detail == "constructor":
        return size.start_timeout_s
    if host == "evaluator":
        return size.evaluation_timeout_s
    if fault.detail == "reset":
        return max(step_timeout_s, size.start_timeout_s)
    return step_timeout_s


def _lives(live: LiveRun, pid: int, host: str) -> bool:
    return any(process.pid == pid and process.role == host for process in live.table())


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def _count_lines(record: Path) -> int:
    with record.open("rb") as file:
        return sum(1 for _ in file)


def _lines_from(record: Path, first: int, last: int | None = None) -> Iterator[str]:
    with record.open(encoding="utf-8") as file:
        yield from itertools.islice(file, first, last)


def values(storm: Storm, seconds: float) -> Mapping[str, float]:
    """Return what a storm counted and timed."""
    tally = storm.tally
    return {
        "minutes": seconds / 60,
        **{name: float(count) for name, count in sorted(tally.counts.items())},
        **{f"worst {name}": value for name, value in sorted(tally.worst.items())},
        **{
            f"judged {name}": float(count) for name, count in sorted(storm.readiness.judged.items())
        },
        **{
            f"updates judged at bound {bound}": float(count)
            for bound, count in sorted(storm.oracle.judged.items())
        },
        "updates recorded": float(storm.oracle.updates),
        "kinds of findings": float(len(storm.findings.records)),
    }
