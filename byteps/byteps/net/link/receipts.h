#ifndef BYTEPS_NET_LINK_RECEIPTS_H_
#define BYTEPS_NET_LINK_RECEIPTS_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "byteps/base/invariant.h"

namespace ps {

// Acknowledgements of a link. Every frame that this side sends carries one. A frame with nothing
// but an acknowledgement is sent at once after many bytes or messages, otherwise within kSoon.
class Receipts {
 public:
  static constexpr size_t kManyBytes = 64 << 10;
  static constexpr uint64_t kManyMessages = 64;
  static constexpr auto kSoon = std::chrono::milliseconds(20);

  // Counts a completely received message.
  void Came(size_t bytes) {
    ++received_;
    untold_bytes_ += bytes;
  }

  // Number of messages received since the beginning. Thread-safe.
  uint64_t received() const { return received_; }

  // Records that a frame which acknowledges `received` messages is about to be sent. Called by one
  // sending thread at a time.
  void Told(uint64_t received) { told_ = received; }

  enum class Tell { kNothing, kNow, kSoon };

  // Returns what to do when there is nothing more to read for now. After Tell::kSoon, call IsDue
  // when the time kSoon has passed.
  Tell Next() {
    BPS_INVARIANT("nothing is acknowledged that has not come", told_ <= received_,
                  std::to_string(told_) + " of " + std::to_string(received_));
    const uint64_t untold = received_ - told_;
    const bool much = untold_bytes_ >= kManyBytes || untold >= kManyMessages;
    if (untold == 0 || much) untold_bytes_ = 0;
    if (untold == 0) return Tell::kNothing;
    if (much) return Tell::kNow;
    if (waits_) return Tell::kNothing;
    waits_ = true;
    return Tell::kSoon;
  }

  // Returns whether an acknowledgement is still missing.
  bool IsDue() {
    waits_ = false;
    untold_bytes_ = 0;
    return received_ != told_;
  }

 private:
  std::atomic<uint64_t> received_{0};
  std::atomic<uint64_t> told_{0};
  size_t untold_bytes_ = 0;
  bool waits_ = false;
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_RECEIPTS_H_
