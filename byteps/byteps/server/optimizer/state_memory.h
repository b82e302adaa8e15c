#ifndef BYTEPS_SERVER_OPTIMIZER_STATE_MEMORY_H_
#define BYTEPS_SERVER_OPTIMIZER_STATE_MEMORY_H_

#include <cstdint>
#include <string>

#include "byteps/base/config.h"
#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

// Not thread-safe.
class StateMemory {
 public:
  explicit StateMemory(const Config& config);

  // Promises memory for the state of a tensor on this server, and, where it has copies, for that of
  // the server before it.  Why there is too little, or "".
  std::string Promise(const Declaration& declaration, int rank, bool copies);
  // The same tensor is freed.
  void Return(const Declaration& declaration, int rank, bool copies);
  uint64_t promised() const { return promised_; }

 private:
  // Bytes that a tensor takes here; `copies`: with those of its copies.
  uint64_t BytesOf(const Declaration& declaration, int rank, bool copies) const;

  const bool is_set_;     // BYTEPS_SERVER_STATE_BYTES
  const uint64_t limit_;  // that, or what there was when this was made
  const int num_servers_;
  uint64_t promised_ = 0;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_OPTIMIZER_STATE_MEMORY_H_
