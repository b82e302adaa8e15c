#include "byteps/server/optimizer/state_memory.h"

#include "byteps/base/memory_reserve.h"
#include "byteps/base/protocol.h"
#include "byteps/server/optimizer/partition_state.h"

namespace byteps {
namespace core {

StateMemory::StateMemory(const Config& config)
    : is_set_(config.Int("BYTEPS_SERVER_STATE_BYTES") > 0),
      limit_(is_set_ ? config.Int("BYTEPS_SERVER_STATE_BYTES") : AvailableMemory()),
      num_servers_(static_cast<int>(config.Int("DMLC_NUM_SERVER"))) {}

uint64_t StateMemory::BytesOf(const Declaration& declaration, int rank, bool copies) const {
  uint64_t bytes = StateBytes(declaration, rank, num_servers_);
  if (copies)
    bytes += StateBytes(declaration, (rank + num_servers_ - 1) % num_servers_, num_servers_);
  return bytes;
}

void StateMemory::Return(const Declaration& declaration, int rank, bool copies) {
  promised_ -= BytesOf(declaration, rank, copies);
}

std::string StateMemory::Promise(const Declaration& declaration, int rank, bool copies) {
  const uint64_t wanted = BytesOf(declaration, rank, copies);
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
