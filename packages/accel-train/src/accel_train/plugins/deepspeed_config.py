"""DeepSpeed's configuration: loading it, and reading it by dotted keys."""

from __future__ import annotations

import base64
import binascii
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_train.errors import ArgumentTypeError, OptionError

__all__ = ["HfDeepSpeedConfig"]


class HfDeepSpeedConfig:
    """DeepSpeed's configuration, whose values may be "auto" until they are filled in.

    Args:
        config_file_or_dict: a mapping, which is copied; the path of a JSON file; JSON text; or JSON in base64.

    Attributes:
        config: the configuration as a dictionary.

    Raises:
        OptionError: the file does not exist, or does not hold a JSON object.
        ArgumentTypeError: the argument is neither a mapping nor text.
    """

    def __init__(self, config_file_or_dict: Mapping[str, Any] | str | Path) -> None:
        self.origin = "the dictionary of hf_ds_config"
        if isinstance(config_file_or_dict, Mapping):
            self.config: dict[str, Any] = copy.deepcopy(dict(config_file_or_dict))
        elif isinstance(config_file_or_dict, str | Path):
            self.config = self._read(str(config_file_or_dict))
        else:
            raise ArgumentTypeError(
                "A DeepSpeed configuration is a mapping, the path of a JSON file or JSON text; got "
                f"{type(config_file_or_dict).__name__}: {config_file_or_dict!r:.80}."
            )
        self.set_stage_and_offload()

    def _read(self, given: str) -> dict[str, Any]:
        path = Path(given).expanduser()
        text = given
        if given.lstrip().startswith("{"):
            self.origin = "the JSON text of hf_ds_config"
        elif path.is_file():
            self.origin = str(path)
            text = path.read_text(encoding="utf-8")
        else:
            self.origin = "the base64 text of hf_ds_config"
            try:
                text = base64.urlsafe_b64decode(given.encode()).decode()
            except (binascii.Error, ValueError):
                raise OptionError(
                    f"The DeepSpeed configuration {given!r:.200} is neither a file that exists nor JSON; give the path "
                    "of a JSON file."
                ) from None
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise OptionError(
                f"{self.origin} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}."
            ) from None
        if not isinstance(found, dict):
            raise OptionError(f"{self.origin} holds {type(found).__name__}; expected a JSON object.")
        return found

    def set_stage_and_offload(self) -> None:
        """Store the ZeRO stage, and whether anything is offloaded, for the `is_…` methods below."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = {
            self.get_value(f"zero_optimization.{part}.device")
            for part in ("offload_optimizer", "offload_param")
        }
        self._offload = bool(devices & {"cpu", "nvme"})

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Find the mapping that holds a dotted key; returns it (None if missing) and the last part of the key."""
        *nodes, key = ds_key_long.split(".")
        config: Any = self.config
        for node in nodes:
            config = config.get(node) if isinstance(config, Mapping) else None
            if config is None:
                return None, key
        return config, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key, or `default` if it is missing."""
        config, key = self.find_config_node(ds_key_long)
        return default if config is None else config.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a dotted key and all below it.

        Raises:
            OptionError: the key is missing, with `must_exist`.
        """
        config, key = self.find_config_node(ds_key_long)
        if config is not None and key in config:
            del config[key]
        elif must_exist:
            raise OptionError(f"{self.origin} has no {ds_key_long!r}.")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a key exists and its value is true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a key exists and its value is false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a value is "auto": it is filled in from the script."""
        return bool(self.get_value(ds_key_long) == "auto")

    def is_zero2(self) -> bool:
        """Whether the ZeRO stage is 2: optimizer states and gradients are divided, and parameters are not."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether the ZeRO stage is 3: parameters are divided as well."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether parameters or optimizer states are kept in host memory or on NVMe."""
        return self._offload
