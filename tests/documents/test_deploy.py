"""The unit and the container file: commands exist, paths agree, the container has few privileges."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.support.pages import ROOT
from tianflow.cli.main import app
from tianflow.config.loading import load_config

UNIT, CONTAINER = ROOT / "deploy" / "tianflow.service", ROOT / "deploy" / "Containerfile"
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze (Debian: systemd) is not installed",
)


def unit(path: Path = UNIT) -> dict[str, str]:
    """Keys of the section Service."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys keep their case
    parser.read(path)
    return dict(parser["Service"])


def instructions() -> list[tuple[str, str]]:
    """Instructions of the container file with their arguments, in order."""
    text = re.sub(r"^#.*\n", "", CONTAINER.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


def given(word: str) -> str:
    """Arguments of the last instruction of this name, which belongs to the final image."""
    return next(rest for name, rest in reversed(instructions()) if name == word)


def health_check() -> list[str]:
    return json.loads(given("HEALTHCHECK").partition("CMD ")[2])  # type: ignore[no-any-return]  # a list of words


STARTED = {"unit": shlex.split(unit()["ExecStart"]), "container": json.loads(given("ENTRYPOINT"))}
"""The command that each of them starts."""
either = pytest.mark.parametrize("command", STARTED.values(), ids=STARTED)


@either
def test_the_command_line_accepts_the_started_command(command: list[str]) -> None:
    program, subcommand, *arguments = command
    assert ("tianflow", "serve") == (Path(program).name, subcommand)
    serve = typer.main.get_command(app).commands[subcommand]  # type: ignore[attr-defined]  # it is a group
    with serve.make_context("serve", arguments) as context:
        assert {"/var/lib/tianflow"} == {
            str(Path(context.params[name]).parent) for name in ("runs_dir", "token_file")
        }


@needs_systemd
def test_the_unit_is_accepted_by_systemd(tmp_path: Path) -> None:
    program = tmp_path / "tianflow"
    program.symlink_to(sys.executable)
    here = tmp_path / UNIT.name
    here.write_text(UNIT.read_text().replace(STARTED["unit"][0], str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", here], capture_output=True, text=True, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)


@needs_systemd
def test_a_key_that_systemd_does_not_know_is_noticed(tmp_path: Path) -> None:
    here = tmp_path / UNIT.name
    here.write_text(
        UNIT.read_text()
        .replace("KillMode=", "KilMode=")
        .replace(STARTED["unit"][0], sys.executable)
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", here], capture_output=True, text=True, check=False
    )
    assert "KilMode" in done.stderr


def test_a_stop_leaves_time_for_a_last_checkpoint_and_is_not_a_failure() -> None:
    service = unit()
    assert ("mixed", "90", "on-failure") == tuple(
        service[key] for key in ("KillMode", "TimeoutStopSec", "Restart")
    )
    assert {"143", "130"} == set(service["SuccessExitStatus"].split())
    assert "tianflow" == service["StateDirectory"]


def test_the_unit_forbids_nothing_that_training_needs() -> None:
    """PyTorch makes kernels at run time, shared memory is a descriptor, hosts are forked, a GPU is
    a device.
    """
    assert set() == set(unit()) & {
        "MemoryDenyWriteExecute",
        "PrivateDevices",
        "ProtectClock",
        "ProcSubset",
        "LimitNPROC",
        "TasksMax",
    }


def test_the_container_runs_as_nobody_and_brings_no_compiler() -> None:
    words = [word for word, _ in instructions()]
    last = len(words) - 1 - words[::-1].index("FROM")
    user = words.index("USER", last)
    assert given("USER").isdecimal()
    assert given("USER") != "0"
    assert "RUN" not in words[user:]
    ran = " ".join(rest for word, rest in instructions() if word == "RUN")
    assert "--only-binary :all:" in ran
    assert not re.search(r"apt-get|\bgcc\b|build-essential", ran)


def test_the_health_check_uses_the_exposed_port_and_runs_are_a_volume() -> None:
    command, port = STARTED["container"], given("EXPOSE")
    assert port == command[command.index("--port") + 1]
    assert f"127.0.0.1:{port}/livez" in health_check()[-1]
    assert given("VOLUME") == given("WORKDIR") == "/var/lib/tianflow"
    assert given("STOPSIGNAL") == "SIGTERM"


def test_every_file_that_the_container_copies_exists() -> None:
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest


# Nodes
# --------------------------------------------------------------------------------------------------

NODE_UNIT, MANIFEST = ROOT / "deploy" / "tianflow-node.service", ROOT / "deploy" / "kubernetes.yaml"


def pods() -> dict[str, dict[str, Any]]:
    """Specifications of the pods of the manifest, by kind of their owner."""
    documents = yaml.safe_load_all(MANIFEST.read_text())
    return {
        document["kind"]: document["spec"]["template"]["spec"]
        for document in documents
        if "template" in document["spec"]
    }


def arguments(command: list[str]) -> dict[str, Any]:
    """Arguments of a command of tianflow, as its command line reads them."""
    program, subcommand, *words = command
    assert "/opt/tianflow/bin/tianflow" == program
    found = typer.main.get_command(app).commands[subcommand]  # type: ignore[attr-defined]  # it is a group
    with found.make_context(subcommand, words) as context:
        return dict(context.params)


@needs_systemd
def test_the_unit_of_a_node_is_accepted_by_systemd(tmp_path: Path) -> None:
    program, here = tmp_path / "tianflow", tmp_path / NODE_UNIT.name
    program.symlink_to(sys.executable)
    here.write_text(
        NODE_UNIT.read_text()
        .replace("/opt/tianflow/bin/tianflow", str(program))
        .replace("User=tianflow", "User=root")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", here], capture_output=True, text=True, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)


def test_a_node_reads_the_join_file_that_the_readme_installs() -> None:
    service = unit(NODE_UNIT)
    path = arguments(shlex.split(service["ExecStart"]))["join_file"]
    assert Path("/var/lib", service["StateDirectory"], "join.toml") == path
    installed = (ROOT / "deploy" / "README.md").read_text()
    assert f"join.toml {path.parent}/" in installed
    assert ("mixed", "90", "2") == tuple(
        service[key] for key in ("KillMode", "TimeoutStopSec", "RestartPreventExitStatus")
    )


def test_the_nodes_of_the_manifest_join_the_run_of_its_head() -> None:
    head, nodes = (pods()[kind] for kind in ("Job", "Deployment"))
    train = arguments(head["containers"][0]["command"])
    config = load_config(train["config"], train["overrides"])
    assert "nodes" == config.placement.launcher
    assert config.run.name is not None
    join = arguments(nodes["containers"][0]["command"])["join_file"]
    assert train["runs_dir"] / config.run.name / "join.toml" == join
    for key in ("securityContext", "volumes", "terminationGracePeriodSeconds"):
        assert head[key] == nodes[key]
    (mounted,) = head["containers"][0]["volumeMounts"]
    assert str(train["runs_dir"]) == mounted["mountPath"]
    deployment = next(
        found for found in yaml.safe_load_all(MANIFEST.read_text()) if found["kind"] == "Deployment"
    )
    assert config.cluster.expect <= deployment["spec"]["replicas"]
