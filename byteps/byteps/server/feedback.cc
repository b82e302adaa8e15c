#include "byteps/server/feedback.h"

#include <cstring>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/server/round.h"

namespace byteps {
namespace core {
namespace {

// Shift of a bfloat16 in a float's bits (little-endian CPUs).
constexpr int kUpperHalf = 16;

std::vector<uint16_t> Halves(const char* values, uint64_t count) {
  std::vector<uint16_t> halves(count);
  for (uint64_t i = 0; i < count; ++i) {
    uint32_t word;
    memcpy(&word, values + i * sizeof(word), sizeof(word));
    halves[i] = static_cast<uint16_t>(word >> kUpperHalf);
  }
  return halves;
}

}  // namespace

bool MovesFeedback(int op, const Declaration& declaration) {
  return declaration.feedback && !declaration.rule && (op == kLoadState || op == kReadState);
}

void MoveFeedback(ServerContext* context, Partition* partition, const Message& message,
                  int64_t received) {
  Caller caller = CallerOf(message, received);
  const uint64_t count = partition->declaration().PartitionValues(partition->index);
  if (message.op == kLoadState) {
    if (message.values.empty()) throw OutOfMemory(message.sent_bytes);  // the values were dropped
    partition->lost = Halves(message.values.data(), count);
    return context->Answer(caller, message.key, "");
  }
  SharedBytes values = SharedBytes::New(caller.bytes);
  const uint64_t first = caller.offset / sizeof(uint32_t);
  for (uint64_t i = 0; i < caller.bytes / sizeof(uint32_t); ++i) {
    const uint64_t at = first + i;  // before the first sum, no rounding loss exists
    const uint32_t half = at < partition->lost.size() ? partition->lost[at] : 0;
    const uint32_t word = half << kUpperHalf;
    memcpy(values.data() + i * sizeof(word), &word, sizeof(word));
  }
  caller.offset = 0;  // offset in the bytes to send
  context->Answer(caller, message.key, "", values.empty() ? nullptr : &values);
}

}  // namespace core
}  // namespace byteps
