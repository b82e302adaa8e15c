// Owners of verbs objects, errors in words, and the RDMA van's settings.
#include "byteps/net/rdma/verbs.h"

#include <arpa/inet.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/rdma/queues.h"
#include "byteps/net/rdma/wire.h"
#include "ps/internal/utils.h"

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

namespace {

struct ListDeleter {
  void operator()(ibv_device** list) const { ibv_free_device_list(list); }
};
struct ContextDeleter {
  void operator()(ibv_context* context) const { ibv_close_device(context); }
};
using OpenDevice = std::unique_ptr<ibv_context, ContextDeleter>;

OpenDevice OpenByName(const std::string& name) {
  int count = 0;
  std::unique_ptr<ibv_device*, ListDeleter> list(ibv_get_device_list(&count));
  std::string known;
  for (int i = 0; i < count; ++i) {
    ibv_device* device = list.get()[i];
    const std::string found = ibv_get_device_name(device);
    if (name == found || (name.empty() && count == 1)) {
      OpenDevice opened(ibv_open_device(device));
      if (!opened) Throw("cannot open the RDMA device " + found, errno);
      return opened;
    }
    known += (known.empty() ? "" : ", ") + found;
  }
  throw Error("BYTEPS_RDMA_DEVICE='" + name +
              "' names no RDMA device; there are: " + (known.empty() ? "none" : known));
}

// The IP address that a RoCE GID stands for; "" when it is none.
std::string AddressOfGid(const ibv_gid& gid) {
  static const uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  char text[INET6_ADDRSTRLEN];
  if (memcmp(gid.raw, kMapped, sizeof(kMapped)) == 0) {
    return inet_ntop(AF_INET, gid.raw + 12, text, sizeof(text)) ? text : "";
  }
  const bool link_local = gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
  static const uint8_t kNone[16] = {0};
  if (link_local || memcmp(gid.raw, kNone, sizeof(kNone)) == 0) return "";
  return inet_ntop(AF_INET6, gid.raw, text, sizeof(text)) ? text : "";
}

std::string AddressAt(ibv_context* context, int port, int index) {
  ibv_gid gid;
  if (ibv_query_gid(context, port, index, &gid) != 0) return "";
  return AddressOfGid(gid);
}

// As in Config's table.
constexpr uint32_t kLeastSends = 4;
constexpr uint32_t kLeastReceives = 8;

}  // namespace

Settings Settings::Get() {
  Settings s;
  s.secret = auth::Secret::FromEnvironment();
  s.device = GetEnv("BYTEPS_RDMA_DEVICE", "");
  s.port = GetEnv("BYTEPS_RDMA_PORT", 0);
  s.gid_index = GetEnv("BYTEPS_RDMA_GID_INDEX", -1);
  s.traffic_class = GetEnv("BYTEPS_RDMA_TRAFFIC_CLASS", -1);
  s.mtu = GetEnv("BYTEPS_RDMA_MTU", 0);
  s.send_depth = s.send_depth_set = GetEnv("BYTEPS_RDMA_START_DEPTH", 64);
  s.receive_depth = s.receive_depth_set = GetEnv("BYTEPS_RDMA_RX_DEPTH", 128);
  s.all_slots_bytes = strtoull(GetEnv("BYTEPS_RDMA_SLOT_BYTES", "536870912"), nullptr, 10);
  s.inline_bytes = GetEnv("BYTEPS_RDMA_INLINE_BYTES", 4096);
  s.pool_bytes = strtoull(GetEnv("BYTEPS_RDMA_POOL_BYTES", "1073741824"), nullptr, 10);
  s.window_bytes = strtoull(GetEnv("BYTEPS_RDMA_WINDOW_BYTES", "1048576"), nullptr, 10);
  s.receive_window_bytes =
      strtoull(GetEnv("BYTEPS_RDMA_RECEIVE_WINDOW_BYTES", "16777216"), nullptr, 10);
  s.busy_poll = GetEnv("BYTEPS_RDMA_BUSY_POLL", 0) != 0;
  s.data_plane = GetEnv("BYTEPS_RDMA_DATA_PLANE", 1) != 0;
  s.data_endpoints = std::max(GetEnv("BYTEPS_CONNECTIONS", 0), 1);
  s.start_timeout_s = atof(GetEnv("BYTEPS_START_TIMEOUT_S", "30"));
  s.reconnect_s = atof(GetEnv("BYTEPS_RECONNECT_TIMEOUT_S", "30"));
  return s;
}

uint32_t Settings::slot_bytes() const {
  return static_cast<uint32_t>(AlignUp(kHeadRoom + inline_bytes, 64));
}

