"""A run on several machines that can be struck: a head, nodes, and what watches them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.lib.live_run import MARK, LiveRun, Scrape, role_of, until
from benchmarks.lib.machine import clean_environment
from benchmarks.lib.namespaces import Machine, machines
from benchmarks.lib.node_faults.frames import count_frames
from benchmarks.lib.node_faults.recovery import Look, is_whole
from benchmarks.lib.node_faults.watcher import Watcher
from benchmarks.lib.nodes import NodeProcess
from benchmarks.lib.oracle import parse
from benchmarks.lib.storm.clock import WallClock
from benchmarks.lib.storm.judges import Findings, OracleJudge, compare_with_ledger
from benchmarks.lib.storm.observers import Tally
from tianflow.rundir import join_file

NAMES, SPARE = ("one", "two", "three"), ("four", "five")
HEAD = "head"
WITH_CLOCK = "three"
"""The node whose wall clock can be shifted."""
HOSTS = 6
"""Hosts of actors, one actor each."""
SHARDS = 2
"""Replay shards of the run that has some. They work on nodes."""
LEASE_S = 5.0
MAX_STALENESS = 4
STALENESS_EDGES = (0, 1, 2, 4)
MAX_STALENESS_OF_ITEMS = 256
"""With replay, items are younger than this while the table has its full size."""
START_S = 120.0
"""Longest time from the start of a coordinator to its first update, on a loaded machine."""
LEFT_S = 10.0
"""Time in which everything of an ended coordinator must be gone."""
QUIET_S = 1.0
NAME = "faults"
INTERRUPTED = 130


class BrokenRunError(Exception):
    """Raised when the run cannot go on. The finding is already reported."""


class Cluster:
    """The run and its machines. `opened` makes one.

    Args:
        network: machines by name.
        scratch: directory for runs, logs and records.
        shards: number of replay shards; 0: each trajectory is trained on once.
        clock: wall clock of the node `WITH_CLOCK`; None: there is no C compiler.
        findings: where broken promises go.
        tally: where counts and times go.
        log: called with each step.
    """

    def __init__(
        self,
        *,
        network: dict[str, Machine],
        scratch: Path,
        shards: int,
        clock: WallClock | None,
        findings: Findings,
        tally: Tally,
        log: Callable[[str], None],
    ) -> None:
        self.machines, self._scratch, self.clock = network, scratch, clock
        self._shards = shards
        self.findings, self.tally, self.log = findings, tally, log
        self.nodes: dict[str, NodeProcess] = {}
        """The nodes that are to work, by name."""
        self.life = 0
        self.live: LiveRun
        self.watcher: Watcher
        bound = MAX_STALENESS_OF_ITEMS if shards else MAX_STALENESS
        self.oracle = OracleJudge(highest_bound=bound)
        self._watching = contextlib.ExitStack()
        self._record, self._frames = scratch / "record", scratch / "frames"
        self._record.touch()
        self._frames.touch()
        self._judged = 0
        self._mark = uuid.uuid4().hex
        self._quiet: tuple[Scrape, int, int]

    @property
    def head(self) -> Machine:
        """The machine of the coordinator."""
        return self.machines[HEAD]

    def report(self, rule: str, subject: str, detail: str) -> None:
        """Report a broken promise, with the newest output of the coordinator."""
        self.findings.report(rule, subject, detail, self.live.stderr[-4000:])

    # The coordinator
    # ----------------------------------------------------------------------------------------------

    def begin(self, *, seed: int) -> None:
        """Start the run and its nodes, and wait until it trains on all of them."""
        config = self._scratch / "faults.toml"
        config.write_text(self._config(seed), encoding="utf-8")
        (self._scratch / "tmp").mkdir()
        self._start(str(config))
        for name in NAMES:
            self.add_node(name)
        self._until_training()

    def resume(self) -> None:
        """Start the next coordinator of the run, and wait for its first metrics."""
        self._start("--resume", NAME)

    def _start(self, *arguments: str) -> None:
        self.life += 1
        self.live = LiveRun(
            name=NAME,
            runs=self._scratch / "runs",
            logs=self._scratch,
            arguments=arguments,
            environment={"TMPDIR": str(self._scratch / "tmp")},
            machine=self.head,
        )
        try:
            until("the run answers", self._answers, within_s=START_S)
            until("the join file", self.join_file.exists, within_s=START_S)
        except TimeoutError as error:
            self.give_up("does not start", str(error))
        self.watcher = Watcher(
            live=self.live,
            life=self.life,
            replay=self._shards > 0,
            findings=self.findings,
            tally=self.tally,
        )
        self._watching.enter_context(self.watcher)

    def _answers(self) -> bool:
        self.require_alive()
        return self.live.scrape()[1] is not None

    def _until_training(self) -> None:
        def look() -> bool:
            self.require_alive()
            scrape = self.live.scrape()[1]
            return scrape is not None and scrape.value("learner_updates_total") > 0

        try:
            until("the run trains", look, within_s=START_S, poll_s=0.1)
        except TimeoutError as error:
            self.give_up("does not train", str(error))
        self._quiet = self._quiet_scrape()

    @property
    def join_file(self) -> Path:
        """The file by which nodes join."""
        return self.live.directory / join_file.NAME

    def _config(self, seed: int) -> str:
        if self._shards:
            algorithm = """name = "benchmarks.lib.oracle:ReplayOracle"
