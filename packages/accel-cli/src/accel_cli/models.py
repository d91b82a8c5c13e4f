"""Finds a model by a name or path, and builds it without storage, for commands that only need its sizes.

No file is executed: configurations and the headers of safetensors files are data. Code of a repository runs only
where the user asks for it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from accel_bigmodel.errors import EstimateError
from accel_state.environment import snapshot
from accel_state.errors import MissingDependencyError
from accel_state.messages import first_line
from accel_state.whole_files import read_whole

__all__ = [
    "LIBRARIES", "FoundModel", "LibraryOption", "ModelArgument", "ModelNotFoundError", "TrustOption", "build_model",
    "find_model",
]  # fmt: skip

LIBRARIES = ("transformers", "timm")
ModelArgument = Annotated[
    str,
    typer.Argument(
        help="Id of a model of the Hub, folder with config.json or safetensors files, or one such file."
    ),
]
LibraryOption = Annotated[
    str | None,
    typer.Option(
        "--library_name",
        help="Library of the model, transformers or timm, if its configuration does not name it.",
    ),
]
TrustOption = Annotated[
    bool, typer.Option("--trust_remote_code", help="Run the model's own code from its repository.")
]
_CONFIG = "config.json"


class ModelNotFoundError(EstimateError, OSError):
    """There is no such model, or its repository cannot be read."""


@dataclass(frozen=True)
class FoundModel:
    """Where the sizes of a model come from.

    Attributes:
        name: as the user gave it.
        library: transformers or timm; None: only its tensors are known.
        config: the file of its configuration, beside which its code is; None: the model is made by name.
        settings: its configuration.
        shapes: shapes of its tensors, from headers of files.
        dtypes: the dtypes in them.
    """

    name: str
    library: str | None
    config: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()


def find_model(name: str, library: str | None = None, trust_remote_code: bool = False) -> FoundModel:
    """Find a model.

    Args:
        name: a folder with ``config.json`` or safetensors files, one such file, or the id of a repository of a hub.
        library: transformers or timm; None: the configuration names it.
        trust_remote_code: download the code of a repository too.

    Raises:
        ModelNotFoundError: nothing has that name, or the repository cannot be read; an `EstimateError`.
        EstimateError: it contains nothing usable.
        MissingDependencyError: a library is not installed.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _local(name, path, library)
    if (
        name.startswith((".", "/", "~"))
        or path.suffix in (".json", ".safetensors", ".gguf")
        or name.count("/") > 1
    ):
        raise ModelNotFoundError(
            f"{name} does not exist; give a folder, a file, or the id of a repository of the Hub"
        )
    if library == "timm" and "/" not in name:
        return FoundModel(name, "timm")
    return _on_hub(name, library, trust_remote_code)


def _local(name: str, path: Path, library: str | None) -> FoundModel:
    if path.is_file():
        if path.suffix == ".json":
            return _configured(name, path, library)
        if path.suffix == ".safetensors":
            return _of_files(name, [path])
        raise EstimateError(
            f"{name} is neither a config.json nor a safetensors file; other formats are not read for estimates"
        )
    config = path / _CONFIG
    files = sorted(path.glob("*.safetensors"))
    if config.is_file():
        found = _configured(name, config, library)
        if not files or (found.library is not None and importlib.util.find_spec(found.library) is not None):
            return found
    if files:
        return _of_files(name, files)
    there = ", ".join(sorted(each.name for each in path.iterdir())[:5]) or "nothing"
    raise EstimateError(f"the folder {name} has neither {_CONFIG} nor safetensors files; it has {there}")


def _configured(name: str, path: Path, library: str | None) -> FoundModel:
    try:
        settings = json.loads(read_whole(path))
    except (OSError, ValueError, RecursionError) as error:
        raise EstimateError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(settings, dict):
        raise EstimateError(f"{path} is not a JSON object, so it is not the configuration of a model")
    if library is None:
        library = "transformers" if "model_type" in settings else None
        library = "timm" if library is None and "architecture" in settings else library
    if library is None:
        raise EstimateError(
            f"{path} does not say which library made the model: it has neither model_type (transformers) nor "
            f"architecture (timm); pass --library_name {' or '.join(LIBRARIES)}"
        )
    return FoundModel(name, library, path, settings)


def _of_files(name: str, files: list[Path]) -> FoundModel:
    import safetensors

    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, None] = {}
    for file in files:
        try:
            with safetensors.safe_open(file, framework="numpy") as opened:
                for key in opened.keys():  # noqa: SIM118 - it is no mapping
                    header = opened.get_slice(key)
                    shapes[key] = tuple(header.get_shape())
                    dtypes[str(header.get_dtype())] = None
        except (OSError, safetensors.SafetensorError) as error:
            raise EstimateError(f"{file} cannot be read as safetensors: {error}") from error
    if not shapes:
        raise EstimateError(f"{name} contains no tensors")
    return FoundModel(name, None, shapes=shapes, dtypes=tuple(dtypes))


