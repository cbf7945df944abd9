"""Scheduled values in force, as statistics: exploration, and the weights of prioritised draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tianflow.config.off_policy import QSettings, TD3Settings
from tianflow.config.schedules import OF_ALGORITHMS, STATISTICS

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.config.on_policy import AlgorithmSettings


def settings_in_force(settings: AlgorithmSettings) -> dict[str, float]:
    """Scheduled settings of an algorithm in force, by the names of their statistics.

    Args:
        settings: with a number for every schedule (`tianflow.config.schedules.settings_at`).
    """
    found = {}
    for path in OF_ALGORITHMS:
        key = path.rpartition(".")[2]
        field = type(settings).model_fields.get(key)
        if field is not None and not field.exclude:
            found[STATISTICS[path].removeprefix("train/")] = float(getattr(settings, key))
    return found


def schedules_in_force(config: Config, updates: int, beta: float | None = None) -> dict[str, float]:
    """Values after ``updates`` updates by the names of their statistics; empty without replay.

    ``rollout/exploration_rate`` is the mean epsilon of all environments, ``rollout/noise_std`` the
    standard deviation of exploration noise, and ``beta`` the exponent of importance weights of the
    batch.
    """
    settings = config.algorithm
    found: dict[str, float] = {}
    if isinstance(settings, QSettings):
        exploration = settings.exploration(updates)
        environments = max(1, config.actors.count) * config.env.num_envs
        found["rollout/exploration_rate"] = mean_epsilon(environments, **exploration)
    elif isinstance(settings, TD3Settings):
        found["rollout/noise_std"] = settings.exploration(updates)["noise_std"]
    if beta is not None and config.replay.selector == "prioritised":
        found["beta"] = beta
    return found


def mean_epsilon(environments: int, *, epsilon: float, alpha: float) -> float:
    """Mean of ``epsilon ** (1 + alpha i / (environments - 1))`` over the environments i (Ape-X,
    arXiv 1803.00933, section 4.1): the mean of a geometric series.
    """
    if alpha == 0.0 or environments == 1 or epsilon in (0.0, 1.0):
        return epsilon
    ratio: float = epsilon ** (alpha / (environments - 1))
    if ratio == 1.0:
        return epsilon
    return epsilon * (1.0 - ratio**environments) / (1.0 - ratio) / environments
