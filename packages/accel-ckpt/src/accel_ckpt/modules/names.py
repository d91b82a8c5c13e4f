"""Canonical names: names of tensors without the prefixes that wrappers of the model add."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from accel_ckpt.errors import NameCollisionError
from accel_ckpt.modules.versions import versions_at, versions_of, with_versions
from accel_ckpt.tensor_storage import is_lazy

__all__ = [
    "by_prefix",
    "canonical_name",
    "canonical_names",
    "canonical_state_dict",
    "is_of_torch_nn",
    "listed",
    "loads_by_itself",
    "misfits",
    "module_of",
    "own_versions",
    "prefixed_modules",
    "refuse_collisions",
    "under_own_names",
]

T = TypeVar("T")

# Names that only wrappers give to their child: torch.compile, activation checkpointing, FSDP 1.
WRAPPER_SEGMENTS = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module"}
)

# Those that call their child "module", which models use for children of their own, too.
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def listed(names: Sequence[str], most: int = 12) -> str:
    """Format names for a message: the first few, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def canonical_name(name: str) -> str:
    """Remove prefixes that wrappers add to a tensor's name, anywhere in it, and a leading ``module.``.

    ``module`` inside a name is kept, because models use it for their own children; ``canonical_names`` decides by the
    types of modules and is right in both cases.
    """
    parts = [part for part in name.split(".") if part not in WRAPPER_SEGMENTS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map the prefix of every module of a model, as ``state_dict()`` writes it, to its canonical prefix.

    Prefixes end in a dot; the prefix of the model itself is empty.
    """
    return {prefix: canonical for prefix, canonical, _ in prefixed_modules(model)}


def prefixed_modules(model: nn.Module) -> list[tuple[str, str, nn.Module]]:
    """List every module of a model under each of its prefixes, with the canonical prefix; parents before children."""
    found: list[tuple[str, str, nn.Module]] = []
    _walk(model, "", "", found, frozenset())
    return found


def _walk(
    module: nn.Module,
    prefix: str,
    canonical: str,
    found: list[tuple[str, str, nn.Module]],
    above: frozenset[int],
) -> None:
    found.append((prefix, canonical, module))
    children = module._modules
    if not children:
        return
    above |= {id(module)}
    for name, child in children.items():
        if child is not None and id(child) not in above:
            wrapped = name in WRAPPER_SEGMENTS or (name == "module" and isinstance(module, _PARALLEL))
            step = "" if wrapped else f"{name}."
            _walk(child, f"{prefix}{name}.", f"{canonical}{step}", found, above)


def canonical_state_dict(state_dict: Mapping[str, T], model: nn.Module | None = None) -> dict[str, T]:
    """Rename the entries of a state dict, and of its modules' versions, to canonical names.

    Args:
        state_dict: a mapping by name.
        model: the module of the state dict. With it, ``module.`` is removed exactly where a parallel wrapper added it;
            without it, only prefixes that no model uses for its own children are removed.

    Raises:
        NameCollisionError: two names become the same.
    """
    if model is None:
        renamed = [(name, _strip_segments(name)) for name in state_dict]
    else:
        prefixes = canonical_names(model)
        renamed = [(name, by_prefix(name, prefixes)) for name in state_dict]
    refuse_collisions(renamed)
    versions = versions_of(state_dict)
    if versions and model is not None:
        versions = own_versions(prefixed_modules(model))
    elif versions:  # of any module; those that never had an older form are of version 1
        versions = {_strip_segments(name): version for name, version in versions.items() if version != 1}
    return with_versions({new: state_dict[old] for old, new in renamed}, versions)


def own_versions(modules: Iterable[tuple[str, str, nn.Module]]) -> dict[str, int]:
    """Versions of the modules that load their state dict by themselves, by canonical name, except those of torch.nn.

    Args:
        modules: the modules of a model, as `prefixed_modules` returns them.
    """
    return {
        canonical.rstrip("."): module._version
        for _, canonical, module in modules
        if loads_by_itself(module, also_torch=True) and not is_of_torch_nn(module)
    }


def misfits(module: nn.Module, weights: Mapping[str, Any], strict: bool = True) -> list[str]:
    """The reasons why weights do not fit a module; torch reports them only after loading all that fit.

    Args:
        module: wrapped or not.
        weights: by canonical name: tensors, or objects with their shape.
        strict: names must be the same, too; but a module that loads its weights by itself may know other names.
    """
    own = canonical_state_dict(module.state_dict(), module)
    shapes = [
        f"{name} is {list(saved)} there and {list(tensor.shape)} here"
        for name, tensor in own.items()
        if isinstance(tensor, torch.Tensor) and not is_lazy(tensor)
        if (saved := getattr(weights.get(name), "shape", None)) is not None and saved != tensor.shape
    ]
    problems = [listed(shapes)] if shapes else []
    if strict and not any(loads_by_itself(child) for child in module.modules()):
        for where, names in (("there", own.keys() - weights.keys()), ("here", weights.keys() - own.keys())):
            problems += [f"not {where}: {listed(sorted(names))}"] if names else []
    return problems


def loads_by_itself(module: nn.Module, also_torch: bool = False) -> bool:
    """Whether a module, not counting its children, overrides how torch's modules load a state dict.

    Args:
        module: any module.
        also_torch: count modules of torch that override it too, such as BatchNorm, which accepts older forms.
    """
    if also_torch and type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:
        return True
    kind = type(module)
    if not (
        kind._load_from_state_dict.__module__.startswith("torch.")
        and kind.load_state_dict.__module__.startswith("torch.")
    ):
        return True
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    # FSDP's hook only gives up whole weights that a forward has left.
    return bool(hooks) and not all(module_of(hook).startswith("torch.distributed.fsdp.") for hook in hooks)


def is_of_torch_nn(module: nn.Module) -> bool:
    """Whether a module loads its state dict only with code of ``torch.nn``."""
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    homes = [type(module)._load_from_state_dict.__module__, *map(module_of, hooks)]
    own = all(home.startswith(("torch.nn.", "torch.distributed.fsdp.")) for home in homes)
    return own and type(module).load_state_dict.__module__.startswith("torch.")


def module_of(hook: Any) -> str:
    """The name of the Python module that a hook of a module is from."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", ""))


def under_own_names(module: nn.Module, weights: Mapping[str, T]) -> dict[str, T]:
    """Rename weights from canonical names to the names that the module's ``load_state_dict`` knows."""
    own = canonical_state_dict({name: name for name in module.state_dict()}, module)
    state = {own.get(name, name): value for name, value in weights.items()}
    versions = versions_of(weights)
    if not versions:
        return state
    prefixes = {canonical: prefix for prefix, canonical, _ in prefixed_modules(module)}
    return with_versions(state, versions_at(versions, prefixes))


def _strip_segments(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def by_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """The canonical name of a tensor, by the prefixes of its modules as ``canonical_names`` gives them."""
    prefix = name
    while prefix:
        prefix = prefix[: prefix.rstrip(".").rfind(".") + 1]
        if prefix in prefixes:
            return prefixes[prefix] + name[len(prefix) :]
    return name


def refuse_collisions(renamed: Iterable[tuple[str, str]]) -> None:
    """Refuse pairs of old and new names in which two old names become the same.

    Raises:
        NameCollisionError: names all three.
    """
    first: dict[str, str] = {}
    for old, new in renamed:
        if first.setdefault(new, old) != old:
            raise NameCollisionError(
                f"{first[new]!r} and {old!r} both have the canonical name {new!r}, and one would be lost; "
                "rename one of the modules, or pass a state dict with distinct names"
            )
