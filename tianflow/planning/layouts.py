"""The layouts of a run: of a trajectory and, with replay, of the draw for one update."""

from __future__ import annotations

from tianflow.config.model import Config
from tianflow.config.networks import state_spec
from tianflow.core.layout import make_draw_layout, make_layout
from tianflow.core.payloads import EnvironmentSpec, TrajectoryLayout


def trajectory_layout(config: Config, spec: EnvironmentSpec) -> TrajectoryLayout:
    """The layout of a trajectory of an actor."""
    return make_layout(
        spec,
        steps=config.actors.rollout_steps,
        state_spec=state_spec(config.network),
        return_accumulator=config.env.normalisation.returns,
        recorded=config.algorithm.recorded,
        replayed=config.algorithm.window is not None,
        request_noise=config.algorithm.noise_size(spec.action) if config.central else 0,
    )


def draw_layout(config: Config, spec: EnvironmentSpec) -> TrajectoryLayout | None:
    """The layout of a draw from replay; None for an algorithm that uses each trajectory once."""
    if config.algorithm.window is None:
        return None
    length, _ = config.algorithm.window
    return make_draw_layout(
        spec,
        length=length,
        items=config.algorithm.items,
        state_spec=state_spec(config.network),
        ends_only=config.algorithm.ends_only,
    )
