#!/usr/bin/env bash
# Install from Debian what DeepSpeed compiles its NVMe operator with, if it is not there.
set -euo pipefail
if ! [ -e /usr/include/libaio.h ]; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libaio-dev >/dev/null
fi
