#!/usr/bin/env bash
# Whole runs of the tiny team in which something fails: each must end as a run without a fault does, bit for bit, or stop by name.
#
#   bash tools/fault_drill.sh [--times 20] [--only WORDS]     about a minute a fault and time, on two cores
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .venv/bin/python -m tests.faults.drill "$@"
