"""Recording the first steps of a training on each rank, for a comparison with those of one process.

``accel prove`` puts the path of a job into the environment. Each rank writes ``rank-<n>.json`` and
``rank-<n>.safetensors`` beside it, and ends after the steps of the job.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.parts import gathered, is_sharded
from accel_state.seeding import set_seed
from accel_train.data.active_loaders import ActiveLoaders
from accel_train.loop.observers import StepObserver
from accel_train.proof.noise import RowNoise

if TYPE_CHECKING:
    from accel_train.setup.prepared import Prepared

__all__ = ["ProofEnd", "StepRecorder"]

# Steps beyond the wanted ones that an optimizer may take while another one has not taken its own.
_MOST = 16
# Bytes of the hash of a row.
_HASH = 8


class ProofEnd(SystemExit):
    """The steps of the job are recorded; ends the script like `sys.exit()`."""


class StepRecorder(StepObserver):
    """Records the steps of one `Accelerator`.

    Args:
        job: path of the job, a JSON object: `accel_cli.proof.runs.ProofJob` says what its fields mean.

    Attributes:
        ledger: for its loaders.
        seeds: of the samples in the batch of so many rows that a loader of this rank has returned last.
    """

    def __init__(self, job: Path) -> None:
        self._folder = job.parent
        self._job = json.loads(job.read_text())
        self._wanted, self._probe, self._saves = int(self._job["steps"]), str(self._job["probe"]), 0
        self._prepared: Prepared | None = None
        self._taken: dict[int, int] = {}
        self._steps: list[dict[str, Any]] = []
        self._tensors: dict[str, Tensor] = {}
        self._now: dict[str, list[Any]] = defaultdict(list)
        self._places: dict[str, str] = {}
        self._own: dict[int, list[Tensor]] = {}  # of each parameter, for each backward pass
        self._dtypes: set[str] = set()  # of losses
        self._depth = 0
        self._read: list[str] = []  # rows that no forward with gradients has had yet
        self._evaluates = False  # a forward without gradients has had them
        self.seeds: dict[int, list[int]] = {}
        self._seed = 0  # what the script has set
        self.ledger = _Batches(self)
        self.noise = RowNoise(self.seeds, double=self._job["double"])

    def follow(self, prepared: Prepared) -> None:
        """Record what is prepared from now on."""
        self._prepared, self._saves = prepared, prepared.project.iteration
        loaders = prepared.options.loaders  # ranks read the same samples as one process
        prepared.options.loaders = replace(loaders, split_batches=self._job["split"])
        if self._job["window"]:
            prepared.accumulator.num_steps = self._job["window"]
        if self._probe == "swapped":
            batch, last = prepared.plan.strategy.batch, prepared.plan.strategy.batch.size - 1
            indexes = tuple(last - index for index in batch.index_of)
            prepared.plan.strategy.batch = replace(batch, index=last - batch.index, index_of=indexes)
        atexit.register(self._write_what_there_is)
        register_module_forward_pre_hook(self._forward_begins)
        register_module_forward_hook(self._forward_ends, always_call=True)
        self.noise.__enter__()  # until the process ends, with the last step of the job

    @property
    def place(self) -> tuple[int, int]:
        """The index of this rank's samples, and how many ranks have others."""
        if self._prepared is None:
            return 0, 1
        batch = self._prepared.plan.strategy.batch
        return batch.index, batch.size

    def read(self, batch: Any) -> None:
        """A loader returns a batch."""
        if self._evaluates:
            self._now["evaluated"] += self._read
            self._evaluates, self._read = False, []
        hashes = _hashes(batch)
        self._seed = self._seed or torch.initial_seed()
        self.seeds[len(hashes)] = [int(one, 16) for one in hashes]
        self._read += hashes
        # Ranks may have other seeds, and a resumed run has not drawn what was drawn before.
        set_seed((self._job["first"] + len(self._steps)) << 16 | len(self._now["losses"]))

    # Forward

    def _forward_begins(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._evaluates = not torch.is_grad_enabled()  # a forward with gradients may follow that of a teacher
        if self._evaluates:
            return
        self._now["rows"] += self._read
        self._read = []
        if module.training:
            if not self.seeds:  # the script has loaders that are not prepared
                self._now["rows"] += _hashes(inputs)
            self._watch_own_gradients()

    def _forward_ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def _watch_own_gradients(self) -> None:
        """Keep the gradients of this rank's own samples, before ranks average them."""
        here = self._prepared
        assert here is not None, "a model is called after the accelerator was made"
        if here.plan.strategy.name not in ("single", "ddp"):
            return
        for model in here.prepared_models:
            for parameter in here.plan.strategy.plain(model).parameters():
                if parameter.requires_grad and id(parameter) not in self._own:
                    self._own[id(parameter)] = []
                    parameter.register_hook(self._noting(parameter))  # type: ignore[no-untyped-call]

    def _noting(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        own = self._own[id(parameter)]

        def note(gradient: Tensor) -> None:
            if parameter.grad is None or not parameter.grad.any():  # the script has set it to zero
                own.clear()
            own.append(gradient.detach().cpu().clone())

        return note

    # Steps

    def before_backward(self, loss: Any, num_items: int | Tensor | None, kwargs: Mapping[str, Any]) -> None:
        """A loss, and how many items it is the sum over."""
        value = float(loss.detach().double()) if isinstance(loss, Tensor) and loss.numel() == 1 else None
        self._now["losses"].append([value, None if num_items is None else float(num_items)])
        if isinstance(loss, Tensor):
            self._dtypes.add(str(loss.dtype))
        self._note_place("losses")
        if self._probe == "terms" and value is not None and not self._steps:
            self._note_terms(loss)

    def _note_terms(self, loss: Tensor) -> None:
        inputs = [(name, parameter) for name, parameter in self._named() if parameter.requires_grad]
        parameters = [parameter for _, parameter in inputs]
        for number, edge in enumerate(_summands(get_gradient_edge(loss))):
            found = torch.autograd.grad(edge, parameters, retain_graph=True, materialize_grads=True)
            for (name, _), gradient in zip(inputs, found, strict=True):
                key = f"0/term {number}/{name}"
                self._tensors[key] = gradient.cpu() + self._tensors.get(key, 0)

    def clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """A norm."""
        self._now["norms"].append(float(gathered(norm) if is_sharded(norm) else norm))
        self._note_place("norms")

    def logged(self, values: Mapping[str, Any]) -> None:
        """Values that the script logs."""
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float | np.generic)
            or (isinstance(value, Tensor) and value.numel() == 1)
        }
        self._now["metrics"].append(numbers)
        self._note_place("metrics")

    def _note_place(self, kind: str) -> None:
        """The line of the script that calls the `Accelerator`."""
        frame = inspect.currentframe()
        while frame is not None and "/accel_train/" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            self._places[kind] = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients that the optimizer steps with."""
        if self._taken.get(id(optimizer), 0) >= self._wanted and self._is_done():
            raise ProofEnd(0)
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        step = f"{len(self._steps)}"
        for name, parameter in self._named():
            if id(parameter) in own and parameter.grad is not None:
                self._tensors[f"{step}/gradient/{name}"] = _whole(parameter.grad)
                for number, gradient in enumerate(self._own.get(id(parameter), ())):
                    self._tensors[f"{step}/own {number}/{name}"] = (
                        gradient.clone()
                    )  # a later step may have it, too

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The weights that the step has left; the end, if it was the last."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._named():
            if id(parameter) in own:
                self._tensors[f"{len(self._steps)}/weight/{name}"] = _whole(parameter)
        assert self._prepared is not None, "it has prepared the optimizer"
        if self.noise.dropout:  # which is left out; an evaluation on one rank may leave its mode there
            modes = [float(model.training) for model in self._prepared.prepared_models]
            self._tensors[f"{len(self._steps)}/weight/training mode"] = torch.tensor(modes)
        rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        self._steps.append({"rates": rates, "places": self._places, **self._now})
        self._now, self._places = defaultdict(list), {}
        self._taken[id(optimizer)] = self._taken.get(id(optimizer), 0) + 1
        self._end_if_saved()
        if self._is_done():
            raise ProofEnd(0)

    def _end_if_saved(self) -> None:
        """Die like a process that is killed, if a state was saved before this step."""
        here = self._prepared
        assert here is not None, "a step was taken"
        if self._job["kills"] and here.project.iteration > self._saves:
            here.saver.drain()
            if here.process.process_index == 0:
                (self._folder / "saved.json").write_text(json.dumps(len(self._steps) - 1))
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_done(self) -> bool:
        assert self._prepared is not None, "asked after it was made"
        taken = [self._taken.get(id(optimizer), 0) for optimizer in self._prepared.optimizers]
        return bool(taken) and (min(taken) >= self._wanted or max(taken) >= self._wanted + _MOST)

    def _write_what_there_is(self) -> None:
        """At the end of the process, which may have taken fewer steps."""
        if self._steps:
            if not self._is_done():  # such as an evaluation after the last epoch
                self._now["evaluated"] += self._read
                for kind, values in self._now.items():
                    self._steps[-1][kind] = [*self._steps[-1].get(kind, []), *values]
                self._steps[-1]["places"] |= self._places
            self.write()

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of all models by name, in an order that is the same on all ranks."""
        here = self._prepared
        assert here is not None, "asked after it was made"
        found: dict[int, tuple[str, nn.Parameter]] = {}  # tied ones have their first name
        for number, model in enumerate(here.prepared_models):
            mark = f"model {number}." if len(here.prepared_models) > 1 else ""
            for name, parameter in NamedModel(here.plan.strategy.plain(model)).parameters().items():
                found.setdefault(id(parameter), (mark + name, parameter))
        return list(found.values())

    def write(self) -> None:
        """Write what was recorded."""
        here = self._prepared
        assert here is not None, "written after it was made"
        rank, (index, size) = here.process.process_index, self.place
        modules = [
            module for model in here.prepared_models for module in here.plan.strategy.plain(model).modules()
        ]
        norms = [module for module in modules if isinstance(module, _BatchNorm)]
        dtypes = {str(parameter.dtype) for _, parameter in self._named()} | self._dtypes
        seed = self._seed or torch.initial_seed()
        about = {
            "index": index,
            "size": size,
            "loss_index": here.plan.strategy.loss.index,
            "divides_sequences": any(here.plan.mesh.degrees[name] > 1 for name in ("cp", "sp")),
            "reads": bool(self.seeds),
            "schedules": bool(here.schedulers),
            "steps": self._steps,
            "noise": {"drawn": self.noise.drawn, "dropout": self.noise.dropout, "seed": seed},
            "normalises_batches": not all(isinstance(norm, nn.SyncBatchNorm) for norm in norms),
            "dtypes": sorted(dtypes | {str(here.plan.precision.dtype)} - {"None"}),
        }
        tensors = {name: tensor.contiguous() for name, tensor in self._tensors.items()}
        save_file(tensors, self._folder / f"rank-{rank}.safetensors")
        (self._folder / f"rank-{rank}.json").write_text(json.dumps(about))


