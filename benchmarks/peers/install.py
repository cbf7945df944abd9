"""Installer of peers: ``python -m benchmarks.peers.install [PEER ...]`` makes an environment for
each peer, because their dependencies conflict.

The environments lie in ``.peers/NAME`` of the checkout, or in the folder that ``TIANFLOW_PEERS``
names. A current environment stays as it is.
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
    """Build of a peer without wheels, which needs a C++ compiler.

    Attributes:
        needs: packages that the build needs beside `COMMON`, with versions.
        variables: environment variables of the build.
        lists: names that its setup script uses as lists without defining them. They become empty
            lists.
    """

    needs: tuple[str, ...]
    variables: Mapping[str, str]
    lists: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """One library to compare with.

    Attributes:
        name: name of its environment.
        package: package whose presence shows that the peer is installed.
        packages: packages to install, with the tested versions.
        newest_python: last Python version with wheels of these packages.
        build: its build. None: there are wheels.
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
        Peer(
            "sbx",
            "sbx-rl",
            (
                "sbx-rl==0.28.0",
                "stable-baselines3==2.9.2",
                "jax==0.10.2",
                "flax==0.12.8",
                "numpy==2.4.6",
                "gymnasium==1.4.0",
            ),
        ),
        # it requires numpy < 2 and gymnasium < 1; later ale-py versions do not register games with
        # that gymnasium
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
        # it requires this gymnasium
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
        Peer("cleanrl", "gymnasium", NEW),  # benchmarks.peers.cleanrl_ppo is its algorithm
        # its setup downloads graphics libraries, and fails with a NameError without them; it uses
        # nvcc with any PyTorch
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
            ("torchrl==0.14.1", "tensordict==0.14.3", *NEW, "opencv-python-headless==4.13.0.92"),
        ),
    )
}
"""Peers by name."""


def home() -> Path:
    """Return the folder of all environments."""
    return Path(os.environ.get(PLACE) or ROOT / ".peers")


def interpreter(name: str) -> Path:
    """Return the path of one peer's interpreter."""
    return home() / name / "bin" / "python"


def plan(peer: Peer) -> dict[str, object]:
    """Return the content of the environment. An environment whose stamp equals it is current."""
    return {
        "packages": sorted((*COMMON, *_needs(peer), *peer.packages)),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


def is_current(peer: Peer) -> bool:
    """True if the environment holds the content of `plan`."""
    stamp = home() / peer.name / STAMP
    try:
        return (
            bool(json.loads(stamp.read_text(encoding="utf-8")) == plan(peer))
            and interpreter(peer.name).exists()
        )
    except (OSError, ValueError):
        return False


def pip_environment(environment: Mapping[str, str], constraints: Path) -> dict[str, str]:
    """Return ``environment`` with ``constraints`` in place of the machine's own pip constraints.

    A machine-wide constraint can name versions that a peer does not accept. The package index stays
    as configured. The variable overrides a pip setting. An option on the command line would only
    add to it.
    """
    return {**environment, "PIP_CONSTRAINT": str(constraints), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def install(peer: Peer, run: Callable[..., object] = subprocess.run) -> bool:
    """Make the environment of ``peer`` if it is not current. Return True if it was made.

    Raises:
        subprocess.CalledProcessError: pip or venv failed. Their output names the reason.
        RuntimeError: this Python is too new for the peer.
    """
    if is_current(peer):
        return False
    if sys.version_info[:2] > peer.newest_python:
        raise RuntimeError(
            f"{peer.name} has no packages for Python versions later than "
            f"{'.'.join(map(str, peer.newest_python))}"
        )
    folder = home() / peer.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "venv", str(folder)], check=True)
    packages = sorted((*COMMON, *peer.packages))
    constraints = folder / "constraints.txt"
    # a constraint must not name extras
    without_extras = [re.sub(r"\[.*\]", "", package) for package in packages]
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
    """Define empty lists as builtins of every program in the environment in ``folder``."""
    lines = ["import builtins", *(f"builtins.{name} = []" for name in lists)]
    for place in folder.glob("lib/python*/site-packages"):
        (place / "lists.pth").write_text("; ".join(lines) + "\n", encoding="utf-8")


def versions(peer: Peer) -> dict[str, str]:
    """Return the versions of `Peer.packages` and `COMMON` in the peer's environment. Empty if the
    peer is not installed.
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
    """Install the named peers, or all. Return 1 if one failed. A failure does not stop the
    others.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.install", description=__doc__)
    parser.add_argument(
        "peers",
        nargs="*",
        metavar="PEER",
        help=f"peers to install: {', '.join(PEERS)} (default: all)",
    )
    chosen = parser.parse_args(given).peers or list(PEERS)
    unknown = [name for name in chosen if name not in PEERS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a peer (expected {', '.join(PEERS)})")
    failed = False
    for name in chosen:
        try:
            print(
                f"{name}: {'installed' if install(PEERS[name]) else 'already current'}", flush=True
            )
        except (subprocess.CalledProcessError, RuntimeError) as error:
            print(f"{name}: the installation failed: {error}", file=sys.stderr, flush=True)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
