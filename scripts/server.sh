#!/usr/bin/env bash
# Runs the servers of one machine of a BytePS cluster.
set -euo pipefail
# shellcheck source=scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

usage() {
  cat <<TEXT
Usage: server.sh --scheduler HOST:PORT --workers N --servers N [options]

Runs one or more BytePS servers on this machine until the job ends. A flag wins over its variable.

  --scheduler HOST:PORT  DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT  where the scheduler listens
  --workers N            DMLC_NUM_WORKER      workers of the job: one for each rank
  --servers N            DMLC_NUM_SERVER      server processes of the whole job, all machines
  --instances N          SERVER_INSTANCES     server processes to run here (default: 1)
  --numa-nodes LIST      SERVER_NUMA_NODES    bind instance i, threads and memory, to the i-th NUMA
                                              node of LIST, such as 0,1, and around again
                                              (default: not bound; needs numactl)
  --node-host HOST       DMLC_NODE_HOST       this machine's own address (default: found out)
  --interface NAME       DMLC_INTERFACE       take that address from this interface (default: found
                                              out)
  -h, --help                                  show this

Instance i of several gets BYTEPS_LOCAL_RANK=i: its metrics are at BYTEPS_METRICS_PORT plus i.
These three have no default: --scheduler, --workers, --servers. Every other BYTEPS_* variable is
handed through; 'byteps-server --config-markdown' lists them, --print-config shows their values.

When one instance fails the others are ended. Exit status: 0 the job ended well; that of the first
instance to fail, 1 for example when a worker was lost; 2 a setting is missing or bad; 130 or 143
after Ctrl-C or SIGTERM.
TEXT
}

instances=${SERVER_INSTANCES:-1}
numa_nodes=${SERVER_NUMA_NODES:-}
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --scheduler) need_argument "$1" "$@"; set_scheduler "$2"; shift 2 ;;
    --workers) need_argument "$1" "$@"; DMLC_NUM_WORKER=$2; shift 2 ;;
    --servers) need_argument "$1" "$@"; DMLC_NUM_SERVER=$2; shift 2 ;;
    --instances) need_argument "$1" "$@"; instances=$2; shift 2 ;;
    --numa-nodes) need_argument "$1" "$@"; numa_nodes=$2; shift 2 ;;
    --node-host) need_argument "$1" "$@"; set_node_host "$2"; shift 2 ;;
    --interface) need_argument "$1" "$@"; set_interface "$2"; shift 2 ;;
    *) die_usage "unknown setting: $1" ;;
  esac
done

need_scheduler
need_integer "the number of workers (--workers or DMLC_NUM_WORKER)" "${DMLC_NUM_WORKER:-}" 1 65535
need_integer "the number of servers (--servers or DMLC_NUM_SERVER)" "${DMLC_NUM_SERVER:-}" 1 65535
need_integer "the number of instances (--instances or SERVER_INSTANCES)" "$instances" 1 1024
((10#$instances <= 10#$DMLC_NUM_SERVER)) \
  || die_usage "--instances $instances is more than the job's --servers $DMLC_NUM_SERVER"
nodes=()
if [[ -n $numa_nodes ]]; then
  [[ $numa_nodes =~ ^[0-9]+(,[0-9]+)*$ ]] \
    || die_usage "--numa-nodes is '$numa_nodes', not a list of node numbers such as 0,1"
  command -v numactl >/dev/null || die_usage "--numa-nodes needs numactl, which is not on PATH"
  IFS=, read -ra nodes <<<"$numa_nodes"
fi
export DMLC_PS_ROOT_URI DMLC_PS_ROOT_PORT DMLC_NUM_WORKER DMLC_NUM_SERVER DMLC_ROLE=server

server=$(find_program byteps-server "run 'make setup' or install the byteps wheel")

# set_command INSTANCE sets the array `command`.
set_command() {
  command=("$server" --role server)
  if ((${#nodes[@]})); then
    local node=${nodes[$1 % ${#nodes[@]}]}
    command=(numactl --cpunodebind="$node" --membind="$node" "${command[@]}")
  fi
}

if ((10#$instances == 1)); then
  set_command 0
  # exec: signals and the exit status are the server's own, and nothing can stay behind.
  exec "${command[@]}"
fi

# send SIGNAL to the instances that still run.
send() {
  local running
  running=$(jobs -rp)
  # shellcheck disable=SC2086  # one word for each process
  [[ -z $running ]] || kill -s "$1" $running 2>/dev/null || true
}

end_all() {
  send TERM
  local deadline=$((SECONDS + 10))
  while [[ -n $(jobs -rp) ]] && ((SECONDS < deadline)); do
    sleep 0.1
  done
  send KILL
  wait
}

# shellcheck disable=SC2329  # the traps call it
on_signal() {
  trap '' INT TERM
  end_all
  exit "$1"
}
trap 'on_signal 130' INT
trap 'on_signal 143' TERM

for ((i = 0; i < 10#$instances; i++)); do
  set_command "$i"
  # If this script is killed without a chance to clean up, the kernel ends the servers.
  # The local rank keeps their metrics apart (BYTEPS_METRICS_PORT).
  BYTEPS_LOCAL_RANK=$i "${command[@]}" --die-with-parent &
done

for ((i = 0; i < 10#$instances; i++)); do
  status=0
  wait -n || status=$?
  if ((status != 0)); then
    echo "server.sh: an instance ended with status $status; ending the others" >&2
    end_all
    exit "$status"
  fi
done
