#!/usr/bin/env bash
#SBATCH --job-name=search_hetero
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --output=%x_%j.log

# Train the heterogeneous search team (three agents, two or three policies).
#
#   bash slurm/search_hetero.sh [--config-name NAME] [key=value …]      here, on this machine
#   sbatch slurm/search_hetero.sh [--config-name NAME] [key=value …]    on a cluster, submitted from the repository's root
#
# The arguments go to `python -m megatron_drmas.train`: key=value are Hydra overrides, NAME is a file of configs/.
# The default, search_hetero, is the tiny team, which needs no GPU and makes its own models and data.  The paper's
# assignment on 8 x H100, the allocation that the lines above ask for, is
#
#   sbatch slurm/search_hetero.sh --config-name search_hetero_8xh100
#
# Ten minutes before the time limit, or when preempted with a signal, the job finishes its step, saves, and queues itself
# again; a run continues from its last checkpoint.  Not run on a GPU yet.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -e "$ROOT/slurm/lib.sh" ] || ROOT=${SLURM_SUBMIT_DIR:-} # Slurm runs a copy of this file
if [ ! -e "$ROOT/slurm/lib.sh" ]; then
  echo "search_hetero.sh: submit it from the repository's root: cd REPOSITORY && sbatch slurm/search_hetero.sh" >&2
  exit 2
fi
cd "$ROOT"
# shellcheck source=tools/shell_lib.sh
. tools/shell_lib.sh
# shellcheck source=slurm/lib.sh
. slurm/lib.sh

config=search_hetero own_team=no previous=''
for argument in "$@"; do
  case $previous in --config-name) config=$argument ;; esac
  case $argument in
    --config-name=*) config=${argument#*=} ;;
    variables.tiny_team=*) own_team=yes ;;
  esac
  previous=$argument
done

bash tools/setup.sh
[ "$config" != search_hetero ] || [ "$own_team" = yes ] || bash tools/make_tiny_team.sh outputs/tiny_team

trap ray_stop EXIT
ray_start
overrides=()
[ "${SLURM_JOB_NUM_NODES:-1}" = 1 ] || overrides=("cluster.nodes=$SLURM_JOB_NUM_NODES")
STOP_GRACE_S=900 # a stop is polite: the step in progress is finished and saved
status=0
run_group .venv/bin/python -m megatron_drmas.train "${overrides[@]}" "$@" || status=$?
if [ "$status" != 0 ] && [ "$RECEIVED" = USR1 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  say "stopped by Slurm's signal; queueing the job again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
