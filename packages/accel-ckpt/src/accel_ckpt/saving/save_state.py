"""Saving the training state of a run: model weights, shared trees, and the trees of each rank, in one folder.

A *tree* is nested dictionaries and lists of tensors and plain data. Its tensors go to safetensors files under
names that say where in the tree they stand, everything else to tagged JSON (``accel_ckpt.format.tagged_json``).

A save has three steps. A *draft* is what this rank holds, encoded; drafts make every rank an *offer* of the
tensors that it holds like all others; from all offers each rank computes the same *plan*, the files that it
writes. Between plan and writing the tensors may be copied (staged), so that training can go on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import torch
import xxhash

from accel_ckpt.coordination import Coordinator, default_coordinator
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.format import tagged_json
from accel_ckpt.modules.names import canonical_state_dict
from accel_ckpt.saving.commit import Contribution, Transaction
from accel_ckpt.saving.plan import convert_file_size_to_int, divide
from accel_ckpt.saving.save_model import plan_model_files
from accel_ckpt.saving.writer import FileRecord, PlannedFile, check_writable, json_bytes, write_bytes
from accel_ckpt.sharded import Box, is_sharded, local_boxes, sharding_metadata, tied_boxes
from accel_ckpt.tensor_storage import as_bytes

__all__ = ["StateDraft", "StatePlan", "Tree", "save_training_state"]

Tree: TypeAlias = Any
"""Nested dictionaries and lists of tensors and plain data."""


class Offer(TypedDict):
    """What the other ranks must know of a draft; plain data, because it travels."""

    load: int
    """Bytes that this rank writes in any case."""
    alike: dict[str, tuple[int, str]]
    """Tensors that it holds like all others: name to bytes and a fingerprint."""
    boxes: dict[str, int]
    """Its parts of sharded tensors: file stem and key of the box, to bytes."""
    tied: dict[str, str]
    """Sharded tensors that repeat an earlier one: stem and name, to the earlier name."""


EXTRA = "model_{}.extra"

# Bytes. Dividing smaller tensors among ranks is not worth a name in every rank's offer.
_WORTH_DIVIDING = 1 << 16

# Elements of a tensor that are compared before ranks rely on each other's copies.
_SAMPLES = 256


def save_training_state(
    directory: str | os.PathLike[str],
    *,
    models: Sequence[Mapping[str, Any]],
    shared: Mapping[str, Tree],
    per_rank: Mapping[str, Tree],
    replicated: Collection[str] = (),
    safe_serialization: bool = True,
    each_node: bool = False,
    before_write: Callable[[Path], None] | None = None,
    max_shard_size: int | str = "10GB",
    coordinator: Coordinator | None = None,
    disk: Disk = LOCAL,
) -> Path:
    """Save a training state so that it exists completely or not at all. Collective.

    Args:
        directory: the checkpoint's folder. One that exists is replaced as a whole, in one step; files in it
            that no save of a training state wrote are carried over.
        models: state dicts with canonical names. Of a ``DTensor`` every rank writes what it holds; all else is
            written by the leading rank, and the others need not give it. Entries that are not tensors
            (``get_extra_state``) are kept with the shared trees.
        shared: name → tree; those of the leading rank count. Where a tree holds a ``DTensor``, all ranks give it.
        per_rank: name → tree, this rank's own; such as its random number generators.
        replicated: names in ``shared`` whose large tensors every rank holds alike, so that each writes a part of
            them. Samples are compared; a tensor that differs is written by the leading rank.
        safe_serialization: weights as safetensors, or as ``.bin`` of ``torch.save``.
        each_node: the first rank of every node leads the save of a folder of its own, for file systems that
            nodes do not share.
        before_write: called on every rank with the temporary folder, before anything is written or `models` is
            read; files that it adds become part of the checkpoint, and it may change `models` in place.
        max_shard_size: bytes per file of weights, or a size such as ``"5GB"``.
        coordinator: the ranks; those of the process group by default.
        disk: where.

    Returns:
        The folder, absolute.

    Raises:
        CheckpointSaveError: writing failed, here or on another rank. On every rank; what was there before is
            unchanged.
        UnsupportedValueError: a tree holds something that cannot be saved exactly; names the path to it.
    """
    transaction, plan = begin_save(
        directory,
        models=models,
        shared=shared,
        per_rank=per_rank,
        replicated=replicated,
        safe_serialization=safe_serialization,
        each_node=each_node,
        before_write=before_write,
        max_shard_size=max_shard_size,
        coordinator=coordinator,
        disk=disk,
    )
    return transaction.complete(lambda folder: plan.write(folder, disk))


def begin_save(
    directory: str | os.PathLike[str],
    *,
    models: Sequence[Mapping[str, Any]],
    shared: Mapping[str, Tree],
    per_rank: Mapping[str, Tree],
    replicated: Collection[str] = (),
    safe_serialization: bool = True,
    each_node: bool = False,
    before_write: Callable[[Path], None] | None = None,
    max_shard_size: int | str = "10GB",
    coordinator: Coordinator | None = None,
    disk: Disk = LOCAL,
) -> tuple[Transaction, StatePlan]:
    """Everything of ``save_training_state`` but the writing, which ``transaction.complete(plan.write)`` does."""
    limit = convert_file_size_to_int(max_shard_size)
    ranks = coordinator or default_coordinator()
    transaction = Transaction.begin(Path(directory), coordinator=ranks, each_node=each_node, disk=disk)
    drafts: list[StateDraft] = []

    def draft() -> tuple[int, Offer]:
        if before_write is not None:
            before_write(transaction.temporary)
        drafts.append(
            StateDraft.make(
                models,
                shared,
                per_rank,
                rank=ranks.rank,
                leads=transaction.leader,
                replicated=replicated if ranks.world_size > 1 else (),
                safe_serialization=safe_serialization,
                max_shard_size=limit,
            )
        )
        if each_node and any(drafts[0].boxes.values()):
            raise UnsupportedValueError(
                "tensors that are divided among ranks are saved to a file system that all nodes share; save without "
                "save_on_each_node"
            )
        return ranks.local_rank, drafts[0].offer()

    answers = transaction.together(draft)
    first, last = _own_group([local for local, _ in answers], ranks.rank) if each_node else (0, len(answers))
    return transaction, drafts[0].plan([offer for _, offer in answers[first:last]], ranks.rank - first)


def _own_group(local_ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """The ranks of this rank's node, which are consecutive and begin with local rank 0."""
    first = max(r for r in range(rank + 1) if local_ranks[r] == 0)
    return first, next(
        (r for r in range(rank + 1, len(local_ranks)) if local_ranks[r] == 0), len(local_ranks)
    )


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The files that this rank writes."""

    texts: Mapping[str, bytes]
    """Files that are complete already."""
    files: tuple[PlannedFile, ...]
    models: tuple[tuple[str, ...], ...] = ()
    """Per model, the files of its tensors; on leading ranks."""

    def write(
        self,
        folder: Path,
        disk: Disk = LOCAL,
        write_file: Callable[[PlannedFile, Path, Disk], FileRecord] = PlannedFile.write,
    ) -> Contribution:
        """Write the files and put them on the disk."""
        records = {name: write_bytes(folder / name, text, disk) for name, text in self.texts.items()}
        for file in self.files:
            records[file.name] = write_file(file, folder / file.name, disk)
        return Contribution(records, self.models)


@dataclass(frozen=True, slots=True)
class StateDraft:
    """What this rank holds, encoded; see ``save_training_state`` for the parts."""

    rank: int
    leads: bool
    texts: Mapping[str, bytes]
    model_files: tuple[PlannedFile, ...]
    models: tuple[tuple[str, ...], ...]
    shared: Mapping[str, torch.Tensor]
    """Tensors of the shared trees by name."""
    replicated: frozenset[str]
    """Those of them that every rank holds alike, if samples agree."""
    boxes: Mapping[str, Mapping[str, Box]]
    """This rank's parts of sharded tensors: file stem, to key, to box."""
    own: Mapping[str, torch.Tensor]
    """Tensors of this rank's own trees by name."""

    @classmethod
    def make(
        cls,
        models: Sequence[Mapping[str, Any]],
        shared: Mapping[str, Tree],
        per_rank: Mapping[str, Tree],
        *,
        rank: int,
        leads: bool,
        replicated: Collection[str],
        safe_serialization: bool,
        max_shard_size: int,
    ) -> StateDraft:
        """Encode the parts.

        Raises:
            UnsupportedValueError: a tree holds something that cannot be saved exactly; names the path to it.
        """
        own_text, own = _encode(per_rank)
        texts = {f"{rank_stem(rank)}.json": own_text}
        parts, extra = _split_models(models)
        text, tensors = _encode({**shared, **extra})
        if leads:
            texts["state.json"] = text
        files: list[PlannedFile] = []
        homes: list[tuple[str, ...]] = []
        boxes: dict[str, dict[str, Box]] = {}
        for index, state_dict in enumerate(parts):
            stem = model_stem(index, safe_serialization)
            held, plain = _take_boxes(state_dict)
            boxes[model_stem(index, True)] = held
            if not leads:
                continue
            if held and not plain:
                homes.append(())
                continue
            model = plan_model_files(plain, max_shard_size, safe_serialization, stem)
            files += model.files
            homes.append(tuple(file.name for file in model.files))
            if model.index is not None:
                suffix = "safetensors" if safe_serialization else "bin"
                texts[f"{stem}.{suffix}.index.json"] = model.index.encode()
        boxes["state"], tensors = _take_boxes(tensors)
        _check_writable({**tensors, **own})
        prefixes = tuple(f"{name}." for name in replicated)
        alike = frozenset(name for name, t in tensors.items() if name.startswith(prefixes) and _divisible(t))
        return cls(rank, leads, texts, tuple(files), tuple(homes), tensors, alike, boxes, own)

    def offer(self) -> Offer:
        """What the other ranks must know to compute the plan."""
        alone = [t for file in self.model_files for t in file.tensors.values()] + [*self.own.values()]
        if self.leads:
            alone += [t for name, t in self.shared.items() if name not in self.replicated]
        alike = {name: self.shared[name] for name in sorted(self.replicated)}
        marks = fingerprints(list(alike.values()))
        return {
            "load": sum(tensor.nbytes for tensor in alone),
            "alike": {name: (t.nbytes, mark) for (name, t), mark in zip(alike.items(), marks, strict=True)},
            "boxes": {
                f"{s}/{k}": box.tensor.nbytes for s, boxes in self.boxes.items() for k, box in boxes.items()
            },
            "tied": {
                f"{stem}/{name}": original
                for stem, boxes in self.boxes.items()
                for name, original in tied_boxes(boxes.values()).items()
            },
        }

    def plan(self, offers: Sequence[Offer], position: int) -> StatePlan:
        """The files of this rank.

        Args:
            offers: of all ranks that save together, the leading one first.
            position: of this rank among them.
        """
        loads = [offer["load"] for offer in offers]
        tied = {name: original for offer in offers for name, original in offer["tied"].items()}
        boxes = _share_boxes([offer["boxes"] for offer in offers], tied, loads)
        alike = {
            name: nbytes
            for name, (nbytes, mark) in offers[0]["alike"].items()
            if all(offer["alike"].get(name) == (nbytes, mark) for offer in offers)
        }
        mine = divide(alike, loads)[position]
        names = [name for name in self.shared if name in mine or (self.leads and name not in alike)]
        files = [*self.model_files]
        for stem, held in self.boxes.items():
            part = [box for key, box in held.items() if f"{stem}/{key}" in boxes[position]]
            if part:
                aliases = {
                    _name_of(alias): name for alias, name in tied.items() if alias.startswith(f"{stem}/")
                }
                files.append(_box_file(box_file(stem, self.rank), part, aliases))
        if names:
            stem = "state" if self.leads else f"state-{self.rank:05d}"
            files.append(_state_file(stem, {name: self.shared[name] for name in names}))
        if self.own:
            files.append(_state_file(rank_stem(self.rank), self.own))
        first = self.rank - position
        homes = tuple(
            home + tuple(box_file(stem, first + at) for at, keys in enumerate(boxes) if _any_of(keys, stem))
            for home, stem in ((home, model_stem(index, True)) for index, home in enumerate(self.models))
        )
        return StatePlan(self.texts, tuple(files), homes)


