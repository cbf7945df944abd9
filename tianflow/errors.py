"""Exceptions that tianflow raises deliberately.

Four of them concern channels: closed (by this side), broken (by the other side), end (normal),
would block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and line feed, characters that reorder text, halves of pairs."""


def printable(text: str) -> str:
    r"""``text`` with escapes such as ``\u001b`` instead of characters that control a terminal.

    Text of environments, plug-ins, files and servers passes through here before a person sees it.
    """
    return UNSAFE.sub(lambda found: f"\\u{ord(str(found[0])):04x}", text)


class TianflowError(Exception):
    """Base class of all exceptions that tianflow raises deliberately."""


class ClosedChannelError(TianflowError):
    """This end was used after its holder had closed it."""


class BrokenChannelError(TianflowError):
    """The other end disappeared without closing."""


class EndOfChannel(TianflowError):  # noqa: N818 - a normal end, not an error, named as in trio and anyio
    """All other ends were closed; no more data will arrive."""


class WouldBlock(TianflowError):  # noqa: N818 - named as in trio and anyio
    """A ``_nowait`` call would have had to wait."""


class Problem:
    """One problem with a setting: path, value, reason, and accepted values.

    Attributes:
        path: dotted path of the setting, e.g. ``"balance.max_staleness"``.
        value: the value given.
        message: reason of the refusal, with its consequence.
        accepted: description of accepted values ("" if the message contains it).
        nearest: nearest known key or name ("" if none is close).
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
    """A configuration, override or HTTP body is invalid. Nothing was started or changed."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


class RunError(TianflowError):
    """A run failed.

    ``component`` raised the first exception; ``details`` is its traceback as text.
    """

    def __init__(self, component: str, summary: str, details: str = "") -> None:
        self.component, self.summary, self.details = component, summary, details
        super().__init__(f"{component}: {summary}")


class RankLostError(TianflowError):
    """Another rank of the learner is gone. The group ends, and starts again from a checkpoint."""


class RunTimeoutError(TianflowError, TimeoutError):
    """A run has not ended within the time of a wait. The run continues."""


class RunNotFoundError(TianflowError):
    """No run matches, or several do, or the directory of a run does not exist any more."""


class RequestError(TianflowError):
    """The run refused the request, or did not answer.

    Attributes:
        bad: True when the request itself was at fault.
        problems: fields of the request that were refused.
        status: HTTP status of the refusal; 0 without an answer.
    """

    def __init__(
        self, message: str, *, bad: bool = False, problems: Sequence[Problem] = (), status: int = 0
    ) -> None:
        self.bad, self.problems, self.status = bad, tuple(problems), status
        super().__init__(message)


class StateConflictError(TianflowError):
    """The request is valid, but not in the current state of the run."""


class CheckpointError(TianflowError):
    """A checkpoint is missing, incomplete, corrupt, or belongs to another configuration."""


class EnvironmentFailedError(TianflowError):
    """An environment raised in its constructor, ``reset`` or ``step``.

    ``details`` is the traceback as text.
    """

    def __init__(self, summary: str, details: str = "") -> None:
        self.summary, self.details = summary, details
        super().__init__(summary)


class PoisonedTrajectoryError(TianflowError):
    """A trajectory contains a value that is not finite, or an array of the wrong shape.

    The message names the environment (-1: the vector environment), the field and the step.
    """

    def __init__(self, message: str, *, environment: int, step: int) -> None:
        self.environment, self.step = environment, step
        super().__init__(message)
