from accelerate.test_utils.scripts import test_cli as test_cli
from accelerate.test_utils.scripts import test_ops as test_ops
from accelerate.test_utils.scripts import test_script as test_script
from accelerate.test_utils.scripts import test_sync as test_sync
