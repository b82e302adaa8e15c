#include "byteps/server/optimizer/state_memory.h"

#include <algorithm>
#include <fstream>

#include "byteps/base/placement.h"

namespace byteps {
namespace core {
namespace {

// The number at the start of a file; `otherwise` where there is none, such as "max".
uint64_t ReadNumber(const std::string& path, uint64_t otherwise) {
  std::ifstream in(path);
  uint64_t value;
  return in >> value ? value : otherwise;
}

uint64_t AvailableOnMachine() {
  std::ifstream in("/proc/meminfo");
  std::string name, unit;
  uint64_t kibibytes;
  while (in >> name >> kibibytes) {
    if (name == "MemAvailable:") return kibibytes << 10;
    std::getline(in, unit);
  }
  return UINT64_MAX;
}

// As a container sees its own group, in version 2 of control groups and in version 1.
uint64_t AvailableInGroup(const char* limit_file, const char* used_file) {
  const uint64_t limit = ReadNumber(limit_file, UINT64_MAX);
  if (limit == UINT64_MAX) return UINT64_MAX;
  return limit - std::min(limit, ReadNumber(used_file, 0));
}

}  // namespace

uint64_t StateBytes(const Declaration& declaration, int rank, int num_servers) {
  if (!declaration.rule) return 0;
  uint64_t values = 0;
  for (uint64_t i = 0; i < declaration.NumPartitions(); ++i) {
    const int server =
        ServerOf(declaration.hash, declaration.Key(), declaration.placement, i, num_servers);
    if (server == rank) values += declaration.PartitionValues(i);
  }
  const UpdateRule& rule = *declaration.rule;
  const bool has_blocks = IsBlock(declaration.dtype);
  const uint64_t held = has_blocks ? SizeOf(rule.held) : 0;
  const uint64_t gradient = has_blocks ? sizeof(float) : SizeOf(declaration.dtype);
  return values * (sizeof(float) * rule.NumSlots() + held + (rule.speculative ? gradient : 0));
}

uint64_t AvailableMemory() {
  return std::min({AvailableOnMachine(),
                   AvailableInGroup("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
                   AvailableInGroup("/sys/fs/cgroup/memory/memory.limit_in_bytes",
                                    "/sys/fs/cgroup/memory/memory.usage_in_bytes")});
}

StateMemory::StateMemory(const Config& config)
    : is_set_(config.Int("BYTEPS_SERVER_STATE_BYTES") > 0),
      limit_(is_set_ ? config.Int("BYTEPS_SERVER_STATE_BYTES") : AvailableMemory()),
      num_servers_(static_cast<int>(config.Int("DMLC_NUM_SERVER"))) {}

std::string StateMemory::Promise(const Declaration& declaration, int rank, bool copies) {
  uint64_t wanted = StateBytes(declaration, rank, num_servers_);
  if (copies)
    wanted += StateBytes(declaration, (rank + num_servers_ - 1) % num_servers_, num_servers_);
  if (wanted > limit_ || promised_ > limit_ - wanted) {
    return "server " + std::to_string(rank) +
           " has too little memory for the optimizer state of '" + declaration.name +
           "': it needs " + std::to_string(wanted) + " bytes (" + declaration.rule->Describe() +
           (copies ? ", and a copy of another server's state" : "") + "), has promised " +
           std::to_string(promised_) + " to other tensors, and may keep " + std::to_string(limit_) +
           (is_set_ ? " (BYTEPS_SERVER_STATE_BYTES)" : " (what was free when it started)") +
           ": take more servers, or servers with more memory";
  }
  promised_ += wanted;
  return "";
}

}  // namespace core
}  // namespace byteps
