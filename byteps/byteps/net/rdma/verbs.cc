#include "byteps/net/rdma/verbs.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "byteps/base/error.h"
#include "byteps/net/link/registration_cache.h"

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

void Throw(const std::string& what, int error) {
  throw Error(what + ": " + strerror(error) + " (errno " + std::to_string(error) + ")");
}

std::string Describe(const ibv_wc& wc) {
  char text[64];
  snprintf(text, sizeof(text), " (status %d, vendor 0x%x)", static_cast<int>(wc.status),
           wc.vendor_err);
  return ibv_wc_status_str(wc.status) + std::string(text);
}

Device::Device(ibv_context* context, int port)
    : context_(context), commands_(context->cmd_fd), events_(context->async_fd), port_(port) {
  memset(&limits_, 0, sizeof(limits_));
  if (int error = ibv_query_device(context_, &limits_)) Throw("cannot query " + name(), error);
  ibv_port_attr attributes;
  memset(&attributes, 0, sizeof(attributes));
  if (int error = ibv_query_port(context_, port_, &attributes)) {
    Throw("cannot query port " + std::to_string(port_) + " of " + name(), error);
  }
  if (attributes.state < IBV_PORT_ACTIVE) {
    throw Error("port " + std::to_string(port_) + " of " + name() +
                " is not active: look at its cable, at its network interface, and at the "
                "subnet manager where it is InfiniBand (`rdma link` shows its state)");
  }
  max_message_bytes_ = attributes.max_msg_sz;
  pd_.reset(ibv_alloc_pd(context_));
  if (!pd_) Throw("cannot make a protection domain on " + name(), errno);
}

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
  // A process uses few.
  const auto it = std::find_if(registrations_.begin(), registrations_.end(),
                               [&](const auto& one) { return one.device.get() == &device; });
  if (it == registrations_.end()) throw Error("memory is not registered with " + device.name());
  return *it->mr;
}

}  // namespace rdma
}  // namespace ps
