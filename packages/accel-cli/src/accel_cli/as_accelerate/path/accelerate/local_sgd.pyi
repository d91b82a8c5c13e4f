from accel_train import Accelerator as Accelerator
from accel_train import DistributedType as DistributedType
from accel_train import LocalSGD as LocalSGD
