"""batches with staleness 0 -> PolicyAgreement -> a metric, and a warning if the policies differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tianflow.interfaces import ExplainsDifference
from tianflow.logs import logger

if TYPE_CHECKING:
    from tianflow.config.model import Config, Precision
    from tianflow.core.payloads import Batch, Version
    from tianflow.interfaces import Algorithm, LearnerBatch, StepResult

TOLERANCE = {"fp32": 0.005, "tf32": 0.02, "bf16": 0.05}
"""Largest |log ratio| at staleness 0, as a share of the spread of log-probabilities, if actors and
learner have the same precision.

Rounding errors of a policy grow with its logits, and so does the spread. Measured over the built-in
networks with weights up to seven times their initial size: 0.0002 with fp32 and 0.008 with bf16.
With tf32, 0.0001 at initial size on a GPU.
"""
MIXED_TOLERANCE = {"tf32": 0.1, "bf16": 0.5}
"""The same if only one side rounds so coarsely. Measured: 0.36 with bf16. That of tf32, whose
mantissa has three bits more, was not measured.
"""
LEAST_SPREAD = 0.05
"""Spread of a nearly uniform policy, in nats."""

log = logger("learner")


def tolerance_of(learner: Precision, actors: Precision) -> float:
    """The tolerance for these precisions."""
    if learner == actors:
        return TOLERANCE[learner]
    return MIXED_TOLERANCE["bf16" if "bf16" in (learner, actors) else "tf32"]


class PolicyAgreement:
    """Compares the learner's log-probabilities with those that actors recorded.

    At staleness 0 both have the same weights, so every log ratio is 0 up to rounding. A larger one
    means that actors and learner compute different policies, and importance weights are wrong.

    Attributes:
        newest: largest |log ratio| of the newest batch with staleness 0, in nats; None before one,
            and for algorithms without log-probabilities.
    """

    def __init__(self) -> None:
        self.newest: float | None = None
        self._checked = False

    def check(
        self,
        *,
        config: Config,
        algorithm: Algorithm,
        version: Version,
        batch: Batch,
        arrays: LearnerBatch,
        result: StepResult,
    ) -> None:
        """Compare, and log a warning for the first batch with staleness 0 if the policies differ.

        ``version`` is that of the learner before the update. Runs on the compute thread. An error
        of the comparison is logged: it must not cost the update.
        """
        found = result.statistics.get("log_ratio_max")
        fresh = all(trajectory.version == version for trajectory in batch.trajectories)
        if found is None or not fresh or not result.finite:
            return
        self.newest = found
        if self._checked:
            return
        self._checked = True
        try:
            self._warn_above_tolerance(found, config, algorithm, arrays)
        except Exception:  # a boundary: advice never ends a run
            log.exception("the policies of actors and learner could not be compared")

    def _warn_above_tolerance(
        self, found: float, config: Config, algorithm: Algorithm, arrays: LearnerBatch
    ) -> None:
        log_prob = arrays.arrays["log_prob"][arrays.arrays["valid"]]
        spread = max(LEAST_SPREAD, float(log_prob.max() - log_prob.min()))
        tolerance = spread * tolerance_of(config.learner.precision, config.acting_precision)
        if found <= tolerance:
            return
        cause = (
            algorithm.explain_difference(arrays)
            if isinstance(algorithm, ExplainsDifference)
            else "unknown"
        )
        log.warning(
            "actors and learner compute different policies from the same weights",
            largest_log_ratio=round(found, 6),
            tolerance=round(tolerance, 6),
            likely_cause=cause,
            consequence="importance weights are wrong even without staleness",
        )
