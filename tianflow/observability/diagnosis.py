"""Diagnosis of a run: its bottleneck, the size of it and a remedy, from recent shares of time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from tianflow.config.model import Config
from tianflow.core.statistics import (
    ComponentStatistics,
    Diagnosis,
    NodeStatistics,
    RunStatistics,
)
from tianflow.logs import logger
from tianflow.observability.stalls import stalled
from tianflow.observability.throughput_model import Forecast
from tianflow.observability.window import MOST, NOTICEABLE, Window

WINDOW_S = 5.0
SPACING_S = 0.5
LEAST_S = 0.5
"""Minimum seconds of a window for a verdict."""
MEMORY_S = 60.0
"""Seconds over which the spread of times is estimated. Times also change by themselves, so it is
limited.
"""
SETTLED_S = 2.0
"""Seconds after a change in which reports may still describe the time before it."""

SERVERS_BUSY = 0.5
"""Share of time from which on servers are the limit, not the time that a request takes."""

log = logger("diagnosis")


class DiagnosisMemory:
    """Component statistics of the last `MEMORY_S` seconds of training under the same settings."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, tuple[ComponentStatistics, ...]]] = deque()
        self._generation, self._since = -1, 0.0

    def add(self, run: RunStatistics) -> Sequence[ComponentStatistics]:
        """Add a sample; the oldest one, empty while there is none."""
        kept = self._kept
        if run.generation != self._generation or run.state != "running":
            kept.clear()
            self._generation, self._since = run.generation, run.now
        while len(kept) > 1 and kept[1][0] <= run.now - MEMORY_S:
            kept.popleft()
        if run.now >= self._since + SETTLED_S and (
            not kept or run.now - kept[-1][0] >= MEMORY_S / 12
        ):
            kept.append((run.now, run.components))
        return kept[0][1] if kept else ()


class DiagnosisWindow:
    """Samples of the last seconds of uninterrupted training, for a diagnosis.

    THE GUARANTEE: a diagnosis is advice. If it fails, the verdict is "unknown", and everything else
    in the statistics stays as it is: metrics, readiness, history and summary do not depend on it.
    """

    def __init__(self) -> None:
        self._kept: deque[RunStatistics] = deque()
        self._memory = DiagnosisMemory()
        self._verdict, self._since = "", 0.0
        self._failure = ""

    def diagnosed(self, run: RunStatistics, config: Config) -> RunStatistics:
        """``run`` with its diagnosis. Adds it to the samples."""
        try:
            return self._diagnosed(run, config)
        except Exception as error:  # a boundary, see the guarantee
            failure = f"{type(error).__name__}: {error}"
            if failure != self._failure:  # statistics are read many times per second
                log.exception("the diagnosis of the run failed", error=failure)
            self._failure = failure
            sentence = f"the diagnosis failed: {failure}"
            return replace(run, diagnosis=Diagnosis("unknown", sentence))

    def _diagnosed(self, run: RunStatistics, config: Config) -> RunStatistics:
        kept = self._kept
        if run.state != "running":
            kept.clear()
        while len(kept) > 1 and kept[1].now <= run.now - WINDOW_S:
            kept.popleft()
        found = diagnose([*kept, run], config, self._memory.add(run))
        if run.state == "running" and (not kept or run.now - kept[-1].now >= SPACING_S):
            kept.append(run)
        if found.verdict != self._verdict:
            self._verdict, self._since = found.verdict, run.now
        return replace(run, diagnosis=replace(found, for_s=max(found.for_s, run.now - self._since)))