def _share_boxes(
    held: Sequence[Mapping[str, int]], tied: Collection[str], loads: list[int]
) -> list[frozenset[str]]:
    """Give each box to one of the ranks that hold it, and count it among their loads."""
    groups: dict[tuple[int, ...], dict[str, int]] = {}
    for key, nbytes in sorted({key: nbytes for boxes in held for key, nbytes in boxes.items()}.items()):
        if key.rpartition("@")[0] not in tied:
            holders = tuple(position for position, boxes in enumerate(held) if key in boxes)
            groups.setdefault(holders, {})[key] = nbytes
    shares: list[frozenset[str]] = [frozenset()] * len(held)
    for holders, sizes in sorted(groups.items()):
        divided = divide(sizes, [loads[position] for position in holders])
        for position, keys in zip(holders, divided, strict=True):
            shares[position] |= keys
            loads[position] += sum(sizes[key] for key in keys)
    return shares


def _any_of(keys: Iterable[str], stem: str) -> bool:
    return any(key.startswith(f"{stem}/") for key in keys)


def _name_of(key: str) -> str:
    return key.partition("/")[2]


def _check_writable(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        check_writable(name, tensor)


def _take_boxes(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Box], dict[str, torch.Tensor]]:
    """This rank's boxes of the sharded tensors, by their keys, and the other tensors."""
    sharded = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
    boxes = {box.key: box for box in local_boxes(sharded)} if sharded else {}
    return boxes, {name: tensor for name, tensor in tensors.items() if name not in sharded}


