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

// Request of a worker to release tensors. It is answered when all these tensors are freed.
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
  // Number of the first round on this server; earlier rounds ended at a lost server.
  uint32_t first_round = 0;
  std::string refusal;  // error for all operations on the tensor; "" if the tensor is valid
  // Members that have declared the tensor, and neither released it nor left; by index.
  std::vector<bool> holds;
  size_t holders = 0;                                 // number of true values in `holds`
  std::vector<std::shared_ptr<Releasing>> releasing;  // requests to release this tensor
  // Rank that released the tensor last, or -1; read without a lock.
  std::atomic<int> released_by{-1};

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
