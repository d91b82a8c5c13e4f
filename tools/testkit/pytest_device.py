"""``pytest --device npu:2``: run tests on simulated devices, as they would run on two accelerators of that type.

Other projects load it with ``-p testkit.pytest_device``.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator

import pytest

from testkit import simulated_device
from testkit.simulated_device import build


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device``."""
    parser.addoption(
        "--device",
        metavar="TYPE[:NUMBER]",
        help="run on simulated devices of this type, such as npu:2, instead of the accelerator of this machine",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give this process and all that it starts the devices."""
    config.addinivalue_line(
        "markers", "simulated: runs processes with simulated devices, for which a C++ compiler is needed"
    )
    wanted = config.getoption("--device")
    if wanted is None:
        return
    try:
        simulated_device.use(wanted)
    except (ValueError, simulated_device.BuildError) as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a compiler where there is none."""
    marked = [item for item in items if item.get_closest_marker("simulated")]
    try:
        if marked:
            build.compiler()
    except simulated_device.BuildError as error:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=str(error)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile beside the tests that need no device, of which most come first."""
    if any(map(_needs_devices, session.items)):
        subprocess.Popen(
            [sys.executable, build.__file__], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Wait until the device is compiled; where it cannot be, each test fails by that."""
    if _needs_devices(item):
        _prepare()


def _needs_devices(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("simulated") and not item.get_closest_marker("skip"))


@functools.cache
def _prepare() -> None:
    simulated_device.prepare()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the devices."""
    wanted = config.getoption("--device")
    return f"simulated devices: {wanted}" if wanted else None


@pytest.fixture(autouse=True)
def _nothing_left_on_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which the device has an error, or an unordered access, that no call has raised."""
    yield
    if request.config.getoption("--device") is not None:
        simulated_device.check()