batch_size = 32"""
            bound, where = MAX_STALENESS_OF_ITEMS, "nodes"
            replay = f"[replay]\nshards = {self._shards}\ncapacity = 4000\nmin_size = 64\n"
        else:
            algorithm = f"""name = "benchmarks.lib.node_faults.frames:Frames"
frames = {json.dumps(str(self._frames))}
batch_trajectories = 2"""
            bound, where, replay = MAX_STALENESS, "head", ""
        return f"""[env]
id = "benchmarks.lib.node_faults.frames:FramesEnv"
num_envs = 2
kwargs = {{ seconds = 0.005, length = 12 }}
[algorithm]
{algorithm}
record = {json.dumps(str(self._record))}
update_s = 0.005
[actors]
count = {HOSTS}
hosts = {HOSTS}
rollout_steps = 8
[balance]
max_staleness = {bound}
min_fragment_steps = 1
{replay}[placement]
launcher = "nodes"
affinity = "none"
[cluster]
expect = {len(NAMES)}
lease_s = {LEASE_S}
replay = "{where}"
[evaluation]
episodes = 1
num_envs = 1
every_s = 10.0
[checkpoint]
every_s = 2.0
[run]
name = "{NAME}"
seed = {seed}
grace_s = 5.0
max_restarts = 100000
restart_window_s = 2.0
[metrics]
interval_s = 0.5
"""

    def require_alive(self) -> None:
        """Raise BrokenRunError, with a finding, if the coordinator has ended by itself."""
        if not self.live.alive:
            last = (self.live.stderr.strip().splitlines() or [""])[-1][:300]
            self.report("end", "by itself", f"exit code {self.live.process.returncode}, {last}")
            raise BrokenRunError

    def give_up(self, subject: str, detail: str) -> NoReturn:
        """Report that the run does not recover, and raise BrokenRunError."""
        document = self.live.request(self.live.resource("")).json()
        states = {key: document.get(key) for key in ("state", "ready", "reasons")}
        outputs = "\n".join(f"{name}: {node.output[-1000:]}" for name, node in self.nodes.items())
        self.findings.report(
            "no recovery", subject, f"{detail}; {states}", f"{self.live.stderr[-4000:]}\n{outputs}"
        )
        raise BrokenRunError

    # Nodes
    # ----------------------------------------------------------------------------------------------

    def add_node(self, name: str) -> None:
        """Start the node of a machine."""
        clock = self.clock.environment if self.clock and name == WITH_CLOCK else {}
        self.nodes[name] = NodeProcess(
            self.join_file,
            name,
            self._scratch / f"{name}.log",
            wrap=self.machines[name].command,
            environment={
                **clean_environment(os.environ),
                **clock,
                "TMPDIR": str(self._scratch / "tmp"),
                MARK: self._mark,
            },
        )

    def remove_node(self, name: str) -> None:
        """Ask a node to leave, and wait for its end."""
        code = self.nodes.pop(name).leave()
        if code != 0:
            self.report("end", "a node that leaves", f"{name} ended with exit code {code}")

    def require_nodes(self) -> None:
        """Report nodes that have ended by themselves, and start them again."""
        for name, node in self.nodes.items():
            if not node.alive:
                last = (node.output.strip().splitlines() or [""])[-1][:300]
                detail = f"{name} ended with exit code {node.process.returncode}: {last}"
                self.report("end", "a node by itself", detail)
                node.start()

    def hosts_of(self, machine: Machine, role: str = "actors") -> list[int]:
        """Return the pids of the hosts of ``role`` on ``machine``."""
        return [pid for pid in machine.pids if role_of(pid).startswith(role)]

    def nodes_of_shards(self) -> list[str]:
        """Return the names of the nodes that have a replay shard."""
        return [name for name in self.nodes if self.hosts_of(self.machines[name], "replay")]

    def is_whole(self, look: Look) -> bool:
        """Return whether all nodes that are to work do so, with all hosts evenly on them."""
        return is_whole(look, self.nodes, HOSTS, self._shards)

    # Judging
    # ----------------------------------------------------------------------------------------------

    def kill_coordinator(self) -> None:
        """Kill the coordinator under load. The hosts of the head end with it."""
        self.watcher.expect_end()
        self.live.process.kill()
        self.live.wait(LEFT_S)
        left = self.live.leftovers(LEFT_S)
        if left:
            self.report("left", "a killed coordinator", "; ".join(left))
        self._watching.close()

    def compare(self) -> None:
        """Compare record and ledger, from the last comparison of this coordinator on."""
        before, lines, frames = self._quiet
        self._quiet = after, last_line, last_frame = self._quiet_scrape()
        uses = [parse(line) for line in self._lines()[lines:last_line] if " of " not in line]
        self.findings.add(
            compare_with_ledger(uses, before, after, lost_learners=0, labels=STALENESS_EDGES)
        )
        trained = after.total("steps_trained_total") - before.total("steps_trained_total")
        if not self._shards and trained != last_frame - frames:
            detail = f"the record has {last_frame - frames} frames, the ledger {trained:g}"
            self.findings.report("oracle", "frames", detail)

    def judge_record(self) -> None:
        """Judge the new lines of the record, and look for frames that were trained on twice."""
        lines = self._lines()
        self.findings.add(self.oracle.judge(lines[self._judged :], ()))
        self._judged = len(lines)
        _, twice = count_frames(self._frames)
        if twice:
            self.findings.report("oracle", "frames twice", f"{twice} frames were trained on twice")

    def frames(self) -> tuple[int, int]:
        """Return the frames trained on, and how many of them twice."""
        return count_frames(self._frames)

    def _lines(self) -> Sequence[str]:
        return self._record.read_text(encoding="utf-8").splitlines()

    def watch_again(self) -> None:
        """After a resume: the counters of this coordinator are compared from now on."""
        self._quiet = self._quiet_scrape()

    def _quiet_scrape(self) -> tuple[Scrape, int, int]:
        """Pause the run, wait until nothing moves, and let it go on. Return what was seen then: the
        metrics, and the numbers of recorded updates and frames.
        """
        self.live.request(self.live.resource("pause"), "POST")
        before: tuple[float, ...] = ()

        def look() -> tuple[Scrape, int, int] | None:
            nonlocal before
            self.require_alive()
            scrape = self.live.scrape()[1]
            if scrape is None:
                return None
            lines, frames = len(self._lines()), self._frames.stat().st_size // 8
            counted = ("learner_updates_total", "trajectories_committed_total")
            now = (lines, frames, *map(scrape.value, counted))
            same, before = now == before, now
            return (scrape, lines, frames) if same else None

        try:
            found = until("a paused run is quiet", look, within_s=START_S, poll_s=QUIET_S)
        except TimeoutError as error:
            self.give_up("a pause", str(error))
        self.live.request(self.live.resource("resume"), "POST")
        return found

    # The end
    # ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Interrupt the run, let the nodes leave, and judge what is left."""
        self.compare()
        self.judge_record()
        self.watcher.expect_end()
        self.live.process.send_signal(signal.SIGINT)
        code = self.live.wait(START_S)
        if code != INTERRUPTED:
            self.report("end", "interrupt", f"exit code {code}, not {INTERRUPTED}")
        summary = self.live.summary
        if summary.get("checkpoint") != summary.get("updates"):
            detail = f"{summary.get('checkpoint')} of {summary.get('updates')} updates saved"
            self.report("end", "checkpoint", detail)
        self._watching.close()
        for name in list(self.nodes):
            self.remove_node(name)
        for what in self._left():
            self.report("left", "at the end", what)

    def _left(self) -> Iterator[str]:
        yield from self.live.leftovers(LEFT_S)
        with contextlib.suppress(TimeoutError):
            until("no process", lambda: not self._pids(), within_s=LEFT_S)
        for pid in self._pids():
            yield f"process {role_of(pid)} ({pid})"
        if self.join_file.exists():
            yield f"the keys of the run, {self.join_file.name}"
        staged = (self.live.directory / "checkpoints").glob(".tmp-*")
        yield from (f"the staged checkpoint {path.name}" for path in staged)
        yield from (f"the temporary file {path.name}" for path in (self._scratch / "tmp").iterdir())
        for name in (*NAMES, *SPARE):
            log = self._scratch / f"{name}.log"
            if log.exists() and "Traceback" in log.read_text():
                yield f"a traceback in the log of node {name}"
        if "Traceback" in self.live.stderr:
            yield "a traceback in the log of the head"

    def _pids(self) -> list[int]:
        return [pid for machine in self.machines.values() for pid in machine.pids]

    def close(self) -> None:
        """End everything at once."""
        if self.life:
            self.watcher.expect_end()
            self.live.kill_all()
        self._watching.close()
        for node in self.nodes.values():
            if node.alive:
                node.resume()
                node.kill()


@contextlib.contextmanager
def opened(
    *,
    scratch: Path,
    shards: int,
    clock: WallClock | None,
    findings: Findings,
    tally: Tally,
    log: Callable[[str], None],
) -> Iterator[Cluster]:
    """Make machines and a cluster on them. Nothing is left afterwards."""
    with machines(HEAD, *NAMES, *SPARE) as network:
        cluster = Cluster(
            network=dict(network),
            scratch=scratch,
            shards=shards,
            clock=clock,
            findings=findings,
            tally=tally,
            log=log,
        )
        try:
            yield cluster
        finally:
            cluster.close()
