"""Traversal of nested structures (trees) of tensors.

A tree is a tensor or other leaf, or a container of trees: a list, tuple or named tuple, a mapping, a dataclass
instance, or an instance of a subclass of these. Results keep the container types, including extra attributes; inputs
are never modified.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "TensorInformation",
    "TreeSpec",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "flatten",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_input_tensors",
    "path_of",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
    "tensor_leaves",
    "unflatten",
]


@dataclasses.dataclass(frozen=True)
class TensorInformation:
    """Shape and dtype of a tensor: enough to allocate one like it."""

    shape: torch.Size
    dtype: torch.dtype


class _Container(NamedTuple):
    """How containers of one type are flattened and rebuilt."""

    children: Callable[[Any], Sequence[Any]]
    outline: Callable[[Any], Any]
    """Plain data that ``build`` needs in addition to the children."""
    rebuild: Callable[[Any, list[Any]], Any]
    """A container like an original, with new children."""
    build: Callable[[Any, Any, list[Any]], Any]
    """A container of a type, from an outline and children."""


def is_torch_tensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a ``torch.Tensor``."""
    return isinstance(tensor, Tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether ``tensor_info`` is a ``TensorInformation``."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Whether ``data`` is an instance of a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Make a sequence of the type of ``obj`` from the items of ``generator``.

    Args:
        obj: a list, tuple, named tuple or a subclass; only read.
        generator: the new items; for named tuples, exactly as many as ``obj`` has.
    """
    container = _container(type(obj))
    if container is None or not isinstance(obj, list | tuple):
        raise TypeError(f"honor_type needs a list or tuple, got {type(obj).__name__}")
    return container.rebuild(obj, list(generator))


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply ``func`` to every leaf of ``data`` that passes ``test_type``.

    Args:
        func: called as ``func(leaf, *args, **kwargs)``.
        data: a tree.
        *args: for ``func``.
        test_type: selects the leaves to change.
        error_on_other_type: raise for other leaves instead of keeping them.
        **kwargs: for ``func``.

    Raises:
        TypeError: ``error_on_other_type`` is set and there is another leaf; the message has its path.
    """
    return _apply(data, func, args, kwargs, test_type, (data,) if error_on_other_type else None)


# Recursive functions are not nested: a nested one refers to itself, which is a reference cycle, and would keep
# the tensors of the outer one until Python's next collection of cycles.
def _apply(
    node: Any,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    test_type: Callable[[Any], bool],
    strict_in: tuple[Any] | None,
) -> Any:
    """See `recursively_apply`; `strict_in` holds the whole tree where other leaves are errors."""
    container = _container(type(node))
    if container is not None and not (container is _DATACLASS and test_type(node)):
        children = container.children(node)
        return container.rebuild(
            node, [_apply(child, func, args, kwargs, test_type, strict_in) for child in children]
        )
    if test_type(node):
        return func(node, *args, **kwargs)
    if strict_in is not None:
        raise TypeError(
            f"{getattr(func, '__name__', func)} takes tensors in nested lists, tuples, mappings and "
            f"dataclasses; found {type(node).__name__} at {path_of(*strict_in, node) or 'the top'}"
        )
    return node


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move every tensor, and every object that has a ``to`` method, to ``device``.

    Args:
        tensor: a tree.
        device: the target device.
        non_blocking: copy asynchronously. Effective for copies from pinned memory to a device; copies to the CPU
            are always complete on return, because the caller could not know when they are readable.
        skip_keys: keys of mappings, at any depth, whose values are not moved.
    """
    where = device if type(device) is torch.device else torch.device(device)
    if skip_keys is not None:
        keys = frozenset((skip_keys,) if isinstance(skip_keys, str) else skip_keys)
    else:
        keys = frozenset()
    return _send(tensor, where, non_blocking and where.type != "cpu", keys)


def _send(node: Any, device: torch.device, non_blocking: bool, skip: frozenset[str]) -> Any:
    cls = type(node)
    if cls is Tensor:
        return node if node.device == device else node.to(device, non_blocking=non_blocking)
    if cls is tuple:
        return tuple([_send(item, device, non_blocking, skip) for item in node])
    if cls is list:
        return [_send(item, device, non_blocking, skip) for item in node]
    if cls is dict and not skip:
        return {key: _send(value, device, non_blocking, skip) for key, value in node.items()}
    container = _container(cls)
    keyed = skip and isinstance(node, Mapping)
    if hasattr(node, "to") and not keyed:
        return node.to(device, non_blocking=True) if non_blocking and _to_overlaps(cls) else node.to(device)
    if container is None:
        return node
    names = node.keys() if keyed else itertools.repeat(None)
    children = [
        child if keyed and name in skip else _send(child, device, non_blocking, skip)
        for name, child in zip(names, container.children(node), strict=False)
    ]
    return container.rebuild(node, children)


def _takes_non_blocking(cls: Any) -> bool:
    """Whether the ``to`` method of a type takes ``non_blocking``."""
    if issubclass(cls, Tensor):
        return True
    try:
        parameters = inspect.signature(cls.to).parameters.values()
    except (
        TypeError,
        ValueError,
        AttributeError,
    ):  # implemented in C, or from __getattr__: signature unknown
        return False
    return any(p.name == "non_blocking" or p.kind is p.VAR_KEYWORD for p in parameters)


_to_overlaps: Callable[[type], bool] = lru_cache(maxsize=1024)(_takes_non_blocking)


def get_data_structure(data: Any) -> Any:
    """Replace tensors by their ``TensorInformation``."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Replace tensors by their shapes, as lists."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Replace each ``TensorInformation`` by an uninitialised CPU tensor of that shape and dtype."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype, device="cpu"),
        data_structure,
        test_type=is_tensor_information,
    )


