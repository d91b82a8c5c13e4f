from accel_state.config.codec import PUBLISHED as PUBLISHED
from accel_state.config.codec import decode as decode
from accel_state.config.codec import encode as encode
from accel_state.config.codec import launcher_only_fields as launcher_only_fields
from accel_state.config.codec import publish as publish
from accel_state.config.codec import rank_environment as rank_environment
from accel_state.config.codec import variables as variables
from accel_state.config.default_config import default_config_file as default_config_file
from accel_state.config.default_config import load_config_from_file as load_config_from_file
from accel_state.config.default_config import write_basic_config as write_basic_config
from accel_state.config.external_variables import OTHER_VARIABLES as OTHER_VARIABLES
from accel_state.config.files import DefaultFile as DefaultFile
from accel_state.config.files import default_path as default_path
from accel_state.config.files import find_default as find_default
from accel_state.config.files import load as load
from accel_state.config.files import save as save
from accel_state.config.flags import ParsedFlags as ParsedFlags
from accel_state.config.flags import parse_flags as parse_flags
from accel_state.config.flags import to_flags as to_flags
from accel_state.config.launch import LaunchConfig as LaunchConfig
from accel_state.config.merge import Origin as Origin
from accel_state.config.merge import Resolved as Resolved
from accel_state.config.merge import resolve as resolve
from accel_state.config.option import Carrier as Carrier
from accel_state.config.option import Option as Option
from accel_state.config.option import Section as Section
from accel_state.config.sagemaker import SageMakerConfig as SageMakerConfig
from accel_state.config.schema import BoundOption as BoundOption
from accel_state.config.schema import Schema as Schema
from accel_state.config.schema import schema_of as schema_of
from accel_state.config.sections.accumulation import (
    GradientAccumulationSection as GradientAccumulationSection,
)
from accel_state.config.sections.deepspeed import DeepSpeedLaunchSection as DeepSpeedLaunchSection
from accel_state.config.sections.deepspeed import DeepSpeedSection as DeepSpeedSection
from accel_state.config.sections.dynamo import DynamoSection as DynamoSection
from accel_state.config.sections.fp8 import Fp8Section as Fp8Section
from accel_state.config.sections.fsdp import FsdpSection as FsdpSection
from accel_state.config.sections.hardware import DEVICE_LIST_VARIABLES as DEVICE_LIST_VARIABLES
from accel_state.config.sections.megatron_lm import MegatronLMSection as MegatronLMSection
from accel_state.config.sections.mpirun import MpirunSection as MpirunSection
from accel_state.config.sections.parallelism import ParallelismSection as ParallelismSection
from accel_state.config.sections.runtime import RuntimeSection as RuntimeSection
from accel_state.config.sections.tpu import TpuSection as TpuSection

__all__: list[str]
