#ifndef BYTEPS_NET_RDMA_SETTINGS_H_
#define BYTEPS_NET_RDMA_SETTINGS_H_

#include <cstdint>
#include <string>

#include "byteps/net/auth/secret.h"
#include "byteps/net/link/rdma_choice.h"

namespace ps {
namespace rdma {

class Device;

// The RDMA van's settings, and the address that they choose.
struct Settings {
  RdmaChoice choice;
  int traffic_class = -1;  // -1: the system's
  int mtu = 0;             // bytes; 0: the port's
  // As they were set, for errors.
  uint32_t send_depth_set = 0;
  uint32_t receive_depth_set = 0;
  // The same, or what FitSlots left of them.
  uint32_t send_depth = 0;
  uint32_t receive_depth = 0;
  uint64_t all_slots_bytes = 0;
  uint32_t inline_bytes = 0;
  uint64_t pool_bytes = 0;
  uint64_t window_bytes = 0;
  bool busy_poll = false;
  bool data_plane = true;
  int data_endpoints = 1;
  uint64_t receive_window_bytes = 0;
  double start_timeout_s = 30;
  double reconnect_s = 30;  // BYTEPS_RECONNECT_TIMEOUT_S
  auth::Secret secret;

  uint32_t slot_bytes() const;
  // Lowers the depths until the slots of so many endpoints fit into BYTEPS_RDMA_SLOT_BYTES.
  void FitSlots(uint64_t endpoints);
  // As an ibv_mtu; 0: any.
  int path_mtu() const;

  // Throws Error naming the setting that asks for more than the device can do.
  void Check(const Device& device) const;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_SETTINGS_H_
