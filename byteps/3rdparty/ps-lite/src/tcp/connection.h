// One TCP connection to a peer.
//
// Sending.  Whoever calls Send writes to the socket himself, as long as it takes bytes; what
// is left waits in a queue, from which the poller's thread sends when the socket has room, or
// whoever is writing already.  Messages with few bytes overtake those with many that have not
// begun.
//
// Receiving.  The poller's thread reads.  What follows a message's meta is read straight to
// where the owner wants it; a few KiB that came along with the meta are copied there.
//
// Life.  Closed once, by either side, an error, or Close; the owner hears of it once, in the
// poller's thread.  The descriptor is closed with the object.
#ifndef PS_TCP_CONNECTION_H_
#define PS_TCP_CONNECTION_H_

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "./memory_pool.h"
#include "./poller.h"
#include "./socket.h"
#include "./wire.h"
#include "ps/internal/message.h"

namespace ps {
namespace tcp {

// How a connection ended.
struct Ending {
  std::string reason;
  bool by_peer = false;
  bool orderly = false;  // the peer said goodbye
};

class Connection;
using ConnectionPtr = std::shared_ptr<Connection>;

class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  // All in the connection's poller thread.

  // Who connected to us says who it is.
  virtual HelloReply OnHello(const ConnectionPtr& connection, const Hello& hello) = 0;
  // Who we connected to has taken us.  A reason is returned to give it up.
  virtual std::string OnReply(const ConnectionPtr& connection, const HelloReply& reply) = 0;
  // Where values belong, or null.  Called with a lock of the connection's held: see Abandon.
  virtual char* PlaceFor(const Meta& meta, size_t bytes) = 0;
  virtual void OnMessage(Connection* connection, Message* msg, size_t bytes) = 0;
  virtual void OnClosed(const ConnectionPtr& connection, const Ending& ending) = 0;
};

class Connection : public Pollable, public std::enable_shared_from_this<Connection> {
 public:
  using Clock = Poller::Clock;

  // `owner` outlives the poller's thread.  `timeout_s`: see SetOptions.
  Connection(ConnectionOwner* owner, std::shared_ptr<Poller> poller,
             std::shared_ptr<MemoryPool> pool, double timeout_s);
  ~Connection() override;

  // Takes what a listener accepted, which has to say hello soon.  Throws dmlc::Error.
  void Accept(Fd fd);

  // Connects to who listens at `host` and `port`, and says `hello`.  Tries again while nobody
  // does, until `deadline`.  Blocks for no longer than it takes to resolve the name.
  void Dial(const std::string& host, int port, const Hello& hello, Clock::time_point deadline);

  // Takes the message over, also before the connection is there.  False when it has ended.
  // Any thread; never blocks.
  bool Send(const Message& msg);

  // Tells the peer that this end will close, behind everything that was sent before.
  void SayGoodbye();
  // Whether all that was sent has gone to the kernel, or never will.
  bool flushed();
  // Closes when all that was sent has gone to the kernel.
  void CloseWhenFlushed();

  // Any thread.
  void Close(const Ending& ending);
  bool closed();

  // Values on their way into these bytes are read elsewhere, and their message is dropped;
  // when this has returned, nothing is written there any more.  Must not be called with a lock
  // held that PlaceFor takes, nor by PlaceFor.
  void Abandon(const void* begin, size_t bytes);

  size_t queued_bytes() const { return queued_bytes_; }

  // Both are the owner's to set.  `token`: what the peer's hello called it.
  uint64_t token = 0;
  // The peer's node id, or Node::kEmpty.
  std::atomic<int> peer{Node::kEmpty};
  // "10.0.0.3:41234"; empty before it is known.
  std::string address();

  bool OnReady(uint32_t events) override;

 private:
  enum class State { kDialing, kGreeting, kOpen, kClosed };
  enum class Phase { kHello, kReply, kHead, kMeta, kValues };

  // A message on its way out.
  struct Outgoing {
    std::string head;  // all that is not a value
    std::vector<SArray<char>> values;
    size_t bytes = 0;
    bool is_goodbye = false;
  };
  using OutgoingList = std::deque<Outgoing>;

  // Read at once beside a value: several small messages, or the next one's meta and little
  // of its values, which has to be copied.
  static constexpr size_t kReadBytes = 16384;

  // ----- connection.cc
  void Finish();
  void OnWritable();
  void SendingFailed(const std::string& reason);
  void Enqueue(Outgoing outgoing);
  // Writes until the socket takes no more or nothing is left.  The caller has set writing_.
  void Drain();
  // Moves what may be written by one call from the queues to writing; false if there is none.
  bool TakeBatch();
  std::vector<iovec> VectorOf(const OutgoingList& batch, size_t done) const;
  static size_t BytesOf(const OutgoingList& batch);

  // ----- connection_dial.cc
  void TryNext();
  void TryAgain(const std::string& error);
  void OnConnected();
  void ExpectGreeting(Clock::time_point deadline, const std::string& complaint);
  void SendGreeting(const std::string& bytes);
  bool ReadHello();
  bool ReadReply();
  void Open();

  // ----- connection_receive.cc
  bool Receive();
  ssize_t Read();
  // A message that is complete.  False: more bytes are needed.
  bool Parse(Message* msg, bool* drop);
  bool ParseHead();
  bool ParseMeta();
  void BeginValue();
  bool ParseValues();
  const char* Peek(size_t bytes);  // null: not there yet
  void Skip(size_t bytes);
  void Need(size_t bytes);

  ConnectionOwner* const owner_;
  const std::shared_ptr<Poller> poller_;
  const std::shared_ptr<MemoryPool> pool_;
  const double timeout_s_;

  std::mutex mu_;
  // Guarded by mu_:
  State state_ = State::kDialing;
  Fd fd_;
  std::string address_;
  OutgoingList urgent_;  // few bytes
  OutgoingList bulk_;
  bool writing_ = false;   // somebody is in Drain
  bool blocked_ = false;   // the socket took no more: the poller will tell
  bool writable_ = false;  // it told while somebody was writing
  bool close_when_flushed_ = false;
  bool goodbye_sent_ = false;
  Ending ending_;
  std::atomic<size_t> queued_bytes_{0};

  // Of who is writing:
  OutgoingList batch_;
  size_t batch_done_ = 0;  // bytes of it that are written

  // Dialing; of the poller's thread:
  bool active_ = false;
  std::string host_;
  int port_ = 0;
  Hello hello_;
  std::vector<Address> addresses_;
  size_t next_address_ = 0;
  Clock::time_point deadline_;
  Clock::duration pause_{};
  std::string last_error_;

  std::mutex receive_mu_;
  // Guarded by receive_mu_; of the poller's thread, but for place_ and drop_:
  Phase phase_ = Phase::kHello;
  std::vector<char> buffer_;
  size_t buffer_begin_ = 0;
  size_t buffer_end_ = 0;
  size_t message_bytes_ = 0;
  FrameHeader header_;
  Message incoming_;
  std::vector<uint64_t> sizes_;
  size_t value_ = 0;  // index of the value that is being read
  char* place_ = nullptr;
  size_t place_bytes_ = 0;
  size_t place_done_ = 0;
  bool drop_ = false;
  bool goodbye_received_ = false;
};

}  // namespace tcp
}  // namespace ps
#endif  // PS_TCP_CONNECTION_H_
