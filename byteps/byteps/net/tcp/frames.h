// Frames that a connection sends: their bytes and their messages.
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

// Outgoing message, or a frame without a message.
struct Outgoing {
  std::string head;  // everything but the values
  std::vector<SArray<char>> values;
  size_t bytes = 0;
  FrameType type = kMessage;
};
using OutgoingPtr = std::shared_ptr<Outgoing>;
using OutgoingList = std::deque<OutgoingPtr>;

// Values are not copied: they are sent from their own memory.
OutgoingPtr MakeMessage(const Message& msg);
OutgoingPtr MakeFrame(FrameType type);

size_t BytesOf(const OutgoingList& list);
// Returns the bytes of all frames in the list, without the first `done`.
std::vector<iovec> VectorOf(const OutgoingList& list, size_t done);

}  // namespace tcp
}  // namespace ps

#endif  // BYTEPS_NET_TCP_FRAMES_H_
