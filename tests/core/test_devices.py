"""Devices of the machine, found without PyTorch."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tianflow.core import devices


class FakeDriver:
    """NVIDIA's driver with two GPUs. A call of ``fails`` returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.flags: dict[int, int] = {}
        self._fails = fails

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's name
        assert flags == 0
        return int(self._fails == "cuInit")

    def cuDeviceGet(self, found: Any, index: int) -> int:  # noqa: N802 - likewise
        found._obj.value = 10 + index
        return int(index > 1)

    def cuDevicePrimaryCtxSetFlags_v2(self, device: ctypes.c_int, flags: int) -> int:  # noqa: N802 - likewise
        self.flags[device.value] = flags
        return int(self._fails == "flags")


@pytest.mark.parametrize("index", [0, 1])
def test_waits_for_one_gpu_sleep(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", {devices.DRIVER: driver}.__getitem__)
    assert devices.sleep_in_waits(index)
    assert {10 + index: devices.BLOCKING_SYNC} == driver.flags


@pytest.mark.parametrize(("fails", "index"), [("cuInit", 0), ("flags", 0), ("", 2)])
def test_a_driver_that_refuses_is_no_error(
    fails: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver(fails))
    assert not devices.sleep_in_waits(index)


@pytest.mark.parametrize("driver", [None, object()])
def test_a_machine_without_such_a_driver_is_no_error(
    driver: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> object:
        if driver is None:
            raise OSError(f"{name} is missing")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert not devices.sleep_in_waits(0)