def _on_hub(name: str, library: str | None, trust_remote_code: bool) -> FoundModel:
    hub = _import("huggingface_hub", "models of the Hub")
    from huggingface_hub import errors
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it warns of each try to connect
    _reach(name, hub)
    try:
        file = Path(hub.hf_hub_download(name, _CONFIG))
        if trust_remote_code:
            file = Path(hub.snapshot_download(name, allow_patterns=["*.json", "*.py"])) / _CONFIG
        return _configured(name, file, library)
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"the repository {name} is gated; ask for access on its page, then log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no file or folder {name}, and no repository of that name that you can see; check the name, and "
            "log in with `hf auth login` if it is private"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelNotFoundError(_offline(name)) from error
    except errors.EntryNotFoundError:
        return _headers_on_hub(name, hub)
    except errors.HFValidationError as error:
        raise ModelNotFoundError(
            f"there is no file or folder {name}, and it cannot be the id of a repository"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ModelNotFoundError(
            f"the request to the Hub for {name} failed: {' '.join(str(error).split())[:300]}"
        ) from error


def _reach(name: str, hub: Any) -> None:
    """Ask once for a configuration that is not in the cache: a download tries for half a minute to reach the Hub."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        with contextlib.suppress(HfHubHTTPError, HFValidationError):  # the download says what is wrong
            if not isinstance(hub.try_to_load_from_cache(name, _CONFIG), str):
                hub.get_hf_file_metadata(hub.hf_hub_url(name, _CONFIG))
    except (OSError, *HfHubHTTPError.__bases__) as error:  # of the HTTP client, which depends on the version
        raise ModelNotFoundError(_offline(name)) from error


def _offline(name: str) -> str:
    environ = snapshot()
    offline = environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    cause = "HF_HUB_OFFLINE is set" if offline else "the Hub cannot be reached"
    then = "unset it" if offline else "check the connection"
    return (
        f"there is no file or folder {name}, its configuration is not in the cache, and {cause}; {then}, run `hf "
        f"download {name} {_CONFIG}` on a machine that is online, or give a local folder"
    )


def _headers_on_hub(name: str, hub: Any) -> FoundModel:
    from huggingface_hub import errors

    try:
        metadata = hub.get_safetensors_metadata(name)
    except (errors.NotASafetensorsRepoError, errors.HfHubHTTPError, OSError) as error:
        raise ModelNotFoundError(
            f"the repository {name} has neither {_CONFIG} nor safetensors files whose headers could be read; "
            "give a local folder"
        ) from error
    tensors = {key: each for file in metadata.files_metadata.values() for key, each in file.tensors.items()}
    shapes = {key: tuple(each.shape) for key, each in tensors.items()}
    return FoundModel(
        name, None, shapes=shapes, dtypes=tuple({each.dtype: None for each in tensors.values()})
    )


def _import(library: str, what: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise MissingDependencyError(f"{what} need {library}: pip install {library}") from error


def build_model(found: FoundModel, trust_remote_code: bool = False) -> Any:
    """Build the model of a configuration, in float32 and without storage.

    With transformers this is the class that ``architectures`` names, with its head; without that key, the choice of
    ``AutoModel``.

    Raises:
        EstimateError: the library cannot build it.
        MissingDependencyError: the library is not installed.
    """
    from accel_bigmodel import init_empty_weights

    if found.library == "timm":
        timm = _import("timm", "models of timm")
        source = f"hf-hub:{found.name}" if "/" in found.name and found.config is not None else found.name
        if found.config is not None and Path(found.name).exists():
            source = str(found.settings["architecture"])
        try:
            with init_empty_weights(include_buffers=False):
                return timm.create_model(source, pretrained=False)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            raise EstimateError(f"timm cannot build {found.name}: {first_line(error).rstrip('.')}") from error
    if found.library != "transformers":
        raise EstimateError(f"library {found.library!r} is not known; known: {', '.join(LIBRARIES)}")
    transformers = _import("transformers", "models of transformers")
    known = found.settings.get("model_type") in transformers.CONFIG_MAPPING
    if "auto_map" in found.settings and not trust_remote_code and not known:
        raise EstimateError(
            f"{found.name} is defined by code in its repository, which is not run; read that code, and pass "
            "--trust_remote_code if you trust it"
        )
    try:
        # Of a folder the library reads config.json, of a file that file, whatever is beside it.
        where = (
            found.config.parent if found.config is not None and found.config.name == _CONFIG else found.config
        )
        config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
        import torch

        with init_empty_weights(include_buffers=False):
            return _make(transformers, config, found, trust_remote_code, torch.float32)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError, RuntimeError) as error:
        raise EstimateError(
            f"transformers cannot build {found.name}: {first_line(error).rstrip('.')}"
        ) from error


def _make(transformers: Any, config: Any, found: FoundModel, trust: bool, dtype: Any) -> Any:
    names = found.settings.get("architectures") or []
    kind = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if kind is not None:
        return kind(config)
    mapped = [name for name in found.settings.get("auto_map", {}) if name.startswith("AutoModel")]
    automatic = getattr(transformers, next((name for name in mapped if name != "AutoModel"), "AutoModel"))
    return automatic.from_config(config, dtype=dtype, trust_remote_code=trust)
