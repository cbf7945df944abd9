"""learner's weights -> WeightPublisher -> newest weights for every reader.

`PolicyWeights` holds a policy's own copy of them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from tianflow.core.payloads import NO_VERSION, Version
from tianflow.core.statistics import HistogramBuilder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tianflow.interfaces import Policy, WeightsReader, WeightsWriter


def publish_due(
    *, version: int, published: int, interval: int, bound: int | None, moved: bool = True
) -> bool:
    """True if ``version`` must be published now.

    A version is published every ``interval`` updates, or sooner if skipping it would break the
    invariant ceil(C/B) - 1 + lag <= bound for the fewest credits that feed the learner (C = B).
    With a larger lag every new trajectory would be too stale, so neither training nor publishing
    would continue.

    Args:
        version: number of completed updates.
        published: number of the newest published version.
        interval: fewest updates between two versions, unless the bound requires the later one.
        bound: largest publish lag; see `tianflow.config.rules.largest_publish_lag`.
        moved: the policy differs enough from the published one; see `diverged`.
    """
    lag = version - published
    return (moved and lag >= interval) or (bound is not None and lag > bound)


def diverged(nats: float, threshold: float) -> bool:
    """True if a policy has moved too far from the published one.

    A divergence that is not a number counts as too far, because it means unknown.
    """
    return not nats <= threshold


class WeightPublisher:
    """Publishes or skips versions. It never waits for a reader.

    Args:
        writer: the learner's end of the weights channel.
    """

    def __init__(self, *, writer: WeightsWriter) -> None:
        self._writer = writer
        self._published = NO_VERSION
        self.published = 0
        self.skipped = 0
        self.nbytes = 0
        self.seconds = HistogramBuilder()

    @property
    def version(self) -> Version:
        """The newest published version."""
        return self._published

    def publish(self, version: Version, flat: NDArray[np.uint8]) -> None:
        """Make ``version`` the newest one for readers."""
        began = time.monotonic()
        self._writer.publish(version, flat)
        self._published = version
        self.published += 1
        self.nbytes += flat.nbytes
        self.seconds.add(time.monotonic() - began)

    def offer(self, version: Version, flat: NDArray[np.uint8] | None) -> bool:
        """Publish ``version`` with the weights ``flat``, or skip it without weights. Returns True
        if it was published.
        """
        if flat is None:
            self.skipped += 1
            return False
        self.publish(version, flat)
        return True


class PolicyWeights:
    """Updates a policy to the newest published weights. Used on the compute thread between steps.

    The returned version always belongs to the tensors that the policy holds.
    """

    def __init__(self, *, reader: WeightsReader, policy: Policy, nbytes: int) -> None:
        self._reader, self._policy = reader, policy
        self._flat = np.zeros(nbytes, np.uint8)
        self._version = NO_VERSION

    def refresh(self) -> Version:
        """Load newer weights if there are any. Returns the version of the policy's weights."""
        if self._reader.version > self._version:
            version = self._reader.read_into(self._flat)
            self._policy.load(self._flat)
            self._version = version
        return self._version
