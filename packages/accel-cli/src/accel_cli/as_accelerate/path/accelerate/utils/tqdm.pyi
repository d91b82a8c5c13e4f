from accel_state import is_tqdm_available as is_tqdm_available
from accel_train import PartialState as PartialState
from accel_train import tqdm as tqdm
