from accel_bigmodel.__about__ import __version__ as __version__
from accel_bigmodel.errors import BigModelError as BigModelError
from accel_bigmodel.errors import DeviceMapError as DeviceMapError
from accel_bigmodel.errors import OffloadError as OffloadError
from accel_bigmodel.errors import PipelineError as PipelineError
from accel_bigmodel.errors import QuantizationError as QuantizationError

__all__: list[str]
