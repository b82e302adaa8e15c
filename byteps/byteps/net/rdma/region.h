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

// Registration of memory with all devices, because after a change of NICs another device reads or
// writes the same memory. The memory must outlive the registration.
class Region {
 public:
  // `access`: IBV_ACCESS flags. Throws Error with the number of bytes and, if the limit of locked
  // memory is the cause, that limit.
  Region(const Devices& devices, const void* address, size_t bytes, int access);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Keys of the memory on `device`, one of the constructor's devices.
  uint32_t lkey(const Device& device) const { return Of(device).lkey; }
  uint32_t rkey(const Device& device) const { return Of(device).rkey; }
  // Returns whether a peer may write to the memory.
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
