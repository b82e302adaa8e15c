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

// Registration of memory for reading and writing by all devices: after a change of NICs the same
// memory is sent over another. The memory must outlive it.
class Region {
 public:
  // Throws Error with the bytes and, if it is the cause, the limit of locked memory.
  Region(const Devices& devices, const void* address, size_t bytes, int access);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // `device`: one of the constructor's.
  uint32_t lkey(const Device& device) const { return Of(device).lkey; }
  uint32_t rkey(const Device& device) const { return Of(device).rkey; }
  // Returns whether a peer may write to it.
  bool writable() const { return writable_; }

 private:
  // Registration with a device.
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
