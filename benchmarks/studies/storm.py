"""Study: the promises of a run under a storm of faults.

Every role is killed, stopped and hung at random moments. The staleness bound, the number of actors,
the disk and the clock change at the same time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable

from benchmarks.lib import child
from benchmarks.lib.harness import Benchmark, Plan, Ratio, Side, Values, quotient
from benchmarks.lib.storm import ends, lives, observers, plan

MINUTES, QUICK_MINUTES = 30.0, 1.5
SHARES = {"use-once": 0.45, "replay": 0.4, "deterministic": 0.15}
"""Part of the time that each run gets."""
OVERTIME_S = 900.0
"""The last round, the last life and waiting on a loaded machine come on top."""


def make(size: Plan) -> Benchmark:
    """Make the benchmark in the size of ``size``."""
    minutes = size.minutes or (QUICK_MINUTES if size.quick else MINUTES)
    notes: list[str] = []

    def side(kind: str) -> Side:
        def measure(number: int) -> Values:
            seconds = 60.0 * minutes * SHARES[kind]
            return _strike(kind, size, seconds, 1 + number, notes.append)

        return Side(kind, measure)

    return Benchmark(
        name="storm",
        title="promises of a run under a storm of kills, stops, hangs, full disks and clock jumps",
        sides=tuple(side(kind) for kind in SHARES),
        ratios=(
            Ratio(
                "promises held: 1 over 1 + kinds of findings",
                lambda v: (
                    1.0 / (1.0 + sum(side["kinds of findings"] or 0.0 for side in v.values()))
                ),
                aim=1.0,
            ),
            *(
                Ratio(
                    f"limit of {observers.LIVE_LIMIT_S:g} s over the slowest /livez, {kind}",
                    lambda v, kind=kind: quotient(  # type: ignore[misc]  # mypy cannot infer a lambda with a default
                        observers.LIVE_LIMIT_S, v[kind].get("worst /livez without waits for a core")
                    ),
                    aim=1.0,
                    sides=(kind,),
                )
                for kind in ("use-once", "replay")
            ),
        ),
        units=units(),
        settings=settings(minutes, quick=size.quick),
        seeds=tuple(range(1, 1 + size.rounds)),
        notes=notes,
    )


def _strike(
    kind: str, size: Plan, seconds: float, seed: int, note: Callable[[str], None]
) -> Values:
    name = "short" if size.quick else "long"
    with tempfile.TemporaryDirectory(dir=size.scratch) as scratch:
        done = child.run(
            "benchmarks.workers.storm",
            *(kind, name, seconds, seed, scratch),
            timeout_s=2 * seconds + OVERTIME_S,
            echo_errors=True,
        )
    for text in done.answer["missing"]:
        note(f"{kind}: {text}")
    for text in done.answer["findings"]:
        note(f"{kind}, seed {seed}: finding at {text}")
    return dict(done.answer["values"])


def units() -> dict[str, str]:
    """Return the unit of each value, in the order of the table."""
    faults = {
        fault.name: "faults" for fault in (*plan.cards(replay=True), plan.Fault(0.0, "clock"))
    }
    return {
        "minutes": "min",
        "kinds of findings": "kinds",
        "lives": "coordinators",
        "rounds": "rounds of faults",
        "resumes": "resumes judged",
        "kill coordinator": "faults",
        **faults,
        **{end.name: "lives" for end in ends.ENDS},
        **{f"{name} = {value}": "changes" for name, value in observers.changes()},
        "pairs of changes": "pairs",
        "/metrics": "scrapes judged",
        "/livez": "answers judged",
        "judged ready": "answers judged",
        "judged unready": "answers judged",
        **{f"updates judged at bound {bound}": "updates" for bound in observers.BOUNDS},
        "updates recorded": "updates",
        "updates": "updates of the run that is left alone",
        "worst /livez": "s",
        "worst /readyz": "s",
        "worst /metrics": "s",
        "worst change": "s",
        "worst /livez without waits for a core": "s, without those of prober and coordinator",
        "worst recovery": "s, from the end of the last fault to ready, whole and training",
        **{f"worst end by {way}": "s" for way in ("interrupt", "drain")},
        "worst hang beyond its limit": "s",
        "worst CPU while paused": "cores, coordinator",
        "worst memory gained": "MiB, coordinator, in one life",
        "worst descriptors gained": "files, coordinator, in one life",
    }


def settings(minutes: float, *, quick: bool) -> dict[str, object]:
    """Return what a reader needs to repeat the storm."""
    lengths = plan.SHORT if quick else plan.LONG
    return {
        "minutes": minutes,
        "stop and hang of a learner": f"{lengths.stop_s:g} s",
        "faults of a round": f"{lengths.together} and up to {lengths.kills} kills",
        "run": "launcher processes, 4 actor hosts, 1 or 64 actors of 2 environments, 2 replay "
        "shards",
        "env.step_timeout_s": lengths.step_timeouts,
        "/readyz judged": f"503 wanted {lives.UNREADY_AFTER_S:g} s after a host of the learner, "
        "of an actor or of replay was stopped, or the last one was gone; 200 wanted "
        f"{lengths.ready_after_s:g} s after the last fault while updates are made",
    }
