"""``python -m benchmarks.peers.install [PEER ...]``: an environment of its own for each peer, since
no one environment holds them all.

They lie in ``.peers/NAME`` of the checkout, or where ``TIANFLOW_PEERS`` says. One that is as it
should be is left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.machine import ROOT

STAMP = "installed.json"
PLACE = "TIANFLOW_PEERS"
COMMON = ("torch==2.13.0",)
NEW = ("numpy==2.4.6", "gymnasium==1.4.0", "ale-py==0.12.1")


@dataclass(frozen=True, slots=True)
class Build:
    """How a peer that has no wheels is built, which takes a C++ compiler.

    Attributes:
        needs: what has to be there before, with versions; `COMMON` is, too.
        variables: of the environment in which it is built.
        lists: names that its setup script uses as lists and may not have defined; they are empty
            then.
    """

    needs: tuple[str, ...]
    variables: Mapping[str, str]
    lists: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """One to compare with.

    Attributes:
        name: of its environment.
        package: whose presence says that it is there.
        packages: what it is installed from, with the versions it was tried with.
        newest_python: a newer one has no wheels of these versions.
        build: how it is built; None if there are wheels.
    """

    name: str
    package: str
    packages: tuple[str, ...]
    newest_python: tuple[int, int] = (3, 13)
    build: Build | None = None


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "sb3",
            "stable-baselines3",
            ("stable-baselines3==2.9.2", "opencv-python-headless==4.13.0.92", *NEW),
        ),
        # it asks for numpy < 2 and gymnasium < 1; the later ale-py do not register games with that
        # gymnasium
        Peer(
            "sample_factory",
            "sample-factory",
            (
                "sample-factory==2.1.1",
                "numpy==1.26.4",
                "gymnasium==0.29.1",
                "ale-py==0.9.0",
                "opencv-python==4.11.0.86",
            ),
            newest_python=(3, 12),
        ),
        # it asks for this gymnasium
        Peer(
            "rllib",
            "ray",
            (
                "ray[rllib]==2.60.0",
                "numpy==2.4.6",
                "gymnasium==1.2.2",
                "ale-py==0.12.1",
                "opencv-python-headless==4.13.0.92",
            ),
        ),
        Peer("cleanrl", "gymnasium", NEW),  # its algorithm is one file of ours
        # by itself its setup wants graphics libraries from the net, and without them fails for a
        # name; nvcc it would use with any PyTorch
        Peer(
            "pufferlib",
            "pufferlib",
            ("pufferlib==3.0.0", "numpy==1.26.4", "gymnasium==0.29.1", "gym==0.23.0"),
            newest_python=(3, 12),
            build=Build(
                needs=(
                    "setuptools==80.9.0",
                    "wheel==0.45.1",
                    "ninja==1.13.0",
                    "cython==3.1.4",
                    "numpy==1.26.4",
                ),
                variables={"NO_OCEAN": "1", "PATH": os.defpath},
                lists=("c_extension_paths",),
            ),
        ),
        Peer(
            "torchrl",
            "torchrl",
            ("torchrl==0.14.1", "tensordict==0.14.3", "numpy==2.4.6", "gymnasium==1.4.0"),
        ),
    )
}
"""By name."""


def home() -> Path:
    """Where the environments lie."""
    return Path(os.environ.get(PLACE) or ROOT / ".peers")


def interpreter(name: str) -> Path:
    """Of one peer, there or not."""
    return home() / name / "bin" / "python"


def plan(peer: Peer) -> dict[str, object]:
    """What the environment is to hold. As long as its stamp says the same, there is nothing
    to do.
    """
    return {
        "packages": sorted((*COMMON, *_needs(peer), *peer.packages)),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


def is_current(peer: Peer) -> bool:
    """True once the environment holds what `plan` says."""
    stamp = home() / peer.name / STAMP
    try:
        return (
            bool(json.loads(stamp.read_text(encoding="utf-8")) == plan(peer))
            and interpreter(peer.name).exists()
        )
    except (OSError, ValueError):
        return False


def pip_environment(environment: Mapping[str, str], constraints: Path) -> dict[str, str]:
    """``environment`` in which pip takes ``constraints`` in place of whatever this machine's
    settings constrain.

    Settings of a machine for all its users may hold versions that a peer cannot live with; where
    packages come from stays as set. The variable outranks a setting, while an option on the command
    line would only be added to it.
    """
    return {**environment, "PIP_CONSTRAINT": str(constraints), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def install(peer: Peer, run: Callable[..., object] = subprocess.run) -> bool:
    """Make the environment of ``peer`` if need be; True if there was something to do.

    Raises:
        subprocess.CalledProcessError: pip, or making an environment, failed; what they wrote says
        why.
        RuntimeError: this Python is too new for the peer.
    """
    if is_current(peer):
        return False
    if sys.version_info[:2] > peer.newest_python:
        raise RuntimeError(
            f"{peer.name} has no packages for a Python newer than "
            f"{'.'.join(map(str, peer.newest_python))}"
        )
    folder = home() / peer.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "venv", str(folder)], check=True)
    packages = sorted((*COMMON, *peer.packages))
    constraints = folder / "constraints.txt"
    without_extras = [
        re.sub(r"\[.*\]", "", package) for package in packages
    ]  # a constraint may name none
    constraints.write_text("\n".join(without_extras) + "\n", encoding="utf-8")
    environment = pip_environment(os.environ, constraints)
    command = [str(interpreter(peer.name)), "-m", "pip", "install", "--quiet"]
    if peer.build is not None:
        run([*command, *COMMON, *peer.build.needs], check=True, env=environment)
        _define(peer.build.lists, folder)
        environment = {**environment, **peer.build.variables}
        command.append("--no-build-isolation")
    run([*command, *packages], check=True, env=environment)
    (folder / STAMP).write_text(json.dumps(plan(peer)), encoding="utf-8")
    return True


def _needs(peer: Peer) -> tuple[str, ...]:
    return () if peer.build is None else peer.build.needs


def _define(lists: Sequence[str], folder: Path) -> None:
    """Empty lists that every program of the environment in ``folder`` finds among its builtins."""
    lines = ["import builtins", *(f"builtins.{name} = []" for name in lists)]
    for place in folder.glob("lib/python*/site-packages"):
        (place / "lists.pth").write_text("; ".join(lines) + "\n", encoding="utf-8")


def versions(peer: Peer) -> dict[str, str]:
    """Versions of what `Peer.packages` and `COMMON` name, as its interpreter sees them; empty if
    the peer is not there.
    """
    python = interpreter(peer.name)
    if not python.exists():
        return {}
    names = [package.partition("==")[0].partition("[")[0] for package in (*peer.packages, *COMMON)]
    ask = (
        "import json, sys; from benchmarks.peers.common import versions; "
        "print(json.dumps(versions(sys.argv[1:])))"
    )
    done = subprocess.run(
        [str(python), "-c", ask, *names], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        return {}
    found: dict[str, str] = json.loads(done.stdout)
    return found if peer.package in found else {}


def main(given: Sequence[str] | None = None) -> int:
    """Install those named, or all; 1 if any could not be. The others are installed all the same."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.install", description=__doc__)
    parser.add_argument(
        "peers",
        nargs="*",
        metavar="PEER",
        help=f"which: {', '.join(PEERS)}; all of them when none is named",
    )
    chosen = parser.parse_args(given).peers or list(PEERS)
    unknown = [name for name in chosen if name not in PEERS]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; known are {', '.join(PEERS)}")
    failed = False
    for name in chosen:
        try:
            print(f"{name}: {'installed' if install(PEERS[name]) else 'nothing to do'}", flush=True)
        except (subprocess.CalledProcessError, RuntimeError) as error:
            print(f"{name}: could not be installed: {error}", file=sys.stderr, flush=True)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