def find_batch_size(data: Any) -> int:
    """Size of the first dimension of the first tensor, in depth-first order, that is not 0-dimensional.

    Raises:
        ValueError: the tree is empty, or all of its tensors are 0-dimensional.
        TypeError: the tree has leaves, but no tensor.
    """
    leaves = list(_leaves(data))
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    if leaves and not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError(
            f"the batch size is read from tensors; found {type(leaves[0]).__name__} and no tensor"
        )
    raise ValueError(
        f"the batch size is unknown: no tensor in this {type(data).__name__} has a first dimension"
    )


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return ``find_batch_size(data)``, or None instead of an error."""
    for leaf in _leaves(data):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return None


def listify(data: Any) -> Any:
    """Replace tensors by (nested) Python lists or numbers; bfloat16 and 8-bit floats are converted through float32."""

    def to_list(tensor: Tensor) -> Any:
        tensor = tensor.detach().cpu()
        small = tensor.dtype == torch.bfloat16 or (tensor.dtype.is_floating_point and tensor.itemsize == 1)
        return tensor.float().tolist() if small else tensor.tolist()

    return recursively_apply(to_list, data)


def find_device(data: Any) -> torch.device | None:
    """Device of the first tensor, in depth-first order, or None if there is no tensor."""
    return next((leaf.device for leaf in _leaves(data) if isinstance(leaf, Tensor)), None)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Index every tensor with ``tensor_slice``.

    Args:
        data: a tree of tensors.
        tensor_slice: the slice of the first dimension.
        process_index: ignored; accepted for compatibility.
        num_processes: ignored; accepted for compatibility.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate trees of equal structure, tensor by tensor.

    Args:
        data: the trees, in order.
        dim: the dimension to concatenate along.

    Raises:
        TypeError: a leaf that is not a tensor, unless there is only one tree.
        ValueError: ``data`` is empty, or the structures differ.
    """
    if not data:
        raise ValueError("concatenate needs at least one tree")
    first = data[0]
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim=dim)
    container = _container(type(first))
    if container is None:
        if len(data) == 1:
            return first
        raise TypeError(f"only tensors can be concatenated, found {type(first).__name__}")
    outline = container.outline(first)
    columns: list[Sequence[Any]] = []
    for tree in data:
        children = _aligned_children(container, outline, first, tree)
        columns.append(children)
    return container.rebuild(first, [concatenate(column, dim) for column in zip(*columns, strict=True)])


def _aligned_children(container: _Container, outline: Any, first: Any, tree: Any) -> Sequence[Any]:
    """Children of ``tree`` in the order of those of ``first``."""
    if isinstance(first, Mapping) and isinstance(tree, Mapping) and first.keys() == tree.keys():
        return [tree[key] for key in first]
    if _container(type(tree)) is container and container.outline(tree) == outline:
        return container.children(tree)
    raise ValueError(
        f"trees of different structure cannot be concatenated: {_brief(first)} and {_brief(tree)}"
    )


