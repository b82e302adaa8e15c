#!/usr/bin/env bash
# Checks this machine's RDMA setup, and says what is wrong, before a job is started.
set -euo pipefail
# shellcheck source=scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

usage() {
  cat <<TEXT
Usage: check_rdma.sh [options]

Looks at this machine as a job with DMLC_ENABLE_RDMA=ibverbs would, and prints a line for each thing
looked at, with the command that fixes what is wrong. Run it as the user, and in the container, that
will train. It changes nothing. A flag wins over its variable.

  --device NAME[:PORT[:GID]]            look at this device (default: that of the address), this
                    BYTEPS_RDMA_DEVICE  port of it (default: 1) and this GID
  --node-host HOST  DMLC_NODE_HOST      the address that this machine will be reached at
  --interface NAME  DMLC_INTERFACE      or the interface that has it
  --server                              then wait for a check_rdma.sh --client on another machine,
                                        and measure the link between the two (perftest)
  --client HOST                         the other end of that
  -h, --help                            show this

Also read: DMLC_PS_ROOT_URI.

Exit status: 0 nothing is wrong (there may be warnings); 1 something is; 2 bad use.
TEXT
}

# ---- state of the checks: device, port, host and interface are set below

# CHECK_RDMA_ROOT names a copy of another machine to check: a tree with sys/, dev/ and proc/.
root=${CHECK_RDMA_ROOT:-}
errors=0
warnings=0

good() {
  echo "ok       $*"
}

# finding KIND TEXT [COMMAND...]: prints a finding, and each command on its own line.
finding() {
  printf '%-8s %s\n' "$1" "$2"
  shift 2
  local line
  for line in "$@"; do
    echo "         do: $line"
  done
}

warn() {
  warnings=$((warnings + 1))
  finding warning "$@"
}

wrong() {
  errors=$((errors + 1))
  finding WRONG "$@"
}

# content FILE prints its first line, or nothing.
content() {
  local line=
  [[ ! -r $1 ]] || { read -r line <"$1" || true; } 2>/dev/null
  echo "$line"
}

check_program() {
  local server=$repo_root/build/venv/bin/byteps-server rdma
  [[ -x $server ]] || server=$(command -v byteps-server || true)
  if [[ -z $server ]]; then
    wrong "byteps-server is neither in build/venv/bin nor on PATH" "make setup"
    return
  fi
  rdma=$("$server" --features 2>/dev/null | sed -n 's/^rdma: //p' || true)
  case $rdma in
    yes) good "byteps-server has RDMA: $server" ;;
    no:*) wrong "$server: ${rdma#no: }" \
      "apt-get install libibverbs1 librdmacm1 ibverbs-providers" ;;
    *) wrong "$server was built without RDMA" \
      "apt-get install libibverbs-dev librdmacm-dev" "make setup" ;;
  esac
}

