"""Every error tianflow raises on purpose. Four of them are about channels, and mean four different
things.
"""

from __future__ import annotations

from collections.abc import Sequence


class TianflowError(Exception):
    """Base of every error raised on purpose."""


class ClosedChannelError(TianflowError):
    """This end was closed by its own holder and used again."""


class BrokenChannelError(TianflowError):
    """The other end went away without saying so."""


class EndOfChannel(TianflowError):  # noqa: N818 - a normal end, not an error, named as in trio and anyio
    """The other ends were all closed; nothing more will come."""


class WouldBlock(TianflowError):  # noqa: N818 - named as in trio and anyio
    """An ``_nowait`` call would have had to wait."""


class Problem:
    """One thing that is wrong with a setting: where, what, and what would have worked.

    Attributes:
        path: dotted path of the setting, e.g. ``"balance.max_staleness"``.
        value: what was given.
        message: why it is refused, with the consequence.
        accepted: what would have been accepted, in words ("" when the message says it all).
        nearest: the nearest known key or name ("" when there is none).
    """

    __slots__ = ("accepted", "message", "nearest", "path", "value")

    def __init__(
        self, path: str, value: object, message: str, accepted: str = "", nearest: str = ""
    ) -> None:
        self.path, self.value, self.message, self.accepted, self.nearest = (
            path,
            value,
            message,
            accepted,
            nearest,
        )

    def __str__(self) -> str:
        text = (
            f"{self.path} = {self.value!r}: {self.message}"
            if self.value is not None
            else f"{self.path}: {self.message}"
        )
        if self.accepted:
            text += f"; accepted: {self.accepted}"
        if self.nearest:
            text += f"; did you mean {self.nearest!r}?"
        return text


class ConfigError(TianflowError):
    """A config, override or HTTP body that cannot be used. Nothing was started or changed."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


class RunError(TianflowError):
    """A run failed. ``component`` raised it; ``details`` holds the first traceback as text."""

    def __init__(self, component: str, summary: str, details: str = "") -> None:
        self.component, self.summary, self.details = component, summary, details
        super().__init__(f"{component}: {summary}")


class StateConflictError(TianflowError):
    """The request makes sense, but not in the state that the run is in."""


class CheckpointError(TianflowError):
    """A checkpoint is missing, torn, corrupt, or was made for something else."""


class EnvironmentFailedError(TianflowError):
    """An environment raised in its constructor, ``reset`` or ``step``; ``details`` is its traceback
    as text.
    """

    def __init__(self, summary: str, details: str = "") -> None:
        self.summary, self.details = summary, details
        super().__init__(summary)


class PoisonedTrajectoryError(TianflowError):
    """A trajectory holds something not finite, or of the wrong shape; names environment (-1: the
    vector), field and step.
    """

    def __init__(self, message: str, *, environment: int, step: int) -> None:
        self.environment, self.step = environment, step
        super().__init__(message)
