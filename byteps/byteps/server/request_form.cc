#include "byteps/server/request_form.h"

#include "byteps/server/updates.h"

namespace byteps {
namespace core {

std::optional<uint64_t> ValueBytes(int op, const Declaration& declaration, uint64_t index) {
  const uint64_t size = declaration.PartitionSize(index);
  if (op == kPushPull) return declaration.rule ? std::nullopt : std::optional(size);
  if (!declaration.rule) return std::nullopt;
  switch (op) {
    case kPushStep:
    case kPushNorm:
    case kPushTry:
      return size;
    case kLoadState:
      return declaration.PartitionValues(index) * sizeof(float);
    case kStep:
    case kReadState:
      return 0;
    default:
      return std::nullopt;
  }
}

bool HasForm(const Message& message, const Declaration& declaration, uint64_t index) {
  if (message.sent_bytes != ValueBytes(message.op, declaration, index)) return false;
  if (declaration.rule) return HasFormOfUpdate(message, declaration, index);
  PushHeader header;
  if (!PushHeader::Unpack(message.body, &header) || header.oldest > header.round) return false;
  if ((header.flags & ~PushHeader::kForgetLost) != 0) return false;
  const uint64_t size = declaration.PartitionSize(index);
  return header.pull_offset <= size && header.pull_bytes <= size - header.pull_offset;
}

}  // namespace core
}  // namespace byteps
