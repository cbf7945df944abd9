"""Videos of a policy show whole episodes, and the returns are the same as without videos."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tests.support.checkpoints import checkpoint
from tests.support.environments import CounterEnv
from tianflow.cli import main as cli
from tianflow.rundir.checkpoints import resolve

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium"),
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning:moviepy"
    ),  # its reader leaves a closed process to the garbage collector
]
moviepy = pytest.importorskip("moviepy", reason="the extra video is not installed")
imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="the extra video is not installed")
pytest.importorskip("pygame", reason="the extra video is not installed")


class Drawn(CounterEnv):
    """Episodes of 4 steps; the brightness of a frame gives the step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as gymnasium declares it

    def __init__(self, render_mode: str | None = None, picture: bool = True) -> None:
        super().__init__(length=4)
        self.render_mode, self._picture = render_mode, picture

    def render(self) -> Any:
        return np.full((32, 48, 3), 40 * self.t, np.uint8) if self._picture else "no picture"


class Vector(gymnasium.vector.SyncVectorEnv):
    """Its single environments have another space, without the number of the episode."""

    def __init__(self, num_envs: int) -> None:
        super().__init__([Drawn] * num_envs)


def trained(folder: Path, env: dict[str, Any], **sections: Any) -> None:
    checkpoint(
        folder, {"env": env, "algorithm": {"name": "ppo"}, "network": {"hidden": [16]}, **sections}
    )


def run(folder: Path, *arguments: str) -> Result:
    checkpoint = () if arguments[0].startswith("/") else ("a-run",)
    return CliRunner().invoke(
        cli.app, ["eval", *checkpoint, "--trust", *arguments, "--runs-dir", str(folder)]
    )


def frames(path: Path) -> list[Any]:
    with moviepy.VideoFileClip(str(path)) as clip:
        return list(clip.iter_frames())


@pytest.mark.e2e
def test_episodes_of_cartpole_are_recorded_and_do_not_change_the_returns(tmp_path: Path) -> None:
    trained(tmp_path, {"id": "CartPole-v1", "kwargs": {"max_episode_steps": 30}})
    without = json.loads(run(tmp_path, "--episodes", "6", "--json").stdout)
    done = run(tmp_path, "--episodes", "6", "--json", "--video", str(tmp_path / "videos"))
    assert 0 == done.exit_code, done.stderr
    found = json.loads(done.stdout)
    videos = found.pop("videos")
    assert without == found
    assert [f"a-run-v1-0000000010-episode-{index}.mp4" for index in range(3)] == sorted(
        path.name for path in (tmp_path / "videos").iterdir()
    )
    for video in videos:
        assert video["length"] + 1 == imageio_ffmpeg.count_frames_and_secs(video["path"])[0]
        pictures = frames(Path(video["path"]))
        assert (400, 600, 3) == pictures[0].shape
        assert pictures[0].std() > 0.0
        assert not np.array_equal(pictures[0], pictures[-1])
        assert video["length"] == video["episode_return"]


@pytest.mark.e2e
def test_a_video_shows_every_step_of_its_episode_and_no_other(tmp_path: Path) -> None:
    trained(tmp_path, {"id": "tests.cli.test_video:Drawn"})
    done = run(
        tmp_path, "--episodes", "5", "--video", str(tmp_path / "videos"), "--video-episodes", "2"
    )
    assert [
        "mean return 4.00 over 5 episodes",
        f"  version 10, {resolve('a-run', tmp_path)}, in tests.cli.test_video:Drawn",
        *(
            f"{tmp_path}/videos/a-run-v1-0000000010-episode-{k}.mp4: return 4.00 in 4 steps"
            for k in (0, 1)
        ),
    ] == (done.stdout.splitlines())
    for path in (tmp_path / "videos").iterdir():
        brightness = [picture.mean() for picture in frames(path)]
        np.testing.assert_allclose(brightness, [0.0, 40.0, 80.0, 120.0, 160.0], atol=6.0)


def test_the_number_of_episodes_limits_the_number_of_videos(tmp_path: Path) -> None:
    trained(tmp_path, {"id": "tests.cli.test_video:Drawn"})
    run(tmp_path, "--episodes", "1", "--video", str(tmp_path))
    assert ["a-run-v1-0000000010-episode-0.mp4"] == [path.name for path in tmp_path.glob("*.mp4")]


@pytest.mark.e2e
def test_videos_of_two_runs_have_different_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        trained(tmp_path / name, {"id": "tests.cli.test_video:Drawn"})
        (tmp_path / name / "a-run").rename(tmp_path / name / f"{name}-run")
        shutil.copytree(
            tmp_path / name / f"{name}-run" / "checkpoints" / "v1-0000000010",
            tmp_path / name / "best",
        )
        for source in (f"{name}-run", "best"):
            done = run(
                tmp_path,
                str(tmp_path / name / source),
                "--episodes",
                "1",
                "--video",
                str(tmp_path / "videos"),
            )
            assert 0 == done.exit_code, done.stderr
    names = ("one-best", "one-run-v1-0000000010", "two-best", "two-run-v1-0000000010")
    assert [f"{name}-episode-0.mp4" for name in names] == sorted(
        path.name for path in (tmp_path / "videos").iterdir()
    )


def refused(folder: Path, video: Path) -> str:
    done = run(folder, "--episodes", "2", "--video", str(video))
    assert (2, "") == (done.exit_code, done.stdout)
    return done.stderr


@pytest.mark.parametrize(
    ("env", "why"),
    [
        (
            {"id": "tests.support.environments:CounterEnv"},
            "unexpected keyword argument 'render_mode'",
        ),
        ({"id": "tests.cli.test_video:Vector", "vectorization": "auto"}, "creates a native vector"),
        ({"id": "tests.cli.test_video:Drawn", "kwargs": {"picture": False}}, "rendered no frames"),
        (
            {"id": "ALE/Pong-v5"},
            "a single environment has other spaces than the vectorised one",
        ),
    ],
)
def test_an_environment_that_cannot_be_recorded_is_named_and_leaves_no_files(
    tmp_path: Path, env: dict[str, Any], why: str
) -> None:
    network = (
        {"network": {"name": "nature_cnn", "kwargs": {"units": 8}}}
        if env["id"].startswith("ALE")
        else {}
    )
    trained(tmp_path, env, **network)
    message = refused(tmp_path, tmp_path / "videos")
    assert message.startswith(env["id"])
    assert why in message
    assert [] == list((tmp_path / "videos").iterdir())


def test_without_the_extra_video_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "moviepy", None)
    assert 'pip install -c constraints.txt -e ".[video]"' in refused(tmp_path, tmp_path / "videos")


def test_a_file_is_not_a_directory_for_videos(tmp_path: Path) -> None:
    (tmp_path / "videos").touch()
    assert "is not a directory" in refused(tmp_path, tmp_path / "videos")
