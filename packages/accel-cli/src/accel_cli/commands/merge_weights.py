"""``accel merge-weights``: merge a sharded checkpoint into plain weight files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from accel_cli.dialect import App
from accel_cli.render import show_text
from accel_cli.sizes import bytes_of
from accel_state.errors import ConfigError

__all__ = ["app"]

app = App()

_BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
"""Files that the Hugging Face libraries keep beside the weights of a model."""


@app.command()
def merge_weights(
    checkpoint_directory: Annotated[
        Path,
        typer.Argument(
            help="Checkpoint to merge: a distributed checkpoint of torch or its parent folder, an FSDP checkpoint of "
            "Accelerate, shards with an index, or a training state."
        ),
    ],
    output_path: Annotated[Path, typer.Argument(help="Folder for the result; created if it does not exist.")],
    unsafe_serialization: Annotated[
        bool,
        typer.Option(
            "--unsafe_serialization",
            help="Write pytorch_model.bin, a pickle, instead of model.safetensors.",
        ),
    ] = False,
    remove_checkpoint_dir: Annotated[
        bool,
        typer.Option(
            "--remove_checkpoint_dir",
            help="Remove the folder of the sharded weights after the result is written.",
        ),
    ] = False,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max_shard_size",
            help="Write shards of at most this size, such as 5GB, with an index; by default one file.",
        ),
    ] = None,
    accelerate_state: Annotated[
        bool,
        typer.Option(
            "--accelerate_state",
            help="Write a complete training state of this library, in new files, in the format that Accelerate's "
            "load_state reads.",
        ),
    ] = False,
) -> None:
    """Merge the weights of a sharded checkpoint into plain files, one tensor at a time."""
    from rich.filesize import decimal

    import accel_ckpt
    from accel_ckpt.modules.names import listed

    if checkpoint_directory.resolve() == output_path.resolve():
        raise ConfigError(
            f"OUTPUT_PATH is CHECKPOINT_DIRECTORY, {checkpoint_directory}: the result would overwrite the input; give "
            "another folder for the result"
        )

    if accelerate_state:
        if unsafe_serialization or remove_checkpoint_dir or max_shard_size is not None:
            raise ConfigError("--accelerate_state cannot be combined with the other options; leave them out")
        for note in accel_ckpt.export_to_accelerate(checkpoint_directory, output_path):
            show_text(f"omitted: {note}")
        show_text(f"{output_path} can be loaded with Accelerate's load_state")
        return
    with _progress() as report:
        names = accel_ckpt.merge_weights(
            checkpoint_directory,
            output_path,
            safe_serialization=not unsafe_serialization,
            remove_checkpoint_dir=remove_checkpoint_dir,
            max_shard_size=None if max_shard_size is None else bytes_of("--max_shard_size", max_shard_size),
            progress=report,
        )
    total = sum((output_path / name).stat().st_size for name in names)
    show_text(f"{output_path}: {listed(names, 4)} ({decimal(total)})")
    left = [
        name
        for name in _BESIDE_WEIGHTS
        if (checkpoint_directory / name).is_file() and not (output_path / name).exists()
    ]
    if left:
        show_text(
            f"only weights are merged; from_pretrained reads these files too, so copy them: {', '.join(left)}"
        )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("merging", total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report
