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

// A release that has not been answered: the answer is due when all its tensors are freed.
struct Releasing {
  int rank = 0;
  uint64_t request = 0;
  uint64_t key = 0;
  size_t left = 0;  // tensors not freed yet
};

// A tensor, as the first worker declared it.
struct DeclaredTensor {
  Declaration declaration;
  int declared_by = 0;
  uint32_t first_round = 0;  // earlier rounds ended at a server that was lost
  std::string refusal;       // error of its operations; "" if it is valid
  std::vector<bool> holds;   // members that declared it, and neither released it nor left; by index
  size_t holders = 0;        // number of true values in `holds`
  std::vector<std::shared_ptr<Releasing>> releasing;  // releases that wait for it to be freed
  std::atomic<int> released_by{-1};  // rank of the last release, or -1; read without a lock

  // Sets whether a rank holds the tensor. No effect if it is no member.
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
