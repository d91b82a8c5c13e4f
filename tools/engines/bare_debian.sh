#!/usr/bin/env bash
# Make a bare Debian in a folder, by debootstrap, which is installed if it is not there: Python with venv, git and
# certificates; no compiler, no ip, no ssh, no zsh. Run as root.
# Where: the first argument, else ACCEL_BARE_FOLDER, else ~/.cache/accel/bare-debian.
set -euo pipefail
folder="${1:-${ACCEL_BARE_FOLDER:-$HOME/.cache/accel/bare-debian}}"
if [ -e "$folder/complete" ]; then
  exit 0
fi
if ! command -v debootstrap >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq debootstrap >/dev/null
fi
rm -rf "$folder"
mkdir -p "$folder"
debootstrap --variant=minbase --include=python3,python3-venv,git,ca-certificates bookworm "$folder" >"$folder.log"
touch "$folder/complete"
