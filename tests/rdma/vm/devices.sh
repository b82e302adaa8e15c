# shellcheck shell=bash
# Sourced in the guest: makes an RDMA device over Ethernet, with an IPv4 and an IPv6 address.

# make_device INTERFACE NUMBER [NET]: a soft-RoCE device over it, rxe0 at 10.77.0.NUMBER and
# fd77::NUMBER, or rxe1 in net 78.
make_device() {
  local net=${3:-77}
  ip link set "$1" mtu 4200 up
  ip addr add "10.$net.0.$2/24" dev "$1"
  ip -6 addr add "fd$net::$2/64" dev "$1" nodad
  rdma link add "rxe$((net - 77))" type rxe netdev "$1"
}

# bring_up NUMBER: sets up the guest of this number. A single guest talks to itself, over a pair of virtual interfaces;
# one of several guests uses its NICs.
bring_up() {
  local nic=eth0
  ip link set lo up
  if [[ ! -e /sys/class/net/$nic ]]; then
    nic=rdma0
    ip link add "$nic" type veth peer name rdma1
    ip link set rdma1 mtu 4200 up
  fi
  make_device "$nic" "$1"
  if [[ -e /sys/class/net/eth1 ]]; then make_device eth1 "$1" 78; fi
  ulimit -l unlimited
  ulimit -n 65536
}
