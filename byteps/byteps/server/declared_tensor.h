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

// A worker's request to release tensors. It is answered when all these tensors are freed.
struct Releasing {
  int rank = 0;
  uint64_t request = 0;
  uint64_t key = 0;
  size_t left = 0;  // number of tensors that are not freed yet
};

// A tensor, as the first worker declared it.
struct DeclaredTensor {
  Declaration declaration;
  int declared_by = 0;
  uint32_t first_round = 0;  // number of the first round here; earlier ones ended at a lost server
  std::string refusal;       // error for all operations on the tensor; "" if the tensor is valid
  std::vector<bool> holds;   // members that declared it, and neither released it nor left; by index
  size_t holders = 0;        // number of true values in `holds`
  std::vector<std::shared_ptr<Releasing>> releasing;  // requests to release this tensor
  std::atomic<int> released_by{-1};  // rank that released it last, or -1; read without a lock

  // Sets whether a rank holds the tensor. Does nothing if the rank is no member of the group.
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
