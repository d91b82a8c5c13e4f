"""Exporting a training state of this project to Accelerate's layout."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import CheckpointError, CheckpointSaveError, StateMismatchError
from accel_ckpt.folders.leftovers import TemporaryFolder, clean_leftovers, host_token, temporary_name
from accel_ckpt.foreign.sources import open_pieces, source_of
from accel_ckpt.format.writer import write_safetensors_from, write_torch
from accel_ckpt.loading.load_state import TrainingCheckpoint, open_training_state
from accel_ckpt.training.optimizers import OWN_KEYS

__all__ = ["export_to_accelerate"]

_SCALER_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}  # torch's
_OURS = {"progress", "replicas"}
"""Parts that only this library's wrappers use."""


def export_to_accelerate(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str], *, disk: Disk = LOCAL
) -> tuple[str, ...]:
    """Export a training state to the layout that Accelerate's ``load_state`` reads.

    The folder appears when it is complete. It has ``model.safetensors``, ``optimizer.bin``, ``scheduler.bin``,
    ``scaler.pt``, ``custom_checkpoint_0.pkl``, ``random_states_0.pkl`` and further numbers of these, like a run with
    one process or DDP. Optimizer states have the parameter order of the saved optimizer.

    Args:
        checkpoint_dir: a training state of this project; every checksum is checked first.
        output_dir: a new folder, or an empty one.
        disk: the file system to write to.

    Returns:
        Parts that Accelerate's layout cannot hold, and that were left out, one sentence each; empty if all was written.

    Raises:
        CheckpointNotFoundError: there is no training state.
        CorruptCheckpointError: a file has changed since it was saved.
        CheckpointSaveError: the output is not empty, or writing failed; nothing is left behind.
        StateMismatchError: an optimizer's state cannot be numbered.
    """
    output = Path(os.path.abspath(Path(output_dir).expanduser()))
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise CheckpointSaveError(f"{output} exists and is not an empty folder; choose another name")
    checkpoint = open_training_state(checkpoint_dir)
    checkpoint.verify()
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = TemporaryFolder(temporary_name(output, host_token(secrets.token_hex(6))), disk)
    try:
        clean_leftovers(output.parent, temporary.path.stat().st_mtime, disk)
        notes = _Export(checkpoint, temporary.path, disk).write()
        disk.sync_directory(temporary.path)
        disk.rename(temporary.path, output)
    except BaseException as error:
        disk.remove_tree(temporary.path)
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise CheckpointSaveError(f"writing {output} failed: {error}") from error
        raise
    finally:
        temporary.release()
    disk.sync_directory(output.parent)
    return tuple(notes)


