# shellcheck shell=bash
# Functions that scheduler.sh, server.sh and worker.sh share. They source this file.

readonly EXIT_USAGE=2

# Name that the user has called: the script, or the command megatron-byteps.
me=${MEGATRON_BYTEPS_COMMAND:-${0##*/}}
unset MEGATRON_BYTEPS_COMMAND

repo_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)

# die_usage TEXT: ends the script, because a setting is missing or bad.
die_usage() {
  echo "$me: $*" >&2
  echo "Try '$me -h' for all settings." >&2
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
  # Ten digits fit bash's arithmetic. 10# keeps a leading zero from meaning octal.
  if ! [[ $value =~ ^[0-9]{1,10}$ ]] || ((10#$value < low || 10#$value > high)); then
    die_usage "$what is '$value', not a whole number from $low to $high"
  fi
}

# need_text WHAT VALUE: fails if the value is empty or has blanks.
need_text() {
  [[ -n $2 ]] || die_usage "missing: $1"
  [[ $2 != *[[:space:]]* ]] || die_usage "$1 is '$2', which has a blank in it"
}

# set_scheduler HOST:PORT sets DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT. An IPv6 address is in brackets: [fd00::1]:9000.
set_scheduler() {
  if [[ $1 =~ ^\[([0-9a-fA-F:.]+(%[^][:space:]]+)?)\]:([0-9]+)$ ]]; then
    DMLC_PS_ROOT_URI=${BASH_REMATCH[1]}
    DMLC_PS_ROOT_PORT=${BASH_REMATCH[3]}
  elif [[ $1 =~ ^([^:[:space:]]+):([0-9]+)$ ]]; then
    DMLC_PS_ROOT_URI=${BASH_REMATCH[1]}
    DMLC_PS_ROOT_PORT=${BASH_REMATCH[2]}
  else
    die_usage "--scheduler is '$1', not HOST:PORT or [IPV6]:PORT"
  fi
}

need_scheduler() {
  need_text "the scheduler's host (--scheduler or DMLC_PS_ROOT_URI)" "${DMLC_PS_ROOT_URI:-}"
  need_integer "the scheduler's port (--scheduler or DMLC_PS_ROOT_PORT)" \
    "${DMLC_PS_ROOT_PORT:-}" 1 65535
}

# need_workers: fails without the number of workers, unless the cluster is kept.
need_workers() {
  if [[ ${BYTEPS_KEEP:-0} == 1 && -z ${DMLC_NUM_WORKER:-} ]]; then return; fi
  need_integer "the number of workers (--workers or DMLC_NUM_WORKER; none with --keep)" \
    "${DMLC_NUM_WORKER:-}" 1 65535
  export DMLC_NUM_WORKER
}

# need_secret: fails unless this machine can read the job's secret, or authentication is off.
need_secret() {
  [[ ${BYTEPS_AUTH:-} != 0 && -z ${BYTEPS_SECRET:-} ]] || return 0
  [[ -n ${BYTEPS_SECRET_FILE:-} ]] || die_usage "missing: the job's secret (--secret-file," \
    "BYTEPS_SECRET_FILE or BYTEPS_SECRET): 'byteps-server --new-secret FILE' makes one;" \
    "BYTEPS_AUTH=0 goes without"
  [[ -r $BYTEPS_SECRET_FILE ]] || die_usage "cannot read the job's secret '$BYTEPS_SECRET_FILE'" \
    "(--secret-file or BYTEPS_SECRET_FILE)"
}

# set_node_host: sets the address at which other nodes reach this node.
set_node_host() {
  need_text "--node-host" "$1"
  export DMLC_NODE_HOST=$1
}

set_interface() {
  need_text "--interface" "$1"
  [[ -e /sys/class/net/$1 ]] || die_usage "--interface is '$1', and this machine has no such interface"
  export DMLC_INTERFACE=$1
}

# join_host_port HOST PORT prints HOST:PORT.
join_host_port() {
  if [[ $1 == *:* ]]; then echo "[$1]:$2"; else echo "$1:$2"; fi
}

# first_line FILE prints its first line, or nothing.
first_line() {
  local line=
  { read -r line <"$1"; } 2>/dev/null || true
  echo "$line"
}

# detect_node [DESTINATION] finds the interface, address, NUMA node and RDMA device that this machine's part of the job
# uses: by DMLC_NODE_HOST or DMLC_INTERFACE if set, otherwise by the route to DESTINATION. It sets node_interface,
# node_address, node_numa and node_rdma. Unknown values stay empty.
detect_node() {
  local destination=${1:-} route device
  node_interface=${DMLC_INTERFACE:-} node_address=${DMLC_NODE_HOST:-} node_numa='' node_rdma=''
  command -v ip >/dev/null || return 0
  if [[ -z $node_interface && -n $node_address ]]; then
    node_interface=$(ip -o address show to "$node_address" 2>/dev/null |
      awk 'NR == 1 {print $2}' || true)
  elif [[ -z $node_interface && -n $destination ]]; then
    destination=$(getent ahosts "$destination" 2>/dev/null | awk 'NR == 1 {print $1}' || true)
    route=$(ip -o route get "${destination:-/}" 2>/dev/null || true)
    [[ ! $route =~ \ dev\ ([^ ]+) ]] || node_interface=${BASH_REMATCH[1]}
    [[ ! $route =~ \ src\ ([^ ]+) ]] || node_address=${BASH_REMATCH[1]}
  fi
  [[ -n $node_interface ]] || return 0
  [[ -n $node_address ]] || node_address=$(ip -o address show dev "$node_interface" scope global \
    2>/dev/null | awk 'NR == 1 {sub("/.*", "", $4); print $4}' || true)
  node_numa=$(first_line "/sys/class/net/$node_interface/device/numa_node")
  [[ $node_numa != -* ]] || node_numa='' # the kernel's value without NUMA nodes
  for device in /sys/class/infiniband/*; do
    [[ -e $device/device/net/$node_interface ]] || continue
    node_rdma=${device##*/}
    break
  done
}

# show_node prints to stderr the detected values, and how to override them.
show_node() {
  if ! command -v ip >/dev/null; then
    echo "$me: there is no ip command (iproute2): byteps-server finds this machine's address by" \
      "itself (--node-host, --interface); NUMA node and RDMA device were not looked for" >&2
    return
  fi
  echo "$me: interface ${node_interface:-unknown} (--interface)," \
    "address ${node_address:-unknown} (--node-host), NUMA node ${node_numa:-none}," \
    "RDMA device ${node_rdma:-none} (BYTEPS_RDMA_DEVICE)" >&2
}

# show_command COMMAND...: prints the command with its settings, ready to be pasted. A secret is left out.
show_command() {
  local name
  for name in $(compgen -e | grep -E '^(DMLC|BYTEPS|SERVER)_|^TORCH_DISABLE_SHARE_' | LC_ALL=C sort); do
    [[ $name != BYTEPS_SECRET ]] || continue # it stays secret
    printf '%s=%q \\\n' "$name" "${!name}"
  done
  printf '%q ' "$@"
  echo
}

# find_program NAME HINT prints its path: in build/venv of this checkout, in bin of an unpacked archive, or on PATH, in
# this order.
find_program() {
  local folder
  for folder in build/venv/bin bin; do
    if [[ -x $repo_root/$folder/$1 ]]; then
      echo "$repo_root/$folder/$1"
      return
    fi
  done
  command -v -- "$1" || die_usage "$1 is neither in $repo_root/build/venv/bin nor on PATH: $2"
}

# has_byteps PYTHON: succeeds if this Python has byteps and torch. It does not import them, which would take seconds.
has_byteps() {
  "$1" - 2>/dev/null <<'PYTHON'
import importlib.util
import sys

sys.path = [folder for folder in sys.path if folder]  # not the folder `byteps` of a checkout
found = [importlib.util.find_spec(name) for name in ("torch", "byteps")]
sys.exit(not all(spec and spec.origin for spec in found))
PYTHON
}

# find_python prints the path of the ranks' Python: the active environment's, if it has byteps; otherwise that of this
# checkout or of an unpacked archive.
find_python() {
  local folder candidate others=() tried=()
  [[ -z ${VIRTUAL_ENV:-} ]] || others+=("$VIRTUAL_ENV/bin/python")
  for candidate in python python3; do
    ! candidate=$(command -v -- "$candidate") || others+=("$candidate")
  done
  for folder in build/venv/bin bin; do others+=("$repo_root/$folder/python"); done
  for candidate in "${others[@]}"; do
    [[ -x $candidate ]] || continue
    if has_byteps "$candidate"; then
      echo "$candidate"
      return
    fi
    tried+=("$candidate")
    [[ -z ${VIRTUAL_ENV:-} || $candidate != "$VIRTUAL_ENV"/* ]] ||
      echo "$me: the active environment, $VIRTUAL_ENV, has no torch, or no byteps" >&2
  done
  die_usage "no Python has both torch and byteps (tried: ${tried[*]:-none}): activate the environment" \
    "that has them, install the byteps wheel there, or run 'make setup'"
}
