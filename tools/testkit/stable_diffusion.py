"""The components of Stable Diffusion 1.5 in plain PyTorch, at their true sizes: text encoder, UNet and VAE.

Layers, shapes and numbers of parameters are those of the published architecture; names are not, so its weights cannot
be loaded. `width` divides all numbers of features, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

PARAMETERS = {"text_encoder": 123_060_480, "unet": 859_520_964, "vae": 83_653_863}
HEADS = 8
TOKENS = 77


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, causal: bool = False) -> Tensor:
    """Attention of batch x tokens x features."""
    split = [each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (query, key, value)]
    return F.scaled_dot_product_attention(*split, is_causal=causal).transpose(1, 2).flatten(2)


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size, divided by the stride."""
    return nn.Conv2d(inputs, outputs, size, stride, size // 2)


class TextLayer(nn.Module):
    """Of CLIP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Batch x tokens x features to the same."""
        y = self.norm1(x)
        x = x + self.out(attend(self.query(y), self.key(y), self.value(y), self.heads, causal=True))
        y = self.up(self.norm2(x))
        out: Tensor = x + self.down(y * torch.sigmoid(1.702 * y))
        return out


class TextEncoder(nn.Module):
    """CLIP ViT-L/14's."""

    def __init__(self, width: int = 1, vocabulary: int = 49408) -> None:
        super().__init__()
        features = 768 // width
        self.tokens, self.places = nn.Embedding(vocabulary, features), nn.Embedding(TOKENS, features)
        self.layers = nn.ModuleList(TextLayer(features, 12) for _ in range(12))
        self.norm = nn.LayerNorm(features)

    def forward(self, ids: Tensor) -> Tensor:
        """Batch x tokens to batch x tokens x features."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


class Residual(nn.Module):
    """Two convolutions, with the time between them in the UNet."""

    def __init__(self, inputs: int, outputs: int, groups: int, time: int = 0) -> None:
        super().__init__()
        epsilon = 1e-5 if time else 1e-6
        self.norm1, self.norm2 = nn.GroupNorm(groups, inputs, epsilon), nn.GroupNorm(groups, outputs, epsilon)
        self.conv1, self.conv2 = conv(inputs, outputs), conv(outputs, outputs)
        self.time = nn.Linear(time, outputs) if time else None
        self.shortcut = conv(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        """An image to one of `outputs` features."""
        y = self.conv1(F.silu(self.norm1(x), inplace=True))
        if self.time is not None and time is not None:
            y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y), inplace=True))
        out: Tensor = (x if self.shortcut is None else self.shortcut(x)) + y
        return out


class CrossAttention(nn.Module):
    """Attention to itself, to the text, and a gated perceptron, over the points of an image."""

    def __init__(self, features: int, context: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, features, 1e-6)
        self.enter, self.leave = conv(features, features, 1), conv(features, features, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(features) for _ in range(3))
        self.own = nn.ModuleList(nn.Linear(features, features, bias=False) for _ in range(3))
        self.own_out = nn.Linear(features, features)
        self.text_query = nn.Linear(features, features, bias=False)
        self.text = nn.ModuleList(nn.Linear(context, features, bias=False) for _ in range(2))
        self.text_out = nn.Linear(features, features)
        self.gate, self.down = nn.Linear(features, 8 * features), nn.Linear(4 * features, features)

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        """The image, changed."""
        x = self.enter(self.norm(image)).flatten(2).transpose(1, 2)
        y = self.norms[0](x)
        x = x + self.own_out(attend(*(layer(y) for layer in self.own), HEADS))  # type: ignore[arg-type]
        y = self.text_query(self.norms[1](x))
        x = x + self.text_out(attend(y, *(layer(context) for layer in self.text), HEADS))  # type: ignore[arg-type]
        value, gate = self.gate(self.norms[2](x)).chunk(2, -1)
        x = x + self.down(value * F.gelu(gate))
        out: Tensor = image + self.leave(x.transpose(1, 2).unflatten(2, image.shape[2:]))
        return out


class UNet(nn.Module):
    """Noise of a latent image, given the time and the text."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        levels = [320 // width, 640 // width, 1280 // width, 1280 // width]
        context, groups, time = 768 // width, 32 // width, 1280 // width
        self.first = levels[0]
        self.time1, self.time2 = nn.Linear(levels[0], time), nn.Linear(time, time)
        self.enter = conv(4, levels[0])
        kept = [levels[0]]  # features of what the way up gets from the way down
        self.down, self.down_text, self.shrink = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        features = levels[0]
        for number, level in enumerate(levels):
            for _ in range(2):
                self.down.append(Residual(features, level, groups, time))
                if number < 3:
                    self.down_text.append(CrossAttention(level, context, groups))
                features = level
                kept.append(features)
            if number < 3:
                self.shrink.append(conv(features, features, stride=2))
                kept.append(features)
        self.middle = nn.ModuleList(Residual(features, features, groups, time) for _ in range(2))
        self.middle_text = CrossAttention(features, context, groups)
        self.up, self.up_text, self.grow = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for number, level in enumerate(reversed(levels)):
            for _ in range(3):
                self.up.append(Residual(features + kept.pop(), level, groups, time))
                if number > 0:
                    self.up_text.append(CrossAttention(level, context, groups))
                features = level
            if number < 3:
                self.grow.append(conv(features, features))
        self.norm = nn.GroupNorm(groups, features)
        self.leave = conv(features, 4)

    def forward(self, latents: Tensor, step: float, context: Tensor) -> Tensor:
        """Batch x 4 x height x width to the same."""
        half = self.first // 2
        angles = step * torch.exp(-torch.arange(half, device=latents.device) * (9.210340372 / half))
        time = torch.cat([angles.cos(), angles.sin()]).to(latents.dtype)[None]
        time = self.time2(F.silu(self.time1(time)))
        x = self.enter(latents)
        kept = [x]
        for number in range(4):
            for each in (2 * number, 2 * number + 1):
                x = self.down[each](x, time)
                if number < 3:
                    x = self.down_text[each](x, context)
                kept.append(x)
            if number < 3:
                x = self.shrink[number](x)
                kept.append(x)
        x = self.middle[0](x, time)
        x = self.middle[1](self.middle_text(x, context), time)
        for number in range(4):
            for each in range(3 * number, 3 * number + 3):
                x = self.up[each](torch.cat([x, kept.pop()], 1), time)
                if number > 0:
                    x = self.up_text[each - 3](x, context)
            if number < 3:
                x = self.grow[number](F.interpolate(x, scale_factor=2.0))
        out: Tensor = self.leave(F.silu(self.norm(x), inplace=True))
        return out


class ImageAttention(nn.Module):
    """With one head, over all points."""

    def __init__(self, features: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, features, 1e-6)
        self.query, self.key = nn.Linear(features, features), nn.Linear(features, features)
        self.value, self.out = nn.Linear(features, features), nn.Linear(features, features)

    def forward(self, image: Tensor) -> Tensor:
        """The image, changed."""
        x = self.norm(image).flatten(2).transpose(1, 2)
        x = self.out(attend(self.query(x), self.key(x), self.value(x), 1))
        out: Tensor = image + x.transpose(1, 2).unflatten(2, image.shape[2:])
        return out


class Half(nn.Module):
    """The VAE's encoder or decoder: residual blocks on four sizes, and attention on the smallest."""

    def __init__(self, levels: Sequence[int], ends: tuple[int, int], groups: int, *, up: bool) -> None:
        super().__init__()
        self.grows = up
        count = 3 if up else 2
        self.enter = conv(ends[0], levels[0])
        features = levels[0]
        middle = features if up else levels[-1]
        self.middle = nn.ModuleList(Residual(middle, middle, groups) for _ in range(2))
        self.attention = ImageAttention(middle, groups)
        self.blocks, self.resize = nn.ModuleList(), nn.ModuleList()
        for number, level in enumerate(levels):
            for _ in range(count):
                self.blocks.append(Residual(features, level, groups))
                features = level
            if number < 3:
                # The encoder's sees one more row and column at the far ends only.
                self.resize.append(conv(features, features) if up else nn.Conv2d(features, features, 3, 2))
        self.norm = nn.GroupNorm(groups, features, 1e-6)
        self.leave = conv(features, ends[1])

    def forward(self, x: Tensor) -> Tensor:
        """An image to one 8 times as large, or as small."""
        x = self.enter(x)
        if self.grows:
            x = self.middle[1](self.attention(self.middle[0](x)))
        count = len(self.blocks) // 4
        for number in range(4):
            for block in self.blocks[number * count : (number + 1) * count]:
                x = block(x)
            if number < 3:
                x = F.interpolate(x, scale_factor=2.0) if self.grows else F.pad(x, (0, 1, 0, 1))
                x = self.resize[number](x)
        if not self.grows:
            x = self.middle[1](self.attention(self.middle[0](x)))
        out: Tensor = self.leave(F.silu(self.norm(x), inplace=True))
        return out


class VAE(nn.Module):
    """Latents to images. (The encoder is there for its size, and for what makes images into others.)"""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        levels = [128 // width, 256 // width, 512 // width, 512 // width]
        self.encoder = Half(levels, (3, 8), 32 // width, up=False)
        self.after_encoder, self.before_decoder = conv(8, 8, 1), conv(4, 4, 1)
        self.decoder = Half(levels[::-1], (4, 3), 32 // width, up=True)

    def encode(self, image: Tensor) -> Tensor:
        """Means and logarithms of variances."""
        out: Tensor = self.after_encoder(self.encoder(image))
        return out

    def forward(self, latents: Tensor) -> Tensor:
        """Decode."""
        out: Tensor = self.decoder(self.before_decoder(latents))
        return out
