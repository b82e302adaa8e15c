// The messages of a link that the other end may lack: what was sent and is kept until then, and
// what has come.
#ifndef BYTEPS_NET_LINK_REPLAY_LOG_H_
#define BYTEPS_NET_LINK_REPLAY_LOG_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"

namespace ps {

// The messages that were sent over a link and may have to be sent again.
//
// Messages are numbered in the order in which the link takes them: a socket the bytes of a whole
// message, a device the request that completes it.  A link delivers in this order, so one number,
// of how many messages have come, says which.  When the link breaks, the other end says this number
// over the next one, and what is missing is sent again before anything else.  So each message comes
// exactly once, however often the link breaks.
//
// What is sent again is numbered again, in the order in which it is taken this time: a device may
// complete a small message before a large one that was begun earlier.
//
// Locked by its owner.

// T: a pointer that owns a message.  What has arrived is moved to a list of the caller's, which
// lets go of it where no lock is held: its owner may send.
template <typename T>
class ReplayLog {
 public:
  // The link has taken this message.
  void Add(T message) {
    in_flight_.push_back(std::move(message));
    ++sent_;
  }

  // Messages since the beginning.  One that is sent again counts once.
  uint64_t sent() const { return sent_; }
  uint64_t arrived() const { return arrived_; }
  // Whether all that was sent has arrived.
  bool empty() const { return in_flight_.empty(); }

  // The other end has received so many.  Throws Error where this cannot be.
  template <typename List>
  void Arrived(uint64_t received, List* arrived) {
    if (received < arrived_ || received > sent_) {
      throw Error("it says that it has received " + std::to_string(received) +
                  " messages over this connection, which is impossible: " + std::to_string(sent_) +
                  " were sent, and " + std::to_string(arrived_) + " had arrived before");
    }
    while (arrived_ < received && !in_flight_.empty()) {
      arrived->push_back(std::move(in_flight_.front()));
      in_flight_.pop_front();
      ++arrived_;
    }
    BPS_INVARIANT(
        "what is in flight was sent and has not arrived", in_flight_.size() == sent_ - received,
        std::to_string(in_flight_.size()) + " messages are in flight, " + std::to_string(sent_) +
            " were sent and " + std::to_string(received) + " have arrived");
  }

  // There is another link, over which nothing was sent yet, and the other end has received so many.
  // Returns what it lacks, in order: to be sent before anything else.  Throws as Arrived does, and
  // has changed nothing then.
  template <typename List>
  std::deque<T> Resume(uint64_t received, List* arrived) {
    Arrived(received, arrived);
    sent_ = received;
    return std::exchange(in_flight_, {});
  }

  // All that is in flight, of a link that ends for good.
  std::deque<T> TakeAll() { return std::exchange(in_flight_, {}); }

 private:
  std::deque<T> in_flight_;  // the last of those that were sent
  uint64_t sent_ = 0;
  uint64_t arrived_ = 0;
};

// What has come over a link, and when the other end is told: it keeps each message until then
// (replay_log.h), and may wait for that to send more.
//
// The other end is told by every frame that is sent anyway.  A frame for this alone is sent at once
// when much has come since, and soon otherwise.

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

#endif  // BYTEPS_NET_LINK_REPLAY_LOG_H_
