#!/usr/bin/env bash
# Install zsh and fish from Debian, if they are not there.
set -euo pipefail
if ! command -v zsh >/dev/null || ! command -v fish >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq zsh fish >/dev/null
fi
bash --version | head -n 1
zsh --version
fish --version
