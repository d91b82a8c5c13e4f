"""Detects ranks that run different blocks: an expert without tokens on one rank, a layer that one rank drops.

Each unit of a divided model is gathered and reduced by collectives of all ranks. If ranks run different units, parts of
different blocks are combined, without an error if they have the same size. So ranks agree on the order of units when
they first run it. From then on a rank compares its next unit with that order, which costs a look-up and no
communication. A rank that sees a difference asks the others before it starts a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ckpt.parts import fsdp_groups, fsdp_modules
from accel_state.errors import CollectiveMismatchError
from accel_state.operations.collectives import gather_object
from accel_state.world.process import PartialState
from accel_train.strategies.gradients import local_part

__all__ = ["SameBlocks"]

_END = "the end of it"
#: Backward passes after which ranks compare which parameters have a gradient, and go on if any had none.
_FIRST_BACKWARDS = 8


class _Order:
    """The units that came after each other, on all ranks alike, in one direction of one model.

    Args:
        what: "forward" or "backward", for messages.
        kind: class of the model.
    """

    def __init__(self, what: str, kind: str) -> None:
        self._what = what
        self._kind = kind
        self._next: dict[Hashable, set[str]] = {}
        self._place: tuple[Hashable, int, str] = (None, 0, "")

    @property
    def begun(self) -> bool:
        return self._place[1] > 0

    def begin(self, mode: Hashable = None) -> None:
        self._place = (mode, 0, "")

    def come_to(self, unit: str) -> None:
        """This rank is about to run a unit.

        Raises:
            CollectiveMismatchError: other ranks run another one.
        """
        known = self._next.get(self._place)
        if known is None or known != {unit}:
            self._agree(unit, known)
        mode, count, _ = self._place
        self._place = (mode, count + 1, unit)

    def _agree(self, unit: str, known: set[str] | None) -> None:
        # Where several units came before, all ranks get here. Else the others may be in a collective of their own.
        if known is None or len(known) == 1:
            there = f"to {next(iter(known))}" if known else "do not come there"
            try:
                alone = PartialState().main_process_alone(f"{self._what} of {unit}")
            except CollectiveMismatchError as error:
                self._refuse(f"this rank comes to {unit}, and others {there}", error)
            if alone:
                self._refuse(f"this rank comes to {unit}, and others {there}")
        units: list[str] = gather_object([unit])
        if len(set(units)) > 1:
            self._refuse(", ".join(f"rank {rank} comes to {other}" for rank, other in enumerate(units)))
        self._next.setdefault(self._place, set()).add(unit)

    def _refuse(self, who: str, cause: Exception | None = None) -> NoReturn:
        after = self._place[2] or "its beginning"
        self.begin()
        raise CollectiveMismatchError(
            f"Ranks run different blocks in the {self._what} of {self._kind}: after {after} {who}. Each block is a "
            "unit that FSDP gathers with all ranks, so all must call the model, and run the same blocks in it. An "
            "expert without tokens on one rank, a layer that one rank drops, or a call under "
            "`if accelerator.is_main_process:` are not the same. Run every block on every rank (with no rows, say), "
            "draw what is dropped alike, or make one unit of what can be left out: FullyShardedDataParallelPlugin("
            "transformer_cls_names_to_wrap=[the class around these blocks]), or auto_wrap_policy='NO_WRAP'. To call "
            "the model on one rank alone: accelerator.whole_parameters(model)."
        ) from cause


class SameBlocks:
    """Watches the units of one divided model.

    Args:
        model: the divided model, without wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        kind = type(model).__name__.removeprefix("FSDP")
        self._forward = _Order("forward", kind)
        self._backward = _Order("backward", kind)
        self._kind = kind
        self._in_forward = False
        self._in_backward = False
        self._groups: list[tuple[str, Any]] = []
        #: The engine's parameters that had no gradient on this rank in this backward, by `id`, and whether an earlier
        #: backward has left them one.
        self._filled: dict[int, tuple[Any, bool]] = {}
        self._reduced: set[int] = (
            set()
        )  # those that had one; after several forwards a unit is reduced several times
        self._compares = _FIRST_BACKWARDS
        names = {id(module): repr(name) for name, module in model.named_modules()}
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)
        for unit in fsdp_modules(model):
            name = names[id(unit)] if unit is not model else "the outermost unit"
            if unit is not model:
                unit.register_forward_pre_hook(self._entering(name), prepend=True)
            for group in fsdp_groups(unit):
                self._groups.append((name, group))
                self._watch(name, group)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            if self._in_backward:
                self._forget_gradients()
            if self._in_forward or self._in_backward:
                self._meet_again()
            self._in_forward = True
            self._forward.begin((module.training, torch.is_grad_enabled()))
            self._backward.begin()
            self.settle()

    def _meet_again(self) -> None:
        """An error ended the pass before, and the script went on; so must all ranks, or they are in other blocks."""
        # Scripts look for "out of memory" in the errors that they catch, so the message does not have it.
        PartialState().all_take_part(
            f"the forward of {self._kind} after one that an error ended",
            "On this rank an error (such as OutOfMemoryError) ended the forward or the backward before, and the script "
            "caught it and went on. The other ranks did not stop there: they wait in a block that this rank has left. "
            "Under FSDP go on only where all ranks get the error; else let it end the script.",
        )
        self._in_forward = self._in_backward = False

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._in_forward:
            self._in_forward = False
            self._forward.come_to(_END)

    def _entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            if not torch.compiler.is_compiling() and self._in_forward:  # not where backward computes it again
                self._forward.come_to(name)

        return enter

    def _watch(self, name: str, group: Any) -> None:
        """Let every trained parameter of a unit have a gradient when it is reduced: what a rank did not use is zero."""
        reduce = group.post_backward

        def post_backward(*unused: Any) -> None:
            if group._training_state.name == "PRE_BACKWARD":
                self._backward.come_to(name)
                if group.reduce_grads:
                    self._fill(group)
            reduce(*unused)

        group.post_backward = post_backward

    def _fill(self, group: Any) -> None:
        """Give zeros to what has no gradient; negative ones, which remain negative only if all ranks give them."""
        accumulated = any(p.unsharded_accumulated_grad is not None for p in group.fsdp_params)
        for parameter in group.fsdp_params:
            whole: Tensor | None = getattr(parameter, "_unsharded_param", None)
            if whole is None or not parameter.sharded_param.requires_grad:
                continue
            if parameter.unsharded_accumulated_grad is not None:
                self._reduced.add(id(parameter))
                continue
            if whole.grad is not None:
                self._reduced.add(id(parameter))
            else:
                had = parameter.sharded_param.grad is not None
                whole.grad = torch.full_like(whole, -0.0)
                self._filled.setdefault(id(parameter), (parameter, had))
            if accumulated and hasattr(parameter, "to_accumulated_grad_if_needed"):  # until PyTorch 2.14
                parameter.to_accumulated_grad_if_needed()  # FSDP reduces gradients of one dtype only

    def _forget_gradients(self) -> None:
        self._filled.clear()
        self._reduced.clear()

    def _unused(self) -> list[tuple[Any, bool]]:
        """What had no gradient on this rank in any reduction of this backward."""
        return [found for number, found in self._filled.items() if number not in self._reduced]

    def before_backward(self) -> None:
        """Called when a backward begins; if no ``after_backward`` follows, an error ended it."""
        self._in_backward = True

    def after_backward(self, *, reduced: bool) -> None:
        """Called when a backward has ended; parameters that no rank has used get no gradient.

        Raises:
            CollectiveMismatchError: other ranks continue with further blocks.
        """
        self._in_backward = False
        if not self._backward.begun:
            return
        self._backward.come_to(_END)
        self._backward.begin()
        if not reduced:
            self._forget_gradients()
        elif self._compares:
            unused = self._unused()
            self._forget_gradients()
            self._drop_unused(unused)
        else:
            self.settle()

    def settle(self) -> None:
        """Drop gradients of parameters that no rank has used; also after `loss.backward()`."""
        if not self._filled:
            self._reduced.clear()
            return
        for parameter, had in self._unused():
            if not had and _is_negative_zero(parameter.sharded_param.grad):
                parameter.sharded_param.grad = None
        self._forget_gradients()

    def _drop_unused(self, unused: list[tuple[Any, bool]]) -> None:
        """Leave no gradient where no rank has one; a collective."""
        before = {id(parameter): had for parameter, had in unused}
        trained = list(self._trained())
        present = torch.tensor([float(id(p) not in before) for p in trained])
        device = trained[0].sharded_param.device if trained else torch.device("cpu")
        everywhere = torch.stack([present, -present]).to(device)
        dist.all_reduce(everywhere, dist.ReduceOp.MAX)
        used, none_missing = everywhere.tolist()
        for parameter, some, all_have in zip(trained, used, none_missing, strict=True):
            if all_have == 0:  # a rank had no gradient
                self._compares = _FIRST_BACKWARDS + 1
            if not some and not before[id(parameter)]:
                parameter.sharded_param.grad = None
        if self._compares <= _FIRST_BACKWARDS:
            self._compares -= 1

    def _trained(self) -> Iterator[Any]:
        for _, group in self._groups:
            yield from (p for p in group.fsdp_params if p.sharded_param.requires_grad)


def _is_negative_zero(gradient: Any) -> bool:
    """Whether this rank's part of a gradient is the sum of the zeros that all ranks gave; empty parts tell nothing."""
    if gradient is None:
        return False
    values = local_part(gradient)
    return values.numel() > 0 and bool(((values == 0) & values.signbit()).all())
