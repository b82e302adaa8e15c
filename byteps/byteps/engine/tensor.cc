#include "byteps/engine/tensor.h"

namespace byteps {
namespace core {

bool Tensor::BeginUse() {
  uint32_t users = users_;
  while (users > 0) {
    if (users_.compare_exchange_weak(users, users + 1)) return true;
  }
  return false;
}

}  // namespace core
}  // namespace byteps