def diagnose(
    samples: Sequence[RunStatistics], config: Config, earlier: Sequence[ComponentStatistics] = ()
) -> Diagnosis:
    """The diagnosis of the time from the first to the last of ``samples``, oldest first.

    Shares cover exactly that time. The samples in between only show how many trajectories were in
    transit. The spread of times is estimated since ``earlier`` (`Window.earlier`).
    """
    run = samples[-1]
    if run.state != "running":
        evaluation = (
            f" and evaluates the policy over {config.evaluation.episodes} episodes; another stop "
            "request skips the evaluation"
            if run.evaluating and run.state == "stopping"
            else ""
        )
        return Diagnosis(run.state, f"the run is {run.state}{evaluation}")
    stall = stalled(samples, config)
    if stall is not None:
        return stall
    window = Window(_since_the_first_update(samples), config, earlier)
    if window.passed < LEAST_S or not window.actors or "learner" not in window.shares:
        return Diagnosis(
            "starting", "the window is too short for a verdict", window_s=window.passed
        )
    verdict = _verdict(window)
    sentence, suggested, forecast = ADVICE[verdict](window)
    return Diagnosis(
        verdict,
        sentence,
        window_s=window.passed,
        waits={"learner": window.learner_waits, "actors": window.actors_wait},
        shares=window.shares,
        suggested=suggested,
        steps_per_s=window.pace,
        forecast_steps_per_s=None if forecast is None else forecast.pace,
        forecast_range=None
        if forecast is None or forecast.low == forecast.high
        else (forecast.low, forecast.high),
    )


def _since_the_first_update(samples: Sequence[RunStatistics]) -> Sequence[RunStatistics]:
    """The samples after the first update, if they span `LEAST_S`: the wait for the very first batch
    says nothing about later ones.
    """
    later = [sample for sample in samples if sample.ledger.updates]
    return later if later and later[-1].now - later[0].now >= LEAST_S else samples


def _verdict(window: Window) -> str:
    """The side that waits names the bottleneck.

    With replay, the learner requests ahead and actors continue while slots are free. So a side that
    is blocked without waiting loses nothing, and a side that waits without being blocked waits for
    the shards.
    """
    learner, actors = window.learner_waits > NOTICEABLE, window.actors_wait > NOTICEABLE
    if not learner and not actors:
        return "balanced"
    if window.run.replay is not None:
        learner, actors = learner and window.blocked("draw"), actors and window.blocked("insert")
        if not learner and not actors:
            return "transport-bound"
    elif learner and (window.held_up or (actors and not window.credits_spent)):
        return "transport-bound"
    if learner and actors:
        return "balance-bound"
    if learner and _inference_holds_hosts_up(window):
        return "inference-bound"
    return "sampling-bound" if learner else "learning-bound"


def _inference_holds_hosts_up(window: Window) -> bool:
    """True if hosts are idle while their actors wait for an inference server. A host with several
    actors steps others meanwhile.
    """
    return window.inference_waits > NOTICEABLE and window.hosts_busy < 1.0 - NOTICEABLE


# Advice: a sentence, settings that would help, and the forecast with them
# --------------------------------------------------------------------------------------------------

Advice = tuple[str, dict[str, float], Forecast | None]


def _waiting(window: Window) -> str:
    return (
        f"the learner waits {window.learner_waits:.0%} of the time, actors {window.actors_wait:.0%}"
    )


