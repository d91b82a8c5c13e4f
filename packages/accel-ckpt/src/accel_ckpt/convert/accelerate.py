"""Reading training states that Accelerate wrote.

Its folders are recognised by the names of their files; they have no manifest, and nothing marks a save as
finished. Models and the other parts are in one file each, numbered by the order of preparation; under FSDP the
models and optimizers are single files of full tensors, folders of torch's Distributed Checkpoint, or files of each
rank, under DeepSpeed the folders that its engine writes for a model and its optimizer. Optimizer states number
parameters by position, under FSDP and ZeRO they name them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accel_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StateMismatchError
from accel_ckpt.folders.find import checkpoints_from
from accel_ckpt.foreign.dcp import DcpFolder, is_dcp_folder
from accel_ckpt.foreign.deepspeed import DeepSpeedFolder, is_deepspeed_folder, tagged_folder
from accel_ckpt.foreign.pickles import unpickle
from accel_ckpt.foreign.rank_files import RankFiles
from accel_ckpt.foreign.sources import FSDP_FILE, FSDP_FOLDER
from accel_ckpt.format.manifest import MANIFEST_NAME
from accel_ckpt.format.reader import MappedShard
from accel_ckpt.locations import RemotePath
from accel_ckpt.modules.names import canonical_name, canonical_state_dict
from accel_ckpt.training.optimizers import name_positions
from accel_ckpt.training.tree_fill import fill_tree
from accel_state.constants import SCALER_NAME
from accel_state.errors import NotAvailableError

__all__ = ["AccelerateCheckpoint", "RankFile", "accelerate_checkpoints", "is_accelerate_checkpoint"]

_NUMBERED = {
    "model": re.compile(r"model(?:_(?P<n>\d+))?\.safetensors"),
    "pickled_model": re.compile(r"pytorch_model(?:_(?P<n>\d+))?\.bin"),
    "fsdp_model": FSDP_FILE,
    "fsdp_folder": FSDP_FOLDER,
    "fsdp_ranks": re.compile(r"pytorch_model_fsdp_(?P<n>\d+)_rank\d+\.bin"),
    "engine_folder": re.compile(r"pytorch_model(?:_(?P<n>\d+))?"),
    "optimizer": re.compile(r"optimizer(?:_(?P<n>\d+))?\.bin"),
    "optimizer_folder": re.compile(r"optimizer_(?P<n>\d+)"),
    "optimizer_ranks": re.compile(r"optimizer_(?P<n>\d+)_rank\d+\.bin"),
    "scheduler": re.compile(r"scheduler(?:_(?P<n>\d+))?\.bin"),
    "loader": re.compile(r"dl_state_dict(?:_(?P<n>\d+))?\.bin"),
    "custom": re.compile(r"custom_checkpoint_(?P<n>\d+)\.pkl"),
    "rank": re.compile(r"random_states_(?P<n>\d+)\.pkl"),
    "flat_shard": re.compile(r"pytorch_model_fsdp_rank(?P<n>\d+)\.bin"),
}
_FOLDERS = {"fsdp_folder", "optimizer_folder", "engine_folder"}
_RANKS = {"fsdp_ranks", "optimizer_ranks"}  # of which the path without "_rank<rank>.bin" is kept
_WEIGHTS = ("engine_folder", "fsdp_folder", "fsdp_ranks", "fsdp_model", "model")
_OPTIMIZER_OF = {"fsdp_folder": "optimizer_folder", "fsdp_ranks": "optimizer_ranks"}
_DEVICE_SEED = re.compile(r"torch_(\w+)_manual_seed")


@dataclass(frozen=True, slots=True)
class RankFile:
    """The content of ``random_states_<rank>.pkl``."""

    step: int | None
    rng: dict[str, Any]
    """Random states as `accel_state.seeding.get_rng_state` returns them, for all devices of the rank's machine."""