class _Batches(ActiveLoaders):
    """The live loaders, which show the batches that they return."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def yielded(self, loader: object, batch: Any = None) -> None:
        """See the base class."""
        super().yielded(loader, batch)
        self._recorder.read(batch)


def _whole(tensor: Tensor) -> Tensor:
    """The whole values, on the CPU; a collective, if ranks hold parts."""
    return (gathered(tensor) if is_sharded(tensor) else tensor).detach().cpu().clone()


def _summands(edge: GradientEdge) -> list[GradientEdge]:
    """The terms of a loss that is a sum, of which some may be scaled."""
    kind = edge.node.name()
    inner = [GradientEdge(node, place) for node, place in edge.node.next_functions if node is not None]
    scales = len(inner) == 1 and kind.startswith(("MulBackward", "DivBackward", "ToCopyBackward"))
    if scales or kind.startswith(("AddBackward", "SubBackward")):
        return [summand for one in inner for summand in _summands(one)]
    return [edge]


def _hashes(batch: Any) -> list[str]:
    """A hash of each row of a tensor in a batch: of the largest among those with the most rows.

    Nodes identify graphs, and their edges do not, because these count the nodes before them in the batch.
    """
    waiting, tensors = [batch], []
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting = [*value.values(), *waiting]
        elif isinstance(value, list | tuple):
            waiting = [*value, *waiting]
        elif isinstance(value, Tensor) and value.dim() and not is_sharded(value):
            tensors.append(value)
    if not any(map(len, tensors)):
        return []
    chosen = max(tensors, key=lambda tensor: (tensor.shape[0], tensor.numel()))
    rows = chosen.detach().cpu().contiguous().view(torch.uint8).reshape(chosen.shape[0], -1)
    return [hashlib.blake2b(row.numpy().tobytes(), digest_size=_HASH).hexdigest() for row in rows]
