#ifndef BYTEPS_NET_TCP_FRAME_READER_H_
#define BYTEPS_NET_TCP_FRAME_READER_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "byteps/net/tcp/memory_pool.h"
#include "byteps/net/tcp/read_buffer.h"
#include "byteps/net/tcp/stream.h"
#include "byteps/net/tcp/wire.h"
#include "ps/internal/message.h"

namespace ps {
namespace tcp {

// Chooses where received values are stored.
class FramePlaces {
 public:
  virtual ~FramePlaces() = default;
  // Returns the buffer for the received values of a message, `bytes` in total. Null: use pooled
  // memory. Nowhere(): drop the values. Called with the reader's lock held: see Abandon.
  virtual char* PlaceFor(const Meta& meta, size_t bytes) = 0;
};

// Reads frames from a socket, with values straight into their destination. Not thread-safe: the
// connection locks it. An exception means that the peer broke the protocol.
class FrameReader {
 public:
  // `places` must outlive this object.
  FrameReader(FramePlaces* places, std::shared_ptr<MemoryPool> pool)
      : places_(places), pool_(std::move(pool)) {}

  // Sets the sender's node id, which is passed to PlaceFor.
  void SetSender(int id) { sender_ = id; }

  // Returns the buffer of bytes that were read. The connection also reads its greeting through it.
  ReadBuffer* buffer() { return &buffer_; }

  // Reads once, like readv. Sets `*all` to true if the kernel holds no more data now. Otherwise
  // leaves it unchanged.
  ssize_t Read(Stream* socket, bool* all);

  enum class Step {
    kMore,     // more bytes are needed
    kHead,     // a frame's header is there: look at it, and call Next again
    kMessage,  // a message is complete: take it
  };
  // Parses the bytes that were read, up to the next step.
  Step Next();

  const FrameHeader& header() const { return header_; }
  // Returns whether the peer has announced that it will close.
  bool goodbye() const { return goodbye_; }
  // Takes the complete message, and sets `bytes` to its size on the wire. Returns false if the
  // message was dropped.
  bool Take(Message* msg, size_t* bytes);

  // Drops the incomplete message, because the socket broke. The peer sends it again over another
  // socket, or never. Returns it, so that the caller can destroy it without the lock.
  Message Restart();

  // Stops reading into these bytes, and drops the message.
  void Abandon(const void* begin, size_t bytes);

 private:
  enum class Phase { kHead, kMeta, kValues };

  Step ReadHead();
  bool ReadMeta();
  void BeginValue();
  bool ReadValues();

  FramePlaces* const places_;
  const std::shared_ptr<MemoryPool> pool_;
  ReadBuffer buffer_;
  Phase phase_ = Phase::kHead;
  FrameHeader header_;
  size_t frame_bytes_ = 0;  // bytes of this frame that were parsed so far
  Message incoming_;
  std::vector<uint64_t> sizes_;
  size_t value_ = 0;  // index of the current value
  char* place_ = nullptr;
  size_t place_bytes_ = 0;
  size_t place_done_ = 0;
  bool drop_ = false;
  bool goodbye_ = false;
  int sender_ = Meta::kEmpty;
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_FRAME_READER_H_
