"""Images of every kind are read alike."""

import numpy as np
import pytest
import torch

from accel_train import ArgumentTypeError, OptionError
from accel_train.tracking.images import LoggedImage, read_images

COLORED = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
GREY = COLORED[:, :, 0]


def one(image):
    [read] = read_images({"image": image})["image"]
    assert read.pixels.dtype == np.uint8
    return read.pixels


@pytest.mark.parametrize(
    "image",
    [
        COLORED,
        COLORED.astype(np.int64),
        COLORED / 255.0,
        (COLORED / 255.0).astype(np.float32),
        np.moveaxis(COLORED, 2, 0),
        torch.from_numpy(COLORED).permute(2, 0, 1),
        torch.from_numpy(COLORED),
        torch.from_numpy(COLORED / 255.0).permute(2, 0, 1).bfloat16().float().requires_grad_(),
        LoggedImage(COLORED),
    ],
    ids=[
        "array",
        "int64",
        "float64",
        "float32",
        "channels first",
        "tensor",
        "channels last",
        "floats",
        "read",
    ],
)
def test_colored(image):
    # bfloat16 has 8 bits, of which values near 1 keep a resolution of 1/256
    assert np.abs(one(image).astype(int) - COLORED).max() <= (1 if isinstance(image, torch.Tensor) else 0)


@pytest.mark.parametrize("image", [GREY, GREY[:, :, None], torch.from_numpy(GREY.copy()), GREY > 127])
def test_grey(image):
    expected = np.where(GREY > 127, 255, 0) if getattr(image, "dtype", None) == np.bool_ else GREY
    np.testing.assert_array_equal(one(image)[:, :, 0], expected)
    assert one(image).shape == (8, 6, 1)


def test_pil(monkeypatch):
    image_module = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    np.testing.assert_array_equal(one(image_module.fromarray(COLORED)), COLORED)
    np.testing.assert_array_equal(one(image_module.fromarray(GREY))[:, :, 0], GREY)
    assert one(image_module.fromarray(GREY > 127)).shape == (8, 6, 3)


@pytest.mark.parametrize(
    ("images", "count"),
    [
        (np.stack([COLORED] * 4), 4),
        (torch.zeros(5, 3, 8, 6), 5),
        (torch.zeros(5, 1, 8, 6), 5),
        (torch.zeros(3, 8, 6), 1),
        ([COLORED, GREY], 2),
        ((COLORED, "caption"), 1),
        ([(COLORED, "caption"), GREY], 2),
    ],
)
def test_how_many(images, count):
    assert len(read_images({"image": images})["image"]) == count


def test_captions():
    read = read_images({"image": [(COLORED, "caption"), GREY]})["image"]
    assert [image.caption for image in read] == ["caption", None]


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        ("file.png", ArgumentTypeError, "got str for 'image', which is not an image"),
        (np.zeros((8, 6, 2)), OptionError, r"shape \[8, 6, 2\]"),
        (np.zeros((5, 8, 6)), OptionError, r"shape \[5, 8, 6\]"),  # five grey ones, or one of five channels
        (np.zeros(5), OptionError, r"image of shape \[5\] for 'image'"),
        (
            torch.full((3, 8, 6), 1.5),
            OptionError,
            "values from 1.5 to 1.5 for 'image', as float32; expected 0 to 1 for floating",
        ),
        (torch.full((3, 8, 6), -0.5), OptionError, "values from -0.5"),
        (torch.full((3, 8, 6), float("nan")), OptionError, "values from nan"),
        (np.full((8, 6, 3), 256), OptionError, "values from 256 to 256"),
    ],
)
def test_what_cannot_be_read(image, error, message):
    with pytest.raises(error, match=message):
        read_images({"image": image})


def test_only_dictionaries():
    with pytest.raises(ArgumentTypeError, match="takes a dictionary of names to images, got list"):
        read_images([COLORED])
