"""Derives rates from the history of a run, finished or in progress.

The durations come from the time that each component spent in each state during the run. They
include other processes on the same cores, and the real lengths of updates and trajectories;
`measuring` sees neither.
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
"""Minimum number of trajectories or updates from which a spread is derived."""
LEAST_S = 2.0
"""Minimum number of seconds of steady training from which a speed is derived."""
MESSAGE_S = 0.001
"""One way between two processes of one machine, roughly; a run does not measure it."""
SHARES_S = 5.0
"""Seconds that the shares of time in a row cover, or all seconds of the row if it covers more."""


def rates_of(rows: Sequence[Row], config: Config) -> dict[str, object]:
    """Derive rates from a history: a trajectory, an update, and the time from a grant to the first
    step, as keys of `MeasuredRates`.

    They are means, with spreads if the rows hold them. Only rows since the last change of settings
    count, and only while the run trained.

    Args:
        rows: of the history; see `tianflow.rundir.history.Row`.
        config: of that run.

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
            f"the run has not trained for {LEAST_S:g} s under its newest settings (the first "
            f"{SHARES_S:g} s do not count)"
        )
        raise ConfigError(
            [Problem("--like", NAME, message, "a run with some seconds of steady training")]
        )
    actor_seconds = {state: share * config.actors.count for state, share in actors.items()}
    whole = config.actors.rollout_steps * config.env.num_envs
    # The step that resets an environment is not valid, so with short episodes a trajectory has
    # fewer valid steps.
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
    ):  # each actor has its own compute thread, so the wait is the way to that thread
        rates["turn_s"] = actor_seconds.get("waiting:turn", 0.0) / trajectories
    return rates | _spreads(spans)


def _spreads(spans: Sequence[tuple[Row, Row]]) -> dict[str, object]:
    """Spreads and skews of durations, if the history holds them; earlier versions did not write
    them.
    """
    found: dict[str, object] = {}
    actor, learner = (_durations(spans, role) for role in ("actor", "learner"))
    if learner.count >= LEAST_COUNT:
        found |= {"update_spread": learner.spread, "update_skew": learner.skew}
    if actor.count >= LEAST_COUNT:
        apart = max(0.0, min(actor.spread, _apart(spans)))
        found |= {"trajectory_spread": math.sqrt(actor.spread**2 - apart**2), "actor_spread": apart}
        # If actors differ by more than the trajectories of one, the common skew does not describe
        # one actor.
        found["trajectory_skew"] = actor.skew if 2 * apart**2 < actor.spread**2 else 0.0
    return found


def _durations(spans: Sequence[tuple[Row, Row]], role: str) -> Moments:
    return sum(
        (Moments.read((row.get("durations") or {}).get(role) or {}) for _, row in spans), Moments()
    )


def _apart(spans: Sequence[tuple[Row, Row]]) -> float:
    """Spread between actors in the newest row, which covers the longest time."""
    spreads = [
        row["durations"]["actor"].get("apart")
        for _, row in spans
        if (row.get("durations") or {}).get("actor")
    ]
    return float(spreads[-1] or 0.0) if spreads else 0.0


def read_like(directory: Path, config: Config) -> tuple[dict[str, object], set[str]]:
    """Derive rates from the run in ``directory`` for a simulation of ``config``. The second result
    names the rates that are assumptions.

    If the batch sizes differ, the time of an update is assumed to be proportional to the batch
    size.

    Raises:
        ConfigError: the files of the run cannot be used, or its work differs from that of
            ``config``.
    """
    own = load_config(directory / CONFIG_FILE)
    try:
        rows = read_rows(directory / NAME)
    except OSError as error:
        raise ConfigError(
            [Problem("--like", str(directory), str(error), "a run with a history")]
        ) from error
    _require_same_work(own, config, directory)
    rates, assumed = rates_of(rows, own), {"latency_s", "learner_latency_s"}
    batches = config.algorithm.batch_trajectories, own.algorithm.batch_trajectories
    if batches[0] != batches[1]:
        rates["update_s"] = cast("float", rates["update_s"]) * batches[0] / batches[1]
        assumed.add("update_s")
    return rates, assumed


def _require_same_work(own: Config, config: Config, directory: Path) -> None:
    """Refuse a run whose work differs: its durations do not apply."""
    differing = [path for path, value in _work(config).items() if value != _work(own)[path]]
    if differing:
        message = (
            f"the run differs in {', '.join(differing)}, so its durations of trajectories and "
            "updates do not apply"
        )
        raise ConfigError(
            [
                Problem(
                    "--like",
                    str(directory),
                    message,
                    "a run that differs only in counts, bounds, controllers and speeds",
                )
            ]
        )


def _work(config: Config) -> dict[str, object]:
    """The settings that decide how long a trajectory and its part of an update take on a given
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
    """Pairs of neighbouring rows between which the run trained without a break, under the newest
    settings.

    The shares of a row cover `SHARES_S` seconds, so rows soon after a start or a change do not
    count.
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
    """Changes and starts that a row marks."""
    return [mark for mark in row.get("marks") or () if mark.get("kind") in ("change", "resumed")]


def _changed(row: Row) -> bool:
    """True if the row marks a change of settings or a restart. Pausing, saving or stopping a run
    changes neither.
    """
    return any(
        mark["kind"] == "resumed" or mark.get("action", "change") == "change"
        for mark in _marked(row)
    )


def _grown(spans: Sequence[tuple[Row, Row]], key: str) -> float:
    return float(sum(max(0, (end.get(key) or 0) - (start.get(key) or 0)) for start, end in spans))


def _seconds(spans: Sequence[tuple[Row, Row]], role: str) -> dict[str, float]:
    """Mean seconds in each state of one component of the role."""
    found: dict[str, float] = {}
    for _, row in spans:
        shares: Mapping[str, Any] = (row.get("shares") or {}).get(role, {})
        for state, share in shares.items():
            found[state] = found.get(state, 0.0) + share * float(row.get("span_s") or 0.0)
    return found
