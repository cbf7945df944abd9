"""Check of an environment: created as in a run, tested by Gymnasium, and stepped at random."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tianflow.config.portable import require_portable
from tianflow.envs.make import make
from tianflow.envs.spec import ActionCodec, allowed_at_random, in_categories
from tianflow.envs.using import with_environment
from tianflow.envs.vector import VectorEnvironment, failures_named
from tianflow.errors import ConfigError, EnvironmentFailedError

if TYPE_CHECKING:
    from tianflow.config.model import EnvSettings
    from tianflow.core.payloads import ActionSpec

COPIES = 2
"""Environments side by side in a check: what several of them return is merged, as in a run."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Colour codes in Gymnasium's warnings."""


@dataclass
class Report:
    """Findings of a check. ``problems`` make an environment unusable, ``warnings`` do not."""

    id: str
    spec: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    deterministic: bool | None = None
    """True if two resets with one seed gave the same observation; None if the reset failed."""
    steps: int = 0
    episodes: int = 0
    """Number of episodes that ended during the random steps."""
    step_mean_us: float | None = None
    """Mean time of one step of one environment with random actions, in microseconds."""
    step_p99_us: float | None = None
    masks: bool | None = None
    """True if the environment returned action masks; None if the reset failed."""

    @property
    def usable(self) -> bool:
        """True if a run would not fail because of a finding."""
        return not self.problems

    def document(self) -> dict[str, Any]:
        """The report for JSON."""
        return {"usable": self.usable, **asdict(self)}

    def lines(self) -> list[str]:
        """The report as text lines; the verdict is last."""
        lines = [f"{name}: {value}" for name, value in self.spec.items()]
        if self.deterministic is not None:
            lines.append(
                f"same seed, same first observation: {'yes' if self.deterministic else 'no'}"
            )
        if self.step_mean_us is not None and self.step_p99_us is not None:
            times = f"{self.step_mean_us:.1f} µs each, 99% within {self.step_p99_us:.1f} µs"
            lines.append(f"{self.steps} random steps: {times}; episodes ended: {self.episodes}")
        if self.masks is not None:
            seen = "yes, and the random steps respected them" if self.masks else "no"
            lines.append(f"action masks in info['action_mask']: {seen}")
        lines += [f"warning: {sentence}" for sentence in self.warnings]
        lines += [f"problem: {sentence}" for sentence in self.problems]
        return [*lines, f"{self.id}: {'usable' if self.usable else 'not usable'}"]


def check(settings: EnvSettings, *, steps: int = 300, seed: int = 0) -> Report:
    """Create two environments from ``settings``, and take ``steps`` random steps with both.

    The report contains every exception that the environment raises.
    """
    report = Report(settings.id)
    try:
        require_portable({"env.kwargs": settings.kwargs})
        stuck: list[str] = []
        masked = with_environment(
            lambda: make(settings, COPIES),
            lambda environment: _examine(environment, report, steps, seed),
            warn=stuck.append,
        )
        # Gymnasium closes its own environment, without a time limit, and its steps ignore masks.
        if not stuck and not masked:
            with_environment(
                lambda: make(settings, 1),
                lambda environment: _gymnasium(environment, report),
                warn=stuck.append,
            )
        report.warnings += stuck
    except ConfigError as error:
        report.problems += [" ".join(str(problem).split("\n")) for problem in error.problems]
    except (EnvironmentFailedError, ValueError) as error:
        report.problems.append(str(error))
    return report


def _examine(environment: VectorEnvironment, report: Report, steps: int, seed: int) -> bool:
    """True if the environment has action masks."""
    _describe(environment, report)
    return _play(environment, report, steps, seed)


def _describe(environment: VectorEnvironment, report: Report) -> None:
    spec = environment.spec
    report.spec = {
        "observation": {
            leaf.name or "observation": f"{leaf.dtype}{list(leaf.shape)}"
            for leaf in spec.observation
        },
        "action": spec.action.kind,
        "action_shape": list(spec.action.shape),
        "actions": _actions(spec.action),
        "autoreset": spec.autoreset,
        "frames_per_step": spec.frames_per_step,
    }


def _actions(spec: ActionSpec) -> str:
    """The number of actions in words: 6, 2 x 3, or the numbers of a Box."""
    if spec.kind == "box":
        count = int(np.prod(spec.shape))
        return f"{count} number{'' if count == 1 else 's'} in a Box"
    return " x ".join(map(str, spec.categories))


