"""Functions of ``accelerate.commands.estimate``."""

from __future__ import annotations

import argparse
from typing import Any

from accel_bigmodel import calculate_maximum_sizes
from accel_cli.models import build_model, find_model

_DTYPES = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}
"""How many times smaller than float32."""


def create_empty_model(
    model_name: str, library_name: str, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """A model on the meta device, made from its configuration.

    Args:
        model_name: a folder, or the id of a repository of a hub.
        library_name: "transformers" or "timm".
        trust_remote_code: run code of the repository.
        access_token: not supported; log in with `hf auth login`, or set HF_TOKEN.

    Raises:
        EstimateError: nothing has that name, or it has only files of weights.
        ValueError: `access_token` is given.
    """
    if access_token is not None:
        raise ValueError(
            "create_empty_model(access_token=…) is not taken: log in with `hf auth login`, or set HF_TOKEN"
        )
    return build_model(find_model(model_name, library_name, trust_remote_code), trust_remote_code)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """The rows of Accelerate's table: dtype, bytes of the largest layer and of all, and those of training with Adam.

    Those of training are a mapping from the parts of a step to bytes, which are -1 for integers.

    Args:
        args: the namespace from the parser of ``estimate_command_parser``.

    Raises:
        EstimateError: there is no such model, or its library is not known.
    """
    trusted = bool(args.trust_remote_code)
    model = build_model(find_model(args.model_name, args.library_name, trusted), trusted)
    total, (largest, _) = calculate_maximum_sizes(model)
    return [
        [name, largest / _DTYPES[name], total / _DTYPES[name], _training(name, total)]
        for name in args.dtypes or _DTYPES
    ]


def _training(dtype: str, total: int) -> dict[str, float]:
    if dtype.startswith("int"):
        return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)
    if dtype == "float32":
        return {"model": total, "optimizer": total * 2, "gradients": total, "step": total * 4}
    return {"model": total, "optimizer": total * 2, "gradients": total * 1.5, "step": total * 2}
