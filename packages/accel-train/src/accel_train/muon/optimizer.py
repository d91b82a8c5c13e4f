"""One optimizer: Muon for the matrices of hidden layers, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt.parts import is_sharded, parts_of
from accel_state.messages import nearest
from accel_train.errors import IncompatibleOptionsError, OptionError, PrepareError
from accel_train.muon.holders import ALONE, Holders, Team, holders_of, of_ranks, team_of
from accel_train.muon.newton_schulz import COEFFICIENTS, EPS, STEPS
from accel_train.muon.plan import matrices_of
from accel_train.muon.rounds import Rounds, Stepped
from accel_train.muon.split import Chosen, split_for_muon
from accel_train.ranks import Ranks
from accel_train.strategies.base import DividesSteps

__all__ = ["MuonWithAdamW", "muon_with_adamw"]

_MOMENTUM = "momentum_buffer"  # as torch.optim.Muon and SGD call it
_SCALES = ("match_rms_adamw", "original")
_Held = Sequence[tuple[Tensor, Mapping[str, Any]]]
"""The trained parameters of Muon, each with the options of its group."""


class MuonWithAdamW(DividesSteps, torch.optim.Optimizer):
    """Muon for parameter groups with `use_muon=True`, AdamW for the others.

    Muon (Keller Jordan, 2024) replaces each matrix's momentum by the nearest orthogonal matrix, which a Newton-Schulz
    iteration in bfloat16 approximates. On one process the two halves give what `torch.optim.Muon` and
    `torch.optim.AdamW` give. With several, each matrix is orthogonalised by one rank of those that hold it: ranks with
    copies, as under ddp, share the matrices out, and matrices that are divided among ranks (`DTensor`), as under
    fsdp2 or tensor parallelism, are brought together on one of them. Momenta are divided as their parameters are.
    `muon_with_adamw` makes the groups from a model.

    Args:
        params: parameters, or groups of them. A group's keys beside `params` and `use_muon` (default True) are options
            that differ from those below. Muon takes shapes (out, in), and (experts, out, in), where each expert is a
            matrix of its own. Its groups may also have `transposed=True`, for weights of shape (…, in, out), which
            matters to `adjust_lr_fn="original"` alone, and `flatten=True`, for convolutions: (out, …) is read as
            (out, all others). AdamW's groups take all options of `torch.optim.AdamW`.
        lr: learning rate of Muon's groups.
        weight_decay: of Muon's groups, decoupled: parameters are multiplied by 1 - lr * weight_decay.
        momentum: weight of the momentum in its average with the gradient.
        nesterov: look ahead by one gradient.
        ns_coefficients: a, b and c of the iteration.
        ns_steps: number of iterations.
        eps: lower bound of the norm that a matrix is divided by.
        adjust_lr_fn: what `lr` is multiplied with for a matrix. "match_rms_adamw": 0.2 * sqrt(max(out, in)), so that
            updates are as large as AdamW's and learning rates that suit AdamW suit Muon (Liu et al., 2025).
            "original": sqrt(max(1, out / in)), Keller Jordan's, and the default of `torch.optim.Muon`.
        adamw_lr: learning rate of AdamW's groups; None: `lr`.
        adamw_betas: AdamW's decay rates.
        adamw_eps: AdamW's term in the denominator.
        adamw_weight_decay: of AdamW's groups; None: `weight_decay`.
        divide_work: False: ranks with copies of a matrix all compute it, and send nothing.
        group: process group of the ranks with copies of all parameters, for a script that averages gradients by itself.
            An `Accelerator` that prepares the optimizer says it for its strategy.
        bucket_bytes: bound on the matrices, in bfloat16, that a rank brings together at a time; one matrix may be
            larger.

    Raises:
        OptionError: a number is out of range, or a parameter of Muon has no matrices.
        IncompatibleOptionsError: `foreach` or `fused` for a group of Muon.
        PrepareError: at a step: gradients are sparse, or an engine has flattened the parameters.
    """

    _ranks: Ranks | None
    _copies: Team
    _planned: tuple[int, ...]
    _rounds: dict[Holders, tuple[Rounds, list[int]]]

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        ns_steps: int = STEPS,
        eps: float = EPS,
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        divide_work: bool = True,
        group: Any = None,
        bucket_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "ns_steps": ns_steps,
            "eps": eps,
            "adjust_lr_fn": adjust_lr_fn,
            "transposed": False,
            "flatten": False,
        }
        _check_muon(muon)
        adamw_options: dict[str, Any] = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "betas": adamw_betas,
            "eps": adamw_eps,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
        }
        _check_rates(adamw_options, "adamw_")
        if bucket_bytes < 1:
            raise OptionError(
                f"bucket_bytes={bucket_bytes}: give the bytes of a few matrices, as in 64 * 1024 * 1024."
            )
        self._adamw = torch.optim.AdamW([nn.Parameter(torch.empty(0))], **adamw_options)
        self._options = {True: muon, False: dict(self._adamw.defaults)}
        self._divide_work = divide_work
        self._bucket_bytes = bucket_bytes
        self._given = team_of(group) if group is not None else None
        self._forget_plan()
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; `use_muon` (default True) says who steps it.

        Raises:
            OptionError: as when the optimizer is made.
            IncompatibleOptionsError: likewise.
        """
        known = {"params", "use_muon", *self._options[True], *self._options[False]}
        for name in param_group.keys() - known:  # others are the script's own, or a scheduler's
            if near := nearest(name, known, cutoff=0.8):
                raise OptionError(f"A group of MuonWithAdamW has the key {name!r}; did you mean {near[0]!r}?")
        muon = bool(param_group.setdefault("use_muon", True))
        for name, value in self._options[muon].items():
            param_group.setdefault(name, value)
        if not isinstance(param_group["params"], Tensor):
            param_group["params"] = list(param_group["params"])
        if muon:
            _check_muon(param_group)
            _check_parameters(param_group)
        else:
            _check_rates(param_group, "adamw_")
        super().add_param_group(param_group)

    def divide_among(self, replicas: Ranks | None) -> None:
        """Share the work of later steps with ranks that hold copies of what this rank holds.

        Args:
            replicas: ranks that average their gradients and take each step together; None: this rank works alone.
        """
        if replicas is not self._ranks:
            self._ranks = replicas
            self._copies = of_ranks(replicas)
            self._rounds = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients.

        Every rank that holds a parameter of Muon must call it at the same step.

        Args:
            closure: computes the loss once more, with its gradients.

        Returns:
            What `closure` returns, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices()
        self._adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adamw.state = self.state
        self._adamw.step()
        return loss

    def _step_matrices(self) -> None:
        held: _Held = [
            (parameter, group)
            for group in self.param_groups
            if group["use_muon"]
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        key = tuple(id(parameter) for parameter, _ in held)
        if key != self._planned:
            self._rounds, self._planned = {}, key
        if not self._rounds and held:
            self._plan(held)
        gradients = {id(p): _gradient(p, group) for p, group in held if p.grad is not None}
        self._average(held, gradients)
        for rounds, members in self._rounds.values():
            rounds.run([self._stepped(held[place][0], held[place][1], gradients) for place in members])

    def _plan(self, held: _Held) -> None:
        copies = (self._given or self._copies) if self._divide_work else ALONE
        members: dict[Holders, list[int]] = {}
        for place, (parameter, _) in enumerate(held):
            found = holders_of(parameter, copies)
            if not self._divide_work:
                found = Holders(found.parts, ALONE, found.device)
            members.setdefault(found, []).append(place)
        self._rounds = {
            holders: (
                Rounds(
                    holders,
                    [held[place][0] for place in places],
                    [held[place][1] for place in places],
                    self._bucket_bytes,
                ),
                places,
            )
            for holders, places in members.items()
        }

    def _average(self, held: _Held, gradients: Mapping[int, Tensor]) -> None:
        """Take the gradients into the momenta, each rank for what it holds."""
        for parameter, group in held:
            gradient = gradients.get(id(parameter))
            if gradient is None:
                continue
            state = self.state[parameter]
            if _MOMENTUM not in state:
                state[_MOMENTUM] = torch.zeros_like(gradient)
            for momentum, part in zip(_parts(state[_MOMENTUM]), _parts(gradient), strict=True):
                momentum.lerp_(part, 1 - group["momentum"])

    def _stepped(
        self, parameter: Tensor, group: Mapping[str, Any], gradients: Mapping[int, Tensor]
    ) -> Stepped:
        gradient = gradients.get(id(parameter))
        return Stepped(
            group,
            _parts(parameter.detach()),
            None if gradient is None else _parts(gradient),
            None if gradient is None else _parts(self.state[parameter][_MOMENTUM]),
        )

    def _forget_plan(self) -> None:
        self._ranks, self._copies = None, ALONE
        self._planned, self._rounds = (), {}

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("_options", "_divide_work", "_bucket_bytes")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = "_adamw" not in self.__dict__  # a copy, or unpickled: not load_state_dict()
        super().__setstate__(state)
        if fresh:
            self._given = None  # a process group belongs to its process
            self._adamw = torch.optim.AdamW([nn.Parameter(torch.empty(0))])
            self._forget_plan()
        for group in self.param_groups:
            for name, value in self._options[group["use_muon"]].items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned.

        Raises:
            OptionError: it is of an optimizer of another class, or groups are stepped otherwise than here.
        """
        saved = [group.get("use_muon") for group in state_dict["param_groups"]]
        here = [group["use_muon"] for group in self.param_groups]
        if len(saved) == len(here) and saved != here:
            raise OptionError(
                f"The state has groups with use_muon {saved}, and this optimizer has {here}. Load the state of a "
                "MuonWithAdamW that was built with the same groups."
            )
        super().load_state_dict(state_dict)


def muon_with_adamw(
    model: nn.Module,
    lr: float | Tensor = 1e-3,
    weight_decay: float = 0.1,
    *,
    include: Chosen = (),
    exclude: Chosen = (),
    convolutions: bool = False,
    decay_vectors: bool = False,
    **options: Any,
) -> MuonWithAdamW:
    """One optimizer for all trained parameters of a model: Muon for hidden matrices, AdamW for the rest.

    `print(split_for_muon(model))` shows which parameter goes where. The groups are: Muon's matrices; those that are
    stored transposed; convolutions; AdamW's matrices, which are embeddings and the output head; and its vectors.

    Args:
        model: before or after `prepare`.
        lr: learning rate of Muon's groups, and of AdamW's without `adamw_lr`.
        weight_decay: of Muon's groups, and of AdamW's matrices without `adamw_weight_decay`.
        include: names of parameters that Muon is to step against the default, as `split_for_muon` takes them.
        exclude: names of those that AdamW is to step.
        convolutions: step weights of convolutions with Muon, as matrices (out, all others).
        decay_vectors: decay norms and biases as well.
        **options: as of `MuonWithAdamW`.

    Raises:
        OptionError: the model has no matrix for Muon, or a number is out of range.
    """
    split = split_for_muon(model, include=include, exclude=exclude, convolutions=convolutions)
    if not split.muon:
        raise OptionError(
            f"Muon orthogonalises matrices of hidden layers, and none of the {len(split.adamw)} trained parameters of "
            f"{type(model).__name__} is one. Train it with torch.optim.AdamW, or name parameters in include=."
        )
    groups: list[dict[str, Any]] = []
    for transposed, flatten in ((False, False), (True, False), (False, True)):
        members = [
            item.parameter for item in split.muon if (item.transposed, item.flatten) == (transposed, flatten)
        ]
        if members:
            groups.append({"params": members, "use_muon": True, "transposed": transposed, "flatten": flatten})
    decayed = [item.parameter for item in split.adamw if decay_vectors or not item.is_vector]
    vectors = [item.parameter for item in split.adamw if not decay_vectors and item.is_vector]
    if decayed:
        groups.append({"params": decayed, "use_muon": False})
    if vectors:
        groups.append({"params": vectors, "use_muon": False, "weight_decay": 0.0})
    return MuonWithAdamW(groups, lr, weight_decay, **options)


def _parts(tensor: Tensor) -> list[Tensor]:
    return [part.tensor for part in parts_of(tensor)]


def _gradient(parameter: Any, group: Mapping[str, Any]) -> Tensor:
    """The gradient, divided as the parameter is."""
    gradient = parameter.grad
    if gradient.is_sparse:
        raise PrepareError(
            f"A parameter of shape {list(parameter.shape)} has a sparse gradient, which Muon cannot orthogonalise. "
            "Exclude it, so that AdamW steps it, and build its module with sparse=False."
        )
    if is_sharded(parameter) and gradient.placements != parameter.placements:
        return gradient.redistribute(parameter.device_mesh, parameter.placements)  # type: ignore[no-any-return]
    return gradient  # type: ignore[no-any-return]


def _check_rates(options: Mapping[str, Any], prefix: str = "") -> None:
    for name in ("lr", "weight_decay"):
        value = float(options[name])
        if not 0 <= value < math.inf:
            raise OptionError(f"{prefix}{name}={value:g}: give a number from 0.")


def _check_muon(options: Mapping[str, Any]) -> None:
    _check_rates(options)
    if not 0 <= options["momentum"] <= 1:
        raise OptionError(f"momentum={options['momentum']}: it is from 0 to 1, as in 0.95.")
    if options["adjust_lr_fn"] not in _SCALES:
        raise OptionError(
            f"adjust_lr_fn={options['adjust_lr_fn']!r} is unknown; choose one of {', '.join(map(repr, _SCALES))}."
        )
    if len(options["ns_coefficients"]) != 3:
        raise OptionError(f"ns_coefficients={options['ns_coefficients']}: give the three numbers a, b and c.")
    steps = options["ns_steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 < steps < 100:
        raise OptionError(f"ns_steps={steps!r}: give a number from 1 to 99, as in 5.")
    for name in ("foreach", "fused"):
        if options.get(name):
            raise IncompatibleOptionsError(
                f"{name}=True in a group with use_muon=True: Muon has no such kernel. Leave it out, or give it to a "
                "group with use_muon=False."
            )


def _check_parameters(group: Mapping[str, Any]) -> None:
    parameters: Iterable[Any] = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    for given in parameters:
        parameter = given[1] if isinstance(given, tuple) else given
        if not isinstance(parameter, Tensor):
            continue  # torch says what it expects
        if parameter.is_complex():
            raise OptionError(
                f"A parameter of shape {list(parameter.shape)} is of {parameter.dtype}, and Muon steps real numbers. "
                "Put it into a group with use_muon=False."
            )
        if matrices_of(tuple(parameter.shape), group["flatten"]) is None:
            raise OptionError(
                f"A parameter of shape {list(parameter.shape)} has no matrices for Muon, which takes (out, in), "
                "(experts, out, in), or with flatten=True a convolution's (out, …). Put it into a group with "
                "use_muon=False, or train with torch.optim.AdamW if the model has only such parameters."
            )
