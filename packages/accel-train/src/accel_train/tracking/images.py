"""Images and tables of a training loop, read into one form that every tracker's engine understands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from accel_state.errors import MissingDependencyError
from accel_state.host.available import is_numpy_available
from accel_train.errors import ArgumentTypeError, OptionError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["LoggedImage", "read_images"]

_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class LoggedImage:
    """One image.

    Attributes:
        pixels: uint8 of shape [height, width, channels], with 1, 3 or 4 channels (grey, RGB, RGBA).
        caption: the caption; None if there is none.
    """

    pixels: np.ndarray[Any, Any]
    caption: str | None = None

    @property
    def squeezed(self) -> np.ndarray[Any, Any]:
        """The pixels, of shape [height, width] if the image is grey: what PIL and engines that use it take."""
        return self.pixels[:, :, 0] if self.pixels.shape[2] == 1 else self.pixels


def read_images(values: Mapping[str, Any]) -> dict[str, list[LoggedImage]]:
    """Read the images of a step, by name.

    Args:
        values: names to an image, a list of images, or a batch of them in one tensor or array. An image is a PIL image,
            a torch tensor [channels, height, width], a NumPy array [height, width, channels] (each also the other way
            round where only that gives 1, 3 or 4 channels), or [height, width] for grey; a batch has four
            dimensions. A pair `(image, caption)` is an image with a caption. Floating values are from 0 to 1, whole
            numbers from 0 to 255.

    Raises:
        ArgumentTypeError: `values` is not a mapping, or an item is not an image.
        OptionError: an image has another shape, or values outside its range.
        MissingDependencyError: NumPy is not installed.
    """
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(
            f"log_images() takes a dictionary of names to images, got {type(values).__name__}: {values!r:.80}."
        )
    if not is_numpy_available():
        raise MissingDependencyError("log_images() needs NumPy: pip install numpy")
    return {str(name): _several(str(name), item) for name, item in values.items()}


def _several(name: str, item: Any) -> list[LoggedImage]:
    import numpy as np

    if isinstance(item, LoggedImage) or _is_captioned(item):
        return [_one(name, item)]
    if isinstance(item, Tensor | np.ndarray):
        return [_one(name, image) for image in item] if item.ndim == 4 else [_one(name, item)]
    if isinstance(item, Sequence) and not isinstance(item, str | bytes):
        return [_one(name, image) for image in item]
    return [_one(name, item)]


def _is_captioned(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], str)


def _one(name: str, item: Any) -> LoggedImage:
    import numpy as np

    if isinstance(item, LoggedImage):
        return item
    caption = None
    if _is_captioned(item):
        item, caption = item
    channels_first = isinstance(item, Tensor)
    if isinstance(item, Tensor):
        array = (item.detach().float() if item.is_floating_point() else item.detach()).cpu().numpy()
    elif isinstance(item, np.ndarray):
        array = item
    elif hasattr(item, "getbands") and hasattr(item, "convert"):  # a PIL image, without importing PIL
        known = item if item.mode in ("L", "RGB", "RGBA") else item.convert("RGB")
        array = np.asarray(known)
    else:
        raise ArgumentTypeError(
            f"log_images() got {type(item).__name__} for {name!r}, which is not an image. Pass a PIL image, a tensor, "
            "a NumPy array, or a list of them."
        )
    return LoggedImage(_as_bytes(name, _channels_last(name, array, channels_first)), caption)


def _channels_last(name: str, array: np.ndarray[Any, Any], channels_first: bool) -> np.ndarray[Any, Any]:
    import numpy as np

    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim == 3:
        first, last = array.shape[0] in _CHANNELS, array.shape[2] in _CHANNELS
        if first and (channels_first or not last):
            return np.moveaxis(array, 0, 2)
        if last:
            return array
    raise OptionError(
        f"log_images() got an image of shape {list(array.shape)} for {name!r}; expected [channels, height, width] of a "
        "tensor or [height, width, channels] of an array, with 1, 3 or 4 channels, or [height, width]."
    )


def _as_bytes(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import numpy as np

    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    highest = 1.0 if array.dtype.kind == "f" else 255
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if not (low >= 0 and high <= highest):
        raise OptionError(
            f"log_images() got values from {low:g} to {high:g} for {name!r}, as {array.dtype}; expected 0 to 1 for "
            "floating-point images and 0 to 255 for whole numbers. Scale the image, or clamp it."
        )
    scaled = array * 255.0 if highest == 1.0 else array
    return np.rint(scaled).astype(np.uint8)
