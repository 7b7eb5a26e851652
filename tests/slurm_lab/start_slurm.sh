#!/usr/bin/env bash
# Start a throw-away Slurm cluster on this machine: munged, slurmctld and one slurmd per node.  Root; no systemd needed.
# Prints `export SLURM_CONF=…` when all nodes are idle.  Running it again leaves live daemons alone.
#
#   SLURM_LAB_ROOT (/tmp/slurm_lab)   folder of everything it writes
#   SLURM_NODES (1)  SLURM_CPUS (8)  SLURM_GPUS (8, stand-ins)  SLURM_BASE_PORT (26817)
#   SLURM_NETNS=1                     every node in its own network namespace, with its own address and host name
set -euo pipefail
LAB=${SLURM_LAB_ROOT:-/tmp/slurm_lab} NODES=${SLURM_NODES:-1} CPUS=${SLURM_CPUS:-8} GPUS=${SLURM_GPUS:-8}
PORT=${SLURM_BASE_PORT:-26817} NETNS=${SLURM_NETNS:-0} NETWORK=10.77.0 BRIDGE=slurmbr0
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH
HOST=$(hostname -s)

die() { echo "start_slurm.sh: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die "needs root"
for command in slurmctld slurmd sbatch munged; do
  command -v $command >/dev/null || die "$command is missing; Debian: apt-get install slurmctld slurmd slurm-client munge"
done

alive() { # PIDFILE COMM: does the file name a live process of that name?
  local pid
  pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ]
}

write_configuration() {
  local controller=127.0.0.1 node where i
  [ "$NETNS" = 0 ] || controller=$NETWORK.1
  cat >"$LAB/etc/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=$HOST($controller)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$LAB/munge/munge.socket
CredType=cred/munge
StateSaveLocation=$LAB/ctld
SlurmdSpoolDir=$LAB/spool.%n
SlurmctldPidFile=$LAB/pid/slurmctld.pid
SlurmdPidFile=$LAB/pid/slurmd.%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout=60
MessageTimeout=30
CONF
  # slurmd looks for a cgroup file system otherwise, and dies where none is mounted; nothing here uses cgroups
  echo "CgroupPlugin=cgroup/v1" >"$LAB/etc/cgroup.conf"
  : >"$LAB/etc/gres.conf"
  for ((i = 1; i <= NODES; i++)); do
    node=node$i where="NodeHostname=$HOST NodeAddr=127.0.0.1"
    [ "$NETNS" = 0 ] || where="NodeHostname=$node NodeAddr=$NETWORK.$((10 + i))"
    echo "NodeName=$node $where Port=$((PORT + i)) CPUs=$CPUS RealMemory=8000 Gres=gpu:$GPUS State=UNKNOWN" >>"$LAB/etc/slurm.conf"
    echo "NodeName=$node Name=gpu File=$LAB/gpu/fake[0-$((GPUS - 1))]" >>"$LAB/etc/gres.conf"
  done
  echo "PartitionName=debug Nodes=node[1-$NODES] Default=YES MaxTime=INFINITE DefaultTime=10 State=UP" >>"$LAB/etc/slurm.conf"
}

make_networks() {
  local node i
  ip link show $BRIDGE >/dev/null 2>&1 ||
    { ip link add $BRIDGE type bridge; ip addr add $NETWORK.1/24 dev $BRIDGE; ip link set $BRIDGE up; }
  { echo "127.0.0.1 localhost"; echo "$NETWORK.1 $HOST"; for ((i = 1; i <= NODES; i++)); do echo "$NETWORK.$((10 + i)) node$i"; done; } \
    >"$LAB/etc/hosts"
  for ((i = 1; i <= NODES; i++)); do
    node=node$i
    [ ! -e "/run/netns/$node" ] || continue
    ip netns add "$node"
    echo "$node" >>"$LAB/etc/netns.list"
    ip link add "v$node" type veth peer name eth0 netns "$node"
    ip link set "v$node" master $BRIDGE up
    ip -n "$node" link set lo up
    ip -n "$node" addr add "$NETWORK.$((10 + i))/24" dev eth0
    ip -n "$node" link set eth0 up
    ip -n "$node" route add default via $NETWORK.1
  done
}

start_node() { # NODE
  local command=(slurmd -f "$SLURM_CONF" -N "$1")
  mkdir -p "$LAB/spool.$1"
  ! alive "$LAB/pid/slurmd.$1.pid" slurmd || return 0
  if [ "$NETNS" = 1 ]; then
    # `ip netns exec` would remount /sys, and slurmd then dies for want of cgroups
    command=(nsenter --net="/run/netns/$1" unshare --uts --mount
      sh -c "hostname $1 && mount --bind '$LAB/etc/hosts' /etc/hosts && exec ${command[*]}")
  fi
  "${command[@]}" || { tail -n 5 "$LAB/log/slurmd.$1.log" >&2; die "slurmd of $1 did not start"; }
}

umask 022
mkdir -p "$LAB"/{etc,log,pid,ctld,gpu,munge}
for ((i = 0; i < GPUS; i++)); do # Slurm takes only device nodes for GPUs: clones of /dev/null
  [ -c "$LAB/gpu/fake$i" ] || mknod -m 666 "$LAB/gpu/fake$i" c 1 3
done
[ -s "$LAB/etc/munge.key" ] || (umask 077; head -c 128 /dev/urandom >"$LAB/etc/munge.key")
write_configuration
export SLURM_CONF=$LAB/etc/slurm.conf
[ "$NETNS" = 0 ] || make_networks
alive "$LAB/pid/munged.pid" munged || {
  rm -f "$LAB"/munge/munge.socket*
  munged --socket="$LAB/munge/munge.socket" --key-file="$LAB/etc/munge.key" --pid-file="$LAB/pid/munged.pid" \
    --log-file="$LAB/log/munged.log" --seed-file="$LAB/munge/munged.seed"
}
alive "$LAB/pid/slurmctld.pid" slurmctld || slurmctld -f "$SLURM_CONF"
for ((i = 1; i <= NODES; i++)); do start_node "node$i"; done

for ((t = 0; t < 300; t++)); do
  up=$(sinfo -h -N -r -t idle,mix,alloc -o %N 2>/dev/null | sort -u | wc -l) || up=0
  [ "$up" != "$NODES" ] || { echo "export SLURM_CONF=$SLURM_CONF"; exit 0; }
  sleep 0.1
done
tail -n 30 "$LAB"/log/*.log >&2
die "the nodes were not up after 30 s"
