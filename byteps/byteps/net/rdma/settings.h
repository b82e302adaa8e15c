#ifndef BYTEPS_NET_RDMA_SETTINGS_H_
#define BYTEPS_NET_RDMA_SETTINGS_H_

#include <cstdint>
#include <string>

#include "byteps/net/auth/secret.h"
#include "byteps/net/link/rdma_choice.h"

namespace ps {
namespace rdma {

class Device;

// Settings of the RDMA van.
struct Settings {
  RdmaChoice choice;
  int traffic_class = -1;  // -1: the system's default
  int mtu = 0;             // in bytes; 0: the MTU of the port
  // Depths as the user has configured them, for errors.
  uint32_t send_depth_set = 0;
  uint32_t receive_depth_set = 0;
  // Number of send and receive slots of an endpoint. FitSlots may lower them.
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
  // Lowers the depths until the slots of this many endpoints fit in BYTEPS_RDMA_SLOT_BYTES.
  void FitSlots(uint64_t endpoints);
  // Returns the MTU as an ibv_mtu, or 0 if the settings leave it to the port.
  int path_mtu() const;

  // Throws Error if a setting exceeds the device's limits.
  void Check(const Device& device) const;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_SETTINGS_H_
