"""Judges of a storm. Each judge takes observations from outside and reports findings.

A judge has no thread, no clock and no I/O, so its tests are lists of observations.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.lib.live_run import Process, Scrape
from benchmarks.lib.oracle import Use, parse

_PARTS = ("_total", "_bucket", "_count", "_sum")


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise. ``subject`` is the part that two findings of one kind share.

    ``detail`` is one line. ``evidence`` is for the log only.
    """

    rule: str
    subject: str
    detail: str
    evidence: str = ""


@dataclass(slots=True)
class Record:
    """How often a finding was made, and its first occurrence: seconds of the storm, and what was
    going on.
    """

    finding: Finding
    at: float
    context: str
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return (
            f"{self.at:.1f} s, {self.context}: {self.finding.rule}, {self.finding.subject}: "
            f"{self.finding.detail}{times}"
        )


class Findings:
    """Collects findings of all judges, from any thread. Findings of one kind are counted.

    Args:
        now: seconds since the storm began.
        context: what is going on, in words.
        log: called with the first finding of each kind.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        context: Callable[[], str],
        log: Callable[[str], None],
    ) -> None:
        self._now, self._context, self._log = now, context, log
        self._lock = threading.Lock()
        self._records: dict[tuple[str, str], Record] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        """Take ``findings``."""
        for finding in findings:
            with self._lock:
                key = finding.rule, finding.subject
                if key in self._records:
                    self._records[key].count += 1
                    continue
                self._records[key] = Record(finding, self._now(), self._context())
                text = str(self._records[key])
            self._log(f"{text}\n{finding.evidence}" if finding.evidence else text)

    def report(self, rule: str, subject: str, detail: str, evidence: str = "") -> None:
        """Take one finding."""
        self.add([Finding(rule, subject, detail, evidence)])

    @property
    def records(self) -> Sequence[Record]:
        """All kinds of findings, in the order of their first occurrence."""
        with self._lock:
            return tuple(self._records.values())


# Metrics
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class MetricsJudge:
    """The accounts close at every scrape, and no counter decreases within the life of a
    coordinator.
    """

    replay: bool
    _highest: dict[str, float] = field(default_factory=dict)

    def judge(self, scrape: Scrape) -> list[Finding]:
        """Judge one scrape."""
        found = [
            Finding("account", name, f"{left:g} is not {right:g}")
            for name, left, right in self._accounts(scrape)
            if left != right
        ]
        found += [
            Finding("account", name, f"{low:g} is above {high:g}")
            for name, low, high in _limits(scrape)
            if low > high
        ]
        return found + self._decreases(scrape)

    def _accounts(self, scrape: Scrape) -> list[tuple[str, float, float]]:
        value, total = scrape.value, scrape.total
        ends = (
            value("trajectories_trained_total")
            + value("trajectories_inserted_total")
            + total("trajectories_dropped_total")
            + value("trajectories_open")
        )
        found = [
            (
                "begun = trained + inserted + dropped + open",
                total("trajectories_begun_total"),
                ends,
            ),
            ("no violation", 0.0, value("staleness_violations_total")),
        ]
        if not self.replay:
            trained = value("trajectories_trained_total")
            return [
                *found,
                ("staleness counted for each trained", value("staleness_updates_count"), trained),
            ]
        drawn = (
            value("replay_items_trained_total")
            + total("replay_items_discarded_total")
            + value("replay_items_held")
        )
        there = value("replay_items_inserted_total") - value("replay_items_removed_total")
        return [
            *found,
            ("drawn = trained + discarded + held", value("replay_items_drawn_total"), drawn),
            ("inserted - removed = items", there, total("replay_items")),
            (
                "staleness counted for each trained",
                value("staleness_updates_count"),
                value("replay_items_trained_total"),
            ),
        ]

    def _decreases(self, scrape: Scrape) -> list[Finding]:
        found = []
        for key, value in scrape.series.items():
            name = key.partition("{")[0]
            if not _counts(name, scrape.counters):
                continue
            before = self._highest.get(key, value)
            if value < before:
                found.append(
                    Finding("counter decreased", name, f"{key} from {before:.15g} to {value:.15g}")
                )
            self._highest[key] = value
        return found


def _limits(scrape: Scrape) -> list[tuple[str, float, float]]:
    value = scrape.value
    return [
        (
            "begun + returned <= granted",
            value("trajectories_begun_total") + value("trajectories_returned_total"),
            value("trajectories_granted_total"),
        ),
        ("credits in use <= slots", value("credits_in_use"), value("slots")),
        (
            "free + quarantined <= slots",
            value("slots_free") + value("slots_quarantined"),
            value("slots"),
        ),
    ]


def _counts(name: str, counters: frozenset[str]) -> bool:
    return name in counters or any(
        name.removesuffix(part) in counters for part in _PARTS if name.endswith(part)
    )


# Readiness
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RoleWatch:
    """Since when each role is whole, stopped or missing, by looks at the process table.

    ``stopped``: by pid, since when. ``missing``: by role, of those that must exist. ``whole``:
    since when nothing is stopped or missing; None while something is. ``seen``: by pid, the last
    look at which the process existed.
    """

    replay_shards: int
    stopped: dict[int, float] = field(default_factory=dict)
    missing: dict[str, float] = field(default_factory=dict)
    whole: float | None = None
    names: dict[int, str] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)

    def look(self, table: Sequence[Process], now: float) -> None:
        """Take one look."""
        self.names = {process.pid: process.role for process in table}
        self.seen |= dict.fromkeys(self.names, now)
        self.stopped = {
            process.pid: self.stopped.get(process.pid, now)
            for process in table
            if process.state in "tT"
        }
        names = Counter(process.role.partition("-")[0] for process in table)
        gone = [role for role in ("learner", "evaluator", "actors", "tianflow") if not names[role]]
        if self.replay_shards and not names["replay"]:
            gone.append("replay")
        self.missing = {role: self.missing.get(role, now) for role in gone}
        short = names["replay"] < self.replay_shards
        if self.stopped or self.missing or short:
            self.whole = None
        elif self.whole is None:
            self.whole = now

    def broken(self, before: float) -> list[str]:
        """Return what has prevented training since a time before ``before``, in words."""
        found = [
            f"{self.names[pid]} ({pid}) is stopped"
            for pid, since in self.stopped.items()
            if since < before and self.names[pid].startswith(("learner", "actors", "replay"))
        ]
        return found + [
            f"there is no {role}"
            for role, since in self.missing.items()
            if since < before and role in ("learner", "actors", "replay")
        ]


@dataclass(slots=True)
class ReadinessJudge:
    """``/readyz`` is right at every moment at which the truth is known from outside.

    It must answer 503 when a host of the learner, of actors or of replay has been stopped, or the
    last one of them has been missing, for ``unready_after_s``. It must answer 200 when no fault was
    active and every process was whole for ``ready_after_s``, and an update was settled lately. A
    paused run makes no update; it has ``paused_after_s``.
    """

    unready_after_s: float
    ready_after_s: float
    paused_after_s: float = 10.0
    fresh_s: float = 2.0
    judged: Counter[str] = field(default_factory=Counter)

    def judge(
        self,
        *,
        asked: float,
        answered: float,
        status: int,
        reasons: str,
        broken: Sequence[str],
        whole_since: float | None,
        quiet_since: float | None,
        updated: float,
        paused: bool,
    ) -> list[Finding]:
        """Judge one answer.

        ``broken``: `RoleWatch.broken` at ``unready_after_s`` before the request, if it held after
        the answer too. ``quiet_since``: the end of the last fault; None while one is active.
        ``updated``: when an update was last seen.
        """
        if broken:
            self.judged["unready"] += 1
            if status == 200:
                return [
                    Finding("ready although broken", "/readyz", f"200 although {', '.join(broken)}")
                ]
            return []
        if whole_since is None or quiet_since is None:
            return []
        calm_s = asked - max(whole_since, quiet_since)
        if calm_s < (self.paused_after_s if paused else self.ready_after_s):
            return []
        if not paused and answered - updated > self.fresh_s:
            return []
        self.judged["ready"] += 1
        if status != 200:
            return [
                Finding(
                    "unready although whole",
                    "/readyz",
                    f"{status} after {calm_s:.1f} s of calm: {reasons}",
                )
            ]
        return []


# Two clients
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Patch:
    """One change that a client asked for. ``value``: of the setting that it names."""

    sent: float
    answered: float
    resource: str
    value: int
    status: int
    generation: int


def judge_pair(one: Patch, other: Patch) -> list[Finding]:
    """Of two changes made for the same generation at most one is put in force, and the other is
    refused by 412.
    """
    statuses = sorted((one.status, other.status))
    if statuses in ([200, 412], [412, 412]):  # a pause or an evaluation also moves the generation
        return []
    return [
        Finding("two clients", one.resource, f"answers {statuses} to two changes of one generation")
    ]


# The oracle
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BoundSpan:
    """A span of time in which the learner surely trained under ``bound``."""

    begin: float
    end: float
    bound: int


def bound_spans(
    patches: Sequence[Patch], generations: Sequence[tuple[float, int]], end: float
) -> list[BoundSpan]:
    """Return the spans in which the bound at the learner is known.

    A span begins when the learner reports the generation of a change that was put in force. It ends
    when a client sends the next change of the bound.

    Args:
        patches: all changes of the bound, in the order in which they were sent.
        generations: (time, generation that the learner reports), in order of time.
        end: when the last observation was made.
    """
    found = []
    for index, patch in enumerate(patches):
        if patch.status != 200:
            continue
        later = [other.sent for other in patches[index + 1 :] if other.sent > patch.answered]
        limit = min(later, default=end)
        reached = [
            time
            for time, generation in generations
            if patch.answered <= time < limit and generation >= patch.generation
        ]
        if reached:
            found.append(BoundSpan(reached[0], limit, patch.value))
    return found


@dataclass(slots=True)
class OracleJudge:
    """Judges the record of the oracle against the bounds that were in force.

    The first update of each learner in a span may have been admitted before the span, so it is not
    judged by the span's bound.
    """

    highest_bound: int
    judged: Counter[int] = field(default_factory=Counter)
    updates: int = 0

    def judge(self, lines: Iterable[str], spans: Sequence[BoundSpan]) -> list[Finding]:
        """Judge some lines of the record."""
        found = []
        begins = [span.begin for span in spans]
        entered: set[tuple[int, int]] = set()
        last: dict[int, int] = {}
        for line in lines:
            try:
                use = parse(line)
            except ValueError:
                found.append(Finding("oracle", "another learner's data", line))
                continue
            self.updates += 1
            if last.get(use.pid, use.number - 1) != use.number - 1:
                found.append(Finding("oracle", "order of updates", line))
            last[use.pid] = use.number
            found += self._judge_ages(use, self.highest_bound)
            index = bisect.bisect_right(begins, use.at) - 1
            if index < 0 or use.at >= spans[index].end:
                continue
            if (index, use.pid) in entered:
                self.judged[spans[index].bound] += 1
                found += self._judge_ages(use, spans[index].bound)
            entered.add((index, use.pid))
        return found

    def _judge_ages(self, use: Use, bound: int) -> list[Finding]:
        if 0 <= min(use.ages) and max(use.ages) <= bound:
            return []
        detail = (
            f"staleness {min(use.ages)} to {max(use.ages)} in update {use.number} of learner "
            f"{use.pid} at {use.at:.3f}"
        )
        return [Finding("oracle", f"bound {bound}", detail)]


def compare_with_ledger(
    uses: Sequence[Use], before: Scrape, after: Scrape, *, lost_learners: int, labels: Sequence[int]
) -> list[Finding]:
    """Compare the record with the ledger's histogram of staleness between two quiet moments.

    Each learner that was lost may have recorded one update that it never settled.

    Args:
        uses: all updates recorded between the two scrapes.
        before: scrape of the first moment.
        after: scrape of the second moment.
        lost_learners: learners that were lost meanwhile.
        labels: upper edges of the histogram's buckets.
    """
    settled = _between(before, after, "learner_updates_total")
    untold = len(uses) - settled
    if not 0 <= untold <= lost_learners:
        detail = (
            f"the record has {len(uses)} updates, the ledger {settled:g}, and {lost_learners} "
            "learners were lost"
        )
        return [Finding("oracle", "updates settled", detail)]
    found = []
    most = sum(sorted((len(use.ages) for use in uses), reverse=True)[: int(untold)])
    for edge in labels:
        recorded = sum(age <= edge for use in uses for age in use.ages)
        counted = _between(before, after, "staleness_updates_bucket", le=f"{float(edge):g}")
        if not 0 <= recorded - counted <= most:
            detail = (
                f"the record has {recorded} of staleness up to {edge}, the ledger {counted:g}, and "
                f"at most {most} may be missing"
            )
            found.append(Finding("oracle", "histogram of staleness", detail))
    return found


def _between(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    try:
        return after.value(name, **labels) - before.value(name, **labels)
    except KeyError:
        other = {key: f"{float(value)}" if key == "le" else value for key, value in labels.items()}
        return after.value(name, **other) - before.value(name, **other)


# Resuming
# --------------------------------------------------------------------------------------------------


def judge_resume(
    *,
    acknowledged: Mapping[str, int],
    in_force: Mapping[str, object],
    checkpoint: tuple[int, int] | None,
    version: tuple[int, int],
) -> list[Finding]:
    """A resumed run has every change that was acknowledged, and a version after its newest
    checkpoint, of a later lineage.
    """
    found = [
        Finding("resume", f"setting {name}", f"{in_force.get(name)} instead of {value}")
        for name, value in acknowledged.items()
        if in_force.get(name) != value
    ]
    if checkpoint is not None and (version[0] <= checkpoint[0] or version[1] < checkpoint[1]):
        detail = f"version {version} after a checkpoint of {checkpoint}"
        found.append(Finding("resume", "version", detail))
    return found