def _sampling(window: Window) -> Advice:
    """Equally fast sides still wait for each other at times, and the more their times vary."""
    count, enough, works = window.actors, window.enough, window.learner_works
    suggested: dict[str, float] = {} if enough <= count else {"actors.count": enough}
    if enough > window.hosts:
        suggested["actors.hosts"] = enough
    bound = window.run.ledger.max_staleness
    batch = window.config.algorithm.batch_trajectories
    if window.run.replay is None and bound is not None and bound * batch < enough:
        suggested["balance.max_staleness"] = -(-enough // batch)
    wide = suggested.get("balance.max_staleness", bound)
    supply = window.pace * enough / max(1e-9, window.stepping)
    forecast = window.forecast(
        supply, window.pace / works, actors=enough, bound=None if wide is None else int(wide)
    )
    sentence = (
        f"{_waiting(window)}; about {1.0 / works:.1f}x the actors that step at once ({enough} "
        f"instead of {window.stepping:.1f}) "
        f"would saturate it, at about {_gain(forecast, window.pace)}, if there are cores for them"
    )
    if "actors.hosts" in suggested:
        sentence += (
            f"; actors of one host take turns, so they need actors.hosts = {enough}, in a new run"
        )
    if "balance.max_staleness" in suggested:
        sentence += (
            f"; max_staleness = {bound} would keep some idle, "
            f"{suggested['balance.max_staleness']:.0f} would not"
        )
        if bound:
            larger = -(-enough // bound)
            sentence += (
                f"; neither would batch_trajectories = {larger}, with the same staleness "
                "and fewer, larger updates"
            )
    return sentence, suggested, forecast


def _inference(window: Window) -> Advice:
    """More servers where they are busy, else more actors a host, which step while others wait."""
    config, wanted = window.config, 1.0 / max(1.0 - MOST, window.hosts_busy)
    servers, busy = config.inference.servers, window.servers_busy
    waits = (
        f"actors wait {window.inference_waits:.0%} of the time for inference servers, which "
        f"compute {busy:.0%} of the time"
    )
    if busy > SERVERS_BUSY:
        more = max(servers + 1, math.ceil(servers * busy * wanted - 0.1))
        forecast = _about(window.pace * min(wanted, more / (servers * busy)))
        sentence = (
            f"{waits}: with inference.servers = {more}, in a new run, about "
            f"{_gain(forecast, window.pace)}, if there are cores or devices for them; a faster "
            "inference.device helps as much"
        )
        return sentence, {"inference.servers": more}, forecast
    enough = math.ceil(window.actors * wanted - 0.1)
    suggested: dict[str, float] = {"actors.count": enough}
    bound, batch = window.run.ledger.max_staleness, config.algorithm.batch_trajectories
    if window.run.replay is None and bound is not None and bound * batch < enough:
        suggested["balance.max_staleness"] = bound = -(-enough // batch)
    supply = window.pace * enough / window.actors
    forecast = window.forecast(
        supply, window.pace / window.learner_works, actors=enough, bound=bound
    )
    sentence = (
        f"{waits}: their hosts are idle meanwhile; with {enough} actors they would step others, "
        f"at about {_gain(forecast, window.pace)}"
    )
    return sentence, suggested, forecast


def _gain(forecast: Forecast, pace: float) -> str:
    likely = (
        ""
        if forecast.low == forecast.high
        else f" ({forecast.low:,.0f} to {forecast.high:,.0f}, as times vary)"
    )
    return f"{forecast.pace:,.0f} steps/s instead of {pace:,.0f}{likely}"


def _about(pace: float) -> Forecast:
    return Forecast(pace, pace, pace)


def _learning(window: Window) -> Advice:
    slowdown, busy = window.config.learner.slowdown, window.actors_work
    supply = window.pace / busy
    if slowdown > 0.0:
        bound = window.run.ledger.max_staleness
        forecast = window.forecast(
            supply, window.pace * (1.0 + slowdown), actors=window.actors, bound=bound
        )
        sentence = (
            f"{_waiting(window)}; learner.slowdown = {slowdown:g} makes each update "
            f"{1.0 + slowdown:g}x as long: "
            f"without it about {_gain(forecast, window.pace)}"
        )
        return sentence, {"learner.slowdown": 0.0}, forecast
    sentence = f"{_waiting(window)}; a faster learner would bring up to {1.0 / busy:.1f}x the steps"
    if window.enough >= window.actors:
        return sentence, {}, None
    return (
        f"{sentence}; {window.enough} of {window.actors} actors would feed this one as well",
        {"actors.count": window.enough},
        _about(window.pace),
    )


def _transport(window: Window) -> Advice:
    if window.run.replay is not None:
        shards = len(window.run.replay.shards)
        return (
            f"{_waiting(window)}, but replay blocks neither: they wait for {shards} replay shards"
            + _nodes_of_shards(window),
            {"replay.shards": shards + 1},
            None,
        )
    ledger = window.run.ledger
    sentence = (
        f"{_waiting(window)}, both while trajectories or grants are in transit ({ledger.in_use} "
        f"of {ledger.credits_limit} credits in use, "
        f"{ledger.queue} queued, {window.stepping:.1f} actors stepping): longer trajectories "
        "(actors.rollout_steps) need fewer messages"
    )
    return sentence + _slowest_node(window), {}, None


def _nodes_of_shards(window: Window) -> str:
    """The nodes with replay shards and what their links carry, in words; "" without them."""
    sentence = ""
    for name, node in window.run.nodes.items():
        if node.shards:
            rates = window.bytes_per_s(name)
            sentence += (
                f"; node {name} has {', '.join(node.shards)} "
                f"(round trip {node.round_trip_s:.2g} s, "
                f"{rates['received']:,.0f} bytes/s to the head, {rates['sent']:,.0f} from it, "
                f"{rates['direct']:,.0f} from other nodes)"
            )
    return sentence


def _slowest_node(window: Window) -> str:
    """The node whose connection is the slowest, in words; "" without nodes."""
    nodes, held_up = window.run.nodes, window.held_up
    if not nodes:
        return ""
    name, node = max(
        nodes.items(), key=lambda found: (not found[1].up, found[0] == held_up, _delay(found[1]))
    )
    if not node.up:
        return f"; node {name} is not connected"
    sentence = (
        f"; node {name} has the slowest connection (round trip {node.round_trip_s:.2g} s, "
        f"{node.weights_lag} versions behind)"
    )
    if name == held_up:
        sentence += f", and its actors wait {window.waits_of(node):.0%} of the time"
    if node.late:
        sentence += (
            f"; {len(node.late)} of its {len(node.actors)} actors rest, because a full batch had "
            "to wait for them: a larger balance.max_staleness or fewer actors.rollout_steps would "
            "let them work"
        )
    return sentence


def _delay(node: NodeStatistics) -> tuple[float, int]:
    return node.round_trip_s, node.weights_lag


def _balance(window: Window) -> Advice:
    waits = _waiting(window)
    forecast = window.pace / max(1e-9, 1.0 - min(MOST, window.learner_waits, window.actors_wait))
    gain = f"without waiting about {forecast:,.0f} steps/s instead of {window.pace:,.0f}"
    replay, config = window.run.replay, window.config
    if replay is not None:
        buffer = replay.limits.max_diff - replay.limits.min_diff
        if math.isinf(buffer):
            # Without replay.samples_per_insert the limiter never blocks a side.
            sentence = (
                f"{waits}, each blocked although replay.samples_per_insert is not set: replay "
                f"shards are missing or have too few items ({replay.items} items in "
                f"{len(replay.shards)} shards, draws begin at {replay.limits.min_size})"
            )
            return sentence, {}, None
        sentence = f"{waits}, each blocked in turn; {gain} with a larger replay.error_buffer"
        return sentence, {"replay.error_buffer": round(buffer)}, _about(forecast)
    bound, batch, actors = (
        window.run.ledger.max_staleness,
        config.algorithm.batch_trajectories,
        window.actors,
    )
    if bound is not None and bound * batch < actors:
        wide = -(-actors // batch)
        cause = (
            f"{actors} actors are more than max_staleness * B = {bound} * {batch} allows "
            "during an update"
        )
        fewer = (
            f"; with actors.count = {bound * batch} the bound would keep no actor idle"
            if bound
            else ""
        )
        return (
            (
                f"{waits}: {cause}; {gain} with max_staleness = {wide}, at the price of staler "
                f"data{fewer}"
            ),
            {"balance.max_staleness": wide},
            _about(forecast),
        )
    if config.balance.credits is not None and config.balance.credits < actors + batch:
        wide = actors + batch
        return (
            f"{waits}: {config.balance.credits} credits are too few; {gain} with {wide}",
            {"balance.credits": wide},
            _about(forecast),
        )
    suggested: dict[str, float] = {} if bound is None else {"balance.max_staleness": bound + 1}
    cause = "in turn" if actors == 1 else f"the others wait for the slowest, {_slowest(window)}"
    return f"{waits}: {cause}; {gain} with a larger bound", suggested, _about(forecast)


def _slowest(window: Window) -> str:
    means = {}
    for component in window.run.components:
        rollouts = component.distributions.get("rollout_seconds")
        if rollouts is not None and rollouts.count:
            means[component.name] = rollouts.total / rollouts.count
    if not means:
        return "some actor"
    name = max(means, key=lambda name: means[name])
    return (
        f"{name} with {means[name]:.2g} s a trajectory "
        f"({sum(means.values()) / len(means):.2g} "
        "s on average)"
    )


def _balanced(window: Window) -> Advice:
    return f"{_waiting(window)}: neither holds the other back", {}, None


ADVICE = {
    "sampling-bound": _sampling,
    "learning-bound": _learning,
    "inference-bound": _inference,
    "transport-bound": _transport,
    "balance-bound": _balance,
    "balanced": _balanced,
}
