"""Whether the forward of a model does what its stages will: call its modules one after the other, and nothing else."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from accel_state.messages import first_line
from accel_train.errors import PrepareError

__all__ = ["check_chain"]


class _Value:
    """What a module is called with, or returns, while a forward is tried: no tensor, so nothing can compute with it."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def __iter__(self) -> Iterator[Any]:
        raise _Unpacked


class _Unpacked(Exception):  # noqa: N818 (no error)
    """A module is indexed or unpacked, so it returns a tuple, whose length its code does not show."""


class _StandIn(nn.Module):
    """A module while a forward is tried."""

    def __init__(self, name: str, module: nn.Module, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        super().__init__()
        self.__dict__.update(_name=name, _stood_for=module, _calls=calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stood_for"], name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Note the call."""
        self._calls.append((self._name, (*inputs, *named.values())))
        return _Value(self._name)


def check_chain(model: nn.Module, names: Sequence[str]) -> None:
    """Check that a forward passes what each module returns to the next one, without data.

    A forward that unpacks what a module returns cannot be checked, and is taken for a chain.

    Args:
        model: the whole model, whose modules are replaced for a moment.
        names: its modules, in the order in which stages call them.

    Raises:
        PrepareError: the forward does something else.
    """
    kind = type(model).__name__
    inputs = [_Value("the input") for _ in _required(model)]
    calls: list[tuple[str, tuple[Any, ...]]] = []
    try:
        with _stand_ins(model, names, calls):
            output = model.forward(*inputs)
    except _Unpacked:
        return
    except Exception as error:
        last = f"what {calls[-1][0]!r} returns" if calls else "its input"
        raise _refused(kind, f"does something with {last} ({first_line(error)})") from error
    called = [name for name, _ in calls]
    if called != list(names):
        place = next(
            (at for at, pair in enumerate(zip(called, names, strict=False)) if pair[0] != pair[1]),
            min(len(called), len(names)),
        )
        found = f"calls {called[place]!r}" if place < len(called) else "ends"
        wanted = f"{names[place]!r} would be called" if place < len(names) else "the last module was called"
        raise _refused(kind, f"{found} where {wanted}")
    for (name, given), (before, _) in zip(calls[1:], calls, strict=False):
        if len(given) != 1 or getattr(given[0], "origin", None) != before:
            raise _refused(kind, f"calls {name!r} with something else than what {before!r} returns")
    if getattr(output, "origin", None) != names[-1]:
        raise _refused(kind, f"returns something else than {names[-1]!r} ({type(output).__name__})")


def _refused(kind: str, what: str) -> PrepareError:
    return PrepareError(
        f"The forward of {kind} {what}. Stages of a pipeline call its modules one after the other, each with what the "
        "one before returned, so that would be left out. Move it into a module, or name other modules: "
        "PipelineParallelConfig(modules=[…])."
    )


def _required(model: nn.Module) -> list[str]:
    """The arguments without which a forward cannot be called."""
    parameters = inspect.signature(model.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [each.name for each in parameters if each.kind in positional and each.default is each.empty]
    some = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return found or (["inputs"] if some else [])


@contextlib.contextmanager
def _stand_ins(
    model: nn.Module, names: Sequence[str], calls: list[tuple[str, tuple[Any, ...]]]
) -> Iterator[None]:
    places = []
    for name in names:
        parent, _, last = name.rpartition(".")
        places.append((model.get_submodule(parent)._modules, last, model.get_submodule(name)))
    try:
        for name, (table, last, module) in zip(names, places, strict=True):
            table[last] = _StandIn(name, module, calls)
        yield
    finally:
        for table, last, module in places:
            table[last] = module
