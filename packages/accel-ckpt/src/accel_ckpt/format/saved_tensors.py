"""Tensors in the files of a training state: names, shapes and dtypes from headers; values are read only when needed.

Each rank plans its own reads without communication. Of a divided tensor it reads the bytes of its own boxes, however
the tensor was divided when it was saved: the layout of the checkpoint says which files hold them, else all headers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from accel_ckpt.errors import CorruptCheckpointError, StateMismatchError
from accel_ckpt.format.box_reads import BoxRead, read_boxes
from accel_ckpt.format.layout import LaidOut, Layout
from accel_ckpt.format.reader import (
    Header,
    MappedShard,
    TensorEntry,
    check_digest,
    file_digest,
    read_entry,
    read_header,
    read_pickled,
    refuse_expanded,
)
from accel_ckpt.format.sharding import EntryPlace, places_of
from accel_ckpt.format.state_files import is_part_file, part_file
from accel_ckpt.geometry import Box, overlap
from accel_ckpt.modules.names import listed
from accel_ckpt.modules.versions import versions_of
from accel_ckpt.parts import Leaf, parts_of, shape_of
from accel_ckpt.tensor_storage import tied_aliases

__all__ = ["FileBox", "FileChecks", "SavedTensor", "SavedTensors", "fill_all", "verify_all"]

# Bytes. A smaller tensor is read in one request, which costs less than mapping the file.
_SMALL = 1 << 20


class FileChecks:
    """Compares the content of files with their checksums, each file once.

    A subclass fetches remote files before they are read, and only the parts that are read.

    Args:
        checksum: file name → the required xxh3 checksum of the content; ``None`` does not check.
    """

    by_range = False
    """Whether `reads` must be called with the bytes that are read; else only the files matter."""

    def __init__(self, checksum: Callable[[str], str | None] = lambda name: None) -> None:
        self._checksum = checksum
        self.checked: set[Path] = set()
        """Files that are checked already."""

    def __call__(self, files: Iterable[Path]) -> None:
        """Check these files.

        Raises:
            CorruptCheckpointError: names the file that has changed.
        """
        for path in sorted(set(files) - self.checked):
            expected = self._checksum(path.name)
            if expected is not None:
                check_digest(path, file_digest(path), expected)
            self.checked.add(path)

    def fetch(self, files: Iterable[Path]) -> None:
        """Called before files are read by code that checks them itself; here they are local already."""

    def headers(self, files: Iterable[Path]) -> None:
        """Called before the headers of safetensors files are read; here they are local already."""

    def reads(self, reads: Iterable[BoxRead]) -> None:
        """Called, where ``by_range``, before parts of files are read."""

    def mapped(self, shard: MappedShard) -> None:
        """Check a file that is mapped and whose views are used next: hashing brings its pages into memory.

        Raises:
            CorruptCheckpointError: the file has changed.
        """
        path = shard.header.file
        expected = None if path in self.checked else self._checksum(path.name)
        if expected is not None:
            shard.verify(expected)
        self.checked.add(path)


@dataclass(frozen=True, slots=True)
class FileBox:
    """A box of a tensor in a file."""

    box: Box
    file: Path
    content: TensorEntry | torch.Tensor
    """A tensor is a view of a file of ``torch.save``."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.content.dtype


