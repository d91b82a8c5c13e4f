"""Options of DeepSpeed."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

from accel_state.config.sections.deepspeed import DEEPSPEED_KEYS, DeepSpeedSection
from accel_train.errors import IncompatibleOptionsError, OptionError
from accel_train.plugins.base import SectionPlugin, StrategyPlugin, positional
from accel_train.plugins.deepspeed_config import HfDeepSpeedConfig

__all__ = ["DeepSpeedPlugin", "DeepSpeedPlugins"]

_DEFAULT_STAGE = 2
# What a field is that neither the script nor the configuration sets.
_UNSET = MappingProxyType(
    {
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_stage": 0,
        "zero3_save_16bit_model": False,
        **dict.fromkeys((name for name in DEEPSPEED_KEYS if name.startswith("offload_")), "none"),
    }
)


@positional(
    "hf_ds_config",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "is_train_batch_min",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "transformer_moe_cls_names",
    "enable_msamp",
    "msamp_opt_level",
)
@dataclass(frozen=True, repr=False, eq=False)
class DeepSpeedPlugin(StrategyPlugin, SectionPlugin, DeepSpeedSection):
    """Train with DeepSpeed's engine: ZeRO stages 0 to 3, and offload to host memory or NVMe.

    Passing one selects the strategy "deepspeed"; unset fields come from the launcher's environment. DeepSpeed's own
    configuration can set all its options. Its "auto" values are filled in from the script. A field that contradicts the
    configuration is an error that names both.

    Attributes:
        hf_ds_config: DeepSpeed's own configuration, as `HfDeepSpeedConfig` takes it, or such an object; None: made
            from the other fields.
        gradient_accumulation_steps: micro-batches per step; None or "auto": the setting of the `Accelerator`.
        gradient_clipping: norm to which the engine clips gradients in every step; 0: no clipping; None or "auto": none,
            unless the script fills "auto" in. The script's `clip_grad_norm_` clips as well.
        zero_stage: what ZeRO divides among ranks: 0 nothing, 1 optimizer states, 2 gradients as well, 3 parameters as
            well.
        is_train_batch_min: the micro-batch size that the engine reports is the smallest of the prepared loaders, else
            the largest.
        offload_optimizer_device: "none", "cpu" or "nvme".
        offload_param_device: "none", "cpu" or "nvme"; with stage 3.
        offload_optimizer_nvme_path: folder of optimizer states on NVMe.
        offload_param_nvme_path: folder of parameters on NVMe.
        zero3_init_flag: models of transformers are divided while they are built, in `zero3_init_context_manager()`
            and by `from_pretrained`; with stage 3.
        zero3_save_16bit_model: whole models are saved in the 16-bit dtype that they compute in, not in float32; with
            stage 3.
        transformer_moe_cls_names: comma-separated names of the mixture-of-experts classes whose experts are gathered
            together; with stage 3.
        enable_msamp, msamp_opt_level: refused: MS-AMP is no longer maintained.

    Raises:
        OptionError: a value cannot be used.
        IncompatibleOptionsError: a field contradicts the configuration, or another field.
        ConfigError: an option is unset, and its environment variable holds a value that cannot be used.
    """

    strategy: ClassVar[str] = "deepspeed"
    section: ClassVar[str] = "deepspeed"
    argument: ClassVar[str] = "deepspeed_plugin"
    when_unset: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    hf_ds_config: Any = None
    zero_stage: Any = None
    offload_optimizer_device: Any = None
    offload_param_device: Any = None
    gradient_clipping: Any = None
    gradient_accumulation_steps: Any = None
    is_train_batch_min: bool = True
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def check(self) -> Mapping[str, Any]:
        """Refuse contradictions, and merge fields and configuration."""
        if self.enable_msamp or self.msamp_opt_level:
            raise OptionError(
                "enable_msamp and msamp_opt_level are options of MS-AMP, which is no longer maintained. Leave them "
                "out; mixed_precision='bf16' trains in bfloat16."
            )
        given = self.hf_ds_config
        if given is None:
            config = HfDeepSpeedConfig(self._as_config())
            config.origin = "DeepSpeedPlugin"
        else:
            # Its owner, such as transformers' TrainingArguments, may fill it in and read it back: it is not copied.
            config = given if hasattr(given, "find_config_node") else HfDeepSpeedConfig(given)
            self._merge(config)
        config.set_stage_and_offload()
        found = {name: self._from(config, name) for name in DEEPSPEED_KEYS}
        stage = found["zero_stage"]
        if stage not in (0, 1, 2, 3):
            raise OptionError(
                f"zero_optimization.stage is {stage!r} in {_origin(config)}; expected 0, 1, 2 or 3."
            )
        self._check_offload(config, stage)
        init = self.zero3_init_flag
        if init and stage != 3:
            init = False  # Accelerate's own wizard writes true for every stage
        return {**found, "hf_ds_config": config, "zero3_init_flag": bool(init)}

    def _as_config(self) -> dict[str, Any]:
        """The configuration that the fields describe."""
        stage = _DEFAULT_STAGE if self.zero_stage is None else self.zero_stage
        zero: dict[str, Any] = {"stage": stage}
        for part, device, folder in (
            ("offload_optimizer", self.offload_optimizer_device, self.offload_optimizer_nvme_path),
            ("offload_param", self.offload_param_device, self.offload_param_nvme_path),
        ):
            if device not in (None, "none"):
                zero[part] = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
        if self.zero3_save_16bit_model is not None:
            zero["stage3_gather_16bit_weights_on_model_save"] = self.zero3_save_16bit_model
        return {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto"
            if self.gradient_accumulation_steps is None
            else self.gradient_accumulation_steps,
            "gradient_clipping": "auto" if self.gradient_clipping is None else self.gradient_clipping,
            "zero_optimization": zero,
            "steps_per_print": None,
        }

    def _merge(self, config: Any) -> None:
        """Fill "auto" from fields, and refuse fields that contradict the configuration."""
        for name, key in DEEPSPEED_KEYS.items():
            mine = getattr(self, name)
            if mine in (None, "auto"):
                continue
            saved = config.get_value(key)
            if saved == "auto":
                node, last = config.find_config_node(key)
                node[last] = mine
            elif saved is None and mine in ("none", 0, False):
                continue
            elif saved != mine:
                there = "does not set it" if saved is None else f"says {saved!r}"
                raise IncompatibleOptionsError(
                    f"{name}={mine!r} of DeepSpeedPlugin (or of its launch option --{name}) contradicts {key} in "
                    f'{_origin(config)}, which {there}. Set it in one of them; "auto" in the file takes the option\'s '
                    "value."
                )

    def _from(self, config: Any, name: str) -> Any:
        value = config.get_value(DEEPSPEED_KEYS[name])
        return _UNSET[name] if value is None else value

    def _check_offload(self, config: Any, stage: int) -> None:
        for part, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
            key = f"zero_optimization.{part}"
            device = config.get_value(f"{key}.device")
            if device in (None, "none"):
                continue
            if device not in ("cpu", "nvme"):
                raise OptionError(f"{key}.device is {device!r} in {_origin(config)}; known: none, cpu, nvme.")
            if stage < lowest:
                raise IncompatibleOptionsError(
                    f"{key}.device={device!r} needs ZeRO stage {lowest} or more, and the stage is {stage} (both in "
                    f"{_origin(config)})."
                )
            if device == "nvme":
                if stage < 3:
                    raise IncompatibleOptionsError(
                        f"{key}.device='nvme' needs ZeRO stage 3, and the stage is {stage} (both in "
                        f"{_origin(config)})."
                    )
                if not config.get_value(f"{key}.nvme_path"):
                    raise OptionError(
                        f"{key}.device is 'nvme' in {_origin(config)} without nvme_path; give the folder, as "
                        f"{part}_nvme_path or in the file."
                    )

    # What clients of Accelerate ask it

    _selected: ClassVar[bool] = False

    @property
    def selected(self) -> bool:
        """Whether an `Accelerator` uses the plugin for the models that are prepared next."""
        return self._selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Refused: a plugin is selected by its name.

        Raises:
            OptionError: always; names the call that selects.
        """
        raise OptionError(
            "DeepSpeedPlugin.select() does not know the plugin's name. Call "
            "accelerator.state.select_deepspeed_plugin(name) with its name in deepspeed_plugins."
        )

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration as a dictionary."""
        config: dict[str, Any] = self.hf_ds_config.config
        return config

    @property
    def launched_precision(self) -> str | None:
        """The precision that the configuration sets; None: the `Accelerator` chooses."""
        for name in ("bf16", "fp16"):
            if self.hf_ds_config.get_value(f"{name}.enabled") is True:
                return name
        return None

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches per step that the configuration sets; None: the `Accelerator` chooses."""
        steps = self.hf_ds_config.get_value("gradient_accumulation_steps")
        return None if steps in (None, "auto") else int(steps)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key of the configuration."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value of a dotted key is "auto"."""
        return bool(self.hf_ds_config.get_value(ds_key_long) == "auto")

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill in a value that is "auto"; if the configuration has another value, record the mismatch.

        Args:
            ds_key_long: dotted key.
            mismatches: list to which a sentence is added.
            must_match: whether another value is a mismatch.
            kwargs: the values, by dotted key.
        """
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None or node.get(key) is None:
            return
        if node[key] == "auto":
            if ds_key_long not in kwargs:
                raise OptionError(
                    f'{ds_key_long} is "auto" in {_origin(self.hf_ds_config)}, and the script does not set its '
                    "value. Set the number in the configuration."
                )
            node[key] = kwargs[ds_key_long]
        elif must_match and mismatches is not None:
            wanted = kwargs.get(ds_key_long)
            if wanted is not None and wanted != node[key]:
                mismatches.append(f"{ds_key_long} is {node[key]!r} there and {wanted!r} in the script")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in every value that is "auto".

        Raises:
            IncompatibleOptionsError: values of the configuration differ from the given ones.
        """
        found: list[str] = [] if mismatches is None else mismatches
        for key, value in list((self.deepspeed_config if config is None else config).items()):
            if isinstance(value, Mapping):
                self.deepspeed_config_process(f"{prefix}{key}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, found, must_match, **kwargs)
        if found and mismatches is None:
            raise IncompatibleOptionsError(
                f"{_origin(self.hf_ds_config)} does not fit the script: {'; '.join(found)}. Correct one of them; "
                '"auto" in the file takes the script\'s value.'
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enable the precision in the configuration, where it is "auto" or absent.

        Raises:
            IncompatibleOptionsError: the configuration enables another precision.
        """
        config = self.deepspeed_config
        other = {"fp16": "bf16", "bf16": "fp16"}.get(mixed_precision)
        if other is None:
            for name in ("bf16", "fp16"):
                if isinstance(config.get(name), dict) and config[name].get("enabled") == "auto":
                    config[name]["enabled"] = False
            return
        if isinstance(config.get(other), dict):
            if config[other].get("enabled") is True:
                raise IncompatibleOptionsError(
                    f"mixed_precision={mixed_precision!r} contradicts {other}.enabled=true in "
                    f"{_origin(self.hf_ds_config)}. Leave one of them out."
                )
            config[other]["enabled"] = False
        section = config.setdefault(mixed_precision, {})
        if section.get("enabled", "auto") == "auto":
            section["enabled"] = True

    def set_deepspeed_weakref(self) -> None:
        """Make transformers build models divided (stage 3 with `zero3_init_flag`); nothing without transformers."""
        if self.zero3_init_flag:
            self._tell_transformers()

    def unset_deepspeed_weakref(self) -> None:
        """Make transformers build models whole again."""
        object.__setattr__(self, "dschf", None)

    def tell_of_divided_models(self) -> None:
        """Tell transformers that ZeRO stage 3 divides models, because some of its functions depend on that.

        `generate()` then lets all ranks compute until the last one has its last token, and `resize_token_embeddings()`
        gathers parameters. Models that are built while transformers knows are divided as well.
        """
        if self.zero_stage != 3 or "transformers" not in sys.modules:
            return  # a model of transformers would have imported it
        from transformers.integrations import is_deepspeed_zero3_enabled

        if not is_deepspeed_zero3_enabled():
            self._tell_transformers()

    def _tell_transformers(self) -> None:
        try:
            from transformers.integrations import set_hf_deepspeed_config
        except ImportError:
            return  # nobody reads it
        config = copy.deepcopy(self.deepspeed_config)
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(key, "auto") == "auto":
                config[key] = 1
        config.pop("train_batch_size", None)
        # transformers keeps a weak reference; the plugin keeps the object. Its own class needs Accelerate installed.
        told = HfDeepSpeedConfig(config)
        object.__setattr__(self, "dschf", told)
        set_hf_deepspeed_config(told)

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are divided while they are built."""
        return bool(self.zero3_init_flag)

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Context in which models are built divided (`enable`) or whole; with stage 3."""
        if self.zero_stage != 3:
            yield
            return
        before, told = self.zero3_init_flag, getattr(self, "dschf", None) is not None
        self.unset_deepspeed_weakref()
        object.__setattr__(self, "zero3_init_flag", enable)
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            object.__setattr__(self, "zero3_init_flag", before)
            self.unset_deepspeed_weakref()
            if told:
                self._tell_transformers()

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Gather all parameters of each mixture-of-experts module together, because not every rank uses every expert.

        Raises:
            OptionError: the model has no module of a class in `transformer_moe_cls_names`.
        """
        names = self.transformer_moe_cls_names
        if not names or self.zero_stage != 3:
            return
        from deepspeed.utils import set_z3_leaf_modules

        classes = {type(module).__name__: type(module) for module in model.modules()}
        wanted = [name.strip() for name in names.split(",")]
        unknown = [name for name in wanted if name not in classes]
        if unknown:
            raise OptionError(
                f"transformer_moe_cls_names names {unknown[0]!r}, and {type(model).__name__} has no module of that "
                f"class. It has: {', '.join(sorted(classes))}."
            )
        set_z3_leaf_modules(model, [classes[name] for name in wanted])


class DeepSpeedPlugins(StrategyPlugin):
    """Several `DeepSpeedPlugin`s by name; the selected one is used for the models that are prepared next.

    Args:
        plugins: the plugins by name; the first is selected.

    Raises:
        OptionError: there are none, or a value is not a `DeepSpeedPlugin`.
    """

    strategy: ClassVar[str] = "deepspeed"
    argument: ClassVar[str] = "deepspeed_plugin"

    def __init__(self, plugins: Mapping[str, DeepSpeedPlugin]) -> None:
        wrong = [name for name, plugin in plugins.items() if not isinstance(plugin, DeepSpeedPlugin)]
        if wrong or not plugins:
            raise OptionError(
                "deepspeed_plugins takes a mapping of names to DeepSpeedPlugin, got "
                + (f"{type(plugins[wrong[0]]).__name__} for {wrong[0]!r}." if wrong else "none.")
            )
        self.plugins = dict(plugins)
        self._mark(next(iter(self.plugins)))

    def _mark(self, name: str) -> None:
        self.selected = name
        for other, plugin in self.plugins.items():
            object.__setattr__(plugin, "_selected", other == name)

    @property
    def active(self) -> DeepSpeedPlugin:
        """The selected plugin."""
        return self.plugins[self.selected]

    @property
    def launched_precision(self) -> str | None:
        """The precision that the selected configuration sets."""
        return self.active.launched_precision

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches per step that the selected configuration sets."""
        return self.active.accumulation_steps

    def get(self, name: str) -> DeepSpeedPlugin:
        """Return the plugin of a name.

        Raises:
            OptionError: there is no plugin of this name.
        """
        if name not in self.plugins:
            raise OptionError(
                f"There is no DeepSpeed plugin {name!r}; deepspeed_plugins has {', '.join(self.plugins)}."
            )
        return self.plugins[name]

    def select(self, name: str) -> None:
        """Select the plugin for the models that are prepared next."""
        chosen = self.get(name)
        self.active.unset_deepspeed_weakref()
        self._mark(name)
        chosen.set_deepspeed_weakref()


def _origin(config: Any) -> str:
    """Where a configuration comes from, for messages."""
    return str(getattr(config, "origin", "hf_ds_config"))
