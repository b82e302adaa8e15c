#include "byteps/net/rdma/settings.h"

#include <algorithm>

#include "byteps/base/invariant.h"
#include "byteps/net/rdma/device.h"
#include "byteps/net/rdma/posted_sends.h"
#include "byteps/net/rdma/wire.h"

namespace ps {
namespace rdma {
namespace {

// Equal to the minima in Config's table.
constexpr uint32_t kLeastSends = 4;
constexpr uint32_t kLeastReceives = 8;

}  // namespace

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
  // FitSlots may have lowered the depths. The configured ones are checked nevertheless: the user
  // knows these numbers, and the next job may have fewer peers.
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

}  // namespace rdma
}  // namespace ps