void Settings::FitSlots(uint64_t endpoints) {
  // An endpoint's slots fill whole pages.
  const uint64_t page = 4096;
  const uint64_t each = all_slots_bytes / std::max<uint64_t>(endpoints, 1) / page * page;
  const uint64_t slots = each / slot_bytes();
  const uint64_t wanted = uint64_t{send_depth} + receive_depth;
  if (slots >= wanted) return;
  const auto part = [&](uint32_t depth, uint32_t least) {
    return std::max(std::min(depth, least), static_cast<uint32_t>(depth * slots / wanted));
  };
  send_depth = part(send_depth, kLeastSends);
  receive_depth = part(receive_depth, kLeastReceives);
}

int Settings::path_mtu() const {
  switch (mtu) {
    case 256:
      return IBV_MTU_256;
    case 512:
      return IBV_MTU_512;
    case 1024:
      return IBV_MTU_1024;
    case 2048:
      return IBV_MTU_2048;
    case 4096:
      return IBV_MTU_4096;
    default:
      return 0;
  }
}

void Settings::Check(const Device& device) const {
  const ibv_device_attr& limits = device.limits();
  const auto fail = [&device](const char* name, uint64_t value, const char* what, int64_t limit) {
    throw Error(std::string(name) + "=" + std::to_string(value) + " is too much for " +
                device.name() + ", which allows " + std::to_string(limit) + " " + what);
  };
  // Those that were set, also where FitSlots has lowered them to what the device can do: its user
  // knows no other number, and the next job may have fewer peers.
  const int64_t most_sends = limits.max_qp_wr - int64_t{PostedSends::kReserved};
  if (send_depth_set > most_sends) {
    fail("BYTEPS_RDMA_START_DEPTH", send_depth_set, "requests in a queue", most_sends);
  }
  if (receive_depth_set > static_cast<uint64_t>(limits.max_qp_wr)) {
    fail("BYTEPS_RDMA_RX_DEPTH", receive_depth_set, "requests in a queue", limits.max_qp_wr);
  }
  const int64_t most_completions = limits.max_cqe - int64_t{PostedSends::kReserved} - 1;
  if (static_cast<int64_t>(send_depth_set) + receive_depth_set > most_completions) {
    throw Error("BYTEPS_RDMA_START_DEPTH=" + std::to_string(send_depth_set) +
                " and BYTEPS_RDMA_RX_DEPTH=" + std::to_string(receive_depth_set) +
                " together are too much for " + device.name() + ", which allows " +
                std::to_string(most_completions) + " completions in a queue");
  }
  if (slot_bytes() > device.max_message_bytes()) {
    fail("BYTEPS_RDMA_INLINE_BYTES", inline_bytes, "bytes in a message",
         device.max_message_bytes());
  }
}

std::string AddressOfDevice(const Settings& settings, const std::string& fallback,
                            bool fallback_was_given) {
  if (settings.device.empty() && settings.gid_index < 0) return fallback;
  const OpenDevice device = OpenByName(settings.device);
  const std::string name = ibv_get_device_name(device->device);
  const int port = settings.port == 0 ? 1 : settings.port;
  ibv_port_attr attributes;
  memset(&attributes, 0, sizeof(attributes));
  if (ibv_query_port(device.get(), port, &attributes) != 0) {
    throw Error("BYTEPS_RDMA_PORT=" + std::to_string(port) + ": " + name + " has no such port");
  }
  if (settings.gid_index >= 0) {
    const std::string address = AddressAt(device.get(), port, settings.gid_index);
    const bool fits = !fallback_was_given || address == NumericAddress(fallback);
    if (!address.empty() && fits) return address;
    throw Error("BYTEPS_RDMA_GID_INDEX=" + std::to_string(settings.gid_index) + " of " + name +
                " port " + std::to_string(port) +
                (address.empty() ? " holds no IP address"
                                 : " is that of " + address + ", not of this node's " + fallback +
                                       " (DMLC_NODE_HOST, DMLC_INTERFACE)"));
  }
  if (fallback_was_given) return fallback;
  std::string first;
  for (int index = 0; index < attributes.gid_tbl_len; ++index) {
    const std::string address = AddressAt(device.get(), port, index);
    if (address == fallback) return fallback;
    const bool v4 = address.find(':') == std::string::npos;
    if (!address.empty() && (first.empty() || (v4 && first.find(':') != std::string::npos))) {
      first = address;
    }
  }
  // InfiniBand: its GIDs are no addresses; the binding will tell whether this one fits.
  return first.empty() ? fallback : first;
}

}  // namespace rdma
}  // namespace ps
