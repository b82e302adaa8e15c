#include "byteps/net/rdma/device.h"

#include <arpa/inet.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "byteps/base/invariant.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/rdma/settings.h"
#include "byteps/net/rdma/verbs.h"

namespace ps {
namespace rdma {
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
    const std::string device_name = ibv_get_device_name(device);
    if (name == device_name || (name.empty() && count == 1)) {
      OpenDevice opened(ibv_open_device(device));
      if (!opened) Throw("cannot open the RDMA device " + device_name, errno);
      return opened;
    }
    known += (known.empty() ? "" : ", ") + device_name;
  }
  throw Error("BYTEPS_RDMA_DEVICE='" + name +
              "' names no RDMA device; there are: " + (known.empty() ? "none" : known));
}

// Returns the IP address that a RoCE GID contains; "" if there is none.
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

}  // namespace

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

std::string AddressOfDevice(const Settings& settings, const std::string& fallback,
                            bool fallback_was_given) {
  const RdmaChoice& choice = settings.choice;
  if (choice.device.empty() && choice.gid_index < 0) return fallback;
  const OpenDevice device = OpenByName(choice.device);
  const std::string name = ibv_get_device_name(device->device);
  const int port = choice.port == 0 ? 1 : choice.port;
  ibv_port_attr attributes;
  memset(&attributes, 0, sizeof(attributes));
  if (ibv_query_port(device.get(), port, &attributes) != 0) {
    throw Error("BYTEPS_RDMA_DEVICE: " + name + " has no port " + std::to_string(port));
  }
  if (choice.gid_index >= 0) {
    const std::string address = AddressAt(device.get(), port, choice.gid_index);
    const bool fits = !fallback_was_given || address == NumericAddress(fallback);
    if (!address.empty() && fits) return address;
    throw Error("BYTEPS_RDMA_DEVICE: GID " + std::to_string(choice.gid_index) + " of " + name +
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
  // A GID of InfiniBand is not an IP address, so the fallback is returned. If it is wrong, binding
  // to it fails.
  return first.empty() ? fallback : first;
}

}  // namespace rdma
}  // namespace ps
