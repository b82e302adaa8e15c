#ifndef BYTEPS_NET_TCP_SEND_QUEUE_H_
#define BYTEPS_NET_TCP_SEND_QUEUE_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "byteps/net/link/replay_log.h"
#include "byteps/net/tcp/frames.h"

namespace ps {
namespace tcp {

// Messages of a connection that wait to be sent, that must be sent again, or that the peer has not
// acknowledged. A small message overtakes large ones whose sending has not begun. Messages of a
// broken socket go first, in their original order.
class SendQueue {
 public:
  void Push(OutgoingPtr outgoing);

  // Moves the messages of the next write into `batch`, which must be empty. Their frames
  // acknowledge `received` messages of the peer. Returns false if no message waits.
  bool TakeBatch(uint64_t received, OutgoingList* batch);
  // Records that this many bytes of the last batch are written.
  void Written(size_t bytes);

  // Handles the peer's count of received messages. Throws like ReplayLog.
  void Arrived(uint64_t received, OutgoingList* arrived);
  // Continues on a new socket. The peer has received this many messages. Returns how many messages
  // are sent again.
  size_t Resume(uint64_t received, OutgoingList* arrived);

  // Returns all messages, when the connection ends.
  OutgoingList TakeAll();

  // Returns whether no message waits. Messages in a batch do not count.
  bool empty() const { return again_.empty() && urgent_.empty() && bulk_.empty(); }
  // Returns whether the peer has received all messages.
  bool all_arrived() const { return empty() && log_.empty(); }
  // Number of bytes that wait, or are in a batch and not written.
  size_t bytes() const { return bytes_; }
  // Number of bytes of messages that were taken for writing and have not arrived.
  size_t bytes_in_flight() const { return bytes_in_flight_; }

 private:
  OutgoingList again_;   // messages of a broken socket
  OutgoingList urgent_;  // small messages
  OutgoingList bulk_;
  ReplayLog<OutgoingPtr> log_;  // messages that were taken for writing
  size_t bytes_ = 0;
  size_t bytes_in_flight_ = 0;
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_SEND_QUEUE_H_
