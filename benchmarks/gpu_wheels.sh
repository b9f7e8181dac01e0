#!/usr/bin/env bash
# Download what a GPU machine without a network lacks beside torch, transformers, peft and pytest: wheels for Python 3.12
# on x86-64 Linux, less than 60 MB.
#
#     benchmarks/gpu_wheels.sh FOLDER
set -euo pipefail
folder=${1:?the folder for the wheels}
packages=(
  "torchrl>=0.14,<0.15" "tensordict>=0.14.3,<0.15" pyvers orjson
  "google-crc32c>=1.6" "zarr>=3.1" numcodecs donfig
  starlette uvicorn pytest-timeout
)
platforms=()
for version in 2_28 2_27 2_24 2_17 2_34 2_35; do platforms+=(--platform "manylinux_${version}_x86_64"); done
"${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$folder" "${packages[@]}"
du -sh "$folder"
echo "next, on the GPU machine: benchmarks/gpu_check.sh --wheels $folder"
