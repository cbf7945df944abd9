from __future__ import annotations

import json
import os
import re
import resource
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support.paths import ROOT
from tianflow import plugins
from tianflow.cli import doctor
from tianflow.cli import main as cli
from tianflow.rundir.control_file import ControlFile, process_start_time


def control_file(directory: Path, start_time: int | None) -> None:
    directory.mkdir()
    address = "http://127.0.0.1:1"
    ControlFile(
        run=directory.name,
        pid=os.getpid(),
        start_time=start_time,
        address=address,
        token="",
        read_token="",
    ).write(directory)


def test_active_runs_are_distinguished_from_crashed_ones(tmp_path: Path) -> None:
    control_file(tmp_path / "alive", process_start_time(os.getpid()))
    control_file(tmp_path / "dead", 1)
    assert [("run alive", "ok"), ("run dead", "warning")] == [
        (f.name, f.level) for f in doctor.runs(tmp_path)
    ]


def test_the_quota_of_the_control_group_counts(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    assert doctor.cores(tmp_path).level == "warning"
    assert doctor.cores(tmp_path).value.startswith("0.5 usable")
    assert doctor.memory(tmp_path).value.startswith("1.0 GiB usable")


def test_a_missing_package_is_a_problem_that_says_what_to_install() -> None:
    assert doctor.Finding(
        "no-such-package", "problem", "not installed", "pip install no-such-package"
    ) == doctor.package("no-such-package")


@pytest.mark.parametrize(
    ("limit", "level"), [(256, "warning"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_few_open_files_are_a_warning(limit: int, level: str) -> None:
    assert level == doctor.descriptors(limit).level


def test_shared_memory_that_cannot_be_made_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert doctor.shared_memory().level == "problem"


class FakeRuntime:
    """CUDA's runtime, which pins memory or refuses it."""

    def __init__(self, error: int) -> None:
        self.pinned: set[int] = set()
        self._error = error

    def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert (doctor.MEMORY_PROBE, 0) == (nbytes, flags)
        if not self._error:
            self.pinned.add(start)
        return self._error

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802 - likewise
        self.pinned.remove(start)
        return 0


@pytest.mark.parametrize(
    ("expected", "capability", "error"),
    [
        ({"gpu precision": "ok", "pinned slots": "ok"}, (9, 0), 0),
        ({"gpu precision": "ok", "pinned slots": "warning"}, (7, 5), 2),
    ],
)
def test_a_gpu_is_shown_with_its_fast_precisions_and_whether_slots_can_be_pinned(
    expected: dict[str, str],
    capability: tuple[int, int],
    error: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, ones = FakeRuntime(error), torch.ones
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda index: f"card {index}",
        "get_device_capability": lambda _: capability,
        "cudart": lambda: runtime,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "ones", lambda count, device: ones(count))
    card, *others = doctor.gpus()
    assert ("gpu", "ok", "card 0, card 1") == (card.name, card.level, card.value)
    assert expected == {finding.name: finding.level for finding in others}
    assert ("bf16 are fast" in others[0].value) == (capability >= (8, 0))
    assert set() == runtime.pinned


def test_a_machine_without_a_gpu_has_one_line_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ["none; the learner uses the CPU"] == [finding.value for finding in doctor.gpus()]


def test_a_directory_that_cannot_be_written_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ok" == doctor.directory(tmp_path / "not" / "yet").level
    monkeypatch.setattr(doctor, "MINIMUM_FREE", 2**80)
    assert "warning" == doctor.directory(tmp_path).level
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "problem" == doctor.directory(tmp_path).level
    (tmp_path / "file").touch()
    assert "problem" == doctor.directory(tmp_path / "file" / "runs").level


def test_every_extra_of_the_package_is_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) - {"bench", "dev", "docs"} == set(doctor.EXTRAS)


def test_the_command_exits_with_one_when_there_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["doctor", "--runs-dir", str(tmp_path), "--json"]
    monkeypatch.setattr(doctor, "REQUIRED", ("numpy",))
    monkeypatch.setattr(
        doctor, "shared_memory", lambda: doctor.Finding("shared memory", "ok", "there")
    )
    monkeypatch.setattr(doctor, "gpus", lambda: [doctor.Finding("gpu", "ok", "none")])
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    monkeypatch.setattr(doctor, "REQUIRED", ("no-such-package",))
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert "problem" in {finding["level"] for finding in json.loads(result.stdout)}


def test_a_missing_extra_is_installed_as_the_readme_says() -> None:
    line = doctor.extra("atari", "no_such_module").value
    assert f"not installed ({plugins.install_line('atari')})" == line
    assert f"`{plugins.install_line('atari')}`" in (ROOT / "README.md").read_text()


def test_the_readme_lists_every_extra() -> None:
    sentence = re.search(r"The extras are\s(.*?)\.", (ROOT / "README.md").read_text(), re.DOTALL)
    assert sentence is not None
    assert set(doctor.EXTRAS) == set(re.findall(r"`(\w+)`", sentence[1]))
