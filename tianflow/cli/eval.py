"""``tianflow eval``: evaluates the policy of a checkpoint, and records videos of some episodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tianflow.cli.common import (
    RUNS,
    AsJson,
    Best,
    CheckpointArgument,
    RunsDir,
    Trust,
    best_of,
    echo,
    exit_codes,
)

EPISODES = 100
"""Episodes that are played without another number."""


def evaluate_checkpoint(
    checkpoint: str,
    *,
    runs_dir: Path,
    episodes: int | None,
    video: Path | None,
    video_episodes: int,
    trust: bool = False,
    overrides: Sequence[str] = (),
    evaluation: str | None = None,
    seed: int | None = None,
    sampled: bool = False,
) -> dict[str, Any]:
    """Returns over ``episodes`` episodes; None: those of ``evaluation``, or `EPISODES` without one.
    ``version``, ``checkpoint`` and ``environment`` say what was played. With ``video``, a
    directory, also ``videos``: path, return and length of each recorded episode.

    ``overrides``, ``evaluation``, ``seed`` and ``sampled``: see `LoadedPolicy.for_evaluation`.

    Recorded episodes are extra, so the returns do not depend on them.

    Raises:
        CheckpointError: the checkpoint does not exist, or is torn.
        ConfigError: the policy does not fit the environment.
        VideoError: episodes cannot be recorded. No episode was played then, unless only the
            environment itself could show it.
    """
    if video is not None:
        from tianflow.cli import video as recording

        recording.require_possible(video)
    from tianflow import api
    from tianflow.config.evaluations import played_environment
    from tianflow.policy import evaluate as play
    from tianflow.rundir.checkpoints import resolve

    # the environment may change the working directory
    path = resolve(checkpoint, runs_dir).absolute()
    target = None if video is None else video.absolute()
    policy = api.load_policy(path, runs_dir=runs_dir, trust=trust)
    if overrides or evaluation is not None or seed is not None or sampled:
        from tianflow.config.loading import parse_overrides

        policy = policy.for_evaluation(
            parse_overrides(overrides), evaluation=evaluation, seed=seed, sampled=sampled
        )
    policy.require_environment()
    if episodes is None:
        episodes = EPISODES if evaluation is None else policy.config.evaluation.episodes
    played = {
        "version": policy.checkpoint.version.number,
        "checkpoint": str(path),
        "environment": played_environment(policy.config.env),
    }
    if video is None or target is None:
        return play(policy, episodes=episodes) | played
    recorded = recording.record(
        policy, target, name=name_of(path), episodes=min(episodes, video_episodes)
    )
    videos = [{**asdict(item), "path": str(video / item.path.name)} for item in recorded]
    return {**play(policy, episodes=episodes), **played, "videos": videos}


def what(result: Mapping[str, Any]) -> str:
    """Version, checkpoint and environment of a ``result``, in one line."""
    environment = result["environment"]
    settings = [
        f", {name} {json.dumps(value)}"
        for name, value in environment.items()
        if value and name != "id"
    ]
    where = environment["id"] + "".join(settings)
    return f"version {result['version']}, {result['checkpoint']}, in {where}"


def name_of(checkpoint: Path) -> str:
    """Name of a checkpoint, with that of its run or directory: checkpoints of different runs have
    equal names.
    """
    *_, folder, name = (
        "",
        *(part for part in checkpoint.resolve().parts[1:] if part != "checkpoints"),
    )
    return f"{folder}-{name}" if folder else name


def evaluate(
    checkpoint: CheckpointArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="env.key=value", help="Other settings of the environment."),
    ] = None,
    *,
    runs_dir: RunsDir = RUNS,
    evaluation: Annotated[
        str | None,
        typer.Option(
            "--evaluation",
            metavar="NAME",
            help="Evaluation of the run, whose settings are used: main, or a further one.",
        ),
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Number of whole episodes; default: {EPISODES}, or those of NAME."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**32 - 1, help="Seed of environments and actions; default: of evaluations."
        ),
    ] = None,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Sampled actions, not the most probable ones.")
    ] = False,
    video: Annotated[
        Path | None,
        typer.Option("--video", metavar="DIR", help="Directory for videos of episodes."),
    ] = None,
    video_episodes: Annotated[
        int, typer.Option(min=1, help="Number of recorded episodes, one file each.")
    ] = 3,
    best: Best = False,
    trust: Trust = False,
    json_line: AsJson = False,
) -> None:
    """Evaluate the policy of CHECKPOINT on whole episodes.

    The command prints their returns. Without --evaluation, the environment is that of training.
    """
    with exit_codes():
        from tianflow.logs import configure

        configure(level="WARNING")  # for example that the newest checkpoint is skipped
        result = evaluate_checkpoint(
            best_of(checkpoint) if best else checkpoint,
            runs_dir=runs_dir,
            episodes=episodes,
            video=video,
            video_episodes=video_episodes,
            trust=trust,
            overrides=overrides or (),
            evaluation=evaluation,
            seed=seed,
            sampled=sampled,
        )
    if json_line:
        echo(json.dumps(result))
        return
    echo(f"mean return {result['mean_return']:.2f} over {result['episodes']} episodes")
    echo(f"  {what(result)}")
    for video_ in result.get("videos", ()):
        echo(f"{video_['path']}: return {video_['episode_return']:.2f} in {video_['length']} steps")
