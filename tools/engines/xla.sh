#!/usr/bin/env bash
# Make a virtual environment with torch 2.9 and torch_xla 2.9 that computes on the CPU, in the folder given; 2.3 GB.
#   tools/engines/xla.sh FOLDER    then: PJRT_DEVICE=CPU FOLDER/bin/python …
# The wheel of torch links CUDA libraries of several GB. Libraries of the same names, in which every function returns
# the error "no CUDA device", take their place.
set -euo pipefail
folder=$(realpath -m "${1:?a folder for the environment}")
libraries=$folder/lib/python3.11/site-packages/torch/lib

# dlopen resolves what a library calls at the first call, but versions and addresses of functions at once.
stubs() {
  local work library name symbols
  work=$(mktemp -d)
  # One line per undefined function: "name library", the library being "-" for functions without a version.
  readelf -W --dyn-syms "$libraries"/*.so |
    awk '$7 == "UND" && $8 ~ /^_*(cu|nccl|nv)/ { split($8, part, "@"); print part[1], part[2] ? part[2] : "-" }' |
    sort -u >"$work/symbols"
  for library in $(readelf -d "$libraries"/*.so | grep -oP 'NEEDED.*\[\Klib(cu|nv|nccl)[^]]*' | sort -u); do
    # libnccl, which has no versions, also holds the functions of the other libraries that have none.
    case $library in libnccl*) name=- ;; libnvshmem*) name=NVSHMEM ;; *) name=$library ;; esac
    symbols=$(awk -v name="$name" '$2 == name { print $1 }' "$work/symbols")
    for symbol in $symbols; do echo "int $symbol(void) { return 100; }"; done >"$work/stub.c"
    if [[ $name == - ]]; then echo "{ global: *; };"; else echo "$name { global: *; };"; fi >"$work/stub.map"
    gcc -w -shared -fPIC -fno-builtin "-Wl,-soname,$library" "-Wl,--version-script=$work/stub.map" \
      -o "$libraries/$library" "$work/stub.c"
  done
  rm -r "$work"
}

if [[ ! -f $folder/complete ]]; then
  "${PYTHON:-python3.11}" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet \
    numpy typing_extensions filelock sympy networkx jinja2 fsspec absl-py pyyaml requests setuptools \
    "safetensors>=0.8" psutil xxhash tqdm rich "huggingface-hub>=0.34" packaging \
    "typer>=0.29" "questionary>=2.0" cloudpickle "pytest>=8" pytest-timeout hypothesis
  # After them, because their own requirements, which name CUDA packages, would count as missing.
  "$folder/bin/python" -m pip install --quiet --no-deps torch==2.9.0 torch_xla==2.9.0 torchdata==0.11.0
  stubs
  touch "$folder/complete"
fi
PJRT_DEVICE=CPU "$folder/bin/python" -c "import torch, torch_xla; print(torch.__version__, torch_xla.__version__, torch_xla.device())"
