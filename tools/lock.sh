#!/usr/bin/env bash
# Make requirements/cpu.lock and requirements/gpu.lock afresh from setup.py's ranges.
#
# Like setup.sh it finds the CPU build of torch through PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.  setup.sh says why three
# packages are left out of the CPU lock.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tools/shell_lib.sh
. tools/shell_lib.sh
command -v uv >/dev/null || die "uv is needed: pip install uv"
options=(setup.py --quiet --python-version 3.11 --no-annotate --no-header --index-strategy unsafe-best-match)
[ -z "${PIP_FIND_LINKS:-}" ] || options+=(--find-links "$PIP_FIND_LINKS")
[ -z "${PIP_EXTRA_INDEX_URL:-}" ] || options+=(--extra-index-url "$PIP_EXTRA_INDEX_URL")

say "resolving the CPU packages"
uv pip compile "${options[@]}" --extra cpu --extra test --output-file requirements/cpu.lock \
  --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec >/dev/null
grep -q '^torch==.*+cpu$' requirements/cpu.lock ||
  die "requirements/cpu.lock got a CUDA build of torch; set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index and run this again"
say "resolving the GPU packages"
uv pip compile "${options[@]}" --extra gpu --extra test --output-file requirements/gpu.lock \
  --python-platform x86_64-manylinux_2_28 >/dev/null
say "done; see the changes with: git diff requirements"
