"""The file with which nodes join: whole, private, and refused by name where it is neither."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tianflow.channels.keys import Keys
from tianflow.errors import ConfigError
from tianflow.rundir.join_file import LARGEST, JoinFile


def written(folder: Path, keys: Keys | None = None) -> Path:
    path = folder / "join.toml"
    JoinFile("a", "tcp://10.0.0.1:5700", keys).write(path)
    return path


def test_a_node_reads_what_the_head_wrote_without_the_secret_of_the_head(tmp_path: Path) -> None:
    keys = Keys.generate()
    path = written(tmp_path, keys)
    found = JoinFile.read(path)
    assert (found.run, found.address) == ("a", "tcp://10.0.0.1:5700")
    assert found.keys is not None
    assert found.keys.client_secret == keys.client_secret
    assert found.keys.server_public == keys.server_public
    assert keys.server_secret.decode() not in path.read_text()


def test_it_is_readable_by_its_owner_only_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = written(tmp_path, Keys.generate())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["join.toml"]


def test_without_keys_there_are_none(tmp_path: Path) -> None:
    assert JoinFile.read(written(tmp_path)).keys is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, Keys.generate())
    path.chmod(mode)
    with pytest.raises(
        ConfigError, match=f"mode {mode:04o}: other users can read or change the keys"
    ):
        JoinFile.read(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "run = 3\naddress = 'tcp://a:1'\n",
        "run = 'a'\n",
        "run = 'a'\naddress = 'http://a:1'\n",
        "run = 'a'\naddress = 'tcp://*:1'\n",
        "run = 'a'\naddress = 'tcp://a:1'\nserver_public = 'short'\n",
        "run = 'a'\naddress = 'tcp://a:1'\nserver_public = 4\n",
        "run = 'a'\naddress = 'tcp://a:1'\nmore = 1\n",
        "run = 'é'\naddress = 'tcp://a:1'\n",
        "run = 'a'\naddress = 'tcp://a:1'\n" + "#" * LARGEST,
        "[[[",
    ],
)
def test_what_is_not_a_join_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "join.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"is not a join file; accepted: the join\.toml"):
        JoinFile.read(path)


def test_a_pipe_or_a_directory_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is not a regular file"):
        JoinFile.read(tmp_path / "pipe")
    with pytest.raises((ConfigError, OSError)):
        JoinFile.read(tmp_path)


def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, Keys.generate())
    assert list(tmp_path.iterdir()) == []
