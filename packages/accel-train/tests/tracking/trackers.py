"""Trackers that remember what they were asked for."""

from __future__ import annotations

from typing import Any

from accel_train import GeneralTracker


class Recorder(GeneralTracker):
    """Keeps every call in a list."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, run_name: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = [("init", run_name, kwargs)]

    @property
    def tracker(self) -> list[tuple[Any, ...]]:
        return self.calls

    def start(self) -> None:
        self.calls.append(("start",))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append(("log", values, step, kwargs))

    def finish(self) -> None:
        self.calls.append(("finish",))


class WithMedia(Recorder):
    """Also takes images and tables."""

    name = "with_media"

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append(("images", values, step, kwargs))

    def log_table(self, table_name: str, **kwargs: Any) -> None:
        self.calls.append(("table", table_name, kwargs))


class Failing(Recorder):
    """Fails in the methods that it is told to, with its own exception."""

    name = "failing"

    def __init__(self, *methods: str) -> None:
        super().__init__()
        self.methods = methods

    def _fail(self, method: str) -> None:
        self.calls.append((method,))
        if method in self.methods:
            raise ConnectionError(f"the server is down ({method})")

    def start(self) -> None:
        self._fail("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._fail("store_init_configuration")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._fail("log")

    def finish(self) -> None:
        self._fail("finish")
