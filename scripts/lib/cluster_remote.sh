# shellcheck shell=bash
# Sent to each host by cluster.sh, and run there: bash -s -- ACTION JOB PROCESS ARGUMENT...
# Before it comes a line that sets `secret`, the job's; empty: it goes without.
# What one process of a job leaves there lies in a folder of its own: log, and pid, the leader of its
# process group.
set -euo pipefail

action=$1 job=/tmp/megatron-byteps-$(id -u)-$2 folder=/tmp/megatron-byteps-$(id -u)-$2/$3
shift 3

# Whether the group still has a process. The pid alone may be another's by now: the folder's name, in
# the environment of whatever was started, tells.
alive() {
  [[ -s $folder/pid ]] || return 1
  pid=$(<"$folder/pid")
  tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qxF "MEGATRON_BYTEPS_RUN=$folder"
}

case $action in
  up)
    # up JOB PROCESS CHECKOUT COMMAND...
    checkout=$1
    shift
    if alive; then
      echo "runs already (pid $pid): take it down first"
      exit 1
    fi
    cd "$checkout"
    rm -rf "$folder"
    mkdir -m 700 "$job" 2>/dev/null || [[ -O $job && ! -L $job ]] || {
      echo "$job is somebody else's"
      exit 1
    }
    mkdir "$folder"
    unset BYTEPS_SECRET
    # shellcheck disable=SC2154 # see above
    if [[ -n $secret ]]; then
      (umask 077 && echo "$secret" >"$folder/secret")
      export BYTEPS_SECRET_FILE=$folder/secret
    else
      export BYTEPS_AUTH=0
    fi
    MEGATRON_BYTEPS_RUN=$folder setsid "$@" >"$folder/log" 2>&1 </dev/null &
    echo $! >"$folder/pid"
    printf '%s\n' "$PWD" "$@" >"$folder/command" # the checkout, then the command, a word a line
    echo "started (pid $!)"
    ;;
  status)
    if alive; then
      echo "running (pid $pid)"
    elif [[ -d $folder ]]; then
      echo "ended: $(tail -n 1 "$folder/log" 2>/dev/null)"
    else
      echo "not started"
      exit 1
    fi
    ;;
  table)
    # table JOB PROCESS: what the scheduler, which runs here, knows of the cluster
    alive || exit 0
    port=$(grep -xF -A 1 -e --status-port "$folder/command" | tail -n 1)
    "$(head -n 1 "$folder/command")/scripts/status.sh" "127.0.0.1:$port"
    ;;
  logs)
    # logs JOB PROCESS LINES
    [[ ! -e $folder/log ]] || tail -n "$1" "$folder/log"
    ;;
  down)
    # down JOB PROCESS SECONDS
    if alive; then
      kill -TERM -- "-$pid" 2>/dev/null || true
      for ((i = 0; i < $1 * 10; i++)); do
        alive || break
        sleep 0.1
      done
      kill -KILL -- "-$pid" 2>/dev/null || true
    fi
    rm -rf "$folder"
    rmdir "$job" 2>/dev/null || true # not empty: another process of the job is on this host
    echo "down"
    ;;
esac
