// Owners of verbs objects, and errors in words.
#ifndef BYTEPS_NET_RDMA_VERBS_H_
#define BYTEPS_NET_RDMA_VERBS_H_

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/fork.h"

namespace ps {
namespace rdma {

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

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_VERBS_H_