class _Export:
    def __init__(self, checkpoint: TrainingCheckpoint, folder: Path, disk: Disk) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.disk = disk
        self.notes: list[str] = []
        self.with_extra = checkpoint.models_with_extra()

    def write(self) -> list[str]:
        shared = dict(self.checkpoint.shared)
        for index, files in enumerate(self.checkpoint.manifest.models):
            self._model(index, files)
        step = shared.pop("step", 0)
        if any(shared.get("progress", {}).get("frozen") or ()):
            self._note("frozen parameters were not saved (trainable_only=True), so files of models lack them")
        for name, tree in shared.items():
            self._part(name, tree)
        for rank in self.checkpoint.manifest.ranks:
            self._rank(rank, step)
        return self.notes

    def _model(self, index: int, files: tuple[str, ...]) -> None:
        number = f"_{index}" if index else ""
        if index in self.with_extra or not files or files[0].endswith(".bin"):
            # Only files of torch.save can hold what a module adds to its state dict beside tensors.
            self._save(f"pytorch_model{number}.bin", self.checkpoint.models[index])
            return
        weights = open_pieces(source_of(self.checkpoint.directory, files))

        def runs(name: str) -> Iterator[torch.Tensor]:
            return weights.tensors[name].runs()

        write_safetensors_from(
            self.folder / f"model{number}.safetensors",
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.tensors.items()},
            runs,
            {"format": "pt", **weights.aliases},
            self.disk,
        )

    def _part(self, name: str, tree: Any) -> None:
        kind, _, number = name.rpartition("_")
        suffix = "" if number == "0" else f"_{number}"
        if kind == "optimizer":
            self._save(f"optimizer{suffix}.bin", _by_position(name, tree))
        elif kind == "scheduler":
            self._save(f"scheduler{suffix}.bin", tree)
        elif kind == "custom":
            self._save(f"custom_checkpoint_{number}.pkl", tree)
        elif name == "scaler":
            self._save("scaler.pt", {key: value for key, value in tree.items() if key in _SCALER_KEYS})
        elif kind == "loader":
            self._loader(number, tree)
        elif kind == "pickled":
            self._note(f"the registered object {number} was saved as a pickle, which is not opened here")
        elif name not in _OURS:
            self._note(f"the part {name!r} has no place in Accelerate's layout")

    def _loader(self, number: str, tree: Mapping[str, Any]) -> None:
        epoch = tree.get("epoch", 0)
        batches = 0 if tree.get("finished") else tree.get("batches_yielded", 0)
        if batches or epoch:
            self._note(
                f"the position of loader {number} is not in Accelerate's layout: go on in epoch {epoch} with "
                f"loader.set_epoch({epoch}) and skip_first_batches(loader, {batches})"
            )

    def _rank(self, rank: int, step: int) -> None:
        trees = dict(self.checkpoint.per_rank(rank) or {})
        rng = trees.pop("rng", None)
        if rng is not None:
            self._save(f"random_states_{rank}.pkl", {"step": step, **self._random_states(rng)})
        windows = trees.pop("windows", {})
        if any(windows.get(name) for name in ("windows", "gradients", "held_back")):
            self._note(
                "the gradients of an unfinished accumulation window have no place in Accelerate's layout"
            )
        if trees.pop("buffers", {}):
            self._note(f"buffers of rank {rank} differ from those of rank 0, and Accelerate keeps one copy")
        if differing := trees.pop("differing", {}):
            self._note(
                f"rank {rank} has its own {', '.join(sorted(differing))}, and Accelerate keeps that of rank 0 for all"
            )
        for name, tree in trees.items():
            kind, _, number = name.rpartition("_")
            if kind == "loader":
                self._loader(number, tree)
            elif name not in _OURS:
                self._note(f"rank {rank} saved {name!r}, which has no place in Accelerate's layout")

    def _random_states(self, rng: Mapping[str, Any]) -> dict[str, Any]:
        python, numpy = rng["python"], rng["numpy"]
        states = {
            "random_state": (python["version"], tuple(python["internal"].tolist()), python["gauss"]),
            "torch_manual_seed": rng["torch"],
        }
        if numpy["bit_generator"] == "MT19937":
            key = numpy["state"]["key"].numpy().astype(np.uint32)
            where = (numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"])
            states["numpy_random_seed"] = (numpy["bit_generator"], key, *where)
        else:
            self._note(f"NumPy's generator is a {numpy['bit_generator']}, which Accelerate does not keep")
        device = rng.get("device")
        if device is not None and self.checkpoint.manifest.world_size == 1:
            states[f"torch_{device['type']}_manual_seed"] = device["states"]
        elif device is not None:
            self._note(
                f"random states of {device['type']} devices: here each rank keeps its own device's, there each keeps "
                "those of all devices of its machine"
            )
        return states

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _save(self, name: str, value: Any) -> None:
        write_torch(self.folder / name, value, self.disk)


def _by_position(name: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers for names: parameters are counted through the groups, as torch's optimizers do."""
    numbers = {
        parameter: number
        for number, parameter in enumerate(p for group in tree["param_groups"] for p in group["params"])
    }
    if unknown := sorted(set(tree["state"]) - set(numbers)):
        raise StateMismatchError(
            f"{name} holds state for {', '.join(unknown)}, which are in none of its groups"
        )
    rest = {key: value for key, value in tree.items() if key not in OWN_KEYS}
    state = {numbers[parameter]: value for parameter, value in tree["state"].items()}
    return {
        "state": {**dict(sorted(state.items())), **tree.get("global_state", {})},
        "param_groups": [
            {**group, "params": [numbers[p] for p in group["params"]]} for group in tree["param_groups"]
        ],
        **rest,
    }
