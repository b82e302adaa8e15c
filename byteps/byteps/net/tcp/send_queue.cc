#include "byteps/net/tcp/send_queue.h"

#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/wire.h"
#include "byteps/net/tcp/frames.h"

namespace ps {
namespace tcp {
namespace {

// Limit in bytes of messages that overtake larger ones, and are batched.
constexpr size_t kUrgentBytes = 4096;
constexpr size_t kBatchBytes = 65536;
constexpr size_t kMaxVectors = 64;

}  // namespace

void SendQueue::Push(OutgoingPtr outgoing) {
  bytes_ += outgoing->bytes;
  const bool urgent = outgoing->bytes <= kUrgentBytes && outgoing->type != kGoodbye;
  (urgent ? urgent_ : bulk_).push_back(std::move(outgoing));
}

bool SendQueue::TakeBatch(uint64_t received, OutgoingList* batch) {
  size_t bytes = 0, vectors = 0;
  while (vectors < kMaxVectors) {
    auto& queue = !again_.empty() ? again_ : !urgent_.empty() ? urgent_ : bulk_;
    if (queue.empty()) break;
    // A large message goes alone or last in a batch. So an urgent message waits for at most one
    // large message.
    if (bytes > 0 && bytes + queue.front()->bytes > kBatchBytes) break;
    const OutgoingPtr next = std::move(queue.front());
    queue.pop_front();
    bytes += next->bytes;
    vectors += 1 + next->values.size();
    if (next->type == kMessage) {
      log_.Add(next);
      bytes_in_flight_ += next->bytes;
    }
    std::string count_bytes;
    ByteWriter(&count_bytes).Int<uint64_t>(received);
    next->head.replace(kReceivedOffset, count_bytes.size(), count_bytes);
    batch->push_back(next);
  }
  BPS_INVARIANT_NOTED("bytes queued are those of the messages queued",
                      !batch->empty() || bytes_ == 0,
                      std::to_string(bytes_) + " without a message");
  return !batch->empty();
}

void SendQueue::Written(size_t bytes) {
  BPS_INVARIANT_NOTED(
      "bytes queued are those of the messages queued", bytes_ >= bytes,
      std::to_string(bytes) + " bytes were written, and " + std::to_string(bytes_) + " queued");
  bytes_ -= bytes;
}

void SendQueue::Arrived(uint64_t received, OutgoingList* arrived) {
  const size_t before = arrived->size();
  log_.Arrived(received, arrived);
  for (size_t i = before; i < arrived->size(); ++i) bytes_in_flight_ -= (*arrived)[i]->bytes;
}

size_t SendQueue::Resume(uint64_t received, OutgoingList* arrived) {
  OutgoingList again = log_.Resume(received, arrived);
  // If the last socket broke while messages were being sent again, the rest of them follows.
  for (auto& message : again_) again.push_back(std::move(message));
  again_.swap(again);
  bytes_ = BytesOf(again_) + BytesOf(urgent_) + BytesOf(bulk_);
  bytes_in_flight_ = 0;
  return again_.size();
}

OutgoingList SendQueue::TakeAll() {
  OutgoingList all = log_.TakeAll();
  for (OutgoingList* list : {&again_, &urgent_, &bulk_}) {
    for (auto& outgoing : *list) all.push_back(std::move(outgoing));
    list->clear();
  }
  bytes_ = bytes_in_flight_ = 0;
  return all;
}

}  // namespace tcp
}  // namespace ps
