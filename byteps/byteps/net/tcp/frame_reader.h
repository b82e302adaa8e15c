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

// Who says where values belong.
class FramePlaces {
 public:
  virtual ~FramePlaces() = default;
  // Where the values of a message, of so many bytes together, belong, if they are one, or null;
  // Nowhere(): they are dropped.  Called with the reader's lock held: see Abandon.
  virtual char* PlaceFor(const Meta& meta, size_t bytes) = 0;
};

// Locked by its owner.  What it throws means that the other end says what it may not.
class FrameReader {
 public:
  // `places` outlives it.
  FrameReader(FramePlaces* places, std::shared_ptr<MemoryPool> pool)
      : places_(places), pool_(std::move(pool)) {}

  // Whose frames it reads, for who is asked where values belong.
  void SetSender(int id) { sender_ = id; }

  // What comes before the first frame is read from here too.
  ReadBuffer* buffer() { return &buffer_; }

  // Reads once, as readv does. `*all`: the kernel holds no more of what has come so far; left alone
  // where that is not known.
  ssize_t Read(Stream* socket, bool* all);

  enum class Step {
    kMore,     // more bytes are needed
    kHead,     // a frame's header is there: its owner looks at it, and goes on
    kMessage,  // a message is complete: its owner takes it
  };
  // What has come, as far as it was read.
  Step Next();

  const FrameHeader& header() const { return header_; }
  // Whether the other end has said that it will close.
  bool goodbye() const { return goodbye_; }
  // The message that is complete, and the bytes that it had on the wire.  False: it is dropped.
  bool Take(Message* msg, size_t* bytes);

  // What came by half comes again, over another socket, or never.  Returns it, to be let go of
  // without the lock.
  Message Restart();

  // Values that are being read into these bytes are read elsewhere from now on, and their message
  // is dropped.
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
  size_t frame_bytes_ = 0;  // of this frame, so far
  Message incoming_;
  std::vector<uint64_t> sizes_;
  size_t value_ = 0;  // index of the value that is being read
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
