#!/usr/bin/env bash
# Runs the workers of one machine: torchrun, with what BytePS must know.
set -euo pipefail
# shellcheck source=scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

usage() {
  cat <<TEXT
Usage: worker.sh [options] -- SCRIPT [ARGUMENTS]
       worker.sh --scheduler HOST:PORT --servers N --nnodes 2 --node-rank 0 \\
                 --master-addr HOST --master-port PORT --nproc-per-node 8 -- train.py --flag

Runs SCRIPT in one process for each rank of this machine, through torchrun (python -m
torch.distributed.run), as workers of a BytePS cluster. A flag wins over its variable.

  --scheduler HOST:PORT  DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT  where the scheduler listens
                         (default: none, the embedded mode: scheduler and servers are started beside
                         the ranks and end with them)
  --servers N            with a scheduler: DMLC_NUM_SERVER, server processes of the job (no default)
                         without: BYTEPS_EMBEDDED_SERVERS, servers to start on each machine
                         (default: 1)
  --node-host HOST       DMLC_NODE_HOST  this machine's own address (default: found out)
  --interface NAME       DMLC_INTERFACE  take that address from this interface (default: found out)
  --dry-run              print the settings and the command, and do nothing
  -h, --help             show this

Handed to torchrun as they are ('python -m torch.distributed.run -h' explains them and has their
defaults): --nnodes --nproc-per-node --node-rank --master-addr --master-port --rdzv-backend
--rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --local-addr --log-dir --redirects --tee

--module (-m) runs SCRIPT as a module. Every BYTEPS_* variable is handed through; 'byteps-server
--config-markdown' lists them.

Exit status: torchrun's; 2 when a setting is missing or bad.
TEXT
}

servers=
dry_run=0
launcher=()
script=()
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --scheduler) need_argument "$1" "$@"; set_scheduler "$2"; shift 2 ;;
    --servers) need_argument "$1" "$@"; servers=$2; shift 2 ;;
    --node-host) need_argument "$1" "$@"; set_node_host "$2"; shift 2 ;;
    --interface) need_argument "$1" "$@"; set_interface "$2"; shift 2 ;;
    --nnodes | --nproc-per-node | --node-rank | --master-addr | --master-port | --rdzv-backend | \
      --rdzv-endpoint | --rdzv-id | --rdzv-conf | --max-restarts | --local-addr | --log-dir | \
      --redirects | --tee)
      need_argument "$1" "$@"; launcher+=("$1=$2"); shift 2 ;;
    --nnodes=* | --nproc-per-node=* | --node-rank=* | --master-addr=* | --master-port=* | --rdzv-*=*)
      launcher+=("$1"); shift ;;
    -m | --module) launcher+=(--module); shift ;;
    --dry-run) dry_run=1; shift ;;
    --) shift; script=("$@"); break ;;
    *) die_usage "unknown setting: $1 (the script and its arguments stand after --)" ;;
  esac
done
((${#script[@]})) || die_usage "missing: -- SCRIPT"

if [[ -n ${DMLC_PS_ROOT_URI:-} ]]; then
  need_scheduler
  DMLC_NUM_SERVER=${servers:-${DMLC_NUM_SERVER:-}}
  need_integer "the number of servers (--servers or DMLC_NUM_SERVER)" "$DMLC_NUM_SERVER" 1 65535
  export DMLC_PS_ROOT_URI DMLC_PS_ROOT_PORT DMLC_NUM_SERVER
elif [[ -n $servers ]]; then
  need_integer "the number of servers (--servers)" "$servers" 1 256
  export BYTEPS_EMBEDDED_SERVERS=$servers
fi
export DMLC_ROLE=worker

python=$(find_program python "run 'make setup'")
if ((dry_run)); then
  show_command "$python" -m torch.distributed.run ${launcher[@]+"${launcher[@]}"} "${script[@]}"
  exit
fi
# exec: torchrun itself gets the signals and ends its ranks; its exit status is ours.
exec "$python" -m torch.distributed.run ${launcher[@]+"${launcher[@]}"} "${script[@]}"
