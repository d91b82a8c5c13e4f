"""Planning the files that a rank writes of a training state.

A *draft* is the encoded state of this rank. Each draft makes an *offer*: the tensors that the rank holds like all
others, and its parts of divided tensors. From all offers each rank computes the same *plan*: the files that it writes.
Between plan and writing the tensors may be copied (staged), so that training can continue.

The leading rank writes whole weights: buffers differ between ranks, and users want one file. Of equal parts of a
divided tensor one holder writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
import xxhash

from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.divisions import Division, RankMesh
from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.folders.folder import Contribution
from accel_ckpt.format import tagged_json
from accel_ckpt.format.layout import Layout
from accel_ckpt.format.sharding import sharding_metadata
from accel_ckpt.format.state_files import EXTRA, model_stem, part_file, rank_stem
from accel_ckpt.format.tagged_json import Tree
from accel_ckpt.format.writer import FileRecord, PlannedFile, check_writable, json_bytes, write_bytes
from accel_ckpt.modules.names import listed
from accel_ckpt.modules.versions import versions_metadata, versions_of, with_versions
from accel_ckpt.parts import Leaf, Part, division_of, is_divided, is_leaf, parts_of, shape_of
from accel_ckpt.saving.part_division import (
    Holding,
    PartKey,
    describe_parts,
    divide_parts,
    tied_parts,
)
from accel_ckpt.saving.plan import divide
from accel_ckpt.saving.save_model import ModelFiles, plan_model_files
from accel_ckpt.tensor_storage import as_bytes, flat_bytes

__all__ = ["Offer", "StateDraft", "StatePlan", "encode_trees", "fingerprints"]

# Bytes. Dividing smaller tensors among ranks is not worth a name in every rank's offer.
_WORTH_DIVIDING = 1 << 16

# Elements of a tensor that are compared before ranks rely on each other's copies.
_SAMPLES = 256


class Offer(TypedDict):
    """Description of a draft for the other ranks; plain data, because it is sent to all ranks."""

    load: int
    """Bytes that this rank would write in any case if it led."""
    alike: dict[str, tuple[int, str]]
    """Tensors that it holds like all others: name to bytes and a fingerprint."""
    parts: dict[str, dict[str, Holding]]
    """The parts of divided tensors that it holds: file stem, to name."""
    tied: dict[str, dict[str, str]]
    """Divided tensors that repeat an earlier one: file stem, to name, to the earlier name."""
    versions: dict[str, dict[str, int]]
    """Versions of the modules' state dicts: file stem, to name of the module."""


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The files that this rank writes."""

    texts: Mapping[str, bytes]
    """Files that are complete already."""
    files: tuple[PlannedFile, ...]
    models: tuple[tuple[str, ...], ...] = ()
    """Per model, the files of its tensors; on leading ranks."""
    problem: str | None = None
    """Why this cannot be written, where only this rank can tell."""
    drifted: str | None = None
    """The tensors that ranks should hold alike and do not; on leading ranks."""
    layout: Layout = field(default_factory=Layout)
    """How ranks divide tensors; for the manifest."""

    @property
    def nbytes(self) -> int:
        """Bytes of its files, but for their headers."""
        tensors = (tensor.nbytes for file in self.files for tensor in file.tensors.values())
        return sum(map(len, self.texts.values())) + sum(tensors)

    def check(self) -> None:
        """Refuse what cannot be written.

        Raises:
            UnsupportedValueError: says what ranks hold that does not belong together.
        """
        if self.problem is not None:
            raise UnsupportedValueError(self.problem)

    def write(
        self,
        folder: Path,
        disk: Disk = LOCAL,
        write_file: Callable[[PlannedFile, Path, Disk], FileRecord] = PlannedFile.write,
    ) -> Contribution:
        """Write the files and put them on the disk."""
        self.check()
        records = {name: write_bytes(folder / name, text, disk) for name, text in self.texts.items()}
        for file in self.files:
            records[file.name] = write_file(file, folder / file.name, disk)
        return Contribution(records, self.models, self.layout)


@dataclass(frozen=True, slots=True)
class StateDraft:
    """The encoded state of this rank; see ``save_training_state`` for the parts."""

    rank: int
    leads: bool
    texts: Mapping[str, bytes]
    models: tuple[ModelFiles, ...]
    """Files of the whole tensors of each model; on the leading rank."""
    shared: Mapping[str, torch.Tensor]
    """Whole tensors of the shared trees by name."""
    replicated: frozenset[str]
    """Names in `shared` of tensors that every rank holds alike, if samples agree."""
    parts: Mapping[str, Mapping[str, Sequence[Part]]]
    """This rank's parts of divided tensors: file stem, to name."""
    divisions: Mapping[str, Mapping[str, Division]]
    """The rules by which ranks divide some of them."""
    load: int
    """Bytes of the whole tensors that a leading rank writes alone."""
    own: Mapping[str, torch.Tensor]
    """Tensors of this rank's own trees by name."""
    versions: Mapping[str, Mapping[str, int]]
    """Versions of the modules' state dicts: file stem, to name of the module."""

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
        own_text, own = encode_trees(per_rank)
        texts = {f"{rank_stem(rank)}.json": own_text}
        weights, extra = _split_models(models)
        text, leaves = encode_trees({**shared, **extra})
        if leads:
            texts["state.json"] = text
        planned: list[ModelFiles] = []
        divided = _DividedTensors(rank)
        versions: dict[str, Mapping[str, int]] = {}
        load = 0
        for index, state_dict in enumerate(weights):
            plain = divided.take(model_stem(index, True), state_dict)
            load += sum([tensor.nbytes for tensor in plain.values()])
            versions[model_stem(index, True)] = said = versions_of(state_dict)
            if leads:
                stem = model_stem(index, safe_serialization)
                plain = with_versions(plain, said)
                planned.append(plan_model_files(plain, max_shard_size, safe_serialization, stem))
        tensors = divided.take("state", leaves)
        if own_parts := sorted(name for name, leaf in own.items() if is_divided(leaf)):
            raise UnsupportedValueError(
                f"{listed(own_parts)}: trees of each rank hold whole tensors; pass tensors that are divided "
                "among ranks in the shared trees"
            )
        prefixes = tuple(f"{name}." for name in replicated)
        alike = frozenset(name for name, t in tensors.items() if name.startswith(prefixes) and _divisible(t))
        load += sum([tensor.nbytes for name, tensor in tensors.items() if name not in alike])
        return cls(
            rank, leads, texts, tuple(planned), tensors, alike, divided.parts, divided.divisions, load,
            cast("dict[str, torch.Tensor]", own), versions,
        )  # fmt: skip

    def offer(self) -> Offer:
        """Make the description from which the other ranks compute the plan."""
        alike = {name: self.shared[name] for name in sorted(self.replicated)}
        marks = fingerprints(list(alike.values()))
        return {
            "load": self.load,
            "alike": {name: (t.nbytes, mark) for (name, t), mark in zip(alike.items(), marks, strict=True)},
            "parts": describe_parts(self.parts, self.divisions),
            "tied": {stem: tied_parts(named) for stem, named in self.parts.items()},
            "versions": {stem: dict(named) for stem, named in self.versions.items()},
        }

    def plan(self, offers: Sequence[Offer], position: int) -> StatePlan:
        """The files of this rank.

        Args:
            offers: of all ranks that save together, the leading one first.
            position: of this rank among them.

        Raises:
            UnsupportedValueError: what ranks hold of a divided tensor does not make up all of it. On all ranks.
        """
        loads = [offers[0]["load"], *(0 for _ in offers[1:])]
        shares = divide_parts(offers, position, loads)
        different = list({id(offer): offer for offer in offers}.values())
        alike = {
            name: nbytes
            for name, (nbytes, mark) in offers[0]["alike"].items()
            if all(offer["alike"].get(name) == (nbytes, mark) for offer in different)
        }
        mine = divide(alike, loads)[position]
        names = [name for name in self.shared if name in mine or (self.leads and name not in alike)]
        files: list[PlannedFile] = []
        texts = dict(self.texts)
        homes: list[tuple[str, ...]] = []
        for index, model in enumerate(self.models):
            stem = model_stem(index, True)
            divided = shares.tensors.get(stem) or shares.others.get(stem)
            whole = model.files if not divided or any(file.tensors for file in model.files) else ()
            files += whole
            homes.append(tuple(file.name for file in whole))
            if model.index is not None:
                texts[model.index_name] = model.index.encode()
        for stem in self.parts:
            files += self._part_files(
                stem, shares.names[stem], shares.keys_of(position), shares.aliases[stem]
            )
        if names:
            stem = "state" if self.leads else f"state-{self.rank:05d}"
            files.append(_state_file(stem, {name: self.shared[name] for name in names}))
        if self.own:
            files.append(_state_file(rank_stem(self.rank), self.own))
        if not self.leads:
            return StatePlan(texts, tuple(files), tuple(homes))
        versions: dict[str, dict[str, int]] = {}
        for offer in different:
            for stem, named in offer["versions"].items():
                versions[stem] = {**named, **versions.get(stem, {})}
        layout = Layout(shares.tensors, shares.others, shares.aliases, versions)
        problem, drifted = self._problem(offers), _drifted(offers, self.rank)
        return StatePlan(texts, tuple(files), tuple(homes), problem, drifted, layout)

    def _part_files(
        self, stem: str, names: Collection[str], keys: Collection[PartKey], aliases: Mapping[str, str]
    ) -> list[PlannedFile]:
        """The files of the parts that this rank writes; a file has one place for a name.

        Args:
            stem: of the files.
            names: the tensors of which it writes all its parts.
            keys: further parts.
            aliases: names that repeat others.
        """
        contents: list[dict[str, Part]] = []
        for name, parts in self.parts[stem].items():
            number = 0
            for part in parts:
                if not part.is_empty and (name in names or PartKey(stem, name, part.box) in keys):
                    contents += [{}] if number == len(contents) else []
                    contents[number][name] = part
                    number += 1
        return [
            PlannedFile(
                part_file(stem, self.rank, number),
                {name: part.tensor.detach() for name, part in held.items()},
                {
                    "format": "pt",
                    **sharding_metadata(held),
                    **versions_metadata(self.versions.get(stem, {})),
                    **{alias: original for alias, original in aliases.items() if original in held},
                },
            )
            for number, held in enumerate(contents)
        ]

    def _problem(self, offers: Sequence[Offer]) -> str | None:
        """Why the parts of other ranks do not fit the leading rank's description of the whole; None: they do."""
        first: dict[int, int] = {}
        for position, offer in enumerate(offers):
            if first.setdefault(id(offer), position) != position:
                continue
            for stem, held in offer["parts"].items():
                known = self._whole_names(stem)
                if known is None and held:
                    return (
                        f"rank {self.rank + position} saves parts of {listed(sorted(held))} of a model ({stem}) that "
                        f"the leading rank does not save; pass the same number of models on all ranks, {{}} where a "
                        "rank holds nothing of one"
                    )
                if both := sorted(held.keys() & (known or ())):
                    return (
                        f"{listed(both)}: whole tensors on the leading rank, and parts of tensors on rank "
                        f"{self.rank + position}; pass Part.whole(tensor) on the leading rank, or no part elsewhere"
                    )
        unknown = {
            name: position
            for position in first.values()
            for name in offers[position]["parts"]["state"]
            if name not in self.parts["state"]
        }
        if unknown:
            return (
                f"rank {self.rank + min(unknown.values())} saves parts of {listed(sorted(unknown))} in shared trees, "
                "and the trees of the leading rank, which are those that count, have no such entries; give them there "
                "as Part.nothing(shape)"
            )
        return None

    def _whole_names(self, stem: str) -> Collection[str] | None:
        """Names of the whole tensors of a model, or of the shared trees; ``None`` if there is no such model here."""
        if stem == "state":
            return self.shared
        stems = {model_stem(index, True): model for index, model in enumerate(self.models)}
        return {name for file in stems[stem].files for name in file.tensors} if stem in stems else None


