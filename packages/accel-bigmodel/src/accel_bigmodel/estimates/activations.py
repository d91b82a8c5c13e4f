"""Estimates the memory that a forward pass keeps for the backward pass, without running on real tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from accel_bigmodel.dispatch import is_dispatched
from accel_bigmodel.errors import EstimateError
from accel_ckpt.modules.tensors import check_is_module

__all__ = ["GroupedProducts", "estimate_activations"]


def estimate_activations(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    autocast: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> int:
    """Estimate the activation memory of training: bytes that autograd keeps from a forward until its backward.

    Exact for eager execution, as far as PyTorch knows the shapes and dtypes that its kernels save. (It assumes 16 bits
    for the statistics that batch norm saves under autocast, which have 32. It does not know the workspaces of recurrent
    layers: of LSTMs on the CPU, and of all in cuDNN. A model that checks whether it is being traced, as those of
    transformers do before omitting an attention mask, may keep a little less.)

    The forward runs in training mode on tensors without values, and the sizes of all storages that autograd saves are
    added up, each storage once. Weights and inputs are not counted; copies of weights made by autocast are.

    Args:
        model: on any device, meta included; not changed.
        args: inputs; only shapes, dtypes and ``requires_grad`` matter. A tensor that is passed twice counts once.
        kwargs: keyword inputs.
        autocast: the autocast dtype of the training.
        device: type of the device that will run it, because kernels save different tensors on different devices:
            ``"cpu"``, or a type that this build of PyTorch supports.

    Raises:
        EstimateError: the model is dispatched; the device is not supported; ``args`` is not a sequence; the forward
            needs values of tensors, or kernels whose results PyTorch cannot derive without values.
        TypeError: ``model`` is not a module.
    """
    check_is_module(model)
    if is_dispatched(model) or getattr(model, "pippy_stage", None) is not None:
        raise EstimateError(
            f"this {type(model).__name__} is dispatched or split into stages, so its forward moves weights; estimate "
            "with a model built under init_empty_weights"
        )
    given: Any = args
    if isinstance(given, Tensor):  # it would be taken as the sequence of its rows
        raise EstimateError("args is a tensor; pass a sequence of inputs, such as (tensor,)")
    where = _known(device)
    precision: AbstractContextManager[Any] = (
        torch.autocast(where.type, autocast) if autocast is not None else nullcontext()
    )
    saved: dict[int, int] = {}
    unreal: dict[int, Tensor] = {}

    def without_values(tensor: Tensor) -> Tensor:
        if id(tensor) not in unreal:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=where)
            unreal[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return unreal[id(tensor)]

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    # Under "force_eager" compiled parts run eagerly. In inference mode autograd would save nothing.
    with _restored(model), torch.inference_mode(False), torch.compiler.set_stance("force_eager"):
        model.train()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                state = {name: without_values(tensor) for name, tensor in _tensors(model)}
                inputs = pytree.tree_map_only(Tensor, without_values, (tuple(args), dict(kwargs or {})))
                with (
                    GroupedProducts(),  # type: ignore[no-untyped-call]
                    torch.enable_grad(),
                    precision,
                    torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
                ):
                    # Held until all is counted: memory that autograd saved must not be reused.
                    output = functional_call(model, state, *inputs)
                del output, mode
        except Exception as error:
            raise EstimateError(
                f"the forward of {type(model).__name__} cannot run without values: {type(error).__name__}: "
                f"{str(error).strip().partition(chr(10))[0].rstrip('.')}. Check the inputs; control flow that depends "
                "on values, and kernels whose results PyTorch cannot derive without them, have no estimate"
            ) from error
    for tensor in unreal.values():
        saved.pop(tensor.untyped_storage()._cdata, None)
    return sum(saved.values())


def _known(device: str | torch.device) -> torch.device:
    """The device, checked, because autograd aborts the process for a type that PyTorch was built without."""
    built = torch.accelerator.current_accelerator()
    kinds = {"cpu", "meta"} | ({built.type} if built is not None else set())
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in kinds:
        raise EstimateError(
            f"device is {device!r}, but this build of PyTorch can estimate only for {', '.join(sorted(kinds))}; "
            "choose one of these, or use a machine with such a device"
        )
    return found


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


class GroupedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch has no types here
    """Derives the result of grouped matrix products, as in mixtures of experts, in any dtype.

    Without values PyTorch supports only bfloat16; its kernels support other dtypes too.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        first, second, *rest = args
        product = func(first.to(torch.bfloat16), second.to(torch.bfloat16), *rest, **(kwargs or {}))
        return product.to(first.dtype)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules: some keep results of a forward, which have no values here."""
    tables = [module.__dict__ for module in model.modules()]
    tables += [value for table in tables for value in table.values() if type(value) is dict]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, was in zip(tables, before, strict=True):
            table.clear()
            table.update(was)
