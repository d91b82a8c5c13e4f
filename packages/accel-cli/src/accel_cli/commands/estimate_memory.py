"""``accel estimate-memory``: how much memory a model takes to load, to train and to generate with."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Annotated, Any

import typer

from accel_cli.dialect import App, Command, repeated
from accel_cli.models import LIBRARIES, LibraryOption, ModelArgument, TrustOption
from accel_cli.progress import ProgressLine, progress
from accel_cli.render import show_table, show_text
from accel_state.errors import ConfigError

__all__ = ["app"]

_DTYPES = {"float32": 1, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 8}
"""How many times smaller than float32 a dtype is."""


class _Command(Command):
    """Takes several words after ``--dtypes``, as Accelerate's does."""

    choices = {"library_name": LIBRARIES, "dtypes": tuple(_DTYPES)}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the flag before every further dtype."""
        # Where the model comes first, as it should, no word after --dtypes can be the model.
        model_known = bool(args) and not args[0].startswith("-")

        def belongs(word: str) -> bool:
            return word in _DTYPES or (model_known and not word.startswith("-"))

        return super().parse_args(ctx, repeated(args, "--dtypes", belongs))


app = App()


@app.command(cls=_Command)
def estimate_memory(
    model_name: ModelArgument,
    library_name: LibraryOption = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option(
            "--dtypes", help=f"One or several of {', '.join(_DTYPES)}; all but bfloat16 by default."
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    batch_size: Annotated[
        int, typer.Option("--batch_size", min=1, help="Samples per batch, for activations and the KV cache.")
    ] = 1,
    seq_length: Annotated[
        int, typer.Option("--seq_length", min=1, help="Tokens per sample, for activations and the KV cache.")
    ] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes are bytes.")] = False,
) -> None:
    """Estimate the memory that a model takes, without loading it. GB are 10^9 bytes."""
    names = dtypes or ["float32", "float16", "int8", "int4"]
    _check(names, library_name)
    from accel_cli.models import build_model, find_model

    with progress(f"finding {model_name}") as shown:
        found = find_model(model_name, library_name, trust_remote_code)
        if found.library is None:
            facts = _of_tensors(found, names)
        else:
            shown.now(f"building {found.name} without weights, by {found.library}")
            model = build_model(found, trust_remote_code)
            facts = _of_model(model, model_name, names, batch_size, seq_length)
        if not as_json:
            with shown.paused():
                _show_weights(facts)
        if found.library is not None:
            _add_activations(facts, model, batch_size, seq_length, shown)
            _add_inference(facts, model, batch_size, seq_length)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _show_the_rest(facts)


def _check(names: list[str], library: str | None) -> None:
    from accel_state.messages import did_you_mean

    for name in names:
        if name not in _DTYPES:
            hint = did_you_mean(name, _DTYPES, f"; expected {', '.join(_DTYPES)}")
            raise ConfigError(f"--dtypes is {name!r}, which is not a dtype of this table{hint}")
    if library is not None and library not in LIBRARIES:
        hint = did_you_mean(library, LIBRARIES, f"; expected {' or '.join(LIBRARIES)}")
        raise ConfigError(f"--library_name is {library!r}, which is not supported{hint}")


def _loading(total: float, largest: float, names: list[str]) -> list[dict[str, Any]]:
    """The rows of Accelerate's table, by its rules: int8 and int4 apply to every tensor.

    Training with Adam is the largest of its parts: four times the float32 weights in float32, twice in 16 bits.
    """
    return [
        {
            "dtype": name,
            "largest_layer": largest / _DTYPES[name],
            "total_size": total / _DTYPES[name],
            "training_with_adam": None if name.startswith("int") else total * (4 if name == "float32" else 2),
        }
        for name in names
    ]


def _of_tensors(found: Any, names: list[str]) -> dict[str, Any]:
    layers: defaultdict[str, int] = defaultdict(int)
    for tensor, shape in found.shapes.items():
        layers[tensor.rpartition(".")[0]] += 4 * math.prod(shape)
    parameters = sum(layers.values()) // 4
    return {
        "model": found.name,
        "class": None,
        "parameters": parameters,
        "stored_dtypes": list(found.dtypes),
        "loading": _loading(4 * parameters, max(layers.values()), names),
        "training": _training(parameters, parameters, 0),
        "notes": [
            "only names and shapes of tensors are known, so activations and the KV cache are not estimated; a "
            "config.json beside the files, and transformers installed, give them"
        ],
    }


def _training(parameters: int, factored: int, cast: int) -> list[dict[str, Any]]:
    states = {"AdamW": 8 * parameters, "AdamW, 8 bits": int(2 * parameters * (1 + 4 / 256)), "SGD": 0}
    if factored != parameters:
        states["Adafactor"] = 4 * factored
    rows = []
    for name, state in states.items():
        for precision in ("no", "bf16"):
            copy = 2 * cast if precision == "bf16" else 0
            rows.append(
                {
                    "optimizer": name,
                    "mixed_precision": precision,
                    "weights": 4 * parameters,
                    "gradients": 4 * parameters,
                    "optimizer_states": state,
                    "low_precision_copy": copy,
                    "total": 8 * parameters + state + copy,
                }
            )
    return rows


def _of_model(model: Any, name: str, names: list[str], batch_size: int, length: int) -> dict[str, Any]:
    from accel_bigmodel import calculate_maximum_sizes, estimate_training
    from accel_bigmodel.planning.model import shape_of_model

    total, (largest, _) = calculate_maximum_sizes(model)
    shape = shape_of_model(model)
    cast = estimate_training(model, mixed_precision="bf16").low_precision_copy // 2
    return {
        "model": name,
        "class": type(model).__name__,
        "parameters": shape.parameters,
        "loading": _loading(total, largest, names),
        "training": _training(shape.parameters, shape.factored, cast),
        "batch_size": batch_size,
        "seq_length": length,
        "notes": [],
    }


def _add_activations(
    facts: dict[str, Any], model: Any, batch_size: int, length: int, shown: ProgressLine
) -> None:
    from accel_bigmodel import EstimateError
    from accel_bigmodel.planning.timelines import text_inputs, timelines_of

    try:
        timelines: Any = timelines_of(model, text_inputs(model, length))
        rows = []
        for precision, numbers in (("no", "float32"), ("bf16", "float32 autocast bfloat16")):
            peaks = []
            for again in (False, True):
                shown.now(f"tracing a step in {numbers}{', with recomputation' if again else ''}")
                peaks.append(max(phase.at(batch_size) for phase in timelines(numbers, again).phases))
            rows.append(
                {"mixed_precision": precision, "activations": peaks[0], "with_checkpointing": peaks[1]}
            )
        facts["activations"] = rows
    except EstimateError as error:
        facts["notes"].append(f"activations are not estimated: {error}")


def _add_inference(facts: dict[str, Any], model: Any, batch_size: int, length: int) -> None:
    from accel_bigmodel import EstimateError, estimate_kv_cache, estimate_weights

    can_generate = getattr(model, "can_generate", None)
    rows: list[dict[str, Any]] = []
    for weights in estimate_weights(model, ("float32", "bfloat16", "int8", "int4")):
        # Quantised layers compute in 16 bits, and so does the cache.
        numbers = "float32" if weights.dtype == "float32" else "bfloat16"
        row = {"weights_dtype": weights.dtype, "weights": weights.total}
        try:
            if callable(can_generate) and can_generate():
                row["kv_cache"] = estimate_kv_cache(model.config, batch_size, length, dtype=numbers)
        except EstimateError as error:
            if not rows:
                facts["notes"].append(f"the KV cache is not estimated: {error}")
        rows.append(row)
    facts["inference"] = rows


def _show_weights(facts: dict[str, Any]) -> None:
    from accel_state.messages import readable_size as size

    kind = f" ({facts['class']})" if facts["class"] else ""
    print(f"Memory usage for loading `{facts['model']}`{kind}, {facts['parameters']:,} parameters\n")
    show_table(
        ("dtype", "Largest Layer", "Total Size", "Training using Adam"),
        [
            (
                row["dtype"],
                size(row["largest_layer"]),
                size(row["total_size"]),
                "N/A" if row["training_with_adam"] is None else size(row["training_with_adam"]),
            )
            for row in facts["loading"]
        ],
    )
    print("\nTraining, without activations\n")
    show_table(
        ("optimizer", "precision", "weights", "gradients", "states", "16-bit copy", "total"),
        [
            (
                row["optimizer"],
                row["mixed_precision"],
                *(
                    size(row[key])
                    for key in ("weights", "gradients", "optimizer_states", "low_precision_copy", "total")
                ),
            )
            for row in facts["training"]
        ],
        left=2,
    )


def _show_the_rest(facts: dict[str, Any]) -> None:
    from accel_state.messages import readable_size as size

    given = f"batch {facts.get('batch_size')}, {facts.get('seq_length')} tokens"
    if "activations" in facts:
        print(f"\nActivations and temporaries of a training step at most, {given}\n")
        show_table(
            ("precision", "all kept", "with checkpointing"),
            [
                (row["mixed_precision"], size(row["activations"]), size(row["with_checkpointing"]))
                for row in facts["activations"]
            ],
        )
    if "inference" in facts:
        print(f"\nInference, {given}\n")
        show_table(
            ("weights", "size", "KV cache", "together"),
            [
                (
                    row["weights_dtype"],
                    size(row["weights"]),
                    size(row["kv_cache"]) if "kv_cache" in row else "-",
                    size(row["weights"] + row.get("kv_cache", 0)),
                )
                for row in facts["inference"]
            ],
        )
    print()
    show_text(
        "GB are 10^9 bytes. In the first table, as in Accelerate's, int8 and int4 apply to all tensors; under "
        "inference they apply to linear layers, as in quantised models. For a number of devices: accel plan."
    )
    for note in facts["notes"]:
        show_text(f"note: {note}")
