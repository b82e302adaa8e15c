#ifndef BYTEPS_NET_LINK_RECEIPTS_H_
#define BYTEPS_NET_LINK_RECEIPTS_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "byteps/base/invariant.h"

namespace ps {

// What has come over a link, and when the other end is told: it keeps each message until then
// (replay_log.h), and may wait for that to send more.
//
// The other end is told by every frame that is sent anyway.  A frame for this alone is sent at once
// when much has come since, and soon otherwise.
//
// Of the thread that receives, but for what says otherwise.
class Receipts {
 public:
  static constexpr size_t kManyBytes = 64 << 10;
  static constexpr uint64_t kManyMessages = 64;
  static constexpr auto kSoon = std::chrono::milliseconds(20);

  // One more message has come whole.
  void Came(size_t bytes) {
    ++received_;
    untold_bytes_ += bytes;
  }

  // Messages that have come since the beginning.  Any thread.
  uint64_t received() const { return received_; }

  // A frame that says so is about to be sent.  Called by one sending thread at a time.
  void Told(uint64_t received) { told_ = received; }

  enum class Tell { kNothing, kNow, kSoon };

  // What to do when nothing more is to be read for now.  After kSoon, IsDue is called in kSoon
  // time.
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

  // Whether the other end still has not been told.
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
