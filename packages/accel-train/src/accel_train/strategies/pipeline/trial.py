"""Whether stages compute what the whole model of transformers does: its forward runs whole and in stages.

The modules of the cut run on the meta device, without weights, and return zeros. What is between them runs as it is.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from accel_state.messages import first_line
from accel_train.errors import PrepareError
from accel_train.strategies.pipeline.cut import Cut
from accel_train.strategies.pipeline.stages import Absent, copied_around, make_stages, without_cache
from accel_train.strategies.provenance import Provenance, storages, tensors_in

__all__ = ["try_cut"]

_ROWS, _POSITIONS = 3, 10


class _Run(Provenance):  # type: ignore[no-untyped-call]  # as its base class
    """Context in which a forward is tried; marked is what the stage does not compute.

    Args:
        untraced: names of modules that cannot run without values; completed where `whole`.
        received: what the first layer of the stage takes from the stage before.
        whole: the whole model is tried.
    """

    def __init__(self, untraced: set[str], received: Any = None, *, whole: bool = False) -> None:
        super().__init__()
        self.untraced, self.received, self.whole = untraced, received, whole
        self.calls: list[_Call] = []
        self.inside: str | None = None  # the module that runs
        self.made: dict[int, tuple[str, Any]] = {}  # which module has computed the tensors of a storage
        self.read: list[tuple[str, str]] = []  # a module, and another one whose values it has read
        self.replaced = "a module"  # of another stage, which was called last
        self.mark(received)

    def replace(self, module: Absent, _inputs: Any, output: Any) -> Any:
        """A value for what a module of another stage would return."""
        self.replaced = module.name
        found = _zeros(output, output.device)
        self.mark(found)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Also note which module computes with what another one has computed inside."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.inside is not None:
            for storage in storages((args, kwargs)):
                name = self.made.get(storage._cdata, (self.inside,))[0]
                if name != self.inside:
                    self.read.append((self.inside, name))
            self.made |= {storage._cdata: (self.inside, storage) for storage in storages(result)}
        return result


class _Call:
    """A call of a module of the cut.

    Attributes:
        name: of the module.
        first: its first argument; `seen` is its version.
        form: of all arguments.
        foreign: a module of another stage from which an argument comes; None: there is none.
        output: what it returned.
        passed: what of that a stage passes on; `version` is its version, which changes in place count up.
    """

    def __init__(self, name: str, module: nn.Module, run: _Run, inputs: Any, named: dict[str, Any]) -> None:
        values = [*inputs, *named.values()]
        self.name = name
        self.first: Any = next(iter(values), None)
        self.seen = self.first._version if isinstance(self.first, Tensor) else None
        others = values[1:] if run.received is not None and self.first is run.received else values
        self.foreign = run.replaced if run.reaches(others) else None
        self.output = _computed(name, module, run, inputs, named)
        self.passed = self.output[0] if isinstance(self.output, tuple | list) else self.output
        self.version = self.passed._version if isinstance(self.passed, Tensor) else None
        self.form = _form(inputs), _form(named)
        run.calls.append(self)


class _Tried(nn.Module):
    """In the place of a module of the cut."""

    def __init__(self, name: str, module: nn.Module, run: _Run) -> None:
        super().__init__()
        plain = {key: value for key, value in module.__dict__.items() if not key.startswith("_")}
        self.__dict__.update({**plain, "tried": (name, module, run)})
        for own in itertools.islice(module.parameters(), 1):  # a forward may ask for the dtype of any
            light = torch.empty(0, dtype=own.dtype, device="cpu" if own.is_meta else own.device)
            self.register_parameter("light", nn.Parameter(light, requires_grad=False))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["tried"][1], name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Zeros of the form of what the module returns."""
        name, module, run = self.__dict__["tried"]
        return _Call(name, module, run, inputs, named).output


def _computed(name: str, module: nn.Module, run: _Run, inputs: Any, named: dict[str, Any]) -> Any:
    tensors = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
    if name not in run.untraced:
        held = (*module.named_parameters(), *module.named_buffers())
        light = {key: torch.empty(value.shape, dtype=value.dtype, device="meta") for key, value in held}
        try:
            given = _zeros((inputs, named), "meta")
            run.inside = name
            output = functional_call(module, light, *given)
        except Exception:
            if not run.whole:
                raise
            run.untraced.add(name)  # it reads values, such as those of a mask or a router
        else:
            return _zeros(output, tensors[0].device if tensors else "cpu")
        finally:
            run.inside = None
    return torch.zeros_like(next(tensor for tensor in tensors if tensor.is_floating_point()))


def try_cut(model: nn.Module, cut: Cut) -> None:
    """Check that stages which run one after the other do what the whole model does; changes nothing.

    Args:
        model: the whole model, with or without values.
        cut: how it is cut.

    Raises:
        PrepareError: a stage would compute something else; it names the module that tells.
    """
    devices = [each.device for each in (*model.buffers(), *model.parameters()) if not each.is_meta]
    device = devices[0] if devices else torch.device("cpu")
    batch: dict[str, Any] = {}
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        whole = _Run(set(), whole=True)
        try:
            batch |= {**_batch(model, device), **without_cache(model)}
            output = _called(model, _skeleton(model, cut, whole), whole, (), batch)
        except Exception as error:
            raise _refused(
                model, f"cannot be tried with {', '.join(batch) or 'tokens'}: {first_line(error)}"
            ) from error
        stage_of = {name: number for number, names in enumerate(cut.stages) for name in names}
        for name, other in whole.read:
            if stage_of[name] != stage_of[other]:
                raise _refused(model, f"lets {name!r} read what {other!r} has computed and kept")
        for number in range(len(cut.stages)):
            _try_stage(model, cut, number, batch, whole, _form(output))


