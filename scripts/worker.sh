#!/usr/bin/env bash
# Runs the workers of a machine: torchrun with BytePS's settings.
set -euo pipefail
# shellcheck source=scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

usage() {
  cat <<TEXT
Usage: $me [options] -- SCRIPT [ARGUMENTS]
Example: $me --scheduler 10.0.0.1:9000 --servers 4 --secret-file job.secret --nnodes 4 --node-rank 0 \\
                 --master-addr 10.0.0.10 --nproc-per-node 8 -- train.py --flag

Runs SCRIPT in one process for each rank of this machine, through torchrun (python -m
torch.distributed.run), as workers of a BytePS cluster. A flag wins over its variable. The Python is that of
the active environment (VIRTUAL_ENV, then PATH) if byteps is installed there, else this checkout's; a line
says which.

  --scheduler HOST:PORT  DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT  where the scheduler listens
                         (default: none, the embedded mode: scheduler and servers are started next to
                         the ranks and end with them)
  --servers N            with a scheduler: DMLC_NUM_SERVER, server processes of the job (no default)
                         without: BYTEPS_EMBEDDED_SERVERS, servers to start on each machine
                         (default: 1)
  --local-servers N      BYTEPS_LOCAL_SERVERS  with a scheduler: of these, start so many on this
                         machine, and as many on each other one with workers (default: 0). They end
                         with the workers, whose number is DMLC_NUM_WORKER (default: --nnodes times
                         --nproc-per-node). With a few server machines
                         (server.sh --instances) they keep every NIC busy: docs/use/when-to-use.md
                         has the best numbers. Their BYTEPS_LOCAL_RANK follows those of the ranks, so
                         that all have metrics at ports of their own
  --replica NUMBER/COUNT BYTEPS_REPLICA  this is one of COUNT jobs of equal size that train one model
                         and meet only at the servers; 0/4 is the first of four. Each has a
                         torchrun world of its own; the scheduler counts the ranks of all
  --secret-file FILE     BYTEPS_SECRET_FILE  the job's secret, the same on every machine (with a
                         scheduler required, unless BYTEPS_SECRET is set, or BYTEPS_AUTH=0; the
                         embedded mode makes one)
  --node-host HOST       DMLC_NODE_HOST  this machine's own address (default: found out)
  --interface NAME       DMLC_INTERFACE  take that address from this interface (default: found out)
  --check                look whether these ranks would be admitted, also to a job that runs, and
                         start nothing; SCRIPT may be left out
  --dry-run              print the settings and the command, and do nothing
  -h, --help             show this

Passed to torchrun unchanged ('python -m torch.distributed.run -h' explains them and has their
defaults): --nnodes --nproc-per-node --node-rank --master-addr --master-port --rdzv-backend
--rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --shutdown-timeout --local-addr --log-dir
--redirects --tee

With --max-restarts torchrun's rendezvous is c10d, unless --rdzv-backend says another: at
--master-addr and --master-port, on the machine of --node-rank 0; torchrun then numbers the
machines itself. Its default (static) lends all restarts one store, in which torch's gloo groups find the
addresses of ranks that have ended, and hang.

--module (-m) runs SCRIPT as a module. Every BYTEPS_* variable is passed on; 'byteps-server
--config-markdown' lists them.

A replica whose ranks get SIGTERM leaves the others after the step that it is in, if that takes
less than 30 s, and is not started again, whatever --max-restarts says.

SIGTERM or Ctrl-C ends the ranks, which torchrun gives 30 s to (--shutdown-timeout, or
TORCH_ELASTIC_SHUTDOWN_TIMEOUT, in a torch that has it): as long as a checkpoint may take that Megatron's
--exit-signal-handler saves.

Exit status: torchrun's; 2 when a setting is missing or bad; 143 or 130 after SIGTERM or Ctrl-C, 143 also
when a replica has left after SIGTERM.
Exit status of --check: 0 they would be admitted; 1 something is wrong; 2 a setting is; 3 nothing
that can be seen here is wrong, but the scheduler does not answer.
TEXT
}

servers=
replicas=1
launch=byteps.launcher.leaving # torchrun with an exit status that shows whether it was terminated
module=0
local_servers=${BYTEPS_LOCAL_SERVERS:-0}
nnodes=1
nproc=1
node_rank=
dry_run=0
check=0
launcher=()
rendezvous=() # torchrun's arguments about the rendezvous
script=()
master_addr='' master_port='' restarts=0 backend='' endpoint='' local_addr=''

