#ifndef BYTEPS_SERVER_DECLARED_TENSOR_H_
#define BYTEPS_SERVER_DECLARED_TENSOR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

// One sum of one partition: who pushed it, who waits for it, and what there is of it.
//
// A debt to a worker that has released tensors: an answer, once all of them are freed.
struct Releasing {
  int rank = 0;
  uint64_t request = 0;
  uint64_t key = 0;
  size_t left = 0;  // tensors that are not freed
};

// A tensor as its first worker declared it.
struct DeclaredTensor {
  Declaration declaration;
  int declared_by = 0;
  uint32_t first_round = 0;  // rounds before it were ended at a server that is lost
  std::string refusal;       // why its operations fail; empty as long as they do not
  std::vector<bool> holds;   // by member index: it has declared it, and neither released nor left
  size_t holders = 0;        // so many of them
  std::vector<std::shared_ptr<Releasing>> releasing;  // who has released it
  std::atomic<int> released_by{-1};                   // the last of them; any thread may read it

  // Sets whether a rank holds the tensor; nothing happens if it is no member.
  void SetHold(int rank, bool has) {
    const int member = declaration.MemberIndex(rank);
    if (member < 0) return;
    holds.resize(declaration.group.size());
    if (holds[member] == has) return;
    holds[member] = has;
    has ? ++holders : --holders;
  }
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_DECLARED_TENSOR_H_