def model_stem(index: int, safe_serialization: bool) -> str:
    """The name, without its extension, of a model's file."""
    return ("model" if safe_serialization else "pytorch_model") + (f"_{index}" if index else "")


def box_file(stem: str, rank: int) -> str:
    """The file of the parts of sharded tensors that one rank writes."""
    return f"{stem}-shard-{rank:05d}.safetensors"


def is_box_file(name: str, stem: str) -> bool:
    """Whether a file holds parts of sharded tensors of ``stem``."""
    return re.fullmatch(re.escape(stem) + r"-shard-\d{5}\.safetensors", name) is not None


def _box_file(name: str, boxes: Sequence[Box], aliases: Mapping[str, str]) -> PlannedFile:
    held = {box.name: box.tensor for box in boxes}
    if len(held) < len(boxes):
        twice = next(box.name for box in boxes if sum(other.name == box.name for other in boxes) > 1)
        raise UnsupportedValueError(
            f"this rank holds several parts of {twice!r}, and a file has one place for a name"
        )
    tied = {alias: original for alias, original in aliases.items() if original in held}
    return PlannedFile(name, held, {"format": "pt", **sharding_metadata(boxes), **tied})


def rank_stem(rank: int) -> str:
    """The name, without its extension, of the files of one rank's own trees."""
    return f"rank-{rank:05d}"


