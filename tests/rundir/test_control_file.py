"""The control file of a run on another machine, in a directory that both see."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tianflow.rundir.control_file import NAME, ControlFile, process_start_time


def control(address: str = "http://127.0.0.1:1") -> ControlFile:
    own = os.getpid()
    return ControlFile(
        run="a",
        pid=own,
        start_time=process_start_time(own),
        address=address,
        token="t",
        read_token="r",
    )


def test_a_run_of_this_machine_is_active_while_its_process_exists() -> None:
    assert control().alive  # nothing listens at its address
    assert not replace(control(), start_time=1).alive


def test_a_run_of_another_machine_is_active_while_it_accepts_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = replace(
            control(f"http://127.0.0.1:{listener.getsockname()[1]}"), machine="another", pid=2**22
        )
        assert found.alive
    assert not found.alive


@pytest.mark.parametrize("address", ["", "http://", "http://[", "http://a:99999", "nonsense"])
def test_an_address_that_is_none_of_a_server_is_not_active(address: str) -> None:
    assert not replace(control(address), machine="another").alive


def test_a_file_says_which_machine_it_is_from_and_an_older_one_is_of_this_machine(
    tmp_path: Path,
) -> None:
    control().write(tmp_path)
    assert control() == ControlFile.read(tmp_path)
    fields = json.loads((tmp_path / NAME).read_text())
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() == fields.pop("machine")
    (tmp_path / NAME).write_text(json.dumps(fields))
    found = ControlFile.read(tmp_path)
    assert found is not None
    assert found.alive
    (tmp_path / NAME).write_text(json.dumps({**fields, "machine": 1}))
    assert ControlFile.read(tmp_path) is None
