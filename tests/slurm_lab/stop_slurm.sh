#!/usr/bin/env bash
# End what start_slurm.sh started under SLURM_LAB_ROOT (/tmp/slurm_lab), its jobs first.
# A daemon is ended by the process id in its file, and only if that process still has the daemon's name.
set -uo pipefail
LAB=${SLURM_LAB_ROOT:-/tmp/slurm_lab}
export SLURM_CONF=$LAB/etc/slurm.conf

stop() { # PIDFILE COMM
  local pid t
  pid=$(cat "$1" 2>/dev/null) || return 0
  if [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ]; then
    kill -TERM "$pid"
    for ((t = 0; t < 100; t++)); do [ -d "/proc/$pid" ] || break; sleep 0.1; done
    [ ! -d "/proc/$pid" ] || kill -KILL "$pid"
  fi
  rm -f "$1"
}

if [ -e "$LAB/pid/slurmctld.pid" ]; then
  mapfile -t jobs < <(timeout 5 squeue -h -o %A 2>/dev/null | sort -u)
  if ((${#jobs[@]})); then
    timeout 10 scancel "${jobs[@]}"
    for ((t = 0; t < 150; t++)); do [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || break; sleep 0.1; done
  fi
fi
for file in "$LAB"/pid/slurmd.*.pid; do stop "$file" slurmd; done
stop "$LAB/pid/slurmctld.pid" slurmctld
stop "$LAB/pid/munged.pid" munged
if [ -s "$LAB/etc/netns.list" ]; then
  while read -r node; do
    ip netns del "$node" 2>/dev/null
    ip link del "v$node" 2>/dev/null
  done <"$LAB/etc/netns.list"
  ip link del slurmbr0 2>/dev/null
  rm -f "$LAB/etc/netns.list"
fi
exit 0