def is_tensor_file(name: str, stem: str) -> bool:
    """Whether a file holds tensors of the trees that ``<stem>.json`` describes: all of them, or one rank's share."""
    return re.fullmatch(re.escape(stem) + r"(-\d{5})?\.safetensors", name) is not None


def _state_file(stem: str, tensors: Mapping[str, torch.Tensor]) -> PlannedFile:
    return PlannedFile(f"{stem}.safetensors", tensors, {"format": "pt"})


def _divisible(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes >= _WORTH_DIVIDING


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[str]:
    """For each contiguous tensor what tells it from another: dtype, shape, and a hash of elements all over it."""
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().view(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().view(torch.uint8)
        samples.setdefault(tensor.device, []).append(sample)
    # One copy per device, not one per tensor.
    copied = {
        device: iter(torch.split(torch.cat(parts).cpu(), [part.numel() for part in parts]))
        for device, parts in samples.items()
    }
    return [
        f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_64_hexdigest(as_bytes(next(copied[tensor.device])))}"
        for tensor in tensors
    ]


def _encode(trees: Mapping[str, Tree]) -> tuple[bytes, dict[str, torch.Tensor]]:
    """The JSON of some trees, and their tensors by the names that it uses."""
    tensors: dict[str, torch.Tensor] = {}

    def sink(path: tuple[Any, ...], tensor: torch.Tensor) -> str:
        joined = ".".join(str(part) for part in path)
        name = base = joined.encode(errors="backslashreplace").decode()  # keys may hold lone surrogates
        number = 1
        while name in tensors or name == "__metadata__":  # {"a.b": x, "a": {"b": y}}
            number += 1
            name = f"{base}~{number}"
        tensors[name] = tensor
        return name

    encoded = {}
    encoder = tagged_json.Encoder(sink)
    for name, tree in trees.items():
        if not isinstance(name, str):
            raise UnsupportedValueError(
                f"parts of a training state have names; {name!r} is a {type(name).__name__}"
            )
        try:
            encoded[name] = encoder.encode(tree, (name,))
        except RecursionError:
            raise UnsupportedValueError(
                f"the part {name!r} of the training state is nested too deeply to be saved; flatten it"
            ) from None
    return json_bytes(encoded), tensors


def _split_models(
    models: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, torch.Tensor]], dict[str, Tree]]:
    weights, extra = [], {}
    for index, state_dict in enumerate(models):
        named = canonical_state_dict(state_dict)
        weights.append({name: value for name, value in named.items() if isinstance(value, torch.Tensor)})
        if rest := {name: value for name, value in named.items() if not isinstance(value, torch.Tensor)}:
            extra[EXTRA.format(index)] = rest
    return weights, extra
