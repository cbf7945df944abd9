"""Rates of a run, from the history that it has left or is leaving.

Times come from where time went while the run went on: with other processes on the same cores, at
the length that its updates and trajectories really had. That is what `measuring` cannot see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tianflow.config.loading import CONFIG_FILE, load_config
from tianflow.core.moments import Moments
from tianflow.errors import ConfigError, Problem
from tianflow.planning.placement import hosts_wanted
from tianflow.rundir.history import NAME, Row, read_rows

if TYPE_CHECKING:
    from tianflow.config.model import Config

LEAST_COUNT = 8
"""Fewer trajectories or updates than this say nothing of how much they vary."""
LEAST_S = 2.0
"""Less of steady training than this says nothing of speed."""
MESSAGE_S = 0.001
"""One way between two processes of one machine, roughly: no run measures it."""
SHARES_S = 5.0
"""Shares of time in a row are of so many seconds up to it, or of all that it covers where that is
longer.
"""


def rates_of(rows: Sequence[Row], config: Config) -> dict[str, object]:
    """Times of a trajectory, of an update and of what lies between a grant and the first step, as
    keys of `Rates`.

    Means, and how much they vary where the rows tell it.

    Those of the newest settings: what came before the last change is left out. Rests and stops are
    left out, too.

    Args:
        rows: of the history; see `tianflow.rundir.history.Row`.
        config: that the run had.

    Raises:
        ConfigError: the run has not trained steadily for `LEAST_S` seconds.
    """
    spans = _steady(rows)
    seconds = sum(float(end.get("span_s") or 0.0) for _, end in spans)
    steps, episodes, updates = (_grown(spans, key) for key in ("env_steps", "episodes", "updates"))
    learner, actors = (_seconds(spans, role) for role in ("learner", "actor"))
    if (
        seconds < LEAST_S
        or min(steps, updates) <= 0
        or min(learner.get("busy", 0.0), actors.get("busy", 0.0)) <= 0.0
    ):
        message = (
            f"the run has not trained for {LEAST_S:g} s, the first {SHARES_S:g} s left "
            "out, "
            "under its newest settings"
        )
        raise ConfigError(
            [
                Problem(
                    "--like", NAME, message, "a run that trains, or has trained, for some seconds"
                )
            ]
        )
    actor_seconds = {state: share * config.actors.count for state, share in actors.items()}
    whole = config.actors.rollout_steps * config.env.num_envs
    # The step in which an environment starts anew counts for nothing: with short episodes a
    # trajectory has fewer valid steps.
    trajectories = (steps + episodes) / whole
    rates: dict[str, object] = {
        "trajectory_s": actor_seconds["busy"] / trajectories,
        "update_s": learner["busy"] / updates / (1.0 + config.learner.slowdown),
        "env_steps": whole * steps / (steps + episodes),
        "latency_s": MESSAGE_S,
        "learner_latency_s": MESSAGE_S,
    }
    if config.actors.count <= hosts_wanted(
        config
    ):  # nobody else's turn is waited for: it is the way to the compute thread
        rates["turn_s"] = actor_seconds.get("waiting:turn", 0.0) / trajectories
    return rates | _spreads(spans)


def _spreads(spans: Sequence[tuple[Row, Row]]) -> dict[str, object]:
    """How much durations varied, where the history tells it: only runs of earlier versions
    do not.
    """
    found: dict[str, object] = {}
    actor, learner = (_durations(spans, role) for role in ("actor", "learner"))
    if learner.count >= LEAST_COUNT:
        found |= {"update_spread": learner.spread, "update_skew": learner.skew}
    if actor.count >= LEAST_COUNT:
        apart = min(actor.spread, _apart(spans))
        found |= {"trajectory_spread": math.sqrt(actor.spread**2 - apart**2), "actor_spread": apart}
        # Of actors that differ by more than their trajectories do, the skew of all together says
        # nothing of one.
        found["trajectory_skew"] = actor.skew if 2 * apart**2 < actor.spread**2 else 0.0
    return found


def _durations(spans: Sequence[tuple[Row, Row]], role: str) -> Moments:
    return sum(
        (Moments.read((row.get("durations") or {}).get(role) or {}) for _, row in spans), Moments()
    )


def _apart(spans: Sequence[tuple[Row, Row]]) -> float:
    """As the newest row tells it, which looks back furthest."""
    told = [
        row["durations"]["actor"].get("apart")
        for _, row in spans
        if (row.get("durations") or {}).get("actor")
    ]
    return float(told[-1] or 0.0) if told else 0.0


def read_like(directory: Path, config: Config) -> tuple[dict[str, object], set[str]]:
    """Rates of the run in ``directory``, for a simulation of ``config``, and which of them are no
    more than supposed.

    An update of another number of trajectories is supposed to take time in proportion to it.

    Raises:
        ConfigError: the run's files cannot be used, or ``config`` has what would take another time.
    """
    own = load_config(directory / CONFIG_FILE)
    try:
        rows = read_rows(directory / NAME)
    except OSError as error:
        raise ConfigError(
            [Problem("--like", str(directory), str(error), "a run with a history")]
        ) from error
    _require_same_work(own, config, directory)
    rates, supposed = rates_of(rows, own), {"latency_s", "learner_latency_s"}
    batches = config.algorithm.batch_trajectories, own.algorithm.batch_trajectories
    if batches[0] != batches[1]:
        rates["update_s"] = cast("float", rates["update_s"]) * batches[0] / batches[1]
        supposed.add("update_s")
    return rates, supposed


def _require_same_work(own: Config, config: Config, directory: Path) -> None:
    """A time is that of a piece of work: it says nothing of another one."""
    differing = [path for path, value in _work(config).items() if value != _work(own)[path]]
    if differing:
        message = (
            f"that run had another {', '.join(differing)}, so its trajectories and updates "
            "take another time"
        )
        raise ConfigError(
            [
                Problem(
                    "--like",
                    str(directory),
                    message,
                    "a run of the same work; counts, bounds, controllers and speeds may differ",
                )
            ]
        )


def _work(config: Config) -> dict[str, object]:
    """What decides how long a trajectory and one of those in an update take, apart from the
    machine.
    """
    free = {*config.algorithm.live, "batch_trajectories"}
    return {
        "env": config.env,
        "network": config.network,
        "algorithm": config.algorithm.model_dump(exclude=free),
        "actors.rollout_steps": config.actors.rollout_steps,
        "learner.device": config.learner.device,
        "learner.threads": config.learner.threads,
    }


def _steady(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Neighbours between which the run trained without a break, under the newest settings.

    Shares of a row look back over `SHARES_S`, so what comes sooner after a start or a change is
    left out.
    """
    spans: list[tuple[Row, Row]] = []
    quiet_from = rows[0]["t"] + SHARES_S if rows else 0.0
    for before, row in pairwise(rows):
        if before.get("state") != "running" or _marked(row):
            quiet_from = row["t"] + SHARES_S
        if _changed(row):
            spans.clear()
        if row.get("state") == "running" and before["t"] >= quiet_from:
            spans.append((before, row))
    return spans


def _marked(row: Row) -> list[Mapping[str, Any]]:
    """What people did to the run, and its starts."""
    return [mark for mark in row.get("marks") or () if mark.get("kind") in ("change", "resumed")]


def _changed(row: Row) -> bool:
    """Whether there are other settings now, or another process. Who pauses, saves or stops a run
    changes neither.
    """
    return any(
        mark["kind"] == "resumed" or mark.get("action", "change") == "change"
        for mark in _marked(row)
    )


def _grown(spans: Sequence[tuple[Row, Row]], key: str) -> float:
    return float(sum(max(0, (end.get(key) or 0) - (start.get(key) or 0)) for start, end in spans))


def _seconds(spans: Sequence[tuple[Row, Row]], role: str) -> dict[str, float]:
    """Seconds in each state of one component of the role, on average."""
    found: dict[str, float] = {}
    for _, row in spans:
        shares: Mapping[str, Any] = (row.get("shares") or {}).get(role, {})
        for state, share in shares.items():
            found[state] = found.get(state, 0.0) + share * float(row.get("span_s") or 0.0)
    return found
