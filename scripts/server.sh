#!/usr/bin/env bash
# Runs the servers of a machine in a BytePS cluster.
set -euo pipefail
# shellcheck source=scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

usage() {
  cat <<TEXT
Usage: $me --scheduler HOST:PORT --workers N --servers N [options]
       $me --scheduler HOST:PORT --keep --servers N [options]

Runs one or more BytePS servers on this machine until the job ends. A flag wins over its variable.

  --scheduler HOST:PORT  DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT  where the scheduler listens
  --workers N            DMLC_NUM_WORKER      workers of the job: one for each rank; with --keep as
                                              many as come
  --servers N            DMLC_NUM_SERVER      server processes of the whole job, all machines
  --instances N          SERVER_INSTANCES     server processes to run here (default: 1)
  --numa-nodes LIST      SERVER_NUMA_NODES    bind instance i, threads and memory, to the i-th NUMA
                                              node of LIST, such as 0,1, and around again; auto:
                                              to that of the NIC (default: not bound;
                                              needs numactl)
  --keep                 BYTEPS_KEEP=1        survive failures of the job and serve its
                                              restart; the scheduler likewise
  --secret-file FILE     BYTEPS_SECRET_FILE   the job's secret, the same on every machine (required,
                                              unless BYTEPS_SECRET is set, or BYTEPS_AUTH=0)
  --node-host HOST       DMLC_NODE_HOST       this machine's own address (default: found out)
  --interface NAME       DMLC_INTERFACE       take that address from this interface (default: found
                                              out)
  --check                                     look whether these servers could run here and would be
                                              admitted, also to a job that runs, and start nothing
                                              (with DMLC_ENABLE_RDMA, over RDMA)
  --dry-run                                   print the settings and the command, and do nothing
  -h, --help                                  show this

Instance i of several gets BYTEPS_LOCAL_RANK=i: its metrics are at BYTEPS_METRICS_PORT plus i.
These three have no default: --scheduler, --workers (but with --keep), --servers. Every other BYTEPS_* variable is
passed on; 'byteps-server --config-markdown' lists them, --print-config shows their values.

SIGTERM ends the servers once all workers have left, for which they wait BYTEPS_STOP_TIMEOUT_S (25)
at most; a second one, 1 s later or more, ends them at once. When one instance fails the others are ended, unless BYTEPS_REPLACE_SERVERS_S lets
another server take its place. Exit status: 0 the job ended well; that of the first
instance to fail, 1 for example when a worker was lost; 2 a setting is missing or bad; 130 or 143
after Ctrl-C or SIGTERM.
Exit status of --check: 0 they would be admitted; 1 something is wrong; 2 a setting is; 3 nothing
that can be seen here is wrong, but the scheduler does not answer.

Example: $me --scheduler 10.0.0.1:9000 --workers 32 --servers 4 --secret-file job.secret
TEXT
}

instances=${SERVER_INSTANCES:-1}
numa_nodes=${SERVER_NUMA_NODES:-}
dry_run=0
check=0
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --scheduler) need_argument "$1" "$@"; set_scheduler "$2"; shift 2 ;;
    --workers) need_argument "$1" "$@"; DMLC_NUM_WORKER=$2; shift 2 ;;
    --servers) need_argument "$1" "$@"; DMLC_NUM_SERVER=$2; shift 2 ;;
    --instances) need_argument "$1" "$@"; instances=$2; shift 2 ;;
    --numa-nodes) need_argument "$1" "$@"; numa_nodes=$2; shift 2 ;;
    --secret-file) need_argument "$1" "$@"; export BYTEPS_SECRET_FILE=$2; shift 2 ;;
    --keep) export BYTEPS_KEEP=1; shift ;;
    --node-host) need_argument "$1" "$@"; set_node_host "$2"; shift 2 ;;
    --interface) need_argument "$1" "$@"; set_interface "$2"; shift 2 ;;
    --check) check=1; shift ;;
    --dry-run) dry_run=1; shift ;;
    *) die_usage "unknown setting: $1" ;;
  esac
done

