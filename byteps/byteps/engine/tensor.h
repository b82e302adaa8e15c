#ifndef BYTEPS_ENGINE_TENSOR_H_
#define BYTEPS_ENGINE_TENSOR_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>

#include "byteps/base/protocol.h"
#include "byteps/engine/plan.h"
#include "byteps/engine/round_window.h"

namespace byteps {
namespace core {

// The tensors that this worker sums, and what it told the servers of them.
//
// A name that is summed.  Of what follows only the atomics change, and `running`.
struct Tensor {
  uint64_t job = 0;  // of the Declarations that made it
  Declaration declaration;
  uint64_t key = 0;
  Plan::Layout layout;
  std::atomic<uint32_t> rounds{0};    // that this worker has begun
  std::atomic<uint32_t> oldest{0};    // of the rounds that have not ended, or the next one
  std::atomic<bool> has_room{false};  // in pinned memory, for a tensor on a GPU
  std::set<uint32_t> running;         // the rounds that have not ended; of Operations, by its lock
  RoundWindow window{&oldest};
  std::atomic<bool> is_released{false};

  // Sources of further requests about it: its name, until that is released, a declaration in
  // flight, and each operation.  The last one to end gives it back (Declarations::GiveBack).
  //
  // False: nothing uses it any more, nor will.
  bool BeginUse();
  // True: that was the last use.
  bool EndUse() { return users_.fetch_sub(1) == 1; }
  bool is_used() const { return users_ > 0; }

 private:
  std::atomic<uint32_t> users_{1};
};
using TensorPtr = std::shared_ptr<Tensor>;

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_TENSOR_H_
