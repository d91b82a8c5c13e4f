"""Restoring saved trees: tensors are filled in place, instead of being assembled and copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_not
from typing import Any, TypeAlias

import torch

from accel_ckpt.errors import StateMismatchError
from accel_ckpt.format.memory import Arena
from accel_ckpt.format.saved_tensors import SavedTensor, fill_all, verify_all
from accel_ckpt.format.tagged_json import Tree, show_path
from accel_ckpt.modules.names import listed
from accel_ckpt.parts import Leaf, Part, fill_part, is_leaf, parts_of, shape_of
from accel_ckpt.tensor_storage import why_not_plain

__all__ = ["Like", "TreeFill", "check_tree", "fill_tree"]

Saved: TypeAlias = SavedTensor | torch.Tensor
Path: TypeAlias = tuple[Any, ...]

_HOLDING = (SavedTensor, torch.Tensor, Mapping, list, tuple)
"""Classes that are, or can hold, a saved tensor; the numbers and strings of a tree are not looked at."""


@dataclass(frozen=True, slots=True)
class Like:
    """Describes a new tensor: with the shape, device and division of another one, and its own dtype."""

    tensor: torch.Tensor
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        """Allocate the tensor, with uninitialised values."""
        return torch.empty_like(self.tensor, dtype=self.dtype, requires_grad=False)


class TreeFill:
    """Matches a saved tree with the live one: which tensor goes where. Nothing is changed before :meth:`run`.

    Args:
        saved: plain data, and tensors as :class:`SavedTensor` or whole.
        live: a tree of the same structure; its tensors are passed to ``choose``.
        choose: saved tensor, live counterpart (``None`` if there is none), path → the leaf to fill, a :class:`Like` for
            a new one, or ``None`` for a whole new one on the CPU.
        apart: a tensor that several top-level entries of the saved tree hold becomes a separate tensor for each.
    """

    def __init__(
        self,
        saved: Tree,
        live: Tree,
        choose: Callable[[Saved, Any, Path], Leaf | Like | None],
        *,
        apart: bool = False,
    ) -> None:
        self._choose = choose
        self._apart = apart
        self._arena = Arena()
        self._saved = saved
        # Saved tensor, its target, and the entry within which it is one new tensor if it occurs several times.
        self._plan: list[tuple[Saved, Leaf | Like | None, Path]] = []
        self._collect(saved, live, ())

    @property
    def filled(self) -> set[int]:
        """Identities of the leaves that are filled."""
        return {id(leaf) for _, leaf, _ in self._plan if leaf is not None}

    def check(self) -> None:
        """Check the content of the files that this rank reads.

        Raises:
            CorruptCheckpointError: a file is not what was written.
        """
        pairs: list[tuple[SavedTensor, Leaf]] = []
        for saved, target, _ in self._plan:
            if isinstance(saved, SavedTensor):
                whole = torch.empty(saved.shape, device="meta") if target is None else target
                pairs.append((saved, whole.tensor if isinstance(whole, Like) else whole))
        verify_all(pairs)

    def run(self) -> Tree:
        """Fill the chosen leaves; returns the saved tree with them in place of the saved tensors.

        Raises:
            CorruptCheckpointError: a file was damaged or changed after the save; raised before anything is changed.
        """
        made: dict[tuple[int, Path], Leaf] = {}
        pairs = [(saved, self._leaf(saved, target, owner, made)) for saved, target, owner in self._plan]
        fill_all([(saved, leaf) for saved, leaf in pairs if isinstance(saved, SavedTensor)])
        for saved, leaf in pairs:
            if isinstance(saved, torch.Tensor) and saved is not leaf:
                fill_part(leaf, saved)
        return _rebuilt(self._saved, (leaf for _, leaf in pairs))

    def _leaf(
        self, saved: Saved, target: Leaf | Like | None, owner: Path, made: dict[tuple[int, Path], Leaf]
    ) -> Leaf:
        if isinstance(target, Like):
            return target.make()
        if target is not None:
            return target
        if (id(saved), owner) not in made:
            made[id(saved), owner] = self._new(saved)
        return made[id(saved), owner]

    def _new(self, saved: Saved) -> Leaf:
        if isinstance(saved, torch.Tensor) and why_not_plain(saved) is not None:
            return saved
        if isinstance(saved, torch.Tensor) and saved.device.type != "cpu":
            return torch.empty_like(saved)
        return self._arena.empty(saved.shape, saved.dtype)

    def _collect(self, saved: Any, live: Any, path: Path) -> None:
        if isinstance(saved, SavedTensor | torch.Tensor):
            self._plan.append((saved, self._choose(saved, live, path), path[:1] if self._apart else ()))
            return
        if isinstance(saved, Mapping):
            named = live if isinstance(live, Mapping) else {}
            for key, value in saved.items():
                if isinstance(value, _HOLDING):
                    self._collect(value, named.get(key), (*path, key))
        elif type(saved) in (list, tuple):
            known = live if isinstance(live, list | tuple) else ()
            for index, value in enumerate(saved):
                if isinstance(value, _HOLDING):
                    self._collect(value, known[index] if index < len(known) else None, (*path, index))


def _rebuilt(saved: Any, leaves: Iterator[Leaf]) -> Any:
    """The tree with leaves in the place of its saved tensors; containers that hold none stay what they are."""
    if isinstance(saved, SavedTensor | torch.Tensor):
        return next(leaves)
    if isinstance(saved, Mapping):
        mapping = {k: _rebuilt(v, leaves) if isinstance(v, _HOLDING) else v for k, v in saved.items()}
        return mapping if any(map(is_not, mapping.values(), saved.values())) else saved
    if type(saved) in (list, tuple):
        items = [_rebuilt(value, leaves) if isinstance(value, _HOLDING) else value for value in saved]
        return type(saved)(items) if any(map(is_not, items, saved)) else saved
    return saved


def _match(saved: Tree, targets: Tree) -> TreeFill:
    problems: list[str] = []

    def choose(tensor: Saved, target: Any, path: Path) -> Leaf | None:
        if not is_leaf(target):
            return None
        if shape_of(target) != tuple(tensor.shape):
            problems.append(
                f"{show_path(path)} is {list(tensor.shape)} there and {list(shape_of(target))} here"
            )
        elif any(part.tensor.is_meta for part in parts_of(target)):
            problems.append(f"{show_path(path)} is on the meta device here; give it memory first")
        return target

    fill = TreeFill(saved, targets, choose)
    missing = [show_path(path) for path, leaf in _leaves(targets, ()) if id(leaf) not in fill.filled]
    if missing:
        problems.append(f"it lacks {listed(missing)}")
    if problems:
        raise StateMismatchError(f"the saved tree does not fit: {'; '.join(problems)}. Nothing was changed")
    return fill


def _leaves(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if is_leaf(tree):
        yield path, tree
        return
    if isinstance(tree, Mapping):
        children: Iterable[tuple[Any, Any]] = tree.items()
    else:
        children = enumerate(tree) if type(tree) in (list, tuple) else ()
    for key, value in children:
        if isinstance(value, (*_HOLDING, Part)):
            yield from _leaves(value, (*path, key))


def check_tree(saved: Tree, targets: Tree) -> None:
    """Check that :func:`fill_tree` can fill these targets; reads and checks files, and changes nothing.

    Raises:
        StateMismatchError: a tensor is missing, or has another shape.
        CorruptCheckpointError: a file was damaged or changed after the save.
    """
    _match(saved, targets).check()


def fill_tree(saved: Tree, targets: Tree) -> Tree:
    """Fill the tensors of a live tree in place from a saved one; of a divided tensor only this rank's part is read.

    Args:
        saved: a tree as ``TrainingCheckpoint.lazy_shared`` returns it, or with whole tensors.
        targets: a tree of the same structure: tensors, DTensors, :class:`accel_ckpt.Part` and lists of parts, such as
            the tree that was saved. Its other values do not matter.

    Returns:
        The saved tree, with the filled leaves in place of its tensors. A tensor without a counterpart is read whole.

    Raises:
        StateMismatchError: a tensor is missing, or has another shape. Nothing was changed.
        CorruptCheckpointError: a file was damaged or changed after the save. Nothing was changed.
    """
    return _match(saved, targets).run()
