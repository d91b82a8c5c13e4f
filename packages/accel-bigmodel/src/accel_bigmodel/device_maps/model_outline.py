"""The outline of a model for device maps: its parts in order, their sizes, and which are tied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from accel_bigmodel.errors import DeviceMapError
from accel_ckpt.modules.sizes import DType, compute_module_sizes, get_max_layer_size
from accel_ckpt.modules.ties import find_tied_tensors

__all__ = ["Outline", "get_module_leaves", "get_module_size_with_ties"]

Part = nn.Module | torch.Tensor
Named = tuple[str, Part]


def class_names(
    classes: str | Iterable[str] | None, argument: str = "no_split_module_classes"
) -> frozenset[str]:
    """Read names of classes, from any of the accepted forms.

    Args:
        classes: one name, several, or None.
        argument: the name of the argument, for the message.

    Raises:
        DeviceMapError: a value is not a name. (A class object would equal no name, and so have no effect.)
    """
    if classes is None:
        return frozenset()
    names = [classes] if isinstance(classes, str) or not isinstance(classes, Iterable) else list(classes)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise DeviceMapError(
            f"{argument} contains {', '.join(map(repr, wrong))}; give names of classes, such as "
            "'TransformerEncoderLayer'"
        )
    return frozenset(names)


@dataclass(frozen=True)
class Outline:
    """A model as device maps see it. Nothing here reads or changes a tensor's values."""

    model: nn.Module
    sizes: Mapping[str, int]
    """Bytes of every module and tensor by name; a tied tensor counts under the first of its names."""
    ties: Sequence[Sequence[str]]
    """Groups of names of one parameter or buffer."""
    no_split: frozenset[str]
    """Names of classes whose modules stay whole."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        no_split_module_classes: str | Iterable[str] | None = None,
        dtype: DType | None = None,
        special_dtypes: Mapping[str, DType] | None = None,
    ) -> Outline:
        """The outline of a model, the weights of which will have ``dtype``."""
        sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
        return cls(model, sizes, find_tied_tensors(model), class_names(no_split_module_classes))

    def roots(self) -> list[Named]:
        """The model's direct parameters, modules and buffers, in this order."""
        return _children("", self.model)

    def can_split(self, part: Part) -> bool:
        """Whether ``part`` is a module with submodules, of a class that may be split."""
        if not isinstance(part, nn.Module) or type(part).__name__ in self.no_split:
            return False
        return any(child is not None for child in part._modules.values())

    def split(self, name: str, part: Part) -> list[Named]:
        """The direct parameters, modules and buffers of a module; empty if it stays whole."""
        return _children(f"{name}.", part) if isinstance(part, nn.Module) and self.can_split(part) else []

    def layers(self) -> Iterator[Named]:
        """The smallest parts that a map may name, in order."""
        rest = list(reversed(self.roots()))
        while rest:
            name, part = rest.pop()
            if self.can_split(part):
                rest += reversed(self.split(name, part))
            else:
                yield name, part

    @staticmethod
    def group_of(name: str, part: Part) -> str:
        """The unit in which a layer is streamed when it is offloaded: itself, or, for a direct tensor of a module that
        may be split, that module, whose forward needs all its own tensors at once.
        """
        return name if isinstance(part, nn.Module) else name.rpartition(".")[0]

    def groups(self, layers: Iterable[Named]) -> dict[str, int]:
        """The layers grouped by what is streamed together when they are offloaded, with the bytes of each group."""
        found: dict[str, int] = {}
        for name, part in layers:
            group = self.group_of(name, part)
            found[group] = found.get(group, 0) + self.sizes.get(name, 0)
        return found

    def tensors(self) -> Iterator[tuple[str, int]]:
        """The names of all parameters and buffers, including tied ones, with the bytes that each counts for."""
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            yield name, self.sizes.get(name, 0)
        for name, _ in self.model.named_buffers(remove_duplicate=False):
            yield name, self.sizes.get(name, 0)

    def largest(self, parts: Sequence[Named]) -> tuple[int, list[str]]:
        """The bytes of the largest layer in ``parts``, and the names of the layers of that size."""
        return get_max_layer_size(parts, self.sizes, self.no_split)

    def partners(self, name: str) -> list[str]:
        """Names outside a part that are tied to a tensor in it."""
        groups = self._ties_of.get(name, ())
        return [member for group in groups for member in group if not is_within(member, name)]

    @cached_property
    def kept_whole(self) -> Mapping[str, str]:
        """The classes of the modules that stay whole because of their class, by name of the module."""
        # Not get_submodule(), which modules of torch.jit do not have.
        modules = self.model.named_modules(remove_duplicate=False)
        return {name: kind for name, module in modules if (kind := type(module).__name__) in self.no_split}

    @cached_property
    def _ties_of(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """For each part that contains tied tensors, their groups."""
        found = defaultdict(list)
        for group in self.ties:
            for part in {part for name in group for part in parts_around(name)}:
                found[part].append(group)
        return found


def parts_around(name: str) -> Iterator[str]:
    """List a name, then the names of the modules that contain it, the model's ``""`` last."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def is_within(name: str, part: str) -> bool:
    """Whether a tensor or module is a part or is inside it; everything is inside ``""``."""
    return part in ("", name) or name.startswith(f"{part}.")


def _children(prefix: str, module: nn.Module) -> list[Named]:
    # Not named_children() and similar methods, which skip the second name of a shared module.
    found: list[tuple[str, Part | None]] = [
        *module._parameters.items(),
        *module._modules.items(),
        *module._buffers.items(),
    ]
    return [(f"{prefix}{name}", part) for name, part in found if part is not None]


def get_module_leaves(module_sizes: Collection[str]) -> list[str]:
    """List the names that have no other name below them, in order; without ``""``.

    Args:
        module_sizes: names, such as the keys of ``compute_module_sizes``.
    """
    parents = {name.rpartition(".")[0] for name in module_sizes}
    return [name for name in module_sizes if name and name not in parents]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Iterable[Named],
) -> tuple[int, list[str], list[Part]]:
    """Compute the bytes of a module together with the modules that must be on its device because of a tied parameter.

    Args:
        tied_params: names outside the module that are tied to a parameter in it; their bytes are subtracted, because
            the parameter counts in the module.
        module_size: bytes of the module.
        module_sizes: bytes by name.
        modules_to_treat: the parts without a device yet; a tied parameter outside of them adds nothing.

    Returns:
        The bytes, and the names and parts that contain the tied parameters, one for each.
    """
    parts = dict(modules_to_treat)
    home_by_name = {tied: home for tied in tied_params if (home := home_of(tied, parts)) is not None}
    module_size += sum(module_sizes.get(home, 0) for home in set(home_by_name.values()))
    module_size -= sum(module_sizes.get(tied, 0) for tied in home_by_name)
    return module_size, [*home_by_name.values()], [parts[home] for home in home_by_name.values()]


def home_of(tensor: str, parts: Collection[str]) -> str | None:
    """The smallest of the parts that contains a tensor; None if none does."""
    return next((part for part in parts_around(tensor) if part in parts), None)