need_scheduler
need_workers
need_integer "the number of servers (--servers or DMLC_NUM_SERVER)" "${DMLC_NUM_SERVER:-}" 1 65535
need_integer "the number of instances (--instances or SERVER_INSTANCES)" "$instances" 1 1024
need_secret
((10#$instances <= 10#$DMLC_NUM_SERVER)) \
  || die_usage "--instances $instances is more than the job's --servers $DMLC_NUM_SERVER"
detect_node "$DMLC_PS_ROOT_URI"
nodes=()
if [[ $numa_nodes == auto ]]; then
  # Nothing is bound on a machine with one NUMA node, or for a NIC without a node.
  numa_nodes=$node_numa
fi
if [[ -n $numa_nodes ]]; then
  [[ $numa_nodes =~ ^[0-9]+(,[0-9]+)*$ ]] \
    || die_usage "--numa-nodes is '$numa_nodes', not a list of node numbers such as 0,1"
  command -v numactl >/dev/null || die_usage "--numa-nodes needs numactl, which is not on PATH"
  IFS=, read -ra nodes <<<"$numa_nodes"
fi
export DMLC_PS_ROOT_URI DMLC_PS_ROOT_PORT DMLC_NUM_SERVER DMLC_ROLE=server

server=$(find_program byteps-server "run 'make setup' or install the byteps wheel")

# set_command INSTANCE sets the array `command`.
set_command() {
  command=("$server" --role server)
  if ((${#nodes[@]})); then
    local node=${nodes[$1 % ${#nodes[@]}]}
    command=(numactl --cpunodebind="$node" --membind="$node" "${command[@]}")
  fi
}

# check_machine prints faults, one per line, and returns the exit status.
check_machine() {
  local wrong=0 status=0 node locked
  "$server" --role server --check="$((10#$instances))" || status=$?
  for node in ${nodes[@]+"${nodes[@]}"}; do
    numactl --cpunodebind="$node" --membind="$node" true >/dev/null 2>&1 && continue
    echo "WRONG numactl cannot bind a server to NUMA node $node (--numa-nodes)"
    wrong=1
  done
  if [[ -n ${DMLC_NODE_HOST:-} && -z $node_interface ]]; then
    echo "WRONG no interface of this machine has the address $DMLC_NODE_HOST (--node-host)"
    wrong=1
  fi
  if [[ ${DMLC_ENABLE_RDMA:-} == ibverbs || ${DMLC_ENABLE_RDMA:-} == 1 ]]; then
    locked=$(ulimit -l)
    [[ $locked == unlimited ]] ||
      echo "note  locked memory is limited to $locked KiB (ulimit -l); check_rdma.sh says more"
  fi
  ((wrong && status % 3 == 0)) || return "$status" # 0, or the scheduler does not answer
  return "$wrong"
}

show_node
if ((check)); then
  check_machine
  exit
fi
if ((dry_run)); then
  for ((i = 0; i < 10#$instances; i++)); do
    set_command "$i"
    ((10#$instances == 1)) || command=(env "BYTEPS_LOCAL_RANK=$i" "${command[@]}" --die-with-parent)
    show_command "${command[@]}"
  done
  exit
fi

if ((10#$instances == 1)); then
  set_command 0
  # exec: the server itself gets the signals and sets the exit status, and no process is left.
  exec "${command[@]}"
fi

pids=()  # pids of the instances that may still run, by number
sleeper= # pid of the sleep in wait_for_one

# find_running sets the array `running` to the running instances.
find_running() {
  local pid
  running=()
  for pid in $(jobs -rp); do
    [[ $pid == "$sleeper" ]] || running+=("$pid")
  done
}

# send SIGNAL: sends the signal to all running instances.
send() {
  find_running
  ((${#running[@]} == 0)) || kill -s "$1" "${running[@]}" 2>/dev/null || true
}

end_all() {
  send TERM
  # A server waits for its workers, and then informs the other nodes. The script waits longer than that.
  local patience=${BYTEPS_STOP_TIMEOUT_S:-25}
  local deadline=$((SECONDS + ${patience%.*} + 8))
  while find_running; ((${#running[@]} && SECONDS < deadline)); do
    sleep 0.1 || true # a signal to the process group ends the sleep
  done
  send KILL
  wait
}

# wait_for_one sets `status` to the status of an instance that has ended, and removes the instance from `pids`. If an
# instance is killed while the script does something else, bash itself reports it, and `wait -n` does not. So `wait -n`
# only wakes this function, which then checks each process by its id.
wait_for_one() {
  local i pid
  while :; do
    find_running
    for i in "${!pids[@]}"; do
      for pid in ${running[@]+"${running[@]}"}; do
        [[ $pid != "${pids[i]}" ]] || continue 2
      done
      status=0
      wait "${pids[i]}" || status=$?
      unset "pids[i]"
      return
    done
    sleep 1 & # an instance may be killed at this point
    sleeper=$!
    wait -n || true
  done
}

# shellcheck disable=SC2329  # the traps call it
on_signal() {
  trap 'send TERM' INT TERM # a second signal
  end_all
  exit "$1"
}
trap 'on_signal 130' INT
trap 'on_signal 143' TERM

for ((i = 0; i < 10#$instances; i++)); do
  set_command "$i"
  # If this script is killed without clean-up, the kernel ends the servers. The local rank gives each a metrics port of
  # its own (BYTEPS_METRICS_PORT).
  BYTEPS_LOCAL_RANK=$i "${command[@]}" --die-with-parent &
  pids+=("$!")
done

replaced=$(awk -v s="${BYTEPS_REPLACE_SERVERS_S:-0}" 'BEGIN { print (s + 0 > 0) }')
first=0
for ((i = 0; i < 10#$instances; i++)); do
  wait_for_one
  ((status != 0)) || continue
  ((first != 0)) || first=$status
  if ((replaced)); then
    echo "$me: an instance ended with status $status; the others go on" >&2
    continue
  fi
  echo "$me: an instance ended with status $status; ending the others" >&2
  end_all
  exit "$status"
done
wait # waits for a sleep
exit "$first"
