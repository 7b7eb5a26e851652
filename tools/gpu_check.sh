#!/usr/bin/env bash
# Checks that need a GPU, each a few minutes at most.
#
#   bash tools/gpu_check.sh advantage     the advantage kernel: right, and bytes per second against a device copy
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
  advantage) exec .venv/bin/python -m tools.bench.advantage_gpu ;;
  *)
    sed -n '2,4p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
