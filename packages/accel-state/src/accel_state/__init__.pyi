from accel_state.__about__ import __version__ as __version__
from accel_state.communication.collectives import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from accel_state.communication.collectives import broadcast as broadcast
from accel_state.communication.collectives import broadcast_object_list as broadcast_object_list
from accel_state.communication.collectives import copy_tensor_to_devices as copy_tensor_to_devices
from accel_state.communication.collectives import gather as gather
from accel_state.communication.collectives import gather_object as gather_object
from accel_state.communication.collectives import pad_across_processes as pad_across_processes
from accel_state.communication.collectives import reduce as reduce
from accel_state.communication.collectives import set_collective_checks as set_collective_checks
from accel_state.communication.scatter import Scatterer as Scatterer
from accel_state.communication.scatter import scatter as scatter
from accel_state.compat import convert_bytes as convert_bytes
from accel_state.compat import get_pretty_name as get_pretty_name
from accel_state.compat import merge_dicts as merge_dicts
from accel_state.compat import recursive_getattr as recursive_getattr
from accel_state.config.default_config import default_config_file as default_config_file
from accel_state.config.default_config import load_config_from_file as load_config_from_file
from accel_state.config.default_config import write_basic_config as write_basic_config
from accel_state.config.files import load_config as load_config
from accel_state.config.files import save_config as save_config
from accel_state.config.launch import LaunchConfig as LaunchConfig
from accel_state.config.merge import resolve_config as resolve_config
from accel_state.config.sagemaker import SageMakerConfig as SageMakerConfig
from accel_state.constants import BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION
from accel_state.constants import BETA_SP_AVAILABLE_DEEPSPEED_VERSION as BETA_SP_AVAILABLE_DEEPSPEED_VERSION
from accel_state.constants import BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION
from accel_state.constants import (
    BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
)
from accel_state.constants import CUDA_DISTRIBUTED_TYPES as CUDA_DISTRIBUTED_TYPES
from accel_state.constants import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from accel_state.constants import FSDP2_STATE_DICT_TYPE as FSDP2_STATE_DICT_TYPE
from accel_state.constants import FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY
from accel_state.constants import FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH
from accel_state.constants import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from accel_state.constants import FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY
from accel_state.constants import FSDP_STATE_DICT_TYPE as FSDP_STATE_DICT_TYPE
from accel_state.constants import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accel_state.constants import MODEL_NAME as MODEL_NAME
from accel_state.constants import OPTIMIZER_NAME as OPTIMIZER_NAME
from accel_state.constants import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
from accel_state.constants import RNG_STATE_NAME as RNG_STATE_NAME
from accel_state.constants import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from accel_state.constants import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from accel_state.constants import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accel_state.constants import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from accel_state.constants import SAMPLER_NAME as SAMPLER_NAME
from accel_state.constants import SCALER_NAME as SCALER_NAME
from accel_state.constants import SCHEDULER_NAME as SCHEDULER_NAME
from accel_state.constants import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
from accel_state.constants import TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES
from accel_state.constants import TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS
from accel_state.constants import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from accel_state.constants import WEIGHTS_NAME as WEIGHTS_NAME
from accel_state.constants import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
from accel_state.constants import (
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
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
from accel_state.environment import convert_dict_to_env_variables as convert_dict_to_env_variables
from accel_state.environment import get_int_from_env as get_int_from_env
from accel_state.environment import parse_choice_from_env as parse_choice_from_env
from accel_state.environment import parse_flag_from_env as parse_flag_from_env
from accel_state.environment import patch_environment as patch_environment
from accel_state.environment import purge_accelerate_environment as purge_accelerate_environment
from accel_state.environment import str_to_bool as str_to_bool
from accel_state.errors import AccelError as AccelError
from accel_state.errors import CollectiveMismatchError as CollectiveMismatchError
from accel_state.errors import ConfigError as ConfigError
from accel_state.errors import ConfigNotFoundError as ConfigNotFoundError
from accel_state.errors import DeviceError as DeviceError
from accel_state.errors import DistributedOperationException as DistributedOperationException
from accel_state.errors import LaunchError as LaunchError
from accel_state.errors import MissingDependencyError as MissingDependencyError
from accel_state.errors import NoExecutableBatchSizeError as NoExecutableBatchSizeError
from accel_state.errors import NotAvailableError as NotAvailableError
from accel_state.errors import StateError as StateError
from accel_state.errors import UnknownKeyError as UnknownKeyError
from accel_state.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel_state.handlers import KwargsHandler as KwargsHandler
from accel_state.host.available import is_4bit_bnb_available as is_4bit_bnb_available
from accel_state.host.available import is_8bit_bnb_available as is_8bit_bnb_available
from accel_state.host.available import is_aim_available as is_aim_available
from accel_state.host.available import is_amdsmi_available as is_amdsmi_available
from accel_state.host.available import is_bf16_available as is_bf16_available
from accel_state.host.available import (
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
)
from accel_state.host.available import is_bnb_available as is_bnb_available
from accel_state.host.available import is_boto3_available as is_boto3_available
from accel_state.host.available import is_clearml_available as is_clearml_available
from accel_state.host.available import is_comet_ml_available as is_comet_ml_available
from accel_state.host.available import is_cuda_available as is_cuda_available
from accel_state.host.available import is_datasets_available as is_datasets_available
from accel_state.host.available import is_deepspeed_available as is_deepspeed_available
from accel_state.host.available import is_dvclive_available as is_dvclive_available
from accel_state.host.available import is_fp8_available as is_fp8_available
from accel_state.host.available import is_fp16_available as is_fp16_available
from accel_state.host.available import is_habana_gaudi1 as is_habana_gaudi1
from accel_state.host.available import is_hpu_available as is_hpu_available
from accel_state.host.available import is_import_timer_available as is_import_timer_available
from accel_state.host.available import is_lomo_available as is_lomo_available
from accel_state.host.available import is_matplotlib_available as is_matplotlib_available
from accel_state.host.available import is_megatron_lm_available as is_megatron_lm_available
from accel_state.host.available import is_mlflow_available as is_mlflow_available
from accel_state.host.available import is_mlu_available as is_mlu_available
from accel_state.host.available import is_mps_available as is_mps_available
from accel_state.host.available import is_msamp_available as is_msamp_available
from accel_state.host.available import is_musa_available as is_musa_available
from accel_state.host.available import is_neuron_available as is_neuron_available
from accel_state.host.available import is_npu_available as is_npu_available
from accel_state.host.available import is_numpy_available as is_numpy_available
from accel_state.host.available import is_pandas_available as is_pandas_available
from accel_state.host.available import is_peft_available as is_peft_available
from accel_state.host.available import is_pippy_available as is_pippy_available
from accel_state.host.available import is_pynvml_available as is_pynvml_available
from accel_state.host.available import is_pytest_available as is_pytest_available
from accel_state.host.available import is_rich_available as is_rich_available
from accel_state.host.available import is_rocm_available as is_rocm_available
from accel_state.host.available import is_sagemaker_available as is_sagemaker_available
from accel_state.host.available import is_schedulefree_available as is_schedulefree_available
from accel_state.host.available import is_sdaa_available as is_sdaa_available
from accel_state.host.available import is_swanlab_available as is_swanlab_available
from accel_state.host.available import is_tensorboard_available as is_tensorboard_available
from accel_state.host.available import is_timm_available as is_timm_available
from accel_state.host.available import is_torch_distributed_available as is_torch_distributed_available
from accel_state.host.available import is_torch_xla_available as is_torch_xla_available
from accel_state.host.available import is_torchao_available as is_torchao_available
from accel_state.host.available import is_torchdata_available as is_torchdata_available
from accel_state.host.available import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from accel_state.host.available import is_torchvision_available as is_torchvision_available
from accel_state.host.available import is_tqdm_available as is_tqdm_available
from accel_state.host.available import is_trackio_available as is_trackio_available
from accel_state.host.available import is_transformer_engine_available as is_transformer_engine_available
from accel_state.host.available import (
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
)
from accel_state.host.available import is_transformers_available as is_transformers_available
from accel_state.host.available import is_triton_available as is_triton_available
from accel_state.host.available import is_wandb_available as is_wandb_available
from accel_state.host.available import is_weights_only_available as is_weights_only_available
from accel_state.host.available import is_xccl_available as is_xccl_available
from accel_state.host.available import is_xpu_available as is_xpu_available
from accel_state.host.available import torchao_required as torchao_required
from accel_state.host.devices import get_current_device_type as get_current_device_type
from accel_state.host.memory import clear_device_cache as clear_device_cache
from accel_state.host.memory import find_executable_batch_size as find_executable_batch_size
from accel_state.host.memory import release_memory as release_memory
from accel_state.host.memory import should_reduce_batch_size as should_reduce_batch_size
from accel_state.host.nvidia import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accel_state.host.nvidia import get_driver_version as get_driver_version
from accel_state.host.nvidia import get_gpu_info as get_gpu_info
from accel_state.host.system import are_libraries_initialized as are_libraries_initialized
from accel_state.host.system import check_cuda_fp8_capability as check_cuda_fp8_capability
from accel_state.host.system import check_os_kernel as check_os_kernel
from accel_state.host.system import get_cpu_distributed_information as get_cpu_distributed_information
from accel_state.host.system import get_free_port as get_free_port
from accel_state.host.system import override_numa_affinity as override_numa_affinity
from accel_state.host.system import set_numa_affinity as set_numa_affinity
from accel_state.host.versions import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
from accel_state.host.versions import compare_versions as compare_versions
from accel_state.host.versions import is_torch_version as is_torch_version
from accel_state.host.versions import torch_version as torch_version
from accel_state.launching.inline import debug_launcher as debug_launcher
from accel_state.launching.inline import notebook_launcher as notebook_launcher
from accel_state.launching.ports import is_port_in_use as is_port_in_use
from accel_state.log import MultiProcessAdapter as MultiProcessAdapter
from accel_state.log import get_logger as get_logger
from accel_state.module_trees import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
)
from accel_state.module_trees import get_module_children_bottom_up as get_module_children_bottom_up
from accel_state.progress import tqdm as tqdm
from accel_state.seeding import get_rng_state as get_rng_state
from accel_state.seeding import set_rng_state as set_rng_state
from accel_state.seeding import set_seed as set_seed
from accel_state.seeding import synchronize_rng_state as synchronize_rng_state
from accel_state.seeding import synchronize_rng_states as synchronize_rng_states
from accel_state.trees import TensorInformation as TensorInformation
from accel_state.trees import concatenate as concatenate
from accel_state.trees import convert_to_fp32 as convert_to_fp32
from accel_state.trees import find_batch_size as find_batch_size
from accel_state.trees import find_device as find_device
from accel_state.trees import get_data_structure as get_data_structure
from accel_state.trees import get_shape as get_shape
from accel_state.trees import honor_type as honor_type
from accel_state.trees import ignorant_find_batch_size as ignorant_find_batch_size
from accel_state.trees import initialize_tensors as initialize_tensors
from accel_state.trees import is_namedtuple as is_namedtuple
from accel_state.trees import is_tensor_information as is_tensor_information
from accel_state.trees import is_torch_tensor as is_torch_tensor
from accel_state.trees import listify as listify
from accel_state.trees import pad_input_tensors as pad_input_tensors
from accel_state.trees import recursively_apply as recursively_apply
from accel_state.trees import send_to_device as send_to_device
from accel_state.trees import slice_tensors as slice_tensors
from accel_state.world.process import PartialState as PartialState
from accel_state.world.process import wait_for_everyone as wait_for_everyone
from accel_state.world.topology import Topology as Topology

__all__: list[str]
