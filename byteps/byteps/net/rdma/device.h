#ifndef BYTEPS_NET_RDMA_DEVICE_H_
#define BYTEPS_NET_RDMA_DEVICE_H_

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/process.h"
#include "byteps/net/rdma/verbs.h"

namespace ps {
namespace rdma {

struct Settings;

// Device in use. librdmacm owns its context and never closes it.
class Device {
 public:
  Device(ibv_context* context, int port);

  ibv_context* context() const { return context_; }
  ibv_pd* pd() const { return pd_.get(); }
  int port() const { return port_; }
  std::string name() const { return ibv_get_device_name(context_->device); }
  const ibv_device_attr& limits() const { return limits_; }
  uint32_t max_message_bytes() const { return max_message_bytes_; }

  uint64_t registered_bytes() const { return registered_bytes_; }
  uint64_t registrations() const { return registrations_; }

 private:
  friend class Region;  // counts its registrations

  ibv_context* const context_;
  const ClosedInChild commands_;
  const ClosedInChild events_;
  const int port_;
  Owned<ibv_pd> pd_;
  ibv_device_attr limits_;
  uint32_t max_message_bytes_ = 0;
  std::atomic<uint64_t> registered_bytes_{0};
  std::atomic<uint64_t> registrations_{0};
};

// Devices that a process uses.
using Devices = std::vector<std::shared_ptr<Device>>;

// Returns the IP address of the device, port and GID that the settings name. Returns `fallback` if
// the settings name none, or if they allow several addresses and `fallback` is one of them. Throws
// Error if there is no such device, port or GID, or if it has no IP address.
std::string AddressOfDevice(const Settings& settings, const std::string& fallback,
                            bool fallback_was_given);

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_DEVICE_H_
