"""Hooks that run before and after a module's ``forward``, and functions that add and remove them.

A hooked module has its hook as ``_hf_hook`` and its original ``forward`` as ``_old_forward``: other libraries read
these attributes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from accel_ckpt.modules.tensors import check_is_module

__all__ = [
    "MOVES",
    "ModelHook",
    "SequentialHook",
    "add_hook_to_module",
    "computes_weight_early",
    "forwards_of",
    "hook_of",
    "outside_graphs",
    "put_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "remove_one_hook",
]

P = ParamSpec("P")
R = TypeVar("R")

# Methods that move a whole module: dispatching overrides them on the instance, and removing hooks restores them. The
# last is what they call on submodules.
MOVES = (
    "to",
    "cpu",
    "cuda",
    "npu",
    "xpu",
    "hpu",
    "mlu",
    "sdaa",
    "musa",
    "neuron",
    "ipu",
    "to_empty",
    "_apply",
)


class ModelHook:
    """Base class of hooks that run around the ``forward`` of a module; by itself it does nothing.

    Unlike PyTorch's own hooks it sees and may change keyword arguments, and is called when ``forward`` fails.

    Attributes:
        no_grad: run ``forward`` under ``torch.no_grad()``.
    """

    no_grad: bool = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called first, when the hook is added to ``module``; returns the module."""
        return module

    def pre_forward(
        self, module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before ``forward`` with its arguments; returns the arguments to pass on.

        A hook that raises here must undo what it did first: nothing else is called for this forward.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after ``forward`` with its output; returns the output for the caller."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Called instead of ``post_forward`` when ``forward`` raised, while the exception propagates."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed from ``module``; returns the module."""
        return module


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function out of the graphs of ``torch.compile``, without importing the compiler unless it is used."""
    excluded: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal excluded
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if excluded is None:
            excluded = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return excluded(*args, **kwargs)

    # The compiler limits recompilations per code object, so each decorated function gets its own.
    own: Any = call
    own.__code__ = own.__code__.replace(co_name=own.__name__)
    return call


class SequentialHook(ModelHook):
    """Several hooks as one. They run in the order given, before ``forward`` and after it.

    Args:
        *hooks: in order.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        for hook in hooks:
            _check_hook(hook)
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    @property
    def execution_device(self) -> Any:
        """The execution device of the first hook that has one; pipelines of diffusers and transformers read it here."""
        named = (getattr(hook, "execution_device", None) for hook in self.hooks)
        return next((device for device in named if device is not None), None)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Initialise each hook; if one fails, the previous ones are detached."""
        for position, hook in enumerate(self.hooks):
            try:
                module = _begun(hook, module)
            except BaseException:
                for begun in reversed(self.hooks[:position]):
                    begun.detach_hook(module)
                raise
        return module

    @outside_graphs
    def pre_forward(
        self, module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments from hook to hook."""
        for position, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                _notify_failure(self.hooks[:position], module)
                raise
        return args, kwargs

    @outside_graphs
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the output from hook to hook."""
        for position, hook in enumerate(self.hooks):
            try:
                output = hook.post_forward(module, output)
            except BaseException:
                _notify_failure(self.hooks[position + 1 :], module)
                raise
        return output

    @outside_graphs
    def forward_failed(self, module: nn.Module) -> None:
        """Call ``forward_failed`` of each hook."""
        _notify_failure(self.hooks, module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detach each hook, the last one first, because it saw the module as the others had changed it."""
        for hook in reversed(self.hooks):
            module = hook.detach_hook(module)
        return module


def _notify_failure(hooks: tuple[ModelHook, ...], module: nn.Module) -> None:
    for hook in hooks:
        hook.forward_failed(module)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Run a hook around the ``forward`` of a module; the signature of ``forward`` stays.

    Args:
        module: changed in place. Its copies and pickles contain copies of the hook.
        hook: the hook. Its ``init_hook`` is called now.
        append: run it after the existing hook, instead of replacing that one.

    Returns:
        The module.

    Raises:
        TypeError: ``module`` is not a module, ``hook`` is not a hook of this library, or its ``init_hook`` did not
            return a module.
    """
    check_is_module(module)
    _check_hook(hook)
    present = hook_of(module)
    if present is not None and append:
        combined = SequentialHook(present, hook)
        hooked = _begun(hook, module)
        hook = combined
    else:
        if present is not None:
            present.detach_hook(module)
        try:
            hooked = _begun(hook, module)
        except BaseException:
            if present is not None:
                present.init_hook(module)
            raise
    put_hook(hooked, hook)
    return hooked


def _begun(hook: ModelHook, module: nn.Module) -> nn.Module:
    hooked: Any = hook.init_hook(module)
    if not isinstance(hooked, nn.Module):
        raise TypeError(
            f"init_hook of {type(hook).__qualname__} returned {hooked!r}; it must return the module that the hook is "
            "added to, usually the one it was given"
        )
    return hooked


# These attributes are read from the module's own dictionary: wrappers, such as those of torch.compile or of adapters,
# look attributes up in the module that they wrap, and some set them there.


def hook_of(module: nn.Module) -> Any:
    """The hook on this module itself, or None."""
    return vars(module).get("_hf_hook")


def forwards_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The wrappers around the ``forward`` of a module, outermost first."""
    forward = vars(module).get("forward")
    while forward is not None:
        yield forward
        forward = getattr(forward, "__wrapped__", None)


def computes_weight_early(module: nn.Module) -> str | None:
    """The class name of a PyTorch hook that computes a weight of a module from others before any wrapper of
    ``forward``.

    These are the older implementations of weight normalisation and pruning; parametrizations compute on access.
    """
    from torch.nn.utils.prune import BasePruningMethod
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    kinds = BasePruningMethod, SpectralNorm, WeightNorm
    hooks = module._forward_pre_hooks.values()
    return next((type(hook).__name__ for hook in hooks if isinstance(hook, kinds)), None)


def put_hook(module: nn.Module, hook: ModelHook | None) -> None:
    """Wrap ``forward`` with an initialised hook, or with none; the existing hook is replaced without being detached.

    Other wrappers around the hooked ``forward`` stay.
    """
    attributes = vars(module)
    present = attributes.pop("_hf_hook", None)
    if hook is not None:
        attributes["_hf_hook"] = hook
        if "_old_forward" not in attributes:
            attributes["_old_forward"] = _own_forward(module)
        elif present is None or isinstance(present, ModelHook):
            return  # the hooked forward looks up its hook at each call
        hooked = functools.partial(_hooked_forward, module)
        attributes["forward"] = functools.update_wrapper(hooked, attributes["_old_forward"])
    elif "_old_forward" in attributes and not _is_wrapped(module):
        old = attributes.pop("_old_forward")
        if _is_of_class(module, old):
            attributes.pop("forward", None)
        else:
            attributes["forward"] = old


def _is_wrapped(module: nn.Module) -> bool:
    """Whether another wrapper around the hooked ``forward`` of a module still calls it."""
    outer = list(forwards_of(module))[1:]
    return any(isinstance(each, functools.partial) and each.func is _hooked_forward for each in outer)


def remove_one_hook(module: nn.Module, hook: ModelHook) -> None:
    """Remove one hook from a module, if the module has it, and keep the others."""
    present = hook_of(module)
    left = _all_but(hook, present)
    if left is not present:
        hook.detach_hook(module)
        put_hook(module, left)


def _all_but(hook: ModelHook, present: Any) -> Any:
    if present is hook:
        return None
    if not isinstance(present, SequentialHook):
        return present
    left = [_all_but(hook, each) for each in present.hooks]
    if all(new is old for new, old in zip(left, present.hooks, strict=True)):
        return present
    left = [each for each in left if each is not None]
    return SequentialHook(*left) if len(left) > 1 else next(iter(left), None)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook from a module, and restore its former ``forward``.

    Overrides of ``to``, ``cuda`` and similar methods that dispatching added are removed too.

    Args:
        module: changed in place; one without a hook stays as it is.
        recurse: do the same for its submodules.

    Returns:
        The module.
    """
    for each in list(module.modules()) if recurse else [module]:
        _remove_hook(each)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks from a module and all its submodules."""
    remove_hook_from_module(module, recurse=True)


def _remove_hook(module: nn.Module) -> None:
    hook = hook_of(module)
    if hook is not None:
        hook.detach_hook(module)
    put_hook(module, None)
    for name in MOVES:
        vars(module).pop(name, None)


def _hooked_forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    hook = module.__dict__.get(
        "_hf_hook"
    )  # not vars(), which torch.compile does not support before torch 2.11
    if hook is None:  # the hook was removed while a wrapper around it stayed
        return module._old_forward(*args, **kwargs)
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = module._old_forward(*args, **kwargs)
        else:
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        hook.forward_failed(module)
        raise
    return hook.post_forward(module, output)


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    """The ``forward`` that a hook wraps."""
    if isinstance(module, torch.fx.GraphModule) and "forward" not in vars(module):
        # It changes whenever the graph is recompiled, so it is looked up at each call.
        return functools.update_wrapper(functools.partial(_forward_of_class, module), module.forward)
    return module.forward


def _forward_of_class(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _is_of_class(module: nn.Module, forward: Any) -> bool:
    """Whether a ``forward`` is that of the module's class."""
    if isinstance(forward, functools.partial):
        return forward.func is _forward_of_class
    own = getattr(forward, "__self__", None) is module
    return own and getattr(forward, "__func__", None) is type(module).forward


def _check_hook(hook: Any) -> None:
    if not isinstance(hook, ModelHook):
        raise TypeError(
            f"a hook must be an accel_bigmodel.ModelHook, got {type(hook).__module__}.{type(hook).__qualname__}; "
            "derive its class from ModelHook; remove hooks of another library with that library first"
        )
