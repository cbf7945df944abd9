"""``tianflow eval``: the returns of a checkpoint's policy, and videos of some of its episodes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tianflow.cli.common import RUNS, AsJson, KeptArgument, RunsDir, exit_codes


def evaluated(
    checkpoint: str, *, runs_dir: Path, episodes: int, video: Path | None, video_episodes: int
) -> dict[str, Any]:
    """Returns over ``episodes`` episodes; with ``video``, a folder, also ``videos``: path, return
    and length of each episode filmed.

    Episodes are filmed apart from those that count, so the returns are the same with and without.

    Raises:
        CheckpointError: there is no such checkpoint, or it is torn.
        VideoError: nothing can be filmed; nothing was played then, unless the environment alone
            shows it.
    """
    if video is not None:
        from tianflow.cli import video as filming

        filming.require_possible(video)
    from tianflow import api
    from tianflow.policy import evaluate as play
    from tianflow.rundir.checkpoints import resolve

    path = resolve(checkpoint, runs_dir)
    policy = api.load_policy(path, runs_dir=runs_dir)
    if video is None:
        return play(policy, episodes=episodes)
    films = filming.film(policy, video, name=name_of(path), episodes=min(episodes, video_episodes))
    videos = [{**asdict(film), "path": str(film.path)} for film in films]
    return {**play(policy, episodes=episodes), "videos": videos}


def name_of(checkpoint: Path) -> str:
    """Of a checkpoint, with that of its run, or of the folder that it was copied to: those of two
    runs bear the same names.
    """
    *_, folder, name = (
        "",
        *(part for part in checkpoint.resolve().parts[1:] if part != "checkpoints"),
    )
    return f"{folder}-{name}" if folder else name


def evaluate(
    checkpoint: KeptArgument,
    *,
    runs_dir: RunsDir = RUNS,
    episodes: Annotated[int, typer.Option(min=1, help="Whole episodes to play.")] = 100,
    video: Annotated[
        Path | None,
        typer.Option("--video", metavar="DIR", help="Film episodes into this folder, too."),
    ] = None,
    video_episodes: Annotated[
        int, typer.Option(min=1, help="Episodes to film, one file each.")
    ] = 3,
    json_line: AsJson = False,
) -> None:
    """Play whole episodes with the policy of CHECKPOINT.

    And print its returns.
    """
    with exit_codes():
        from tianflow.logs import configure

        configure(level="WARNING")  # that the newest checkpoint is skipped, say
        result = evaluated(
            checkpoint,
            runs_dir=runs_dir,
            episodes=episodes,
            video=video,
            video_episodes=video_episodes,
        )
    if json_line:
        typer.echo(json.dumps(result))
        return
    typer.echo(f"mean return {result['mean_return']:.2f} over {result['episodes']} episodes")
    for film in result.get("videos", ()):
        typer.echo(f"{film['path']}: return {film['episode_return']:.2f} in {film['length']} steps")
