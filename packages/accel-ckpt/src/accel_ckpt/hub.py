"""Weights on a model hub. huggingface_hub handles the endpoint, tokens, the cache and offline mode."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointSaveError
from accel_ckpt.format.index import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    find_weights,
    is_weight_file,
)
from accel_state.errors import MissingDependencyError
from accel_state.host.versions import install_extra

__all__ = ["check_repo_id", "fetch_weights", "is_repo_id", "push_to_hub"]

# As the hub has them: org/name, of letters, digits, dots, dashes and underscores.
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_FORMATS = (
    (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, "model-?????-of-?????.safetensors"),
    (WEIGHTS_NAME, WEIGHTS_INDEX_NAME, "pytorch_model-?????-of-?????.bin"),
)


def is_repo_id(name: object) -> bool:
    """Whether a string can be the name of a repository on a hub: ``org/name``."""
    return isinstance(name, str) and _REPO_ID.fullmatch(name) is not None


def check_repo_id(repo_id: str) -> None:
    """Check the name of a repository, and that huggingface_hub is installed, before anything is done.

    Raises:
        CheckpointSaveError: the name is not ``org/name``.
        MissingDependencyError: huggingface_hub is not installed.
    """
    if not is_repo_id(repo_id):
        raise CheckpointSaveError(f"{repo_id!r} does not name a repository; give it as 'org/name'")
    _library()


def _library() -> ModuleType:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise MissingDependencyError(
            f"repositories of a hub need huggingface_hub: {install_extra('accel-ckpt', 'hub')}"
        ) from error


def _failures() -> tuple[type[BaseException], ...]:
    """The errors that huggingface_hub and its HTTP client raise; the client depends on its version."""
    from huggingface_hub import errors

    later = getattr(errors, "RevisionResolutionError", errors.EntryNotFoundError)
    # The second class is the client's own root: https://github.com/huggingface/huggingface_hub, errors.py
    return (*errors.HfHubHTTPError.__mro__[:2], errors.EntryNotFoundError, later, OSError, ValueError)


@contextlib.contextmanager
def _retold(tell: Callable[[str, BaseException], CheckpointError], repo_id: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into errors of ours."""
    _library()
    try:
        yield
    except CheckpointError:
        raise
    except _failures() as error:
        raise tell(repo_id, error) from error


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _not_saved(repo_id: str, error: BaseException) -> CheckpointError:
    advice = "Try again with push_to_hub(folder, repository); what was uploaded is not uploaded twice"
    if _status(error) in (401, 403):
        advice = (
            "Log in with `hf auth login`, or pass token=, with the right to write there; then push_to_hub()"
        )
    elif _is_offline(error):
        advice = "This process is in offline mode; unset HF_HUB_OFFLINE, then push_to_hub()"
    return CheckpointSaveError(f"uploading to {repo_id} failed: {_short(error)}. {advice}")


def _not_found(repo_id: str, error: BaseException) -> CheckpointError:
    advice = "Check the connection and try again; files that are complete are not downloaded twice"
    if _status(error) in (401, 403, 404):
        advice = "Check the name; if it is private, log in with `hf auth login` or pass token="
    elif _is_offline(error):
        advice = f"Download it once with `hf download {repo_id}` while online, or pass a local folder"
    return CheckpointNotFoundError(
        f"there is no file or folder {repo_id}, and the repository of that name cannot be read: {_short(error)}. "
        f"{advice}"
    )


def _is_offline(error: BaseException | None) -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE) or type(error).__name__ == "OfflineModeIsEnabled"


def fetch_weights(repo_id: str, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Download the weights of a repository into huggingface_hub's cache, or find them there.

    Safetensors come before ``.bin``, and only one of the two is downloaded. A connection that breaks is resumed
    where it stopped; after a process was killed, the next one fetches the files that were not complete.

    Args:
        repo_id: ``org/name``.
        revision: branch, tag or commit; the main branch by default.
        token: for private repositories; by default the token of the last login.

    Returns:
        The folder of the cache.

    Raises:
        CheckpointNotFoundError: there is no such repository or revision, or no weights in it; the hub cannot be
            reached; or this process is offline and a file is missing in the cache.
        MissingDependencyError: huggingface_hub is not installed.
    """
    for patterns in _FORMATS:
        with _retold(_not_found, repo_id):
            from huggingface_hub import snapshot_download

            found = snapshot_download(repo_id, revision=revision, token=token, allow_patterns=list(patterns))
        folder = Path(found)
        if any((folder / name).exists() for name in patterns[:2]):
            _check_whole(repo_id, folder)
            return folder
    raise CheckpointNotFoundError(
        f"the repository {repo_id}{f' at {revision}' if revision else ''} holds no weights: no {SAFE_WEIGHTS_NAME} or "
        f"{WEIGHTS_NAME}, whole or with an index"
        + (", or they are not in the cache and this process is offline" if _is_offline(None) else "")
    )


def _check_whole(repo_id: str, folder: Path) -> None:
    try:
        find_weights(folder)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"only a part of {repo_id} is in the cache: {error}. Download the rest with `hf download {repo_id}` while "
            "online"
        ) from error


def push_to_hub(
    save_directory: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
) -> str:
    """Upload the weights in a folder, in one commit. The calling process uploads; call it on one rank.

    Weights of an earlier upload that this one does not replace, such as shards, are removed in the same commit; other
    files stay.

    Args:
        save_directory: the folder that `save_model` wrote.
        repo_id: ``org/name``; the repository is created if it does not exist.
        token: by default the token of the last login.
        private: whether a newly created repository is private; by default the organisation's setting.
        commit_message: ``"Upload weights"`` by default.

    Returns:
        The address of the commit.

    Raises:
        CheckpointSaveError: the upload failed, or ``private`` is set and the repository is public. The files in the
            folder stay.
        CheckpointNotFoundError: there are no weights in the folder.
        MissingDependencyError: huggingface_hub is not installed.
    """
    check_repo_id(repo_id)
    folder = Path(save_directory)
    find_weights(folder)
    names = sorted(path.name for path in folder.iterdir() if is_weight_file(path.name))
    with _retold(_not_saved, repo_id):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api = HfApi(token=token, library_name="accel-ckpt")
        api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise CheckpointSaveError(
                f"{repo_id} exists and is public, but private=True was given; nothing was uploaded. Make the "
                "repository private, choose another name, or leave out private=True"
            )
        stale = [name for name in api.list_repo_files(repo_id) if is_weight_file(name) and name not in names]
        operations: list[Any] = [CommitOperationAdd(name, str(folder / name)) for name in names]
        operations += [CommitOperationDelete(name) for name in stale]
        done = api.create_commit(repo_id, operations, commit_message=commit_message or "Upload weights")
    return str(done.commit_url)
