#!/usr/bin/env bash
# Run the benchmarks one by one, and put what they found into docs/benchmarks.md and README.md with date and machine.
#
#   bash tools/bench/all.sh [--quick] [--work FOLDER] [--questions FILE] [NAME…]
#
# NAME: of some, instead of all.  --quick: small sizes, a quarter of an hour in all; nothing is written outside FOLDER.
# --work: models, environments and logs (default: outputs/bench).  --questions: with number answers, such as GSM8K's; `trl`
# is left out without it.  `convert` needs 46 GB there, and 3 GB with --quick.  The rest of the machine should be idle.
# One that fails, or misses its target, does not keep the others from running; the exit status is 1 if any failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tools/shell_lib.sh
. tools/shell_lib.sh

HELPERS=' advantage_gpu command table training_runs trl_trainer ' # no benchmark, or one that needs a GPU
quick='' work=outputs/bench questions='' names=()
while (($#)); do
  case $1 in
    --quick) quick=yes ;;
    --work | --questions)
      [ -n "${2:-}" ] || die "$1 needs a value"
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    -*) die "unknown option $1; the options are --quick, --work FOLDER and --questions FILE" ;;
    *) names+=("$1") ;;
  esac
  shift
done
known=()
for file in tools/bench/*.py; do
  name=$(basename "$file" .py)
  [[ $HELPERS == *" $name "* ]] || known+=("$name")
done
for name in "${names[@]}"; do
  [[ " ${known[*]} " == *" $name "* ]] || die "no benchmark '$name'; there are: ${known[*]}"
done
((${#names[@]})) || names=("${known[@]}")
[ -z "$questions" ] || [ -f "$questions" ] || die "--questions $questions: no such file"
mkdir -p "$work" 2>/dev/null || die "--work $work: cannot be made"
[ -x .venv/bin/python ] || die "no .venv; run: bash tools/setup.sh"

arguments() { # NAME: its arguments, a line each
  local smollm2=$work/models/SmolLM2-135M-Instruct
  case $1 in
    trl) printf '%s\n' --models "$work/models" --questions "$questions" --cache "$work" ;;
    train_step) printf '%s\n' --model "$smollm2" ${quick:+--rounds 1} ;;
    convert) printf '%s\n' --work "$work/convert" ${quick:+--shape qwen2.5-0.5b --repeats 1} ;;
    default_run) printf '%s\n' ${quick:+--steps 3 --turns 1} ;;
    collector_throughput | rollout_throughput | lockstep) printf '%s\n' ${quick:+--rounds 1} ;;
    advantage) printf '%s\n' ${quick:+--rows 100000} ;;
  esac
}

logs=()
for name in "${names[@]}"; do
  if [ "$name" = trl ] && [ -z "$questions" ]; then
    say "trl is left out: it needs --questions FILE"
    continue
  fi
  if [[ $name == trl || $name == train_step ]] && [ ! -d "$work/models/SmolLM2-135M-Instruct" ]; then
    mkdir -p "$work/models"
    .venv/bin/python tools/smollm2.py --out "$work/models/SmolLM2-135M-Instruct" >"$work/smollm2.txt" 2>&1 ||
      say "SmolLM2 could not be made; see $work/smollm2.txt"
  fi
  mapfile -t args < <(arguments "$name")
  [ -n "${args[0]:-}" ] || args=()
  began=$SECONDS status=0
  run_group .venv/bin/python -W ignore -m "tools.bench.$name" "${args[@]}" >"$work/$name.log" 2>&1 || status=$?
  [ -z "$RECEIVED" ] || die "interrupted"
  say "$name: exit status $status after $((SECONDS - began)) s; $(grep '^{"name"' "$work/$name.log" | tail -n 1 || echo "see $work/$name.log")"
  logs+=("$work/$name.log")
done
((${#logs[@]})) || die "nothing was run"
record=(--record)
[ -z "$quick" ] || record=()
status=0
.venv/bin/python -m tools.bench.table "${logs[@]}" "${record[@]}" >"$work/table.md" || status=$?
cat "$work/table.md"
exit "$status"
