#!/usr/bin/env bash
# Says what is wrong with this machine's RDMA before a job is started on it.
set -euo pipefail
# shellcheck source=scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
# shellcheck source=scripts/lib/rdma.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/rdma.sh"

usage() {
  cat <<TEXT
Usage: check_rdma.sh [options]

Looks at this machine as a job with DMLC_ENABLE_RDMA=ibverbs would, and prints a line for each thing
looked at, with the command that fixes what is wrong. Run it as the user, and in the container, that
will train. It changes nothing. A flag wins over its variable.

  --device NAME     BYTEPS_RDMA_DEVICE  look at this device (default: that of the address)
  --port N          BYTEPS_RDMA_PORT    and at this port of it (default: 1)
  --node-host HOST  DMLC_NODE_HOST      the address that this machine will be reached at
  --interface NAME  DMLC_INTERFACE      or the interface that has it
  --server                              then wait for a check_rdma.sh --client on another machine,
                                        and measure the link between the two (perftest)
  --client HOST                         the other end of that
  -h, --help                            show this

Also read: BYTEPS_RDMA_GID_INDEX, BYTEPS_RDMA_MTU, DMLC_PS_ROOT_URI.

Exit status: 0 nothing is wrong (there may be warnings); 1 something is; 2 bad use.
TEXT
}

device=${BYTEPS_RDMA_DEVICE:-}
port=${BYTEPS_RDMA_PORT:-0}
host=${DMLC_NODE_HOST:-}
interface=${DMLC_INTERFACE:-}
measure=
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --device) need_argument "$1" "$@"; device=$2; shift 2 ;;
    --port) need_argument "$1" "$@"; port=$2; shift 2 ;;
    --node-host) need_argument "$1" "$@"; host=$2; shift 2 ;;
    --interface) need_argument "$1" "$@"; interface=$2; shift 2 ;;
    --server) measure=server; shift ;;
    --client) need_argument "$1" "$@"; measure=client; peer=$2; shift 2 ;;
    *) die_usage "unknown setting: $1" ;;
  esac
done
need_integer "the port (--port or BYTEPS_RDMA_PORT)" "$port" 0 255
((port > 0)) || port=1
[[ -z $host ]] || need_text "--node-host" "$host"
[[ -z $interface ]] || need_text "--interface" "$interface"
[[ -z $device ]] || need_text "--device" "$device"

check_program
check_modules
check_locked_memory
if check_devices; then
  choose_device
  if [[ -n $device ]]; then
    check_access
    check_port
    check_gids
    check_mtu
    check_numa
    check_lossless
  fi
fi
if [[ -n $measure ]] && ((errors == 0)); then
  measure_link "$measure" "${peer:-}"
fi

if ((errors > 0)); then
  echo "check_rdma.sh: $errors wrong, $warnings to consider"
  exit 1
fi
echo "check_rdma.sh: nothing is wrong, $warnings to consider"
