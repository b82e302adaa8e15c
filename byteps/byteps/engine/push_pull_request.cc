#include "byteps/engine/push_pull_request.h"

#include "byteps/base/dtype.h"
#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

uint64_t PushPullRequest::OfferedBytes() const {
  if (op == kReadState) return StateBytes(tensor.bytes, tensor.dtype);
  return tensor.rule ? AnswerBytes(tensor.dtype, tensor.bytes) : tensor.bytes;
}

}  // namespace core
}  // namespace byteps
