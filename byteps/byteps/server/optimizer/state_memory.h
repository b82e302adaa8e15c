#ifndef BYTEPS_SERVER_OPTIMIZER_STATE_MEMORY_H_
#define BYTEPS_SERVER_OPTIMIZER_STATE_MEMORY_H_

#include <cstdint>
#include <string>

#include "byteps/base/config.h"
#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

// Bytes of optimizer state that a server has promised to keep, and their limit. Not thread-safe.
class StateMemory {
 public:
  explicit StateMemory(const Config& config);

  // Reserves memory for a tensor's state on this server and, with `copies`, for the copy of the
  // previous server's state. Returns "", or the error if there is too little memory.
  std::string Promise(const Declaration& declaration, int rank, bool copies);
  // Releases the reservation of a tensor.
  void Return(const Declaration& declaration, int rank, bool copies);
  uint64_t promised() const { return promised_; }

 private:
  // Returns the bytes that a tensor takes here, including `copies`.
  uint64_t BytesOf(const Declaration& declaration, int rank, bool copies) const;

  const bool is_set_;     // whether BYTEPS_SERVER_STATE_BYTES is set
  const uint64_t limit_;  // BYTEPS_SERVER_STATE_BYTES, or the free memory at the start
  const int num_servers_;
  uint64_t promised_ = 0;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_OPTIMIZER_STATE_MEMORY_H_
