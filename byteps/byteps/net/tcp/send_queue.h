// What a connection has to send: messages that wait, those that are sent once more, and those that
// were sent and have not arrived yet.
//
// Messages with few bytes overtake those with many that have not begun.  What was sent over a
// socket that broke goes before all others, and in the order in which it was sent.
#ifndef BYTEPS_NET_TCP_SEND_QUEUE_H_
#define BYTEPS_NET_TCP_SEND_QUEUE_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "byteps/net/link/replay_log.h"
#include "byteps/net/tcp/wire.h"
#include "ps/internal/message.h"

namespace ps {
namespace tcp {

// An outgoing message, or a frame without one.
struct Outgoing {
  std::string head;  // all that is not a value
  std::vector<SArray<char>> values;
  size_t bytes = 0;
  FrameType type = kMessage;
};
using OutgoingPtr = std::shared_ptr<Outgoing>;
using OutgoingList = std::deque<OutgoingPtr>;

// Its values are sent from where they lie.
OutgoingPtr MakeMessage(const Message& msg);
OutgoingPtr MakeFrame(FrameType type);

size_t BytesOf(const OutgoingList& list);
// The bytes of these, one after another, but for the first `done`.
std::vector<iovec> VectorOf(const OutgoingList& list, size_t done);

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