@dataclass(frozen=True, slots=True, eq=False)
class SavedTensor:
    """A tensor of a checkpoint, of which no values have been read.

    In a saved state it takes the place of a tensor that ranks divide, so that each reads its part with ``fill``.
    """

    name: str
    """The name of the tensor in the files."""
    shape: torch.Size
    dtype: torch.dtype
    boxes_in: Callable[[Box], Iterable[FileBox]]
    """Finds the saved boxes that have elements in common with a box. Together they hold every element exactly once."""
    check: FileChecks
    pickled: torch.Tensor | None = None
    """The tensor in a file of ``torch.save``, mapped; it may have a layout of which no boxes are known."""

    def reads(self, target: Leaf) -> Iterator[BoxRead]:
        """The byte ranges that this rank must read for a target."""
        for part in parts_of(target):
            for saved in self.boxes_in(part.box):
                common = saved.box.meet(part.box)
                if common is not None:
                    into = part.tensor.detach()[common.within(part.offsets).slices]
                    yield BoxRead(saved.content, common.within(saved.box.offsets), into)

    def read(self, empty: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """Read the whole tensor, to new memory on the CPU.

        Args:
            empty: allocates the memory for a shape and ``dtype``; by default ``torch.empty``.

        Raises:
            CorruptCheckpointError: a file was damaged or changed after the save.
        """
        if self.pickled is not None:
            return self.pickled.clone()
        make = empty or partial(torch.empty, device="cpu")
        whole = make(self.shape, dtype=self.dtype)
        reads = list(self.reads(whole))
        if (
            len(reads) == 1
            and isinstance(content := reads[0].content, TensorEntry)
            and content.nbytes <= _SMALL
        ):
            _verify([(self, reads)])
            return read_entry(content, whole)
        _fill([(self, reads)])
        return whole

    def fill(self, target: Leaf) -> None:
        """Fill a target of this shape in place with this rank's part: a tensor, a ``DTensor``, or parts.

        Raises:
            CorruptCheckpointError: a file was damaged or changed after the save; raised before anything is changed.
        """
        fill_all([(self, target)])


def verify_all(pairs: Iterable[tuple[SavedTensor, Leaf]]) -> None:
    """Check the files that this rank reads to fill targets; each once per opened checkpoint.

    Raises:
        CorruptCheckpointError: a file was damaged or changed after the save.
    """
    _verify((saved, saved.reads(target)) for saved, target in pairs)


def fill_all(pairs: Sequence[tuple[SavedTensor, Leaf]]) -> None:
    """Fill targets in place with this rank's part of each saved tensor, which has the same shape.

    Raises:
        CorruptCheckpointError: a file was damaged or changed after the save; raised before anything is changed.
    """
    _fill([(saved, list(saved.reads(target))) for saved, target in pairs])


def _verify(planned: Iterable[tuple[SavedTensor, Iterable[BoxRead]]]) -> None:
    files: dict[FileChecks, set[Path]] = {}
    ranges: dict[FileChecks, list[BoxRead]] = {}
    for saved, reads in planned:
        if saved.check.by_range:
            ranges.setdefault(saved.check, []).extend(reads)
        else:
            contents = (read.content for read in reads)
            needed = {content.file for content in contents if isinstance(content, TensorEntry)}
            files.setdefault(saved.check, set()).update(needed)
    for check, paths in files.items():
        check(paths)
    for check, parts in ranges.items():
        check.reads(parts)


def _fill(planned: Sequence[tuple[SavedTensor, Sequence[BoxRead]]]) -> None:
    _verify(planned)
    read_boxes(read for _, reads in planned for read in reads)


class _PartFiles:
    """The files of parts of one stem; the header of each is read, and compared with the layout, when it is needed.

    Args:
        stem: of the files.
        paths: of the files that there are, by name.
        check: prepares files, and checks their contents.
    """

    def __init__(self, stem: str, paths: Mapping[str, Path], check: FileChecks) -> None:
        self._stem, self._paths, self._check = stem, paths, check
        self._opened: dict[str, tuple[Header, Mapping[str, EntryPlace]]] = {}
        self._boxes: dict[tuple[str, Box], list[FileBox]] = {}

    def boxes_in(self, name: str, laid_out: LaidOut, wanted: Box) -> Sequence[FileBox]:
        """The saved boxes of a tensor that have elements in common with a box; asked to check, and again to read.

        Raises:
            CorruptCheckpointError: a file does not hold what the layout says.
        """
        if (name, wanted) not in self._boxes:
            self._boxes[name, wanted] = list(self._find(name, laid_out, wanted))
        return self._boxes[name, wanted]

    def _find(self, name: str, laid_out: LaidOut, wanted: Box) -> Iterator[FileBox]:
        for rank, number, box in laid_out.boxes_in(wanted):
            file = part_file(self._stem, rank, number)
            header, places = self._open(file)
            entry, place = header.entries.get(name), places.get(name)
            here = (
                None
                if entry is None or place is None
                else (place.offsets, entry.shape, entry.dtype, place.shape)
            )
            if entry is None or here != (box.offsets, box.sizes, laid_out.dtype, laid_out.shape):
                raise CorruptCheckpointError(
                    f"{header.file} is to hold the part {list(box.offsets)} of shape {list(box.sizes)} of {name!r} "
                    f"({laid_out.dtype}, {list(laid_out.shape)}), and does not: another save wrote it, or it is damaged"
                )
            yield FileBox(box, header.file, entry)

    def _open(self, file: str) -> tuple[Header, Mapping[str, EntryPlace]]:
        if file not in self._opened:
            path = self._paths.get(file)
            if path is None:
                raise CorruptCheckpointError(
                    f"the layout of the checkpoint names {file}, which its manifest does not list"
                )
            self._check.headers([path])
            header = read_header(path)
            self._opened[file] = header, places_of(header)
        return self._opened[file]


class SavedTensors(Mapping[str, SavedTensor]):
    """The tensors in a set of files, which hold them whole or in boxes; tied names included.

    Args:
        files: safetensors files, or files of ``torch.save``.
        check: checks contents before they are used: of safetensors files when they are read, of others immediately.
        stem: of the files of parts among them.
        layout: says what files of parts hold, which are then opened when they are needed.

    Raises:
        CorruptCheckpointError: boxes of a tensor overlap, leave a gap, or differ in dtype.
    """

    def __init__(
        self,
        files: Iterable[Path],
        check: FileChecks | None = None,
        stem: str = "",
        layout: Layout | None = None,
    ) -> None:
        self._check = check or FileChecks()
        self._found: dict[str, list[tuple[EntryPlace, FileBox]]] = {}
        self._files = list(files)
        laid_out: Mapping[str, LaidOut] = {}
        self.aliases: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        """Name of a module → the version in which it saved its state dict, if the files have it."""
        opened = self._files
        if layout is not None and stem in layout.tensors:
            laid_out = layout.tensors[stem]
            self.aliases |= layout.aliases.get(stem, {})
            self.versions |= layout.versions.get(stem, {})
            others = set(layout.others.get(stem, ()))
            opened = [path for path in opened if path.name in others or not is_part_file(path.name)]
        self._check.headers(path for path in opened if path.suffix == ".safetensors")
        for path in opened:
            if path.suffix == ".safetensors":
                self._add_safetensors(path)
            else:
                self._add_pickled(path)
        self._tensors = {name: self._tensor(name) for name in self._found if name not in laid_out}
        parts = _PartFiles(stem, {path.name: path for path in self._files}, self._check)
        for name, laid in laid_out.items():
            find = partial(parts.boxes_in, name, laid)
            self._tensors[name] = SavedTensor(name, torch.Size(laid.shape), laid.dtype, find, self._check)
        self._tensors |= {alias: self._tensors[name] for alias, name in self.aliases.items()}

    def _add_safetensors(self, path: Path) -> None:
        header = read_header(path)
        for name, place in places_of(header).items():
            entry = header.entries[name]
            saved = FileBox(Box(place.offsets, entry.shape), path, entry)
            self._found.setdefault(name, []).append((place, saved))
        self.aliases |= header.aliases
        self.versions |= header.versions

    def _add_pickled(self, path: Path) -> None:
        self._check([path])
        read = read_pickled(path)
        self.versions |= versions_of(read)
        content = {n: v for n, v in read.items() if isinstance(v, torch.Tensor)}
        aliases = tied_aliases(content)
        for name, value in content.items():
            if name not in aliases:
                refuse_expanded(name, value, str(path))
                place = EntryPlace((0,) * value.dim(), tuple(value.shape))
                saved = FileBox(Box(place.offsets, tuple(value.shape)), path, value)
                self._found.setdefault(name, []).append((place, saved))
        self.aliases |= aliases

    def _tensor(self, name: str) -> SavedTensor:
        if len(self._found[name]) == 1:
            [(place, saved)] = self._found[name]
            if place.shape == saved.box.sizes and not any(place.offsets):  # the whole tensor, as most are
                return self._saved(name, torch.Size(place.shape), [saved])
        places = [place for place, _ in self._found[name]]
        boxes = [saved for _, saved in self._found[name]]
        ends = [saved.box.ends for saved in boxes]
        shape = places[0].shape or tuple(max(sizes) for sizes in zip(*ends, strict=True))
        fit = all(place.shape in (None, shape) for place in places) and all(
            len(end) == len(shape) and all(e <= n for e, n in zip(end, shape, strict=True)) for end in ends
        )
        whole = sum(saved.box.volume for saved in boxes) == Box(shape, shape).volume
        if not fit or not whole or overlap(s.box for s in boxes) or len({s.dtype for s in boxes}) > 1:
            where = ", ".join(sorted(saved.file.name for saved in boxes))
            raise CorruptCheckpointError(
                f"the parts of the tensor {name!r} in {where} do not make up one of shape {list(shape)}: a file is "
                "missing, or belongs to another save"
            )
        return self._saved(name, torch.Size(shape), boxes)

    def _saved(self, name: str, shape: torch.Size, boxes: Sequence[FileBox]) -> SavedTensor:
        content = boxes[0].content
        pickled = content if isinstance(content, torch.Tensor) else None
        return SavedTensor(name, shape, boxes[0].dtype, lambda wanted: boxes, self._check, pickled)

    def __getitem__(self, name: str) -> SavedTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def verify(self) -> None:
        """Check the content of all files.

        Raises:
            CorruptCheckpointError: a file is not what was written.
        """
        self._check(self._files)

    def pairs(self, targets: Mapping[str, Leaf]) -> list[tuple[SavedTensor, Leaf]]:
        """The saved tensor of every target.

        Raises:
            StateMismatchError: a name is missing, or has another shape.
        """
        problems = (
            [f"it lacks {listed(missing)}"] if (missing := sorted(targets.keys() - self.keys())) else []
        )
        for name, target in sorted(targets.items()):
            if name in self and (not isinstance(target, list | tuple) or target):
                shape = shape_of(target)
                if shape != self[name].shape:
                    problems.append(f"{name} is {list(self[name].shape)} there and {list(shape)} here")
                if any(part.tensor.is_meta for part in parts_of(target)):
                    problems.append(
                        f"{name} is on the meta device here; give it memory first, as to_empty() does"
                    )
        if problems:
            raise StateMismatchError(
                f"the checkpoint does not fit: {'; '.join(problems)}. Nothing was changed"
            )
        return [(self[name], target) for name, target in targets.items()]
