#!/usr/bin/env bash
# What a machine with one GPU must show, within eight minutes and without a network:
#
#     benchmarks/gpu_wheels.sh wheels            # where there is a network: the packages that such a machine lacks
#     benchmarks/gpu_check.sh --wheels wheels    # there: the tests for a GPU, runs with a kill, the learner, the sampler
#     benchmarks/gpu_check.sh --tiny             # a tiny model on any machine: does all of it run
#
# Needs Python 3.11 or later with torch, transformers and pytest; PYTHON names another interpreter. The other arguments
# are those of benchmarks/gpu_check.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [ "${1:-}" = --wheels ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "${2:?--wheels FOLDER}"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
  shift 2
fi
export PYTHONPATH="$PWD:$PWD/storage${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
"$python" benchmarks/gpu_check.py "$@"
