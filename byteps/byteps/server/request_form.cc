#include "byteps/server/request_form.h"

#include <string>

#include "byteps/server/feedback.h"
#include "byteps/server/updates.h"

namespace byteps {
namespace core {

std::optional<uint64_t> ValueBytes(int op, const Declaration& declaration, uint64_t index) {
  const uint64_t size = declaration.PartitionSize(index);
  if (op == kPushPull || op == kGiveSum) {
    return declaration.rule ? std::nullopt : std::optional(size);
  }
  if (!declaration.rule && !MovesFeedback(op, declaration)) return std::nullopt;
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

namespace {

constexpr uint32_t kKnownFlags = PushHeader::kForgetLost | PushHeader::kKeepsSums;

bool HasFormOfGift(const Message& message, const Declaration& declaration, uint64_t index) {
  const uint64_t bytes = message.sent_bytes;
  if (declaration.rule || (bytes != 0 && bytes != declaration.PartitionSize(index))) return false;
  PushHeader header;
  std::string members;
  return PushHeader::Unpack(message.body, &header, &members) &&
         members.size() <= (declaration.group.size() + 7) / 8;
}

}  // namespace

bool HasForm(const Message& message, const Declaration& declaration, uint64_t index) {
  if (message.op == kGiveSum) return HasFormOfGift(message, declaration, index);
  if (message.sent_bytes != ValueBytes(message.op, declaration, index)) return false;
  if (declaration.rule) return HasFormOfUpdate(message, declaration, index);
  PushHeader header;
  if (!PushHeader::Unpack(message.body, &header) || header.oldest > header.round) return false;
  if ((header.flags & ~kKnownFlags) != 0) return false;
  uint64_t size = declaration.PartitionSize(index);
  if (MovesFeedback(message.op, declaration)) {
    size = declaration.PartitionValues(index) * sizeof(float);
    if (header.pull_offset % sizeof(float) != 0 || header.pull_bytes % sizeof(float) != 0) {
      return false;
    }
  }
  return header.pull_offset <= size && header.pull_bytes <= size - header.pull_offset;
}

}  // namespace core
}  // namespace byteps
