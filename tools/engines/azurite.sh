#!/usr/bin/env bash
# Install Azurite, Azure's own server of Blob Storage for tests, by npm (90 MB), and Node from Debian, if they are not there.
# Where: the first argument, else ACCEL_AZURITE_FOLDER, else ~/.cache/accel/azurite.
set -euo pipefail
folder="${1:-${ACCEL_AZURITE_FOLDER:-$HOME/.cache/accel/azurite}}"
if ! command -v npm >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq nodejs npm >/dev/null
fi
if [ ! -e "$folder/node_modules/.bin/azurite-blob" ]; then
  mkdir -p "$folder"
  npm install --prefix "$folder" --no-fund --no-audit --silent azurite@3
fi
"$folder/node_modules/.bin/azurite-blob" --version
