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
// Messages are numbered in the order in which the link accepts them. A link has accepted a message
// when a socket has taken all its bytes, or a device has taken its last request. A link delivers in
// this order, so a count of received messages says which ones have arrived. After a link breaks,
// the peer tells its count over the next connection, and this side sends the missing messages again
// before any other. So each message arrives exactly once.
//
// Messages that are sent again get new numbers, in the order in which they are accepted this time,
// which may differ: a device may complete a small message before a large one that began earlier.
//
// Not thread-safe: the link locks this object.
//
// T is a pointer that owns a message. Arrived messages are moved to the caller's list. The caller
// destroys them without the lock, because a message's owner may call Send.
template <typename T>
class ReplayLog {
 public:
  // Adds a message that the link has accepted.
  void Add(T message) {
    in_flight_.push_back(std::move(message));
    ++sent_;
  }

  // Number of messages that the link has accepted since the beginning. A message that was sent
  // again counts once.
  uint64_t sent() const { return sent_; }
  uint64_t arrived() const { return arrived_; }
  // Returns whether all sent messages have arrived.
  bool empty() const { return in_flight_.empty(); }

  // Moves the messages that have arrived to `arrived`. `received`: number of messages that the peer
  // has received. Throws Error if the number is impossible.
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

  // Returns the messages that the peer is missing, in order. Send them before any other. Call when
  // there is a new connection, over which the peer has told that it has received `received`
  // messages. If this throws, like Arrived, it changes nothing.
  template <typename List>
  std::deque<T> Resume(uint64_t received, List* arrived) {
    Arrived(received, arrived);
    sent_ = received;
    return std::exchange(in_flight_, {});
  }

  // Returns the messages in flight, when the link ends for good.
  std::deque<T> TakeAll() { return std::exchange(in_flight_, {}); }

 private:
  std::deque<T> in_flight_;  // the most recently sent messages
  uint64_t sent_ = 0;
  uint64_t arrived_ = 0;
};

}  // namespace ps

#endif  // BYTEPS_NET_LINK_REPLAY_LOG_H_
