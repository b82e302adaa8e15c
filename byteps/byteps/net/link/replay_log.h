// ReplayLog: messages of a link that the other end may lack.
#ifndef BYTEPS_NET_LINK_REPLAY_LOG_H_
#define BYTEPS_NET_LINK_REPLAY_LOG_H_

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

}  // namespace ps

#endif  // BYTEPS_NET_LINK_REPLAY_LOG_H_
