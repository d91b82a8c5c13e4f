"""Public signatures of the real Accelerate 1.15 and of what answers for it. Run with `hatch run engines:accelerate`.

What has another signature on purpose is listed with its reason.
"""

from __future__ import annotations

import importlib
import inspect
import types
from pathlib import Path

import pytest

from accel_cli import as_accelerate
from accel_state._lazy import load, names_of_stub

pytest.importorskip("accelerate", reason="hatch run engines:accelerate installs it")

STUBS = Path(as_accelerate.__file__).parent / "path"
PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

MADE_HERE = "only an Accelerator makes it; without arguments it returns the newest"
ENGINE = "Megatron's own objects: Megatron-LM's internals are not answered"
FIELDS = "fields are keywords, as in a file; values are checked"
UNSET = "None: the launcher's setting, or all ranks"
DECORATED = "a decorator hides the real signature there"
DEVIATIONS = {
    "AcceleratorState": MADE_HERE,
    "BaseConfig": FIELDS,
    "ClusterConfig": FIELDS,
    "SageMakerConfig": FIELDS,
    "DataLoaderAdapter": "the base class of prepared loaders, which takes what they take",
    "MegatronEngine": ENGINE,
    "MegatronLMDummyDataLoader": ENGINE,
    "MegatronLMPlugin": ENGINE,
    "Accelerator.log": DECORATED,
    "Accelerator.init_trackers": DECORATED,
    "Accelerator.trigger_sync_in_backward": "each Accelerator has its own windows, so it is a method",
    "Accelerator.on_main_process.function": "there is no use without a function",
    "Accelerator.on_local_main_process.function": "there is no use without a function",
    "DataLoaderDispatcher.adjust_state_dict_for_prefetch": "states count what was yielded",
    "DataLoaderShard.adjust_state_dict_for_prefetch": "states count what was yielded",
    "SkipDataLoader.adjust_state_dict_for_prefetch": "states count what was yielded",
    "DeepSpeedSchedulerWrapper.print_lr": "removed from PyTorch",
    "load_checkpoint_and_dispatch.strict": "missing names and other shapes are errors by default",
    "load_checkpoint_in_model.strict": "missing names and other shapes are errors by default",
    "notebook_launcher.use_port": "a free port is chosen",
    "write_basic_config.save_location": "the file of this library",
    "DistributedDataParallelKwargs.gradient_as_bucket_view": "it saves a copy of the gradients",
    "GradientAccumulationPlugin.adjust_scheduler": "it has an effect here",
    "TorchTensorParallelPlugin.tp_size": UNSET,
}
"""By class, function, method, or parameter."""


def pairs():
    """Every class and function of Accelerate that is answered: its name, theirs and ours, each once."""
    seen = set()
    for stub in sorted(STUBS.rglob("*.pyi")):
        module = ".".join(stub.relative_to(STUBS).with_suffix("").parts).removesuffix(".__init__")
        try:
            real = importlib.import_module(module)
        except ImportError:
            continue
        for name, home in names_of_stub(stub.read_text(encoding="utf-8")).items():
            theirs = getattr(real, name, None)
            if home == module or not getattr(theirs, "__module__", "").startswith("accelerate"):
                continue
            key = (theirs.__module__, name)
            if callable(theirs) and key not in seen:
                seen.add(key)
                yield name, theirs, load(home, name)


def members(kind):
    """The public methods and properties that Accelerate's own classes define."""
    for name in dir(kind):
        home = next((base for base in kind.__mro__ if name in vars(base)), object)
        if not name.startswith("_") and home.__module__.startswith("accelerate"):
            value = inspect.getattr_static(kind, name)
            if isinstance(value, types.FunctionType | staticmethod | classmethod | property):
                yield name


def signature(item):
    try:
        return list(inspect.signature(item).parameters.values())
    except (TypeError, ValueError):
        return None


def differences(name, theirs, ours):
    there, here = signature(theirs), signature(ours)
    if there is None or here is None:
        return
    positions = [[p.name for p in each if p.kind in PLACES] for each in (there, here)]
    if positions[0] != positions[1][: len(positions[0])]:
        yield name, f"positions are {positions[1]}, there {positions[0]}"
        return
    by_name = {p.name: p for p in here}
    for parameter in there:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            if parameter.kind not in {p.kind for p in here}:
                yield name, f"does not take {parameter}"
        elif parameter.name not in by_name:
            yield name, f"has no {parameter.name}"
        elif repr(by_name[parameter.name].default) != repr(parameter.default):
            plain = parameter.default is None or isinstance(
                parameter.default, bool | int | float | str | tuple
            )
            if plain or by_name[parameter.name].default is inspect.Parameter.empty:
                yield (
                    f"{name}.{parameter.name}",
                    f"is {by_name[parameter.name].default!r}, there {parameter.default!r}",
                )


def all_differences():
    for name, theirs, ours in pairs():
        found = list(differences(name, theirs, ours))
        yield from found
        if isinstance(theirs, type) and name not in DEVIATIONS and isinstance(ours, type):
            for member in members(theirs):
                if not hasattr(ours, member):
                    if not _delegated(name, member):
                        yield f"{name}.{member}", "is missing"
                elif callable(getattr(theirs, member)):
                    yield from differences(f"{name}.{member}", getattr(theirs, member), getattr(ours, member))


def _delegated(name, member):
    return name == "AcceleratorState"  # attributes of `PartialState`, by `__getattr__`


def test_every_signature_is_accelerates():
    found = dict(all_differences())
    wrong = {
        name: what
        for name, what in found.items()
        if name not in DEVIATIONS and name.split(".")[0] not in DEVIATIONS
    }
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
    assert sum(1 for _ in pairs()) > 300


def test_deviations_exist():
    found = dict(all_differences())
    used = {*found, *(name.split(".")[0] for name in found)}
    unused = DEVIATIONS.keys() - used - {"MegatronLMPlugin", "MegatronLMDummyDataLoader", "AcceleratorState"}
    assert not unused, "their methods differ, which is not asked of a class that is listed"