check_modules() {
  local module missing=()
  for module in ib_core ib_uverbs rdma_ucm; do
    [[ -d $root/sys/module/$module ]] || missing+=("$module")
  done
  if ((${#missing[@]} == 0)); then
    good "the kernel has ib_core, ib_uverbs and rdma_ucm"
  elif [[ -d $root/sys/module/ib_core || -d $root/lib/modules/$(uname -r) ]]; then
    wrong "kernel modules are not loaded: ${missing[*]}" "modprobe -a ${missing[*]}"
  else
    wrong "this kernel has no RDMA (${missing[*]}), and no modules to load" \
      "boot the distribution's stock kernel, not a cloud or minimal one"
  fi
}

may_lock_all() {
  local effective
  effective=$(awk '/^CapEff:/ {print $2}' "$root/proc/self/status" 2>/dev/null || true)
  [[ -n $effective ]] && (((16#$effective >> 14) & 1)) # CAP_IPC_LOCK
}

# Each connection registers a few megabytes; values in flight register up to a gigabyte.
check_locked_memory() {
  local limit kib=1048576
  limit=$(ulimit -l)
  if [[ $limit == unlimited ]]; then
    good "locked memory is not limited"
  elif may_lock_all; then
    good "locked memory is limited to $limit KiB, which does not hold for this user (CAP_IPC_LOCK)"
  elif ((limit < kib)); then
    wrong "this user may lock $limit KiB of memory (ulimit -l): registering buffers will fail" \
      "echo '* - memlock unlimited' >/etc/security/limits.d/rdma.conf, and log in again" \
      "in a container: docker run --ulimit memlock=-1; in a service: LimitMEMLOCK=infinity"
  else
    warn "this user may lock no more than $limit KiB of memory (ulimit -l)" \
      "echo '* - memlock unlimited' >/etc/security/limits.d/rdma.conf, and log in again"
  fi
}

devices() {
  local path
  for path in "$root"/sys/class/infiniband/*; do
    [[ ! -e $path ]] || echo "${path##*/}"
  done
}

check_devices() {
  local found
  found=$(devices | tr '\n' ' ')
  if [[ -n $found ]]; then
    good "RDMA devices: $found"
    return 0
  fi
  wrong "this machine has no RDMA device" \
    "load the NIC's driver, such as modprobe mlx5_ib; lspci | grep -iE 'mellanox|infiniband'" \
    "in a container: start it with --device=/dev/infiniband and the host's network" \
    "without an RDMA NIC, to try: rdma link add rxe0 type rxe netdev INTERFACE (soft-RoCE)"
  return 1
}

# interface_of DEVICE prints the network interface of its port (also for soft-RoCE and IPoIB).
interface_of() {
  local folder=$root/sys/class/infiniband/$1 name
  name=$(content "$folder/ports/$port/gid_attrs/ndevs/0")
  [[ -n $name ]] || name=$(content "$folder/parent")
  if [[ -z $name && -d $folder/device/net ]]; then
    name=$(basename -a "$folder"/device/net/* | sed -n 1p)
  fi
  echo "$name"
}

# own_interface prints the job's interface: the one with the job's address, if that is known.
own_interface() {
  if [[ -n $interface ]]; then
    echo "$interface"
  elif [[ -n $host ]]; then
    ip -o addr show to "$host" 2>/dev/null | awk 'NR == 1 {print $2}'
  elif [[ -n ${DMLC_PS_ROOT_URI:-} ]]; then
    ip -o route get "$DMLC_PS_ROOT_URI" 2>/dev/null | sed -nE 's/.* dev ([^ ]+).*/\1/p'
  fi
}

# Sets `device` to the device of the job's interface, or to none.
choose_device() {
  local wanted name pairs='' fitting=''
  wanted=$(own_interface || true)
  for name in $(devices); do
    pairs+="$(interface_of "$name") (${name}) "
    [[ -z $wanted || $(interface_of "$name") != "$wanted" ]] || fitting=$name
  done
  if [[ -n $device && ! -e $root/sys/class/infiniband/$device ]]; then
    wrong "there is no RDMA device '$device'" "export BYTEPS_RDMA_DEVICE=$(devices | sed -n 1p)"
    device=
  elif [[ -n $device && -n $fitting && $fitting != "$device" ]]; then
    wrong "interface $wanted belongs to $fitting, not to $device" \
      "export DMLC_INTERFACE=$(interface_of "$device")" "or export BYTEPS_RDMA_DEVICE=$fitting"
  elif [[ -z $device && -n $wanted && -z $fitting ]]; then
    wrong "interface $wanted has no RDMA device; these have: $pairs" \
      "export DMLC_INTERFACE=${pairs%% *}"
  elif [[ -z $device && -z $wanted && $(devices | wc -l) -gt 1 ]]; then
    device=$(devices | sed -n 1p)
    warn "several devices and no address to choose by; looking at $device of: $pairs" \
      "export DMLC_INTERFACE=NAME, or give --node-host"
  else
    device=${device:-${fitting:-$(devices | sed -n 1p)}}
    good "device $device, interface $(interface_of "$device")"
  fi
}

check_access() {
  local node verbs
  verbs=$(basename -a "$root/sys/class/infiniband_verbs"/* 2>/dev/null | while read -r node; do
    [[ $(content "$root/sys/class/infiniband_verbs/$node/ibdev") != "$device" ]] || echo "$node"
  done)
  for node in ${verbs:-uverbs0} rdma_cm; do
    if [[ ! -e $root/dev/infiniband/$node ]]; then
      wrong "/dev/infiniband/$node is not there" \
        "modprobe -a ib_uverbs rdma_ucm; in a container: --device=/dev/infiniband"
    elif [[ ! -r $root/dev/infiniband/$node || ! -w $root/dev/infiniband/$node ]]; then
      wrong "user $(id -un) may not open /dev/infiniband/$node" "chmod a+rw /dev/infiniband/$node"
    else
      good "/dev/infiniband/$node can be opened"
    fi
  done
  if [[ -z $root ]] && command -v ibv_devices >/dev/null; then
    node=$(ibv_devices 2>/dev/null | awk -v name="$device" '$1 == name')
    [[ -n $node ]] ||
      wrong "libibverbs does not know $device: its user-space driver is missing" \
        "apt-get install ibverbs-providers"
  fi
}

port_folder() {
  echo "$root/sys/class/infiniband/$device/ports/$port"
}

link_layer() {
  content "$(port_folder)/link_layer"
}

check_port() {
  local state name
  if [[ ! -d $(port_folder) ]]; then
    wrong "$device has no port $port" "export BYTEPS_RDMA_DEVICE=$device:1"
    return
  fi
  state=$(content "$(port_folder)/state")
  name=$(interface_of "$device")
  if [[ $state == *ACTIVE* ]]; then
    good "port $port is active: $(link_layer), $(content "$(port_folder)/rate")"
  elif [[ $(link_layer) == InfiniBand && $state == *INIT* ]]; then
    wrong "port $port waits for a subnet manager (state $state)" \
      "start one in the fabric: systemctl start opensm"
  elif [[ $(link_layer) == InfiniBand ]]; then
    wrong "port $port has no link: state $state, $(content "$(port_folder)/phys_state")" \
      "look at the cable and the switch's port"
  else
    wrong "port $port is not active: state $state" "ip link set ${name:-INTERFACE} up" \
      "then look at the cable: ethtool ${name:-INTERFACE} | grep 'Link detected'"
  fi
}

# usable_gids prints index, type and GID of entries with a routable address.
usable_gids() {
  local file index gid
  for file in "$(port_folder)"/gids/*; do
    index=${file##*/}
    gid=$(content "$file")
    [[ -n $gid && $gid != 0000:0000:0000:0000:0000:0000:0000:0000 && $gid != fe80:* ]] || continue
    # Reading the type of an unused entry fails, so the error is ignored.
    echo "$index $(content "$(port_folder)/gid_attrs/types/$index" | tr ' ' -) $gid"
  done
}

check_gids() {
  local gids name
  name=$(interface_of "$device")
  if [[ $(link_layer) == InfiniBand ]]; then
    if [[ -n $name && $(ip -o addr show dev "$name" 2>/dev/null) == *inet* ]]; then
      good "$name has an IP address (IPoIB), which connections are made by"
    else
      wrong "no interface of $device has an IP address: connections are made by address" \
        "modprobe ib_ipoib; ip link set ib0 up; ip addr add ADDRESS/24 dev ib0"
    fi
    return
  fi
  gids=$(usable_gids)
  if ! grep -q 'RoCE-v2' <<<"$gids"; then
    wrong "port $port has no RoCE v2 GID of an IP address" \
      "ip addr add ADDRESS/24 dev ${name:-INTERFACE}; then show_gids or rdma link show"
  elif grep -q 'RoCE-v2 0000:0000:0000:0000:0000:ffff:' <<<"$gids"; then
    good "GIDs of RoCE v2 for IPv4: $(awk '/RoCE-v2 0000/ {printf "%s ", $1}' <<<"$gids")"
  else
    warn "the GIDs of RoCE v2 are of IPv6 only: all machines have to use IPv6" \
      "ip addr add ADDRESS/24 dev ${name:-INTERFACE}"
  fi
  if [[ -n $gid ]] && ! grep -qE "^$gid RoCE-v2 " <<<"$gids"; then
    wrong "GID $gid of BYTEPS_RDMA_DEVICE is none of RoCE v2 with an address" \
      "leave it out, or take one of: $(awk '/RoCE-v2/ {printf "%s ", $1}' <<<"$gids")"
  fi
}

# roce_mtu BYTES prints the largest RDMA MTU that fits into frames of an interface with this MTU.
roce_mtu() {
  local size
  for size in 4096 2048 1024 512 256; do
    if (($1 >= size + 76)); then # Headers of IPv6, UDP and InfiniBand, and the checksum.
      echo "$size"
      return
    fi
  done
  echo 0
}

check_mtu() {
  local name frame largest wanted=${BYTEPS_RDMA_MTU:-0}
  name=$(interface_of "$device")
  frame=$(content "$root/sys/class/net/$name/mtu")
  [[ $(link_layer) == Ethernet && -n $frame ]] || return 0
  largest=$(roce_mtu "$frame")
  if [[ $wanted =~ ^[0-9]+$ ]] && ((wanted > largest)); then
    wrong "BYTEPS_RDMA_MTU=$wanted is more than $name's MTU $frame lets through ($largest)" \
      "ip link set $name mtu 9000, on all machines; and jumbo frames on the switch"
  elif ((largest < 4096)); then
    warn "MTU of $name is $frame, so that RDMA packets hold $largest bytes at most" \
      "ip link set $name mtu 9000, on all machines; and jumbo frames on the switch"
  else
    good "MTU of $name is $frame: RDMA packets hold $largest bytes (the same on all machines?)"
  fi
}

is_soft() {
  [[ -e $root/sys/class/infiniband/$device/parent && ! -e $root/sys/class/infiniband/$device/device ]]
}

check_numa() {
  local node nodes
  node=$(content "$root/sys/class/infiniband/$device/device/numa_node")
  nodes=("$root"/sys/devices/system/node/node[0-9]*)
  if ((${#nodes[@]} > 1)) && [[ -n $node && $node != -1 ]]; then
    good "$device is at NUMA node $node of ${#nodes[@]}: bind servers there" \
      "(scripts/server.sh --numa-nodes $node)"
  fi
}

check_lossless() {
  local name pfc ecn
  [[ $(link_layer) == Ethernet ]] || return 0
  name=$(interface_of "$device")
  if is_soft; then
    warn "$device is soft-RoCE: right for trying, and of no use for speed"
    return
  fi
  if command -v mlnx_qos >/dev/null; then
    pfc=$(mlnx_qos -i "$name" 2>/dev/null | awk '$1 == "enabled" {$1 = ""; print}' || true)
  elif command -v dcb >/dev/null; then
    pfc=$(dcb pfc show dev "$name" 2>/dev/null | sed -nE 's/.*prio-pfc//p' || true)
    pfc=${pfc//on/1}
  else
    warn "cannot see whether priority flow control is on: neither mlnx_qos nor dcb is here" \
      "apt-get install iproute2 (dcb), or see docs/use/rdma.md for the settings"
    return
  fi
  ecn=$(cat "$root/sys/class/net/$name"/ecn/roce_np/enable/* 2>/dev/null | tr -d '\n' || true)
  if [[ $pfc != *1* && $ecn != *1* ]]; then
    warn "neither PFC nor ECN is on at $name: under congestion RoCE loses packets and crawls" \
      "mlnx_qos -i $name --trust dscp --pfc 0,0,0,1,0,0,0,0; and the same on the switch" \
      "export BYTEPS_RDMA_TRAFFIC_CLASS=104 (DSCP 26, that is priority 3, in its upper six bits)"
  else
    good "$name: PFC of priorities 0 to 7:${pfc:- unknown}; ECN: ${ecn:-unknown}"
  fi
}

# measure_link server|client HOST measures the link's bandwidth.
measure_link() {
  local command=(ib_write_bw -R -d "$device" -i "$port" -s 1048576 -t 16 -D 5 --report_gbits) text
  if ! command -v ib_write_bw >/dev/null; then
    wrong "ib_write_bw is not here" "apt-get install perftest"
    return
  fi
  if [[ $1 == server ]]; then
    echo "waiting 120 s for: scripts/check_rdma.sh --client THIS_MACHINE"
  else
    command+=("$2")
  fi
  if text=$(timeout 120 "${command[@]}" 2>&1); then
    good "the link moves $(awk '/^ *1048576/ {print $4}' <<<"$text") Gbit/s (ib_write_bw, 1 MiB)"
  else
    wrong "ib_write_bw failed: $(grep -v '^ *$' <<<"$text" | tail -n 1)" \
      "start --server first; both ends in one subnet; let UDP 4791 (RoCE) and TCP 18515 pass" \
      "the MTU has to be the same at both ends and on the switch"
  fi
}

# ---- the command line

chosen=${BYTEPS_RDMA_DEVICE:-}
host=${DMLC_NODE_HOST:-}
interface=${DMLC_INTERFACE:-}
measure=
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --device) need_argument "$1" "$@"; chosen=$2; shift 2 ;;
    --node-host) need_argument "$1" "$@"; host=$2; shift 2 ;;
    --interface) need_argument "$1" "$@"; interface=$2; shift 2 ;;
    --server) measure=server; shift ;;
    --client) need_argument "$1" "$@"; measure=client; peer=$2; shift 2 ;;
    *) die_usage "unknown setting: $1" ;;
  esac
done
IFS=: read -r device port gid <<<"$chosen"
port=${port:-1}
need_integer "the port (--device or BYTEPS_RDMA_DEVICE)" "$port" 1 255
[[ -z $gid ]] || need_integer "the GID (--device or BYTEPS_RDMA_DEVICE)" "$gid" 0 255
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
