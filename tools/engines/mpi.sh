#!/usr/bin/env bash
# Install Open MPI from Debian, if it is not there.
set -euo pipefail
if ! command -v mpirun >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openmpi-bin >/dev/null
fi
mpirun --version | head -n 1