def _drifted(offers: Sequence[Offer], leader: int) -> str | None:
    """The tensors that all ranks say to hold alike, and whose samples differ."""
    first = offers[0]["alike"]
    others = [(leader + at, offer) for at, offer in enumerate(offers) if offer is not offers[0]]
    differ = {
        name: [rank for rank, offer in others if offer["alike"].get(name, mark) != mark]
        for name, mark in (first.items() if others else ())
    }
    names = [name for name, ranks in differ.items() if ranks]
    if not names:
        return None
    ranks = ", ".join(map(str, differ[names[0]]))
    return f"{names[0]} (the first of {len(names)} tensors) has other values on rank {ranks} than on rank {leader}"


class _DividedTensors:
    """This rank's parts of divided tensors, and the rules by which they are divided, by file stem and name.

    Args:
        rank: of this process among those that save, who may be others than those of the process group.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.parts: dict[str, dict[str, Sequence[Part]]] = {}
        self.divisions: dict[str, dict[str, Division]] = {}
        self._meshes: dict[Any, RankMesh] = {}

    def take(self, stem: str, leaves: Mapping[str, Leaf]) -> dict[str, torch.Tensor]:
        """Take the parts of some leaves; returns the whole tensors."""
        parts = self.parts[stem] = {}
        divisions = self.divisions[stem] = {}
        whole: dict[str, torch.Tensor] = {}
        for name, leaf in leaves.items():
            if isinstance(leaf, torch.Tensor) and not is_divided(leaf):
                whole[name] = leaf
                continue
            division = division_of(leaf, self._mesh, self._rank)
            if division is not None:
                divisions[name] = division
            parts[name] = parts_of(leaf) or [Part.nothing(shape_of(leaf), _dtype_of(leaf))]
            for part in parts[name]:
                check_writable(name, part.tensor)
        return whole

    def _mesh(self, mesh: Any) -> RankMesh:
        if mesh not in self._meshes:
            self._meshes[mesh] = RankMesh.of(mesh.mesh)
        return self._meshes[mesh]


def _dtype_of(leaf: Leaf) -> torch.dtype:
    """The dtype of a tensor or of parts, also of empty ones."""
    first = leaf if isinstance(leaf, torch.Tensor | Part) else leaf[0]
    return first.tensor.dtype if isinstance(first, Part) else first.dtype


def _state_file(stem: str, tensors: Mapping[str, torch.Tensor]) -> PlannedFile:
    return PlannedFile(f"{stem}.safetensors", tensors, {"format": "pt"})


def _divisible(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes >= _WORTH_DIVIDING


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The fingerprint of each contiguous tensor: dtype, shape, and a hash of elements all over it."""
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().view(-1)
        sample = flat_bytes(flat[:: max(1, flat.numel() // _SAMPLES)].contiguous())
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


def encode_trees(trees: Mapping[str, Tree]) -> tuple[bytes, dict[str, Leaf]]:
    """The JSON of some trees, and their tensors by the names that it uses.

    Raises:
        UnsupportedValueError: a tree holds something that cannot be saved exactly; names the path to it.
    """
    tensors: dict[str, Leaf] = {}

    def sink(path: tuple[Any, ...], tensor: Leaf) -> str:
        joined = ".".join(map(str, path))
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


def _split_models(models: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Leaf]], dict[str, Tree]]:
    weights, extra = [], {}
    for index, state_dict in enumerate(models):
        tensors = {name: value for name, value in state_dict.items() if is_leaf(value)}
        weights.append(with_versions(tensors, versions_of(state_dict)))
        if rest := {name: value for name, value in state_dict.items() if not is_leaf(value)}:
            extra[EXTRA.format(index)] = rest
    return weights, extra
