from accel_state import MultiProcessAdapter as MultiProcessAdapter
from accel_train import PartialState as PartialState
from accel_train import get_logger as get_logger
