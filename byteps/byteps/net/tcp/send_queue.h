#ifndef BYTEPS_NET_TCP_SEND_QUEUE_H_
#define BYTEPS_NET_TCP_SEND_QUEUE_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "byteps/net/link/replay_log.h"
#include "byteps/net/tcp/frames.h"

namespace ps {
namespace tcp {

// Locked by its owner.  Lists that it returns are to be let go of without the lock: the owners of
// what is in them may send.
class SendQueue {
 public:
  void Push(OutgoingPtr outgoing);

  // Moves what may be written by one call to `batch`, which is empty; false if there is none.  All
  // of it tells the other end that `received` messages have come.
  bool TakeBatch(uint64_t received, OutgoingList* batch);
  // So many bytes of the last batch have been written.
  void Written(size_t bytes);

  // The other end has received so many messages; see ReplayLog, and what it throws.
  void Arrived(uint64_t received, OutgoingList* arrived);
  // Likewise, over another socket, to which nothing was written yet.  Returns the number of
  // messages that are sent again.
  size_t Resume(uint64_t received, OutgoingList* arrived);

  // All that it has, where the connection ends.
  OutgoingList TakeAll();

  // Whether nothing waits to be written; what is in a batch was taken.
  bool empty() const { return again_.empty() && urgent_.empty() && bulk_.empty(); }
  // Whether the other end has received all messages.
  bool all_arrived() const { return empty() && log_.empty(); }
  // That wait, or are in a batch and not written.
  size_t bytes() const { return bytes_; }
  // Of messages that were taken to be written and have not arrived.
  size_t bytes_in_flight() const { return bytes_in_flight_; }

 private:
  OutgoingList again_;   // were sent over a socket that broke
  OutgoingList urgent_;  // few bytes
  OutgoingList bulk_;
  ReplayLog<OutgoingPtr> log_;  // of messages that were taken to be written
  size_t bytes_ = 0;
  size_t bytes_in_flight_ = 0;
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_SEND_QUEUE_H_