def _try_stage(
    model: nn.Module, cut: Cut, number: int, batch: dict[str, Any], whole: _Run, output: Any
) -> None:
    names = cut.stages[number]
    before = _passed_on(model, cut, number, whole) if number else None
    run = _Run(whole.untraced, None if before is None else torch.zeros_like(before.first))
    [stage] = make_stages(_skeleton(model, cut, run), cut, [number], None, None)
    for module in stage.modules():
        if isinstance(module, Absent):
            module.register_forward_hook(run.replace)
    failed, found = None, None
    try:
        found = _called(model, stage, run, () if before is None else (run.received,), batch)
    except Exception as error:
        failed = error
    begins = f"if it begins with {names[0]!r}"
    wanted = [call for call in whole.calls if call.name in names]
    for call, want in itertools.zip_longest(run.calls, wanted):
        if call is not None and call.foreign is not None:
            raise _refused(model, f"calls {call.name!r} with a value of {call.foreign!r} in another stage")
        if failed is not None:
            continue
        if call is None:
            raise _refused(
                model, f"calls {want.name!r} again or after {names[-1]!r}, with which its stage ends"
            )
        if want is None or (call.name, call.form) != (want.name, want.form):
            raise _refused(model, f"calls {call.name!r} in another order or with other arguments {begins}")
    if failed is not None:
        raise _refused(model, f"fails {begins} ({first_line(failed)})") from failed
    if number == len(cut.stages) - 1 and (run.reaches(found) or _form(found) != output):
        raise _refused(model, "returns values that an earlier stage computes")


def _passed_on(model: nn.Module, cut: Cut, number: int, whole: _Run) -> _Call:
    """The call of the first layer of a stage, which gets what the last layer of the stage before returned."""
    last = next(name for name in reversed(cut.stages[number - 1]) if name in cut.layers)
    first = next(name for name in cut.stages[number] if name in cut.layers)
    calls = [[call for call in whole.calls if call.name == name] for name in (last, first)]
    for name, found in zip((last, first), calls, strict=True):
        if len(found) != 1:
            raise _refused(model, f"calls {name!r} {len(found)} times")
    [left], [entered] = calls
    if entered.first is not left.passed or entered.seen != left.version:
        raise _refused(model, f"calls {first!r} with something else than what {last!r} returns")
    return entered


def _refused(model: nn.Module, what: str) -> PrepareError:
    return PrepareError(
        f"The forward of {type(model).__name__} {what}. Stages of a pipeline pass on what their last layer returns "
        "and nothing else, so they would compute something else than the whole model. Cut it elsewhere or name other "
        "modules (PipelineParallelConfig(cuts=[…], modules=[…])), or train it without pp_size."
    )


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Context after which modules have the attributes and buffers of before, such as caches."""
    kept = [(module, dict(module.__dict__), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _skeleton(model: nn.Module, cut: Cut, run: _Run) -> nn.Module:
    places = {name: _Tried(name, model.get_submodule(name), run) for name in cut.names}
    return copied_around(model, "", places)


def _called(
    model: nn.Module, module: nn.Module, run: _Run, inputs: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """What a module returns, with copies of its buffers: zeros for those without values."""
    buffers = {
        name: torch.zeros_like(each, device="cpu") if each.is_meta else each.clone()
        for name, each in module.named_buffers()
    }
    with run, _unchanged(model):
        return functional_call(module, buffers, inputs, named)


def _batch(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """A tiny batch for a model of transformers."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    transformer: Any = model
    embeddings: Any = transformer.get_input_embeddings()
    config: Any = model.config
    size = getattr(config, "image_size", None)
    rows = torch.arange(_ROWS * _POSITIONS, device=device).view(_ROWS, _POSITIONS) % 7 + 1
    needed = [
        name
        for name, each in parameters.items()
        if name == main or (each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD)
    ]
    batch = dict.fromkeys(needed or list(parameters)[:1], rows)
    if main == "pixel_values" and size is not None:
        height, width = size if isinstance(size, tuple | list) else (size, size)
        batch[main] = torch.zeros(_ROWS, getattr(config, "num_channels", 3), height, width, device=device)
    elif isinstance(embeddings, nn.Linear):
        batch[next(iter(batch))] = torch.zeros(_ROWS, _POSITIONS, embeddings.in_features, device=device)
    if "decoder_input_ids" in parameters:
        batch["decoder_input_ids"] = rows
    if "attention_mask" in parameters and main == "input_ids":
        batch["attention_mask"] = (
            (torch.arange(_POSITIONS, device=device) < _POSITIONS - 3).long().expand(_ROWS, -1)
        )
    return batch


def _zeros(value: Any, device: Any) -> Any:
    """Zeros for tensors, also in tuples, lists and outputs; other objects, which modules may share, stay."""
    if isinstance(value, Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    if all(leaf.device.type == torch.device(device).type for leaf in tensors_in(value)):
        return value
    if type(value) in (tuple, list):
        return type(value)(_zeros(item, device) for item in value)
    return {key: _zeros(item, device) for key, item in value.items()} if type(value) is dict else value


def _form(value: Any) -> Any:
    """Structure, shapes, dtypes and plain values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return {key: _form(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_form(item) for item in value]
    return value if isinstance(value, int | float | str | None) else type(value)
