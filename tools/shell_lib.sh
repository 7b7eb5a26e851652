# shellcheck shell=bash
# What the project's bash scripts share; sourced, never run.

say() { printf '[%s] %s\n' "${0##*/}" "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

STOP_GRACE_S=${STOP_GRACE_S:-60} # what a command may take to end after it was told to

# run_group COMMAND…: run COMMAND so that nothing it starts outlives it, and return its exit status.
# It runs in a session of its own.  INT, TERM, HUP and USR1 that reach this shell go to it; when it does not end within
# STOP_GRACE_S it is killed.  Whatever it leaves behind, daemons included (found by a mark in their environment), is ended.
# RECEIVED is the last of these signals, or empty.
run_group() {
  local mark="DRMAS_GROUP_$$_$RANDOM" leader watchdog='' status=0
  # shellcheck disable=SC2034  # callers read it
  RECEIVED=
  env "$mark=1" setsid setpriv --pdeathsig TERM "$@" &
  leader=$!
  # shellcheck disable=SC2064  # the leader's number is meant to be fixed here
  {
    for signal in INT TERM HUP; do
      trap "RECEIVED=$signal; kill -s $signal $leader 2>/dev/null
            [ -n \"\$watchdog\" ] || { setsid bash -c 'sleep $STOP_GRACE_S; kill -KILL -- -$leader' </dev/null >/dev/null 2>&1 & watchdog=\$!; }" $signal
    done
    trap "RECEIVED=USR1; kill -s USR1 $leader 2>/dev/null" USR1
  }
  while kill -0 "$leader" 2>/dev/null; do
    status=0
    wait "$leader" || status=$?
  done
  [ -z "$watchdog" ] || kill -KILL -- "-$watchdog" 2>/dev/null || true
  _end_leftovers "$leader" "$mark"
  trap - INT TERM HUP USR1
  return "$status"
}

_leftovers() { # LEADER MARK: process ids
  { pgrep --session "$1" || true; grep -lzx "$2=1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 || true; } | sort -un
}

_end_leftovers() {
  local attempt signal=TERM ids
  for ((attempt = 0; attempt < 60; attempt++)); do
    ids=$(_leftovers "$1" "$2")
    [ -n "$ids" ] || return 0
    ((attempt < 50)) || signal=KILL # 5 s to tidy up (shared memory, sockets)
    # shellcheck disable=SC2086
    kill -s $signal $ids 2>/dev/null || true
    sleep 0.1
  done
}
