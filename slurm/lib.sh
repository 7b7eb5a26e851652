# shellcheck shell=bash
# Ray on a Slurm allocation; sourced by the batch scripts, after tools/shell_lib.sh, with ROOT set.
#
#   ray_start    start Ray on every node of the allocation, wait until all have joined, export RAY_ADDRESS
#   ray_stop     end what ray_start started; call it from an EXIT trap
#
# On one node ray_start starts nothing: a driver that finds no RAY_ADDRESS starts Ray itself, on loopback, and ends it.
# On several, the head runs on the first node (where the batch script runs) and each node's Ray in a job step of its own,
# so that Slurm ends it with the job whatever happens.  The repository with its .venv must be on a file system that all
# nodes share.

RAY_START_TIMEOUT_S=${RAY_START_TIMEOUT_S:-180}
RAY_STEPS=()

ray_start() {
  # Sockets and logs apart from other jobs' on the same node (short: socket paths are limited to 107 characters).
  export RAY_TMPDIR=/tmp/ray_${SLURM_JOB_ID:-$$}
  [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ] || return 0

  local nodes port=$((20000 + SLURM_JOB_ID % 5000 * 2)) head_ip rank
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  head_ip=$(ip_towards "${nodes[1]}")
  RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | sha256sum | cut -c1-64)
  export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_ADDRESS=$head_ip:$port
  RAY_LOGS=$ROOT/outputs/ray_$SLURM_JOB_ID
  mkdir -p "$RAY_LOGS"
  say "starting Ray on ${#nodes[@]} nodes at $RAY_ADDRESS; logs in ${RAY_LOGS#"$ROOT"/}"
  for rank in "${!nodes[@]}"; do
    # Since Slurm 22.05 a step takes one CPU unless told otherwise.
    srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[rank]}" --cpus-per-task="$SLURM_CPUS_ON_NODE" --mem=0 \
      bash -c "ROOT='$ROOT'; . '$ROOT/tools/shell_lib.sh'; . '$ROOT/slurm/lib.sh'; ray_node $rank ${#nodes[@]}" \
      >"$RAY_LOGS/${nodes[rank]}.log" 2>&1 &
    RAY_STEPS+=($!)
  done
  _ray_wait "${#nodes[@]}"
}

# ip_towards HOST: this machine's address on the route to HOST (a datagram socket sends nothing to find out).
ip_towards() {
  "$ROOT/.venv/bin/python" -c 'import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((sys.argv[1], 9))
    print(probe.getsockname()[0])' "$1"
}

# ray_node RANK NODES: one node's Ray in the foreground, until it is signaled; runs inside a job step.
ray_node() {
  local rank=$1 ports=$((10000 / $2)) options=(--disable-usage-stats --log-style=record --log-color=false --block)
  # Ray's processes take no CPU share here; the count sizes its pool of idle workers.  Each node has worker ports of its
  # own, since nodes may share an address (as on a one-machine Slurm).
  options+=(--num-cpus=2 --min-worker-port=$((10000 + rank * ports)) --max-worker-port=$((10000 + (rank + 1) * ports - 1)))
  if [ "$rank" = 0 ]; then
    options+=(--head --port="${RAY_ADDRESS##*:}" --ray-client-server-port=$((${RAY_ADDRESS##*:} + 1)) --include-dashboard=false)
    options+=(--node-ip-address="${RAY_ADDRESS%:*}" --temp-dir="$RAY_TMPDIR")
  else
    options+=(--address="$RAY_ADDRESS" --node-ip-address="$(ip_towards "${RAY_ADDRESS%:*}")")
  fi
  run_group env -u RAY_ADDRESS "$ROOT/.venv/bin/ray" start "${options[@]}"
}

# _ray_wait NODES: until as many have joined; a step that ended, or RAY_START_TIMEOUT_S, is an error that names the log.
_ray_wait() {
  local step
  "$ROOT/.venv/bin/python" - "$1" "$RAY_START_TIMEOUT_S" <<'PYTHON' &
import os, socket, sys, time
import ray

expected, limit = int(sys.argv[1]), float(sys.argv[2])
host, port = os.environ["RAY_ADDRESS"].rsplit(":", 1)
started, joined, shown = time.monotonic(), 0, -1
while joined < expected:
    seconds = time.monotonic() - started
    if seconds > limit:
        sys.exit(f"only {joined} of {expected} nodes joined Ray within {limit:g} s")
    if not ray.is_initialized():
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                ray.init(log_to_driver=False, logging_level="error")
    else:
        joined = sum(node["Alive"] for node in ray.nodes())
        if joined != shown:
            shown = joined
            print(f"Ray: {joined} of {expected} nodes have joined after {seconds:.0f} s", flush=True)
    time.sleep(0.5)
PYTHON
  local waiter=$!
  while kill -0 "$waiter" 2>/dev/null; do
    for step in "${RAY_STEPS[@]}"; do
      kill -0 "$step" 2>/dev/null || { kill "$waiter"; tail -n 5 "$RAY_LOGS"/*.log >&2; die "Ray did not start on a node; logs in $RAY_LOGS"; }
    done
    sleep 0.5
  done
  wait "$waiter" || { tail -n 5 "$RAY_LOGS"/*.log >&2; die "Ray did not start on every node; logs in $RAY_LOGS"; }
}

# Ray drains before it ends; that must happen before Slurm kills the job's steps.
ray_stop() {
  local step
  for step in "${RAY_STEPS[@]}"; do kill -TERM "$step" 2>/dev/null || true; done
  for step in "${RAY_STEPS[@]}"; do wait "$step" 2>/dev/null || true; done
  RAY_STEPS=()
  [ -z "${RAY_TMPDIR:-}" ] || rm -rf "$RAY_TMPDIR"
}
