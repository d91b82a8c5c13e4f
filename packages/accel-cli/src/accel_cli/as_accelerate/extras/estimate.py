"""Functions of ``accelerate.commands.estimate``."""

from __future__ import annotations

from typing import Any

from accel_cli.models import build_model, find_model

__all__ = ["create_empty_model"]


def create_empty_model(
    model_name: str, library_name: str, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """A model on the meta device, made from its configuration.

    Args:
        model_name: a folder, or the id of a repository of a hub.
        library_name: "transformers" or "timm".
        trust_remote_code: run code of the repository.
        access_token: not taken; log in with `hf auth login`, or set HF_TOKEN.

    Raises:
        EstimateError: there is nothing of that name, or only files of weights.
        ValueError: `access_token` is given.
    """
    if access_token is not None:
        raise ValueError(
            "create_empty_model(access_token=…) is not taken: log in with `hf auth login`, or set HF_TOKEN"
        )
    return build_model(find_model(model_name, library_name, trust_remote_code), trust_remote_code)