def _contents(folder: Path) -> dict[str, dict[int, Path]]:
    """The parts of a folder by kind and number."""
    found: dict[str, dict[int, Path]] = {kind: {} for kind in _NUMBERED}
    for path in folder.iterdir():
        for kind, pattern in _NUMBERED.items():
            match = pattern.fullmatch(path.name)
            if match is not None and path.is_dir() == (kind in _FOLDERS):
                name = path.name.partition("_rank")[0] if kind in _RANKS else path.name
                found[kind][int(match["n"] or 0)] = path.with_name(name)
    found["model"] = {**found["pickled_model"], **found["model"]}  # safetensors come first, as in Accelerate
    engines = {number: path for number, path in found["engine_folder"].items() if is_deepspeed_folder(path)}
    if not engines and (tagged := tagged_folder(folder)) is not None:
        engines = {0: tagged}  # of DeepSpeed itself
    found["engine_folder"] = engines
    return found


def is_accelerate_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a training state that Accelerate wrote, whole or not.

    It has no manifest of this library, and a file that only a training state has: a random state, an optimizer, a
    scheduler, or weights in one of the layouts of FSDP or DeepSpeed.
    """
    if isinstance(folder, RemotePath):  # those of Accelerate are read from local folders
        return False
    if not folder.is_dir() or (folder / MANIFEST_NAME).exists():
        return False
    if (folder / "latest").is_file():
        return True  # of DeepSpeed
    found = _contents(folder)
    folders = any(is_dcp_folder(path) for kind in _FOLDERS for path in found[kind].values())
    files = ("rank", "optimizer", "scheduler", "custom", "fsdp_model", "flat_shard", "engine_folder", *_RANKS)
    return folders or any(found[kind] for kind in files)


def accelerate_checkpoints(base: Path, prefix: str = "checkpoint_") -> list[Path]:
    """List the folders ``<prefix><number>`` that look like training states of Accelerate, by number.

    Whether a folder is complete cannot be checked.
    """
    if isinstance(base, RemotePath):
        return []
    return [path for path in checkpoints_from(base, 0, prefix) if is_accelerate_checkpoint(path)]


class AccelerateCheckpoint:
    """A training state that Accelerate wrote. Every access reads; tensors are on the CPU.

    Args:
        directory: the folder.
        trusted: allow unpickling custom objects and schedulers, which can run code from the files.
        opt_in: the option with which a user allows that, for messages.
        lazy: give `SavedTensor` in the place of tensors that are in files of each rank, so that this rank reads its
            part.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it has none of these layouts.
        NotAvailableError: the files of the engine that wrote it cannot be read here.
    """

    def __init__(
        self, directory: Path, *, trusted: bool = False, opt_in: str = "", lazy: bool = False
    ) -> None:
        self.directory = directory
        self._lazy = lazy
        self._trusted = trusted
        self._opt_in = opt_in
        if not directory.is_dir():
            raise CheckpointNotFoundError(f"there is no checkpoint folder {directory}")
        if (directory / "latest_checkpointed_iteration.txt").exists():
            raise NotAvailableError(
                f"{directory} was written by Megatron-LM, whose own layout is not read here; convert it with its tools "
                "to plain weights, and load them with load_checkpoint_in_model"
            )
        if not is_accelerate_checkpoint(directory):
            raise CheckpointNotFoundError(
                f"{directory} is no training state: it has neither a {MANIFEST_NAME} nor files with the names that "
                "Accelerate gives (model.safetensors with optimizer.bin, random_states_0.pkl, …)"
            )
        self._found = _contents(directory)
        self._engines = {
            number: DeepSpeedFolder(path) for number, path in self._found["engine_folder"].items()
        }
        if self._found["flat_shard"]:
            raise NotAvailableError(
                f"{directory} holds one flat file per rank ({next(iter(self._found['flat_shard'].values())).name}), "
                "which only the same number of FSDP ranks can read. Load it there, and save with "
                "SHARDED_STATE_DICT or FULL_STATE_DICT"
            )

    # What is there

    @property
    def _weights_kind(self) -> str:
        return next((kind for kind in _WEIGHTS if self._found[kind]), "model")

    def _weights(self) -> dict[int, Path]:
        return self._found[self._weights_kind]

    def _optimizers(self) -> dict[int, Path]:
        if self._engines:
            return {number: engine.path for number, engine in self._engines.items() if engine.has_optimizer}
        beside = _OPTIMIZER_OF.get(self._weights_kind, "optimizer")
        kinds = (beside, "optimizer", *_OPTIMIZER_OF.values())
        return next((self._found[kind] for kind in kinds if self._found[kind]), {})

    @property
    def kind(self) -> str:
        """The layout in words."""
        if self._engines:
            stage = max(engine.stage for engine in self._engines.values())
            return f"DeepSpeed, ZeRO stage {stage}" if stage else "DeepSpeed without ZeRO"
        if self._found["fsdp_folder"]:
            return "FSDP, sharded"
        if self._found["fsdp_ranks"] or self._found["optimizer_ranks"]:
            return "FSDP, a file of each rank"
        return "FSDP, full" if self._found["fsdp_model"] else "single process or DDP"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose random states were saved."""
        return tuple(sorted(self._found["rank"]))

    @property
    def loaders(self) -> tuple[int, ...]:
        """Loaders whose positions were saved: those that were prepared with use_stateful_dataloader."""
        return tuple(sorted(self._found["loader"]))

    def parts(self) -> dict[str, int]:
        """Numbers of models, optimizers, schedulers, scalers and custom objects in it."""
        return {
            "models": len(self._weights()),
            "optimizers": len(self._optimizers()),
            "schedulers": len(self._schedulers()),
            "scalers": int((self.directory / SCALER_NAME).is_file()),
            "custom objects": len(self._found["custom"]),
        }

    def _schedulers(self) -> dict[int, Any]:
        """Files of schedulers, or the states of those that DeepSpeed's engines stepped."""
        if self._found["scheduler"]:
            return dict(self._found["scheduler"])
        states = [engine.scheduler for engine in self._engines.values()]
        return dict(enumerate(state for state in states if state is not None))

    # What it holds

    def model(self, index: int) -> dict[str, Any]:
        """A model's state dict under canonical names; of tied names perhaps only one."""
        path = self._part("model", self._weights(), index)
        if index in self._engines:
            state_dict: Any = self._engines[index].weights()
        elif path.is_dir():
            state_dict = DcpFolder(path).tree("model")
        elif not path.suffix:
            state_dict = self._of_ranks(path)
        elif path.suffix == ".safetensors":
            shard = MappedShard(path)
            names = {**{name: name for name in shard.header.entries}, **shard.header.aliases}
            state_dict = {name: shard.tensor(key) for name, key in names.items()}
        else:
            state_dict = unpickle(path, str(path), mapped=True)
        if not isinstance(state_dict, Mapping):
            raise CorruptCheckpointError(f"{path} does not hold a state dict")
        return canonical_state_dict(state_dict)

    def optimizer(
        self, index: int, parameters: Sequence[Sequence[Tensor]], models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Read an optimizer's state as `load_optimizer_state` takes it.

        Args:
            index: number of the optimizer.
            parameters: the parameters of each group of the optimizer that continues, built as the saved one was; they
                turn positions into names.
            models: the models that name the parameters; under FSDP, optimizer ``i`` belongs to model ``i``.
        """
        path = self._part("optimizer", self._optimizers(), index)
        if index in self._engines:
            saved: Any = self._engines[index].optimizer()
        elif path.is_dir():
            saved = DcpFolder(path).tree("optimizer")
        elif not path.suffix:
            saved = self._of_ranks(path)
        else:
            saved = unpickle(path, str(path), mapped=True)
        if not (isinstance(saved, Mapping) and isinstance(saved.get("param_groups"), Sequence)):
            raise CorruptCheckpointError(f"{path} does not hold the state of an optimizer")
        saved = {"state": {}, **saved}  # a sharded state without entries has no key
        try:
            if any(isinstance(p, str) for group in saved["param_groups"] for p in group["params"]):
                return _rename(saved, index, models)
            return name_positions(saved, parameters, models)
        except StateMismatchError as error:
            raise StateMismatchError(f"{path} does not fit optimizer {index}: {error}") from error

    def scheduler(self, index: int) -> Any:
        """A scheduler's state dict."""
        state = self._part("scheduler", self._schedulers(), index)
        return self._unpickle(state) if isinstance(state, Path) else state

    def scaler(self) -> Any:
        """The state dict of the gradient scaler."""
        path = self.directory / SCALER_NAME
        return unpickle(path, str(path))

    def loader(self, index: int) -> Any:
        """The state of a loader of torchdata."""
        return self._unpickle(self._part("loader", self._found["loader"], index))

    def custom(self, index: int) -> Any:
        """The state dict of a registered object."""
        return self._unpickle(self._part("custom object", self._found["custom"], index))

    def rank(self, rank: int) -> RankFile:
        """Random states and step of a rank.

        Raises:
            CheckpointNotFoundError: the rank has no file.
            UnsafeCheckpointError: reading the file would run code.
            CorruptCheckpointError: the file cannot be read, or the state of a generator is missing.
        """
        path = self._found["rank"].get(rank)
        if path is None:
            raise CheckpointNotFoundError(
                f"{self.directory} has no random_states_{rank}.pkl; it has those of the ranks {list(self.ranks)}"
            )
        content = unpickle(path, str(path))
        try:
            return RankFile(content.get("step"), _rng_tree(content))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(
                f"{path} does not hold the random states of a rank: {error!r}"
            ) from error

    def _of_ranks(self, stem: Path) -> Any:
        tree = RankFiles(stem).tree
        return tree if self._lazy else fill_tree(tree, {})

    def _unpickle(self, path: Path) -> Any:
        return unpickle(path, str(path), trusted=self._trusted, opt_in=self._opt_in)

    def _part(self, what: str, parts: Mapping[int, Any], index: int) -> Any:
        if index not in parts:
            raise CheckpointNotFoundError(
                f"{self.directory} ({self.kind}) holds no {what} {index}; it holds the numbers {sorted(parts)}"
            )
        return parts[index]


def _rename(saved: Mapping[str, Any], index: int, models: Sequence[nn.Module]) -> dict[str, Any]:
    """Names of one model, as FSDP gives them, to names among all models."""
    owner = index if index < len(models) else 0
    parameters = canonical_state_dict(
        dict(models[owner].named_parameters(remove_duplicate=False)), models[owner]
    )
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        first.setdefault(id(parameter), name)

    def full(name: str) -> str:
        plain = canonical_name(name)
        return f"model_{owner}.{first[id(parameters[plain])] if plain in parameters else plain}"

    return {
        **saved,
        "state": {full(name): dict(value) for name, value in saved["state"].items()},
        "param_groups": [
            {**group, "params": [full(name) for name in group["params"]]} for group in saved["param_groups"]
        ],
    }


def _rng_tree(content: Mapping[str, Any]) -> dict[str, Any]:
    version, internal, gauss = content["random_state"]
    generator, key, position, has_gauss, cached = content["numpy_random_seed"]
    tree: dict[str, Any] = {
        "python": {
            "version": version,
            "internal": torch.tensor(internal, dtype=torch.int64, device="cpu"),
            "gauss": gauss,
        },
        "numpy": {
            "bit_generator": str(generator),
            "state": {"key": torch.from_numpy(np.asarray(key).astype(np.int64)), "pos": int(position)},
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        },
        "torch": content["torch_manual_seed"],
    }
    devices = {match[1]: key for key in content if (match := _DEVICE_SEED.fullmatch(key))}
    devices |= {"xla": "xm_seed"} if "xm_seed" in content else {}
    for kind, name in devices.items():
        states = content[name]
        tree["device"] = {
            "type": kind,
            "states": list(states) if isinstance(states, (list, tuple)) else [states],
        }
    return tree
