// How much optimizer state a server has promised to keep, and may.
#ifndef BYTEPS_SERVER_OPTIMIZER_STATE_MEMORY_H_
#define BYTEPS_SERVER_OPTIMIZER_STATE_MEMORY_H_

#include <cstdint>
#include <string>

#include "byteps/base/config.h"
#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

// Bytes that server `rank` of `num_servers` keeps of a tensor between steps: its state, what
// workers hold of it where they are sent differences, and the gradients of a step that was tried.
// 0 of one that is summed.
uint64_t StateBytes(const Declaration& declaration, int rank, int num_servers);

// Bytes that this process may still take: what the machine has available, or less where its
// control group (a container) allows less.
uint64_t AvailableMemory();

// Not thread-safe.
class StateMemory {
 public:
  explicit StateMemory(const Config& config);

  // Promises memory for the state of a tensor on this server, and, where it has copies, for that of
  // the server before it.  Why there is too little, or "".
  std::string Promise(const Declaration& declaration, int rank, bool copies);
  uint64_t promised() const { return promised_; }

 private:
  const bool is_set_;     // BYTEPS_SERVER_STATE_BYTES
  const uint64_t limit_;  // that, or what there was when this was made
  const int num_servers_;
  uint64_t promised_ = 0;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_OPTIMIZER_STATE_MEMORY_H_
