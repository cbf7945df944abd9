"""Key files that others can read are refused, and no address off loopback is used without keys."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tianflow.channels.keys import (
    Keys,
    is_loopback,
    read_keys,
    read_or_make_keys,
    require_address,
    require_keys,
)
from tianflow.errors import ConfigError


def test_a_key_file_is_written_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    before = os.umask(0)
    try:
        keys = read_or_make_keys(path)
    finally:
        os.umask(before)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert keys == read_keys(path) == read_or_make_keys(path)
    assert [path] == list(tmp_path.iterdir())


def test_two_that_start_at_once_have_the_same_keys(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read_or_make_keys, [tmp_path / "keys"] * 16))
    assert 1 == len({keys.fingerprint for keys in found})
    assert [tmp_path / "keys"] == list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601, 0o777])
def test_a_key_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    read_or_make_keys(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        read_keys(path)


def test_what_is_not_a_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    read_or_make_keys(path)
    whole = path.read_text()
    other = read_or_make_keys(tmp_path / "other")
    lines = whole.splitlines()
    for text in (
        "",
        "not TOML",
        "\n".join(lines[:-1]),
        whole + 'more = "1"\n',
        whole.replace('"\n', 'x"\n', 1),
        whole + "#" * 5000,
        "\n".join([lines[0], f'server_public = "{other.server_public.decode()}"', *lines[2:]]),
        whole.replace("server_public", "server_publik"),
        "\n".join([*lines[:-1], "client_secret = 3"]),
        "\n".join([*lines[:-1], 'client_secret = "é"']),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not a complete key file"):
            read_keys(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_keys(tmp_path / "pipe")


def test_a_file_that_is_missing_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_keys(tmp_path / "keys")


def test_secrets_are_not_shown() -> None:
    keys = Keys.generate()
    assert f"Keys({keys.fingerprint})" == repr(keys)
    assert 16 == len(keys.fingerprint)
    assert keys.fingerprint != Keys.generate().fingerprint


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://192.0.2.1:1", False),
        ("tcp://localhost.example.org:1", False),
        ("tcp://machine:1", False),
    ],
)
def test_loopback_is_what_no_other_machine_reaches(address: str, loopback: bool) -> None:
    assert loopback == is_loopback(address)


def test_an_address_off_loopback_needs_a_key(caplog: pytest.LogCaptureFixture) -> None:
    address = "tcp://192.0.2.1:1"
    with pytest.raises(ConfigError, match=r"addresses = 'tcp://192.0.2.1:1'.*a key file"):
        require_keys(address, None, insecure=False, path="addresses")
    require_keys(address, Keys.generate(), insecure=False, path="addresses")
    require_keys("tcp://127.0.0.1:1", None, insecure=False, path="addresses")
    assert not caplog.records
    require_keys(address, None, insecure=True, path="addresses")
    assert ["WARNING"] == [record.levelname for record in caplog.records]


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:1", "tcp://:1", "tcp://h", "tcp://h:x", "tcp://h:1/", "tcp://h:65536",
     "ipc://x", "tcp://a b:1", "tcp://h:1\n", 3, None],
)  # fmt: skip
def test_what_is_not_an_address_is_refused(address: object) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        require_address(address, path="--listen", listen=True)


def test_only_a_listener_may_leave_host_and_port_open() -> None:
    for address in ("tcp://*:5700", "tcp://127.0.0.1:*"):
        assert address == require_address(address, path="--listen", listen=True)
        with pytest.raises(ConfigError, match="addresses"):
            require_address(address, path="addresses")
