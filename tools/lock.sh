#!/usr/bin/env bash
# Make requirements/cpu.lock and requirements/gpu.lock again from setup.py's ranges.
#
#   bash tools/lock.sh [--upgrade]    versions that still fit are kept, unless --upgrade asks for the newest
#
# Like setup.sh it finds the CPU build of torch through PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.  setup.sh says why three
# packages are left out of the CPU lock.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tools/shell_lib.sh
. tools/shell_lib.sh
command -v uv >/dev/null || die "uv is needed: pip install uv"
options=(setup.py --extra test --python-version 3.11 --no-annotate --no-header --quiet "$@")

say "resolving the CPU packages"
cpu_torch=(--index-strategy unsafe-best-match)
[ -z "${PIP_FIND_LINKS:-}" ] || cpu_torch+=(--find-links "$PIP_FIND_LINKS")
[ -z "${PIP_EXTRA_INDEX_URL:-}" ] || cpu_torch+=(--extra-index-url "$PIP_EXTRA_INDEX_URL")
uv pip compile "${options[@]}" --extra cpu "${cpu_torch[@]}" --output-file requirements/cpu.lock \
  --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec >/dev/null
grep -q '^torch==.*+cpu$' requirements/cpu.lock ||
  die "requirements/cpu.lock got a CUDA build of torch; set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index and run this again"
say "resolving the GPU packages"
uv pip compile "${options[@]}" --extra gpu --python-platform x86_64-manylinux_2_28 --output-file requirements/gpu.lock >/dev/null
say "done; see the changes with: git diff requirements"
