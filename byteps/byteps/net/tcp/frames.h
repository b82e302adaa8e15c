// Frames that a connection sends: their bytes, and the messages that they carry.
#ifndef BYTEPS_NET_TCP_FRAMES_H_
#define BYTEPS_NET_TCP_FRAMES_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "byteps/net/tcp/wire.h"
#include "ps/internal/message.h"
#include "ps/sarray.h"

namespace ps {
namespace tcp {

// What a connection has to send: messages that wait, those that are sent once more, and those that
// were sent and have not arrived yet.
//
// Messages with few bytes overtake those with many that have not begun.  What was sent over a
// socket that broke goes before all others, and in the order in which it was sent.

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

}  // namespace tcp
}  // namespace ps

#endif  // BYTEPS_NET_TCP_FRAMES_H_
