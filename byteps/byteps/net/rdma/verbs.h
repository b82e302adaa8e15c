// What RDMA is made of: its libraries, owners of their objects, and settings.
#ifndef BYTEPS_NET_RDMA_VERBS_H_
#define BYTEPS_NET_RDMA_VERBS_H_

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/process.h"
#include "byteps/net/auth/secret.h"

namespace ps {
namespace rdma {

// libibverbs and librdmacm, found at run time: a machine without them runs what does not
// ask for RDMA.

// Loads both libraries, once for the process.  To be called before any ibv_ or rdma_
// function; verbs_library.cc defines those that the van calls and hands each call on.
// Throws Error that names what is missing and the packages that have it.
void LoadVerbsLibraries();

// Owners of verbs objects, and errors in words.

// Error: "what: reason (errno)".
[[noreturn]] void Throw(const std::string& what, int error);

// "transport retry counter exceeded (status 12, vendor 0x81)"
std::string Describe(const ibv_wc& wc);

struct Deleter {
  void operator()(ibv_pd* pd) const { ibv_dealloc_pd(pd); }
  void operator()(ibv_cq* cq) const { ibv_destroy_cq(cq); }
  void operator()(ibv_qp* qp) const { ibv_destroy_qp(qp); }
  void operator()(ibv_mr* mr) const { ibv_dereg_mr(mr); }
  void operator()(ibv_comp_channel* channel) const { ibv_destroy_comp_channel(channel); }
  void operator()(rdma_event_channel* channel) const { rdma_destroy_event_channel(channel); }
  void operator()(rdma_cm_id* id) const { rdma_destroy_id(id); }
};
template <typename T>
using Owned = std::unique_ptr<T, Deleter>;

// One device as this process uses it.  The context stays librdmacm's, which never closes
// it.
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
  friend class Region;  // counts

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

// Those that a process uses.
using Devices = std::vector<std::shared_ptr<Device>>;

// How memory of values is registered.  Their bytes may come in any order, which many a machine is
// faster at; what tells that they are there comes behind them.  An older kernel ignores it.
constexpr int kValueAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING;

// Memory that devices may read and write, for as long as this lives.  The memory must live longer.
// It is registered with each of them: a link that leaves a NIC sends the same memory by another.
class Region {
 public:
  // Throws Error that names the bytes and, where that is the reason, the limit of
  // locked memory.
  Region(const Devices& devices, const void* address, size_t bytes, int access);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // `device` is one of those.
  uint32_t lkey(const Device& device) const { return Of(device).lkey; }
  uint32_t rkey(const Device& device) const { return Of(device).rkey; }
  // Whether a peer may write to it.
  bool writable() const { return writable_; }

 private:
  // With one device.
  struct Registration {
    Registration(std::shared_ptr<Device> device, const void* address, size_t bytes, int access);
    ~Registration();
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

    const std::shared_ptr<Device> device;
    const size_t bytes;
    Owned<ibv_mr> mr;
  };

  const ibv_mr& Of(const Device& device) const;

  const bool writable_;
  std::deque<Registration> registrations_;
};

// The RDMA van's settings, and the address that they choose.
struct Settings {
  std::string device;      // "": that of the address
  int port = 0;            // of the device; 0: that of the address
  int gid_index = -1;      // -1: that of the address
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

  // From ps-lite's Environment, which Config has checked.
  static Settings Get();

  uint32_t slot_bytes() const;
  // Lowers the depths until the slots of so many endpoints fit into BYTEPS_RDMA_SLOT_BYTES.
  void FitSlots(uint64_t endpoints);
  // As an ibv_mtu; 0: any.
  int path_mtu() const;

  // Throws Error naming the setting that asks for more than the device can do.
  void Check(const Device& device) const;
};

// The address of the device, port and GID that the settings name.  `fallback` when they
// name none, or leave the choice open and it belongs to the device.  Throws Error
// when there is no such device, port or GID, or it has no IP address.
std::string AddressOfDevice(const Settings& settings, const std::string& fallback,
                            bool fallback_was_given);

}  // namespace rdma
}  // namespace ps

#endif  // BYTEPS_NET_RDMA_VERBS_H_
