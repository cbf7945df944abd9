"""Videos of whole episodes of a policy, one file an episode, recorded with Gymnasium."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tianflow import plugins
from tianflow.components.evaluator import play
from tianflow.config.evaluations import main_evaluation
from tianflow.envs.make import environment_seed, make
from tianflow.errors import ConfigError, EnvironmentFailedError, TianflowError

if TYPE_CHECKING:
    from tianflow.policy import LoadedPolicy


class VideoError(TianflowError):
    """Episodes cannot be recorded. ``bad``: the request was at fault."""

    def __init__(self, message: str, *, bad: bool = True) -> None:
        self.bad = bad
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class EpisodeVideo:
    """One recorded episode: path of the video, return, and length in steps."""

    path: Path
    episode_return: float
    length: int


def require_possible(directory: Path) -> None:
    """Raise VideoError if no video can be written into ``directory``, whatever the
    environment is.
    """
    if directory.exists() and not directory.is_dir():
        raise VideoError(f"{str(directory)!r} is not a directory")
    try:
        import moviepy  # noqa: F401 - Gymnasium writes videos with it
    except ImportError as error:
        raise VideoError(
            f"videos need an extra: {plugins.install_line('video')} first ({error})"
        ) from None


def record(
    policy: LoadedPolicy, directory: Path, *, name: str, episodes: int
) -> tuple[EpisodeVideo, ...]:
    """Play ``episodes`` whole episodes in one environment, and write
    ``directory/NAME-episode-K.mp4``, K from 0, all or none.

    The environment has the seed of the first environment of an evaluation. Unless that is a vector
    of its own kind, these are the first episodes of a deterministic evaluation. Files of the same
    names are replaced.

    Raises:
        VideoError: the environment cannot render or be made singly; the extra ``video`` is not
            installed; ``directory`` cannot be written.
        EnvironmentFailedError: the environment fails during an episode.
    """
    require_possible(directory)
    policy.require_environment()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".", dir=directory))
        try:
            played = _played(policy, scratch, name, episodes)
            paths = [scratch / f"{name}-episode-{index}.mp4" for index in range(episodes)]
            if missing := [path.name for path in paths if not path.is_file()]:
                raise VideoError(
                    f"{policy.config.env.id} rendered no frames, or they could not be written: "
                    f"{missing[0]} is missing"
                )
            return tuple(
                EpisodeVideo(
                    path.replace(directory / path.name), episode.episode_return, episode.length
                )
                for path, episode in zip(paths, played, strict=True)
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise VideoError(f"videos cannot be written: {error}", bad=False) from error


def _played(policy: LoadedPolicy, scratch: Path, name: str, episodes: int) -> Sequence[Any]:
    config = policy.config
    settings = config.env.model_copy(
        update={
            "vectorization": "sync",
            "kwargs": {**config.env.kwargs, "render_mode": "rgb_array"},
        }
    )

    def recorded(environment: Any) -> Any:
        from gymnasium.wrappers import RecordVideo

        return RecordVideo(
            environment,
            str(scratch),
            episode_trigger=lambda index: index < episodes,
            name_prefix=name,
            disable_logger=True,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the existing directory, encoders, old environments
        try:
            environment = make(settings, 1, around=recorded, previous_step=config.previous_step)
        except (ConfigError, EnvironmentFailedError) as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise VideoError(
                f"{settings.id} cannot be recorded: a single environment that renders itself "
                f"(rgb_array) cannot be made: {first}"
            ) from error
        try:
            if (environment.spec.observation, environment.spec.action) != (
                policy.spec.observation,
                policy.spec.action,
            ):
                raise VideoError(
                    f"{settings.id} cannot be recorded: a single environment has other spaces than "
                    "the vectorised one"
                )
            found = play(
                policy.policy,
                environment,
                replace(environment.spec, action_mask=policy.spec.action_mask),
                episodes=episodes,
                seed=environment_seed(main_evaluation(config).seed, 0, 1, stream=1),
                deterministic=config.evaluation.deterministic,
                should_stop=lambda: False,
            )
        finally:
            environment.close()
    assert found is not None
    return found
