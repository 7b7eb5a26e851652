#!/usr/bin/env bash
# Set up what the checks and tests need, then run them: format, lint rules, types, shell scripts, pytest.
#
#   bash tools/test.sh [--slow] [pytest arguments]     --slow adds the tests marked slow
#   bash tools/test.sh --lint                          format, lint rules, types and shell scripts, and nothing else
#
# The format and the lint rules come before the tests.  Where no file or folder of tests is named, the tests share the cores, at
# most four; elsewhere, and with -n 0, they run one after the other.  Types are checked beside them when the whole suite runs.
# As root on Debian it installs Slurm, shellcheck and bubblewrap when they are missing; elsewhere the tests that need them are skipped,
# with the reason.
set -euo pipefail
if [ "${1:-}" = --help ]; then
  sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0"
  exit
fi
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
# shellcheck source=tools/shell_lib.sh
. tools/shell_lib.sh

bash tools/setup.sh

.venv/bin/ruff format --check --quiet || die "the format differs; run: .venv/bin/ruff format"
.venv/bin/ruff check --quiet || die "ruff has findings; some of them it fixes: .venv/bin/ruff check --fix"

if [ "${1:-}" = --lint ]; then
  [ $# = 1 ] || die "--lint takes no other arguments; got: $*"
  .venv/bin/mypy || die "mypy has findings"
  if command -v shellcheck >/dev/null; then
    find .ci tools slurm tests/slurm_lab \( -name '*.sh' -o -path .ci/run \) -exec shellcheck --external-sources {} +
  else
    say "shellcheck is not installed: shell scripts are not checked"
  fi
  exit
fi

# Transformer Engine's Python half, for the tests of the recipes that it gets (see tests/te_stub); it must not be importable elsewhere.
ENGINE=transformer_engine==2.11.0
if [ "$(cat .venv/.platform)" = cpu ] && [ ! -e .venv/te/transformer_engine ]; then
  say "fetching $ENGINE (pure Python) for the tests"
  rm -rf .venv/te.new
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/te.new "$ENGINE"
  mv .venv/te.new .venv/te
fi

missing=()
command -v sbatch >/dev/null && command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null ||
  missing+=(slurmctld slurmd slurm-client munge)
command -v shellcheck >/dev/null || missing+=(shellcheck)
command -v bwrap >/dev/null || missing+=(bubblewrap)
if ((${#missing[@]})); then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing Debian's ${missing[*]}"
    if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
      >.venv/apt.log 2>&1; then
      say "apt-get failed (see .venv/apt.log); what needs ${missing[*]} will be skipped"
    fi
  else
    say "not root on Debian: what needs ${missing[*]} will be skipped"
  fi
fi

arguments=()
workers=$(($(nproc) < 4 ? $(nproc) : 4)) # a run of the tiny team takes up to 4 GiB of memory
for argument in "$@"; do
  if [ "$argument" = --slow ]; then arguments+=(-m ""); else arguments+=("$argument"); fi
  case $argument in -n* | --numprocesses*) workers=0 ;; esac
  [ ! -e "${argument%%::*}" ] || workers=0
done
((workers < 2)) || arguments+=(-n "$workers" --dist loadfile --no-loadscope-reorder)
# One thread a process: the tests start many, and two cores is the smallest machine they are meant for.
export OMP_NUM_THREADS=1
if (($# == 0)) || [ "$*" = --slow ]; then
  .venv/bin/mypy >.venv/types.log 2>&1 &
  types=$!
fi
run_group .venv/bin/python -m pytest "${arguments[@]}"
if [ -n "${types:-}" ] && ! wait "$types"; then
  cat .venv/types.log
  die "mypy has findings"
fi