# pass FLAG VALUE: records an argument of torchrun that this script also needs.
pass() {
  case $1 in
    --nnodes) nnodes=$2 ;;
    --nproc-per-node) nproc=$2 ;;
    --node-rank) node_rank=$2 ;;
    --master-addr) master_addr=$2 ;;
    --master-port) master_port=$2 ;;
    --max-restarts) restarts=$2 ;;
    --rdzv-backend) backend=$2 ;;
    --rdzv-endpoint) endpoint=$2 ;;
    --local-addr) local_addr=$2 ;;
  esac
  case $1 in
    --node-rank | --master-* | --rdzv-*) rendezvous+=("$1=$2") ;;
    *) launcher+=("$1=$2") ;;
  esac
}

# is_number TEXT...: succeeds if each is a whole number.
is_number() {
  local text
  for text in "$@"; do [[ $text =~ ^[0-9]{1,5}$ ]] || return 1; done
}

# choose_rendezvous: for jobs with restarts, chooses a rendezvous that has a new store after each restart.
choose_rendezvous() {
  if [[ $restarts =~ ^0*$ || ( -n $backend && $backend != c10d ) ]]; then return; fi
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
  [[ -z $backend && -z $endpoint ]] || return 0
  local argument kept=()
  for argument in ${rendezvous[@]+"${rendezvous[@]}"}; do
    [[ $argument != --rdzv-* ]] || kept+=("$argument")
  done
  if [[ $nnodes == 1 && -z $master_addr ]]; then
    rendezvous=(--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 ${kept[@]+"${kept[@]}"})
  else
    endpoint=$(join_host_port "${master_addr:-127.0.0.1}" "${master_port:-29500}")
    rendezvous=(--rdzv-backend=c10d "--rdzv-endpoint=$endpoint" ${kept[@]+"${kept[@]}"})
    # The store's host is named explicitly, because a host may not recognize its own name.
    if [[ $nnodes == 1 ]]; then node_rank=${node_rank:-0}; fi
    if is_number "$node_rank" && [[ ${kept[*]-} != *--rdzv-conf=* ]]; then
      rendezvous+=("--rdzv-conf=is_host=$((10#$node_rank == 0))")
    fi
    # This is the address at which others find rank 0, if it runs here.
    if [[ -z $local_addr ]]; then
      detect_node "${master_addr:-127.0.0.1}"
      [[ -z $node_address ]] || rendezvous+=("--local-addr=$node_address")
    fi
  fi
  echo "$me: torchrun's rendezvous is ${rendezvous[*]}: with the static one restarted ranks" \
    "would hang (--max-restarts; --rdzv-backend)" >&2
}

