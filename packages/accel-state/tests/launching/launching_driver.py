"""What tests start to see the launcher as a process: flags, then the script, as for ``accel launch``."""

import sys

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.environment import snapshot
from accel_state.errors import AccelError
from accel_state.launching.engines import check_available
from accel_state.launching.run import launch
from accel_state.launching.target import Target

flags = parse_flags(sys.argv[1:])
try:
    config = check_available(resolve(environ=snapshot(), flags=flags, use_default_file=False))
    kind = "module" if config.module else "program" if config.no_python else "script"
    code = launch(config, Target(flags.rest[0], flags.rest[1:], kind), snapshot())
except AccelError as error:
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.exit(2)
if "torch" in sys.modules:
    sys.stderr.write("the launcher imported torch\n")
    sys.exit(99)
sys.exit(code)
