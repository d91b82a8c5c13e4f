"""Objects that the script registered as part of a training state."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import accel_ckpt
from accel_ckpt.format import tagged_json
from accel_train.errors import OptionError
from accel_train.setup.prepared import Registered
from accel_train.state_part import SavedTrees, StatePart, Trees, check_order

__all__ = ["RegisteredStates"]


class RegisteredStates(StatePart):
    """The `state_dict` of each registered object; as a pickle, if the script trusts it.

    Args:
        registered: the objects.
        trusted: the caller of `load_state` allows loading pickles.
        averages: descriptions of averages of weights, of which a script may have several, by `id`.
    """

    group: ClassVar[str | None] = "registered"

    def __init__(self, registered: Sequence[Registered], trusted: bool, averages: Mapping[int, str]) -> None:
        self._registered, self._trusted, self._averages = registered, trusted, averages

    def dump(self, trees: Trees) -> None:
        """A shared tree for each; what they are is shared progress."""
        trees.progress["registered"] = self._kinds()
        for index, registered in enumerate(self._registered):
            kind, tree = _dump(registered, index)
            trees.shared[f"{kind}_{index}"] = tree

    def expected(self) -> Iterator[str]:
        """A tree for each."""
        yield from (f"custom_{index}" for index in range(len(self._registered)))

    def _kinds(self) -> list[str]:
        return [self._averages.get(id(known.item), type(known.item).__name__) for known in self._registered]

    def read(self, saved: SavedTrees) -> list[Any]:
        """Read the states. Pickles are loaded only for objects registered as trusted, and if the caller allows it."""
        check_order("registered object", self._kinds(), saved, "registered")
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
