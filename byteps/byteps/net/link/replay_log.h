#ifndef BYTEPS_NET_LINK_REPLAY_LOG_H_
#define BYTEPS_NET_LINK_REPLAY_LOG_H_

#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"

namespace ps {

// Log of the messages sent over a link that may have to be sent again.
//
// Messages are numbered in the order in which the link accepts them: a socket accepts all bytes of
// a message, a device the request that completes it. A link delivers in this order, so a count of
// received messages identifies them. After a link breaks, the peer tells its count over the next
// connection, and the missing messages are sent again before any other. So each message arrives
// exactly once.
//
// Messages sent again get new numbers, in the order in which they are accepted this time: a device
// may complete a small message before a large one that began earlier.
//
// Not thread-safe: its owner locks it.
//
// T is a pointer that owns a message. Arrived messages are moved to the caller's list, to be
// destroyed without the lock: their owners may send.
template <typename T>
class ReplayLog {
 public:
  // The link has accepted this message.
  void Add(T message) {
    in_flight_.push_back(std::move(message));
    ++sent_;
  }

  // Messages accepted since the beginning. A repeated message counts once.
  uint64_t sent() const { return sent_; }
  uint64_t arrived() const { return arrived_; }
  // Returns whether everything sent has arrived.
  bool empty() const { return in_flight_.empty(); }

  // The peer has received this many messages. Throws Error if that is impossible.
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

  // Starts over with a new connection; the peer has received this many messages. Returns the
  // missing ones, in order: send them before any other. Throws as Arrived does, and then changes
  // nothing.
  template <typename List>
  std::deque<T> Resume(uint64_t received, List* arrived) {
    Arrived(received, arrived);
    sent_ = received;
    return std::exchange(in_flight_, {});
  }

  // Returns everything in flight of a link that ends for good.
  std::deque<T> TakeAll() { return std::exchange(in_flight_, {}); }

 private:
  std::deque<T> in_flight_;  // the most recently sent messages
  uint64_t sent_ = 0;
  uint64_t arrived_ = 0;
};

}  // namespace ps

#endif  // BYTEPS_NET_LINK_REPLAY_LOG_H_
