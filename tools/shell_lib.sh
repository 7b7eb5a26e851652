# shellcheck shell=bash
# What the project's bash scripts share; sourced, never run.

say() { printf '[%s] %s\n' "${0##*/}" "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

STOP_GRACE_S=${STOP_GRACE_S:-60} # what a command may take to end after a signal

# run_group COMMAND…: run COMMAND so that nothing it starts outlives it, and return its exit status.
# It runs in a session of its own.  INT, TERM, HUP and USR1 that reach this shell go to it; when it does not end within
# STOP_GRACE_S it is killed.  Whatever it leaves behind, daemons included (found by a mark in their environment), is ended.
# RECEIVED is the last of these signals, or empty.
run_group() {
  local mark="DRMAS_GROUP_$$_$RANDOM" leader signal early='' watchdog='' status=0 last interrupted
  # shellcheck disable=SC2034  # callers read it
  RECEIVED=
  for signal in INT TERM HUP USR1; do
    # shellcheck disable=SC2064
    trap "early=$signal" $signal # there is no command yet to pass it on to
  done
  # a shell starts background commands with INT ignored, and they could not change that themselves
  env --default-signal=INT,QUIT "$mark=1" setsid setpriv --pdeathsig TERM "$@" &
  leader=$!
  # shellcheck disable=SC2064  # the leader's number is meant to be fixed here
  {
    for signal in INT TERM HUP; do
      trap "RECEIVED=$signal interrupted=yes; kill -s $signal $leader 2>/dev/null
            [ -n \"\$watchdog\" ] || _kill_later" $signal
    done
    trap "RECEIVED=USR1 interrupted=yes; kill -s USR1 $leader 2>/dev/null" USR1
  }
  [ -z "$early" ] || kill -s "$early" "$BASHPID"
  while
    interrupted=no last=$status status=0
    wait "$leader" || status=$?
    [ $interrupted = yes ]
  do :; done
  [ "$status" != 127 ] || [ -z "$RECEIVED" ] || status=$last # it ended, and was waited for, just as a signal came
  [ -z "$watchdog" ] || kill -KILL -- "-$watchdog" 2>/dev/null || true
  _end_leftovers "$leader" "$mark"
  trap - INT TERM HUP USR1
  return "$status"
}

_kill_later() { # sets watchdog; leader is run_group's
  setsid bash -c "sleep $STOP_GRACE_S; kill -KILL -- -$leader" </dev/null >/dev/null 2>&1 &
  watchdog=$!
  disown "$watchdog" # or bash tells the user that it was killed
}

_leftovers() { # LEADER MARK: process ids
  {
    ps -s "$1" -o pid=,stat= | awk '$2 !~ /Z/ { print $1 }' || true
    grep -lzx "$2=1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 || true
  } | sort -un
}

_end_leftovers() { # LEADER MARK
  local signal=TERM ids kill_at=$((SECONDS + 5)) # they may tidy up first (shared memory, sockets)
  while ids=$(_leftovers "$@") && [ -n "$ids" ]; do
    ((SECONDS < kill_at)) || signal=KILL
    # shellcheck disable=SC2086
    kill -s $signal $ids 2>/dev/null || true
    ((SECONDS < kill_at + 5)) || return 0
    sleep 0.1
  done
}