# find_server prints the byteps-server of the ranks' own Python or, if it has none, another one.
find_server() {
  local program=${python%/*}/byteps-server
  if [[ -x $program ]]; then echo "$program"; else
    find_program byteps-server "run 'make setup' or install the byteps wheel"
  fi
}

# check_workers checks the settings of this machine's ranks, and returns the exit status.
check_workers() {
  local server ranks=1 wrong=0 status=0
  if ((${#script[@]})) && [[ ${script[0]} != -* && ! -e ${script[0]} ]] && ((!module)); then
    echo "WRONG there is no script ${script[0]}"
    wrong=1
  fi
  # An import would take seconds, so this only looks for the modules.
  if ! "$python" -c 'import importlib.util as u, sys
sys.exit(not (u.find_spec("torch") and u.find_spec("byteps")))'; then
    echo "WRONG $python has no torch, or no byteps"
    wrong=1
  fi
  server=$(find_server)
  if is_number "$nproc"; then
    ranks=$((10#$nproc))
    # Sets the values that torchrun will set, as far as they are known.
    [[ -n $node_rank || $nnodes != 1 ]] || node_rank=0
    if is_number "$nnodes"; then export WORLD_SIZE=$((10#$nnodes * ranks)); fi
    if is_number "$node_rank"; then export RANK=$((10#$node_rank * ranks)); fi
  fi
  if ((10#$local_servers)); then
    DMLC_NUM_WORKER=${DMLC_NUM_WORKER:-${WORLD_SIZE:-1}} BYTEPS_LOCAL_RANK=$ranks \
      "$server" --role server --check="$((10#$local_servers))" || wrong=1
  fi
  "$server" --role worker --check="$ranks" || status=$?
  ((wrong && status % 3 == 0)) || return "$status" # 0, or the scheduler does not answer
  return "$wrong"
}

# start_local_servers starts servers as children of this process. It becomes torchrun, so they end with it.
start_local_servers() {
  local workers=${DMLC_NUM_WORKER:-} ranks=1 server i
  if [[ -z $workers ]]; then
    [[ $nnodes =~ ^[0-9]{1,5}$ && $nproc =~ ^[0-9]{1,5}$ ]] || die_usage \
      "--local-servers needs DMLC_NUM_WORKER, or numbers for --nnodes and --nproc-per-node"
    workers=$((10#$nnodes * 10#$nproc * replicas))
  fi
  # Numbers after the ranks' give all processes different metrics ports.
  if is_number "$nproc"; then ranks=$((10#$nproc)); fi
  server=$(find_server)
  for ((i = 0; i < 10#$local_servers; i++)); do
    BYTEPS_LOCAL_RANK=$((ranks + i)) DMLC_ROLE=server DMLC_NUM_WORKER=$workers "$server" --die-with-parent --role server &
  done
}

while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --scheduler) need_argument "$1" "$@"; set_scheduler "$2"; shift 2 ;;
    --servers) need_argument "$1" "$@"; servers=$2; shift 2 ;;
    --secret-file) need_argument "$1" "$@"; export BYTEPS_SECRET_FILE=$2; shift 2 ;;
    --node-host) need_argument "$1" "$@"; set_node_host "$2"; shift 2 ;;
    --interface) need_argument "$1" "$@"; set_interface "$2"; shift 2 ;;
    --replica) need_argument "$1" "$@"; export BYTEPS_REPLICA=$2; shift 2 ;;
    --local-servers) need_argument "$1" "$@"; local_servers=$2; shift 2 ;;
    --nnodes | --nproc-per-node | --node-rank | --master-addr | --master-port | --rdzv-backend | \
      --rdzv-endpoint | --rdzv-id | --rdzv-conf | --max-restarts | --shutdown-timeout | \
      --local-addr | --log-dir | --redirects | --tee)
      need_argument "$1" "$@"; pass "$1" "$2"; shift 2 ;;
    --nnodes=* | --nproc-per-node=* | --node-rank=* | --master-addr=* | --master-port=* | \
      --rdzv-*=* | --max-restarts=*)
      pass "${1%%=*}" "${1#*=}"; shift ;;
    -m | --module) module=1; launcher+=(--module); shift ;;
    --check) check=1; shift ;;
    --dry-run) dry_run=1; shift ;;
    --) shift; script=("$@"); break ;;
    *) die_usage "unknown setting: $1 (the script and its arguments stand after --)" ;;
  esac
done
((${#script[@]} || check)) || die_usage "missing: -- SCRIPT"

if [[ -n ${BYTEPS_REPLICA:-} ]]; then
  replicas=${BYTEPS_REPLICA#*/}
  if ! is_number "${BYTEPS_REPLICA%%/*}" "$replicas" || ((10#${BYTEPS_REPLICA%%/*} >= 10#$replicas)); then
    die_usage "--replica (BYTEPS_REPLICA) is NUMBER/COUNT, such as 0/4 and 3/4, not '$BYTEPS_REPLICA'"
  fi
  replicas=$((10#$replicas))
  [[ -n ${DMLC_PS_ROOT_URI:-} ]] || die_usage "--replica needs --scheduler, which all replicas join"
fi
if [[ -n ${DMLC_PS_ROOT_URI:-} ]]; then
  need_scheduler
  need_secret
  DMLC_NUM_SERVER=${servers:-${DMLC_NUM_SERVER:-}}
  need_integer "the number of servers (--servers or DMLC_NUM_SERVER)" "$DMLC_NUM_SERVER" 1 65535
  need_integer "the number of local servers (--local-servers or BYTEPS_LOCAL_SERVERS)" \
    "$local_servers" 0 256
  ((10#$local_servers <= 10#$DMLC_NUM_SERVER)) || die_usage \
    "--local-servers $local_servers is more than the job's --servers $DMLC_NUM_SERVER"
  export DMLC_PS_ROOT_URI DMLC_PS_ROOT_PORT DMLC_NUM_SERVER BYTEPS_LOCAL_SERVERS=$local_servers
elif ((local_servers)); then
  die_usage "--local-servers needs --scheduler; without it --servers are all on the workers' machines"
elif [[ -n $servers ]]; then
  need_integer "the number of servers (--servers)" "$servers" 1 256
  export BYTEPS_EMBEDDED_SERVERS=$servers
fi
export DMLC_ROLE=worker

python=$(find_python)
echo "$me: $python runs the ranks" >&2
if ((check)); then
  check_workers
  exit
fi
choose_rendezvous
command=("$python" -m "$launch" ${launcher[@]+"${launcher[@]}"} ${rendezvous[@]+"${rendezvous[@]}"}
  "${script[@]}")
if ((dry_run)); then
  show_command "${command[@]}"
  exit
fi
if [[ -n ${DMLC_PS_ROOT_URI:-} ]] && ((10#$local_servers)); then
  start_local_servers
fi
# exec: torchrun itself gets the signals, ends its ranks, and sets the exit status.
exec "${command[@]}"
