"""Panels of learning: episode length, and the statistics of updates and episodes."""

from __future__ import annotations

from dashboards.panels import Json, lines, now

LOSSES = "train/(loss|value_loss)"
DIVERGENCES = "train/(approx_kl|kl)"


def statistic(name: str) -> str:
    """The newest values of the statistics whose names match."""
    return now("learner_statistic", f'name=~"{name}"')


def learning_panels() -> list[Json]:
    """Returns, and statistics of updates and episodes. Each panel has one query, so that it stays
    readable with many runs.
    """
    return [
        lines(
            "Return",
            "Mean return of the last 100 episodes of training.",
            (now("episode_return_mean"), "{{run}} mean"),
        ),
        lines(
            "Evaluation",
            "Mean return of the newest evaluation, and of named ones.",
            (now("evaluation_return_mean"), "{{run}} {{evaluation}}"),
        ),
        lines(
            "Episode length",
            "Mean length of the last 100 episodes of training, in steps.",
            (now("episode_length_mean"), "{{run}}"),
            width=6,
        ),
        lines(
            "Best return",
            "Largest return of the last 100 episodes of training.",
            (now("episode_return_max"), "{{run}}"),
            width=6,
        ),
        lines(
            "Losses",
            "Losses of the newest update.",
            (statistic(LOSSES), "{{run}} {{name}}"),
            width=6,
        ),
        lines(
            "Policy loss",
            "Policy loss of the newest update; a value loss is often thousands of times as large.",
            (statistic("train/policy_loss"), "{{run}}"),
            width=6,
        ),
        lines(
            "Metrics of episodes",
            "Newest values of the metrics in the environments' info.",
            (now("episode_metric"), "{{run}} {{name}}"),
            width=6,
        ),
        lines(
            "Metrics of evaluations",
            "Means of the metrics in the environments' info, in the newest evaluation.",
            (now("evaluation_metric"), "{{run}} {{evaluation}} {{name}}"),
            width=6,
        ),
        lines(
            "Entropy",
            "Entropy of the policy in the newest update, in nats.",
            (statistic("train/entropy"), "{{run}}"),
            width=6,
        ),
        lines(
            "KL divergence",
            "Divergence of the policy within the newest update, and from the acting policy, in "
            "nats.",
            (statistic(DIVERGENCES), "{{run}} {{name}}"),
            width=6,
        ),
        lines(
            "Gradient norm",
            "Norm of the gradient of the newest update, before clipping.",
            (statistic("train/grad_norm"), "{{run}}"),
            width=6,
        ),
        lines(
            "Learning rate",
            "Learning rate of the newest update.",
            (statistic("train/learning_rate"), "{{run}}"),
            width=6,
        ),
    ]