def convert_to_fp32(tensor: Any) -> Any:
    """Convert tensors in float16 and bfloat16 to float32; other leaves are not changed."""
    low = (torch.float16, torch.bfloat16)
    return recursively_apply(
        Tensor.float, tensor, test_type=lambda leaf: isinstance(leaf, Tensor) and leaf.dtype in low
    )


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Append zeros along ``dim`` until the batch size is a multiple of the number of processes.

    Args:
        tensor: a tree; tensors whose size along ``dim`` is not ``batch_size`` are not changed.
        batch_size: the batch size.
        num_processes: the padded size is a multiple of this.
        dim: the batch dimension.
    """
    missing = -batch_size % num_processes

    def pad(leaf: Tensor) -> Tensor:
        if missing == 0 or leaf.dim() <= dim or leaf.shape[dim] != batch_size:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    return recursively_apply(pad, tensor)


def tensor_leaves(data: Any) -> list[Tensor]:
    """The tensors of a tree, in depth-first order.

    Raises:
        TypeError: a leaf is not a tensor; the message has its path.
    """
    found: list[Tensor] = []
    for leaf in _leaves(data):
        if not isinstance(leaf, Tensor):
            raise _not_a_tensor(data, leaf)
        found.append(leaf)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class TreeSpec:
    """A container without its tensors: plain data that pickles and compares.

    Attributes:
        kind: the container's type; None for a tensor; ``Ellipsis`` for any other leaf.
        outline: keys or field names; the leaf itself for a leaf that is not a tensor.
        children: one spec per child.
    """

    kind: Any
    outline: Any = None
    children: tuple[TreeSpec, ...] = ()


_TENSOR = TreeSpec(None)


def flatten(tree: Any, only_tensors: bool = False) -> tuple[list[Tensor], TreeSpec]:
    """Separate a tree into its tensors and a spec.

    Args:
        tree: the tree.
        only_tensors: raise for other leaves.

    Returns:
        the tensors, in depth-first order, and a spec with everything else.

    Raises:
        TypeError: ``only_tensors`` is set and there is another leaf; the message has its path.
    """
    leaves: list[Tensor] = []
    return leaves, _spec(tree, leaves, (tree,) if only_tensors else None)


def _spec(node: Any, leaves: list[Tensor], strict_in: tuple[Any] | None) -> TreeSpec:
    """The spec of a node, whose tensors go to `leaves`; `strict_in` as for `_apply`."""
    if isinstance(node, Tensor):
        leaves.append(node)
        return _TENSOR
    container = _container(type(node))
    if container is None:
        if strict_in is not None:
            raise _not_a_tensor(*strict_in, node)
        return TreeSpec(..., node)
    children = tuple([_spec(child, leaves, strict_in) for child in container.children(node)])
    return TreeSpec(type(node), container.outline(node), children)


def unflatten(spec: TreeSpec, leaves: Iterable[Tensor]) -> Any:
    """Rebuild a tree: the inverse of ``flatten``.

    Raises:
        ValueError: the number of tensors differs from that of the spec.
    """
    source = iter(leaves)
    tree = _built(spec, source)
    if next(source, None) is not None:
        raise ValueError("unflatten got more tensors than the spec has")
    return tree


def _built(spec: TreeSpec, source: Iterator[Tensor]) -> Any:
    if spec.kind is None:
        leaf = next(source, None)
        if leaf is None:
            raise ValueError("unflatten got fewer tensors than the spec has")
        return leaf
    if spec.kind is ...:
        return spec.outline
    container = _container(spec.kind)
    assert container is not None, spec.kind
    return container.build(spec.kind, spec.outline, [_built(child, source) for child in spec.children])


def _not_a_tensor(data: Any, leaf: Any) -> TypeError:
    return TypeError(
        "only tensors in nested lists, tuples, mappings and dataclasses are accepted; "
        f"found {type(leaf).__name__} at {path_of(data, leaf) or 'the top'}. "
        "gather_object and broadcast_object_list send other objects between ranks"
    )


def path_of(data: Any, leaf: Any) -> str:
    """The path of the object ``leaf`` in ``data``, as a Python expression suffix; "" at the top level."""
    return _search(data, leaf, "") or ""


def _search(node: Any, leaf: Any, path: str) -> str | None:
    if node is leaf:
        return path
    container = _container(type(node))
    if container is None:
        return None
    for name, child in zip(_child_names(node), container.children(node), strict=True):
        found = _search(child, leaf, path + name)
        if found is not None:
            return found
    return None


def _child_names(node: Any) -> list[str]:
    if isinstance(node, Mapping):
        return [f"[{key!r}]" for key in node]
    if isinstance(node, list | tuple):
        names = getattr(node, "_fields", None)
        return [f".{name}" for name in names] if names else [f"[{index}]" for index in range(len(node))]
    return [f".{name}" for name in _field_names(node)]


def _leaves(node: Any) -> Iterator[Any]:
    container = None if isinstance(node, Tensor) else _container(type(node))
    if container is None:
        yield node
        return
    for child in container.children(node):
        yield from _leaves(child)


def _brief(node: Any) -> str:
    container = _container(type(node))
    if container is None:
        return type(node).__name__
    return f"{type(node).__name__}({', '.join(name.strip('.[]') for name in _child_names(node))})"


# --- container types ---


def _rebuild_list(original: list[Any], children: list[Any]) -> list[Any]:
    if type(original) is list:
        return children
    new = copy.copy(original)
    new[:] = children
    return new


def _build_tuple(cls: Any, outline: Any, children: list[Any]) -> Any:
    return tuple(children) if cls is tuple else cls(children)


def _rebuild_tuple(original: tuple[Any, ...], children: list[Any]) -> Any:
    new = _build_tuple(type(original), None, children)
    state = getattr(original, "__dict__", None)
    if state:
        vars(new).update(state)
    return new


def _build_mapping(cls: Any, outline: Any, children: list[Any]) -> Any:
    keys, factory = outline
    items = dict(zip(keys, children, strict=True))
    if cls is dict:
        return items
    return cls(factory, items) if issubclass(cls, defaultdict) else cls(items)


def _rebuild_mapping(original: Any, children: list[Any]) -> Any:
    if type(original) is dict:
        return dict(zip(original, children, strict=True))
    if not isinstance(original, dict | UserDict):
        # A shallow copy of another mapping type may share its storage, so a new one is built.
        return type(original)(dict(zip(original, children, strict=True)))
    new = copy.copy(original)
    for key, child in zip(original, children, strict=True):
        new[key] = child
    return new


def _mapping_outline(original: Mapping[Any, Any]) -> Any:
    return tuple(original), getattr(original, "default_factory", None)


def _field_names(original: Any) -> tuple[str, ...]:
    """Fields that have a value; a field with ``init=False`` may have none yet."""
    return tuple(field.name for field in dataclasses.fields(original) if hasattr(original, field.name))


def _set_fields(target: Any, names: Iterable[str], children: list[Any]) -> Any:
    for name, child in zip(names, children, strict=True):
        object.__setattr__(target, name, child)  # works for frozen classes and fields with init=False
    return target


def _rebuild_dataclass(original: Any, children: list[Any]) -> Any:
    names = _field_names(original)
    if all(getattr(original, name) is child for name, child in zip(names, children, strict=True)):
        return original
    return _set_fields(copy.copy(original), names, children)


_LIST = _Container(lambda o: o, len, _rebuild_list, lambda cls, _, c: c if cls is list else cls(c))
_TUPLE = _Container(lambda o: o, len, _rebuild_tuple, _build_tuple)
_NAMEDTUPLE = _Container(
    lambda o: o, len, lambda o, c: type(o)(*c), lambda cls, _, c: cls(*c)
)  # fmt: skip
_MAPPING = _Container(lambda o: list(o.values()), _mapping_outline, _rebuild_mapping, _build_mapping)
_DATACLASS = _Container(
    lambda o: [getattr(o, name) for name in _field_names(o)],
    _field_names,
    _rebuild_dataclass,
    lambda cls, names, c: _set_fields(object.__new__(cls), names, c),
)


def _classify(cls: type) -> _Container | None:
    if issubclass(cls, list):
        return _LIST
    if issubclass(cls, tuple):
        return _NAMEDTUPLE if hasattr(cls, "_asdict") and hasattr(cls, "_fields") else _TUPLE
    if issubclass(cls, Mapping):
        return _MAPPING
    if dataclasses.is_dataclass(cls) and not issubclass(cls, Tensor | torch.nn.Module):
        return _DATACLASS
    return None


_container: Callable[[type], _Container | None] = lru_cache(maxsize=4096)(_classify)
