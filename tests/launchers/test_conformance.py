"""Shipped launchers pass the conformance suite, and a broken launcher fails each of its tests."""

from __future__ import annotations

from tianflow.launchers.inline import InlineLauncher
from tianflow.launchers.processes import ProcessLauncher
from tianflow.testing import LauncherConformance


class TestInline(LauncherConformance):
    make = InlineLauncher


class TestProcesses(LauncherConformance):
    make = ProcessLauncher
