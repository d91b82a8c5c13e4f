"""Objects that the script registered as part of a training state."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import accel_ckpt
from accel_ckpt.format import tagged_json
from accel_ckpt.format.forms import check_form
from accel_train.errors import OptionError
from accel_train.setup.prepared import Registered
from accel_train.state_part import SavedTrees, StatePart, Trees

__all__ = ["RegisteredStates"]


class RegisteredStates(StatePart):
    """The `state_dict` of each registered object; as a pickle, if the script trusts it.

    Args:
        registered: the objects.
        trusted: the caller of `load_state` allows loading pickles.
    """

    group: ClassVar[str | None] = "registered"

    def __init__(self, registered: Sequence[Registered], trusted: bool) -> None:
        self._registered, self._trusted = registered, trusted

    def dump(self, trees: Trees) -> None:
        """A shared tree for each; their classes are shared progress."""
        trees.progress["registered"] = self._classes()
        for index, registered in enumerate(self._registered):
            kind, tree = _dump(registered, index)
            trees.shared[f"{kind}_{index}"] = tree

    def expected(self) -> Iterator[str]:
        """A tree for each."""
        yield from (f"custom_{index}" for index in range(len(self._registered)))

    def _classes(self) -> list[str]:
        return [type(registered.item).__name__ for registered in self._registered]

    def _check_order(self, saved: SavedTrees) -> None:
        """A class may get another name, but no state goes to an object of a class that has another state."""
        here, there = self._classes(), saved.progress.get("registered", [])
        check_form(there, [str], f"{saved.directory}: registered")
        for index, (one, other) in enumerate(zip(here, there, strict=False)):
            if one != other and one in there and other in here:
                raise accel_ckpt.StateMismatchError(
                    f"{saved.directory}: the registered object {index} is {other} there and {one} here. Register the "
                    f"same objects in the same order: {', '.join(there)}"
                )

    def read(self, saved: SavedTrees) -> list[Any]:
        """Read the states. Pickles are loaded only for objects registered as trusted, and if the caller allows it."""
        self._check_order(saved)
        for index, registered in enumerate(self._registered):
            if f"pickled_{index}" in saved.shared and not (registered.trusted and self._trusted):
                self._refuse(index, registered, saved)
        return [
            pickle.loads(saved.shared[f"pickled_{index}"])
            if f"pickled_{index}" in saved.shared
            else saved.shared[f"custom_{index}"]
            for index in range(len(self._registered))
        ]

    def _refuse(self, index: int, registered: Registered, saved: SavedTrees) -> None:
        kind = type(registered.item).__name__
        missing = [] if registered.trusted else ["register_for_checkpointing(…, trusted=True)"]
        missing += [] if self._trusted else ["load_state(…, trust_custom_objects=True)"]
        raise OptionError(
            f"{saved.directory} holds the registered object {index} ({kind}) as a pickle, which can run any code when "
            f"it is loaded. If you trust the authors of the checkpoint, pass {' and '.join(missing)}."
        )

    def load(self, taken: list[Any], saved: SavedTrees) -> None:
        """Load each object's state."""
        for registered, state in zip(self._registered, taken, strict=True):
            registered.item.load_state_dict(state)


def _dump(registered: Registered, index: int) -> tuple[str, Any]:
    state = registered.item.state_dict()
    try:
        tagged_json.encode(state, lambda path, tensor: "")
    except accel_ckpt.UnsupportedValueError as error:
        if registered.trusted:
            return "pickled", pickle.dumps(state)
        raise accel_ckpt.UnsupportedValueError(
            f"the registered object {index} ({type(registered.item).__name__}): {error}. Or pass "
            "register_for_checkpointing(…, trusted=True) to pickle its state, and load_state(…, "
            "trust_custom_objects=True): only for checkpoints of people you trust, because a pickle can run any code"
        ) from error
    return "custom", state
