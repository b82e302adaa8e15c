# shellcheck shell=bash
# Sourced in the guest: an RDMA device over Ethernet, with an IPv4 and an IPv6 address.

# make_device INTERFACE NUMBER: soft-RoCE device rxe0 over it, at 10.77.0.NUMBER and fd77::NUMBER.
make_device() {
  ip link set "$1" mtu 4200 up
  ip addr add "10.77.0.$2/24" dev "$1"
  ip -6 addr add "fd77::$2/64" dev "$1" nodad
  rdma link add rxe0 type rxe netdev "$1"
}

# bring_up NUMBER: everything the guest of this number needs. Alone it talks to itself, over a pair
# of virtual interfaces; one of several uses its NIC.
bring_up() {
  local nic=eth0
  ip link set lo up
  if [[ ! -e /sys/class/net/$nic ]]; then
    nic=rdma0
    ip link add "$nic" type veth peer name rdma1
    ip link set rdma1 mtu 4200 up
  fi
  make_device "$nic" "$1"
  ulimit -l unlimited
  ulimit -n 65536
}
