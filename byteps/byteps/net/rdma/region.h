#ifndef BYTEPS_NET_RDMA_REGION_H_
#define BYTEPS_NET_RDMA_REGION_H_

#include <infiniband/verbs.h>

#include <cstdint>
#include <deque>
#include <memory>

#include "byteps/net/rdma/device.h"
#include "byteps/net/rdma/verbs.h"

namespace ps {
namespace rdma {

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
#endif  // BYTEPS_NET_RDMA_REGION_H_
