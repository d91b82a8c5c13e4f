from accel_cli.as_accelerate.extras.testing import RegressionDataset as RegressionDataset
from accel_cli.as_accelerate.extras.testing import RegressionModel as RegressionModel
from accel_train import DistributedType as DistributedType
