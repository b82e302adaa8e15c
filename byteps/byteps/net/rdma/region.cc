#include "byteps/net/rdma/region.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/rdma/device.h"
#include "byteps/net/rdma/verbs.h"

namespace ps {
namespace rdma {
namespace {

std::string LockedLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur / 1024) + " KiB";
}

}  // namespace

Region::Registration::Registration(std::shared_ptr<Device> with, const void* address, size_t size,
                                   int access)
    : device(std::move(with)), bytes(size) {
  mr.reset(ibv_reg_mr(device->pd(), const_cast<void*>(address), bytes, access));
  if (!mr) {
    const int error = errno;
    std::string what = "cannot register " + std::to_string(bytes) + " bytes of memory with " +
                       device->name() + " (" + std::to_string(device->registered_bytes()) +
                       " bytes in " + std::to_string(device->registrations()) +
                       " regions are registered)";
    if (error == ENOMEM) {
      what += "; the limit of locked memory (ulimit -l) is " + LockedLimit() +
              ": raise it, or lower BYTEPS_RDMA_RX_DEPTH or BYTEPS_SERVER_WINDOW_BYTES";
    }
    Throw(what, error);
  }
  device->registered_bytes_ += bytes;
  ++device->registrations_;
}

Region::Registration::~Registration() {
  device->registered_bytes_ -= bytes;
  --device->registrations_;
}

Region::Region(const Devices& devices, const void* address, size_t bytes, int access)
    : writable_((access & IBV_ACCESS_REMOTE_WRITE) != 0) {
  for (const auto& device : devices) registrations_.emplace_back(device, address, bytes, access);
  RegistrationCache::CountRegistration();
}

const ibv_mr& Region::Of(const Device& device) const {
  // A linear search is enough, because a process uses few devices.
  const auto it = std::find_if(registrations_.begin(), registrations_.end(),
                               [&](const auto& one) { return one.device.get() == &device; });
  if (it == registrations_.end()) throw Error("memory is not registered with " + device.name());
  return *it->mr;
}

}  // namespace rdma
}  // namespace ps
