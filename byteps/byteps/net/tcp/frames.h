// The frames of a connection: how they are read, into which memory, and which wait to be sent.
#ifndef BYTEPS_NET_TCP_FRAMES_H_
#define BYTEPS_NET_TCP_FRAMES_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/link/replay_log.h"
#include "byteps/net/tcp/socket.h"
#include "byteps/net/tcp/wire.h"
#include "ps/internal/message.h"
#include "ps/sarray.h"

namespace ps {
namespace tcp {

// Memory for received values, used again: fresh pages cost as much as receiving into them.
class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
 public:
  // Keeps at most `limit` bytes that nobody uses.
  explicit MemoryPool(size_t limit) : idle_(limit) {}
  ~MemoryPool();

  // `bytes` bytes, aligned to pages.  They come back when the last copy is gone, in any thread.
  // Throws std::bad_alloc.
  SArray<char> Take(size_t bytes);

 private:
  static size_t Rounded(size_t bytes);
  void Return(char* block, size_t size);

  Mutex mu_;
  IdleBlocks<char*> idle_ PS_GUARDED_BY(mu_);
  size_t out_ PS_GUARDED_BY(mu_) = 0;  // blocks in use
};

// Reads frames from a socket: what follows a message's meta straight to where it belongs; a few KiB
// that came along with the meta are copied there.

// Bytes that have come and were not looked at yet.
class ReadBuffer {
 public:
  // Read at once in addition to a value: several small messages, or the next one's meta and little
  // of its values, which has to be copied.
  static constexpr size_t kBytes = 16384;

  ReadBuffer() : bytes_(kBytes) {}

  size_t size() const { return end_ - begin_; }
  const char* data() const { return bytes_.data() + begin_; }

  // These many, or null: they are not there yet, and the next reads have room for them.
  const char* Peek(size_t bytes);
  void Skip(size_t bytes) { begin_ += bytes; }
  void Clear() { begin_ = end_ = 0; }
  // Gives back what a long meta took, if it can.
  void Shrink();

  // Where the next bytes are read to, and that so many were.
  iovec Room();
  void Add(size_t bytes);

 private:
  void Need(size_t bytes);

  std::vector<char> bytes_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

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

#endif  // BYTEPS_NET_TCP_FRAMES_H_