def _play(environment: VectorEnvironment, report: Report, steps: int, seed: int) -> bool:
    """Take random steps on the vector itself, because stored observations are cast to their dtype.

    Returns True if the environment has action masks, which the steps respect.
    """
    vector: Any = environment._vector  # noqa: SLF001 - the rows that a run reads are already encoded
    with failures_named("reset"):
        first = [_copies(environment, vector.reset(seed=seed)[0])]
        observation, info = vector.reset(seed=seed)
        first.append(_copies(environment, observation))
    report.deterministic = all(
        np.array_equal(a, first[1][name], equal_nan=a.dtype.kind == "f")
        for name, a in first[0].items()
    )
    vector.action_space.seed(seed)
    _check_observation(environment, first[1], report)
    disabled, times = environment.spec.autoreset == "disabled", []
    masked, generator = (
        "action_mask" in info and environment.spec.action.kind != "box",
        np.random.default_rng(seed),
    )
    report.masks, over = masked, np.zeros(environment.num_envs, np.bool_)
    for _ in range(steps):
        if masked:
            mask = _mask(environment, info)
            _check_mask(environment, mask[~over], report)
            action = _allowed(environment, mask, generator)
        else:
            action = vector.action_space.sample()
        began = time.perf_counter()
        with failures_named("step"):
            observation, reward, terminated, truncated, info = vector.step(action)
        times.append((time.perf_counter() - began) / environment.num_envs)
        _check_step(environment, observation, reward, report)
        over = np.logical_or(terminated, truncated)
        report.episodes += int(over.sum())
        if disabled and over.any():
            with failures_named("reset"):
                _, info = vector.reset(options={"reset_mask": over})
            over = np.zeros_like(over)
    report.steps = len(times)
    if not report.episodes and not _limited(vector):
        report.warnings.append(
            f"no episode ended in {steps} steps, and no step limit is known: evaluation plays "
            "complete episodes, so each must terminate or be truncated"
        )
    report.step_mean_us, report.step_p99_us = (
        float(np.mean(times)) * 1e6,
        float(np.percentile(times, 99)) * 1e6,
    )
    return masked


def _limited(vector: Any) -> bool:
    """True if episodes are known to be truncated after a number of steps."""
    singles = getattr(vector, "envs", None) or [vector]
    wrapped = any(
        hasattr(single, "has_wrapper_attr") and single.has_wrapper_attr("_max_episode_steps")
        for single in singles
    )
    return wrapped or any(
        getattr(getattr(single, "spec", None), "max_episode_steps", None) is not None
        for single in singles
    )


def _mask(environment: VectorEnvironment, info: dict[str, Any]) -> NDArray[np.bool_]:
    """The masks in ``info``, [N, mask_size]."""
    mask = np.ones((environment.num_envs, environment.spec.action.mask_size), np.bool_)
    if "action_mask" in info:  # a final observation may come without a mask
        environment._write_mask(info, mask)  # noqa: SLF001 - as above
    return mask


def _check_mask(environment: VectorEnvironment, mask: NDArray[np.bool_], report: Report) -> None:
    """Report a choice without a possible action; ``mask`` is of episodes that go on."""
    choices = np.split(mask, np.cumsum(environment.spec.action.categories)[:-1], axis=1)
    if not all(choice.any(axis=1).all() for choice in choices):
        _once(
            report.warnings,
            "info['action_mask'] allows no action before the end of an episode; the policy then "
            "takes any action. Allow at least one, or end the episode",
        )


def _allowed(
    environment: VectorEnvironment, mask: NDArray[np.bool_], generator: np.random.Generator
) -> Any:
    """An action that ``mask`` allows, in the form of the vector's action space."""
    spec = environment.spec.action
    return ActionCodec(spec).decode(allowed_at_random(spec, mask, generator))


def _copies(environment: VectorEnvironment, observation: Any) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {
        leaf.name: np.zeros((environment.num_envs, *leaf.shape), leaf.dtype)
        for leaf in environment.spec.observation
    }
    environment.observations.encode(observation, arrays)
    return arrays


def _check_step(
    environment: VectorEnvironment, observation: Any, reward: Any, report: Report
) -> None:
    _check_observation(environment, _copies(environment, observation), report)
    if not environment._vector.observation_space.contains(observation):  # noqa: SLF001 - as above
        _once(
            report.warnings,
            "an observation is outside of the observation space, or has another dtype",
        )
    if not np.isfinite(np.asarray(reward, np.float64)).all():
        _once(report.problems, "a reward is not finite")


def _check_observation(
    environment: VectorEnvironment, arrays: dict[str, np.ndarray[Any, Any]], report: Report
) -> None:
    for leaf in environment.spec.observation:
        array, name = arrays[leaf.name], leaf.name
        what = f"observation {name!r}" if name else "an observation"
        if not np.isfinite(array).all():
            _once(report.problems, f"{what} is not finite")
        if leaf.categories and not in_categories(leaf, array).all():
            _once(report.problems, f"{what} is outside of its Discrete space")


def _once(sentences: list[str], sentence: str) -> None:
    if sentence not in sentences:
        sentences.append(sentence)


def _gymnasium(environment: VectorEnvironment, report: Report) -> None:
    """Run Gymnasium's `check_env` on a single environment. A native vector has none."""
    from gymnasium.utils.env_checker import check_env

    singles = getattr(environment._vector, "envs", None)  # noqa: SLF001 - as above
    if not singles:
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(singles[0].unwrapped, skip_render_check=True)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code and Gymnasium's assertions may raise anything
            _once(
                report.warnings,
                f"Gymnasium's check_env: {type(error).__name__}: "
                f"{(str(error).splitlines() or [''])[0]}",
            )
    for warning in caught:
        _once(report.warnings, COLOURS.sub("", (str(warning.message).splitlines() or [""])[0]))
