#!/usr/bin/env bash
# Runs the scheduler of a BytePS cluster, whose address servers and workers need.
set -euo pipefail
# shellcheck source=scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

usage() {
  cat <<TEXT
Usage: $me --host HOST --port PORT --workers N --servers N [options]
       $me --host HOST --port PORT --keep --servers N [options]

Runs the scheduler of a BytePS cluster until the job ends. A flag wins over its variable.

  --host HOST        DMLC_PS_ROOT_URI   address at which servers and workers reach this machine
  --port PORT        DMLC_PS_ROOT_PORT  port to listen on; 0: the kernel chooses (see --port-file)
  --workers N        DMLC_NUM_WORKER    workers of the job: one for each rank; with --keep as many as
                                        the first one of each restart says
  --servers N        DMLC_NUM_SERVER    server processes of the job
  --keep             BYTEPS_KEEP=1      survive failures of the job and accept its restart
  --secret-file FILE BYTEPS_SECRET_FILE the job's secret, the same on every machine (required, unless
                                        BYTEPS_SECRET is set, or BYTEPS_AUTH=0)
  --port-file PATH   (default: none)    write "HOST PORT" here once it listens
  --status-port PORT BYTEPS_STATUS_PORT show the cluster at http://127.0.0.1:PORT/ (status.sh shows
                                        the same); default: nowhere
  --status-host HOST BYTEPS_HTTP_HOST   show it at this address of the machine instead, without
                                        authentication; 0.0.0.0: at all
  --check                               look whether the scheduler could run here, and start nothing
  --dry-run                             print the settings and the command, and do nothing
  -h, --help                            show this

These four have no default: --host, --port, --workers (but with --keep), --servers. Every other BYTEPS_* variable is
passed on; 'byteps-server --config-markdown' lists them, --print-config shows their values.

SIGTERM ends the scheduler once all workers have left, for which it waits BYTEPS_STOP_TIMEOUT_S (25)
at most; a second one, 1 s later or more, ends it at once.
Exit status: 0 the job ended well; 1 a failure, for example a worker was lost; 2 a setting is missing
or bad; 130 or 143 after Ctrl-C or SIGTERM. Of --check: 0 it could run; 1 something is wrong; 2 a
setting is.

Example: $me --host 10.0.0.1 --port 9000 --workers 32 --servers 4 --secret-file job.secret
TEXT
}

port_file=
dry_run=0
check=0
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --host) need_argument "$1" "$@"; DMLC_PS_ROOT_URI=$2; shift 2 ;;
    --port) need_argument "$1" "$@"; DMLC_PS_ROOT_PORT=$2; shift 2 ;;
    --workers) need_argument "$1" "$@"; DMLC_NUM_WORKER=$2; shift 2 ;;
    --servers) need_argument "$1" "$@"; DMLC_NUM_SERVER=$2; shift 2 ;;
    --keep) export BYTEPS_KEEP=1; shift ;;
    --secret-file) need_argument "$1" "$@"; export BYTEPS_SECRET_FILE=$2; shift 2 ;;
    --port-file) need_argument "$1" "$@"; port_file=$2; shift 2 ;;
    --status-port) need_argument "$1" "$@"; export BYTEPS_STATUS_PORT=$2; shift 2 ;;
    --status-host) need_argument "$1" "$@"; export BYTEPS_HTTP_HOST=$2; shift 2 ;;
    --check) check=1; shift ;;
    --dry-run) dry_run=1; shift ;;
    *) die_usage "unknown setting: $1" ;;
  esac
done

need_text "the scheduler's host (--host or DMLC_PS_ROOT_URI)" "${DMLC_PS_ROOT_URI:-}"
need_integer "the scheduler's port (--port or DMLC_PS_ROOT_PORT)" "${DMLC_PS_ROOT_PORT:-}" 0 65535
need_workers
need_integer "the number of servers (--servers or DMLC_NUM_SERVER)" "${DMLC_NUM_SERVER:-}" 1 65535
need_integer "the port of the status page (--status-port or BYTEPS_STATUS_PORT)" \
  "${BYTEPS_STATUS_PORT:-0}" 0 65535
need_secret
if [[ $DMLC_PS_ROOT_PORT =~ ^0+$ && -z $port_file ]]; then
  die_usage "--port 0 needs --port-file: nobody would learn the port"
fi
export DMLC_PS_ROOT_URI DMLC_PS_ROOT_PORT DMLC_NUM_SERVER DMLC_ROLE=scheduler

server=$(find_program byteps-server "run 'make setup' or install the byteps wheel")
command=("$server" --role scheduler)
[[ -z $port_file ]] || command+=(--port-file "$port_file")
if ((check)); then
  exec "${command[@]}" --check
fi
if ((dry_run)); then
  show_command "${command[@]}"
  exit
fi
# exec: the scheduler itself gets the signals and sets the exit status, and no process is left.
exec "${command[@]}"
