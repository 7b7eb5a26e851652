#!/usr/bin/env bash
# End what start_slurm.sh started under SLURM_LAB_ROOT (/tmp/slurm_lab), its jobs first.
# A daemon is ended by the process id in its file, and only if that process still has the daemon's name.
set -uo pipefail
LAB=${SLURM_LAB_ROOT:-/tmp/slurm_lab}
export SLURM_CONF=$LAB/etc/slurm.conf

daemon() { # PIDFILE: the live daemon's process id, or nothing
  local pid comm
  pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] && comm=$(cat "/proc/$pid/comm" 2>/dev/null) || return 0
  case ${1##*/}/$comm in slurmctld.pid/slurmctld | slurmd.*.pid/slurmd | munged.pid/munged) echo "$pid" ;; esac
}

if [ -e "$LAB/pid/slurmctld.pid" ]; then
  mapfile -t jobs < <(timeout 5 squeue -h -o %A 2>/dev/null | sort -u)
  if ((${#jobs[@]})); then
    timeout 10 scancel "${jobs[@]}"
    for ((t = 0; t < 150; t++)); do [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || break; sleep 0.1; done
  fi
fi
pids=()
for file in "$LAB"/pid/*.pid; do mapfile -t -O ${#pids[@]} pids < <(daemon "$file"); done
((!${#pids[@]})) || kill -TERM "${pids[@]}"
for ((t = 0; t < 100; t++)); do
  kill -0 "${pids[@]}" 2>/dev/null || break
  sleep 0.1
done
for file in "$LAB"/pid/*.pid; do
  mapfile -t pids < <(daemon "$file")
  ((!${#pids[@]})) || kill -KILL "${pids[@]}"
  rm -f "$file"
done
if [ -s "$LAB/etc/netns.list" ]; then
  while read -r node; do
    ip netns del "$node" 2>/dev/null
    ip link del "v$node" 2>/dev/null
  done <"$LAB/etc/netns.list"
  ip link del slurmbr0 2>/dev/null
  rm -f "$LAB/etc/netns.list"
fi
exit 0
