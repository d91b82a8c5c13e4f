"""Trackers by name; other packages add theirs through the entry-point group `accel_train.tracking`."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TypeVar

from accel_state.messages import warn
from accel_state.registry import Registry
from accel_train.errors import OptionError
from accel_train.tracking.base import GeneralTracker

__all__ = ["LOGGER_TYPE_TO_CLASS", "TRACKERS", "TrackerClasses", "register_tracker_class"]

C = TypeVar("C", bound=type[GeneralTracker])

TRACKERS: Registry[type[GeneralTracker]] = Registry(
    "tracker",
    "accel_train.tracking",
    {
        "aim": "accel_train.tracking.aim:AimTracker",
        "clearml": "accel_train.tracking.clearml:ClearMLTracker",
        "comet_ml": "accel_train.tracking.comet_ml:CometMLTracker",
        "dvclive": "accel_train.tracking.dvclive:DVCLiveTracker",
        "kubeflow": "accel_train.tracking.kubeflow:KubeflowTracker",
        "mlflow": "accel_train.tracking.mlflow:MLflowTracker",
        "swanlab": "accel_train.tracking.swanlab:SwanLabTracker",
        "tensorboard": "accel_train.tracking.tensorboard:TensorBoardTracker",
        "trackio": "accel_train.tracking.trackio:TrackioTracker",
        "wandb": "accel_train.tracking.wandb:WandBTracker",
    },
    error=OptionError,
)


class TrackerClasses(MutableMapping[str, type[GeneralTracker]]):
    """The tracker classes of a registry, and those that a script adds while it runs.

    Only added classes can be deleted; they have precedence over those of the registry.
    """

    def __init__(self, registry: Registry[type[GeneralTracker]]) -> None:
        self._registry = registry
        self._added: dict[str, type[GeneralTracker]] = {}

    def __getitem__(self, name: str) -> type[GeneralTracker]:
        if name in self._added:
            return self._added[name]
        if name not in self._registry.names():
            raise KeyError(name)
        return self._registry.get(name)

    def __setitem__(self, name: str, tracker_class: type[GeneralTracker]) -> None:
        self._added[name] = tracker_class

    def __delitem__(self, name: str) -> None:
        del self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._registry.names(), *self._added}))

    def __len__(self) -> int:
        return len({*self._registry.names(), *self._added})


LOGGER_TYPE_TO_CLASS = TrackerClasses(TRACKERS)
"""Name to tracker class, including the classes that `register_tracker_class` added."""


def register_tracker_class(tracker_class: C) -> C:
    """Register a tracker class under its `name`, so that `log_with` takes the name; also a decorator.

    Args:
        tracker_class: a subclass of `GeneralTracker` with `name` and `requires_logging_directory`. A class with the
            same name is replaced, with a warning.

    Returns:
        The class.

    Raises:
        OptionError: it is not a subclass of `GeneralTracker`, or lacks one of these attributes.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise OptionError(
            f"register_tracker_class() takes a subclass of GeneralTracker, got {tracker_class!r:.80}."
        )
    for attribute in ("name", "requires_logging_directory"):
        if getattr(tracker_class, attribute, None) is None:
            raise OptionError(
                f"register_tracker_class() got {tracker_class.__qualname__}, which lacks the class attribute "
                f"{attribute!r}."
            )
    name = str(tracker_class.name)
    if name in LOGGER_TYPE_TO_CLASS:
        warn(
            f"The tracker {name!r} was {LOGGER_TYPE_TO_CLASS[name].__qualname__} and is {tracker_class.__qualname__} "
            "from now on.",
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class
    return tracker_class
