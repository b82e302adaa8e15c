# shellcheck shell=bash
# What scheduler.sh, server.sh and worker.sh share. To be sourced, not run.

readonly EXIT_USAGE=2

repo_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)

# Ends the script: a setting is missing or bad.
die_usage() {
  echo "${0##*/}: $*" >&2
  echo "Try '${0##*/} -h' for all settings." >&2
  exit "$EXIT_USAGE"
}

# need_argument FLAG "$@": the flag must be followed by a value.
need_argument() {
  (($# >= 3)) || die_usage "$1 needs a value"
}

# need_integer WHAT VALUE LOW HIGH
need_integer() {
  local what=$1 value=$2 low=$3 high=$4
  [[ -n $value ]] || die_usage "missing: $what"
  # Ten digits fit bash's arithmetic; 10# keeps a leading zero from meaning octal.
  if ! [[ $value =~ ^[0-9]{1,10}$ ]] || ((10#$value < low || 10#$value > high)); then
    die_usage "$what is '$value', not a whole number from $low to $high"
  fi
}

# need_text WHAT VALUE: there, and without blanks.
need_text() {
  [[ -n $2 ]] || die_usage "missing: $1"
  [[ $2 != *[[:space:]]* ]] || die_usage "$1 is '$2', which has a blank in it"
}

# set_scheduler HOST:PORT sets DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT.
set_scheduler() {
  [[ $1 =~ ^([^:[:space:]]+):([0-9]+)$ ]] || die_usage "--scheduler is '$1', not HOST:PORT"
  DMLC_PS_ROOT_URI=${BASH_REMATCH[1]}
  DMLC_PS_ROOT_PORT=${BASH_REMATCH[2]}
}

need_scheduler() {
  need_text "the scheduler's host (--scheduler or DMLC_PS_ROOT_URI)" "${DMLC_PS_ROOT_URI:-}"
  need_integer "the scheduler's port (--scheduler or DMLC_PS_ROOT_PORT)" \
    "${DMLC_PS_ROOT_PORT:-}" 1 65535
}

# What every node may be told about its own address.
set_node_host() {
  need_text "--node-host" "$1"
  export DMLC_NODE_HOST=$1
}

set_interface() {
  need_text "--interface" "$1"
  [[ -e /sys/class/net/$1 ]] || die_usage "--interface is '$1', and this machine has no such interface"
  export DMLC_INTERFACE=$1
}

# find_program NAME HINT prints its path: build/venv of this checkout before PATH.
find_program() {
  local venv_program=$repo_root/build/venv/bin/$1
  if [[ -x $venv_program ]]; then
    echo "$venv_program"
  else
    command -v -- "$1" || die_usage "$1 is neither in $repo_root/build/venv/bin nor on PATH: $2"
  fi
}
