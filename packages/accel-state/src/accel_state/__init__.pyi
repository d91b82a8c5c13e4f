from accel_state.__about__ import __version__ as __version__
from accel_state.enums import BaseEnum as BaseEnum
from accel_state.enums import ComputeEnvironment as ComputeEnvironment
from accel_state.enums import DistributedType as DistributedType
from accel_state.enums import DynamoBackend as DynamoBackend
from accel_state.enums import EnumWithContains as EnumWithContains
from accel_state.enums import FP8BackendType as FP8BackendType
from accel_state.enums import LoggerType as LoggerType
from accel_state.enums import PrecisionType as PrecisionType
from accel_state.enums import RNGType as RNGType
from accel_state.enums import SageMakerDistributedType as SageMakerDistributedType
from accel_state.environment import clear_environment as clear_environment
from accel_state.environment import get_int_from_env as get_int_from_env
from accel_state.environment import parse_choice_from_env as parse_choice_from_env
from accel_state.environment import parse_flag_from_env as parse_flag_from_env
from accel_state.environment import patch_environment as patch_environment
from accel_state.environment import str_to_bool as str_to_bool
from accel_state.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel_state.handlers import KwargsHandler as KwargsHandler

__all__: list[str]
