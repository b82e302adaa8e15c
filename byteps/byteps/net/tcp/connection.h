// One connection to a peer, over as many sockets as it takes.
//
// Sending.  Whoever calls Send writes to the socket himself, as long as it takes bytes; what
// is left waits in a queue, from which the poller's thread sends when the socket has room, or
// whoever is writing already.  Messages with few bytes overtake those with many that have not
// begun.
//
// Receiving.  The poller's thread reads.  What follows a message's meta is read straight to
// where the owner wants it; a few KiB that came along with the meta are copied there.
//
// A socket that breaks.  Each side counts the messages that it has sent, in the order in which
// it writes them, and those that it has received whole.  It tells the other what it has
// received, with each frame that it sends anyway or by one of its own, and keeps what it has
// sent until the other has told so.  When the socket breaks, who had connected connects again
// and both say what they have received; what is missing is sent again, in the same order.  So
// each message comes exactly once.  A greeting that fails then is one more failed attempt (wire.h).
// The outage ends when something that was sent over the new socket has been acknowledged, or when
// nothing is to be sent: a path may carry a greeting and nothing larger.  After
// BYTEPS_RECONNECT_TIMEOUT_S of it the connection closes.
//
// Life.  Closed once, by either side, an error, or Close; the owner hears of it once, in the
// poller's thread.
#ifndef BYTEPS_NET_TCP_CONNECTION_H_
#define BYTEPS_NET_TCP_CONNECTION_H_

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/auth/secret.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/choice.h"
#include "byteps/net/link/link_ending.h"
#include "byteps/net/link/link_outage.h"
#include "byteps/net/link/receipts.h"
#include "byteps/net/link/replay_log.h"
#include "byteps/net/tcp/memory_pool.h"
#include "byteps/net/tcp/poller.h"
#include "byteps/net/tcp/stream.h"
#include "byteps/net/tcp/wire.h"
#include "ps/internal/message.h"

namespace ps {
namespace tcp {

// Reasons that tell more than that a socket broke (kLinkClosed is another).  The kernel closes the
// sockets of a process that ends, and resets those that it had not read to the end.
constexpr char kReset[] = "its connection was reset";
// The other end was silent for ConnectionSettings::silence_s.
constexpr char kTimedOut[] = "its connection timed out";

class Connection;
using ConnectionPtr = std::shared_ptr<Connection>;

class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  // All in the connection's poller thread.

  // Who we connected to says who it is, and has proved it.  A reason is returned to give it up, for
  // good.
  virtual std::string OnChallenge(const ConnectionPtr& connection, const Challenge& challenge) = 0;
  // Where the values of a message, of so many bytes together, belong, if they are one, or null;
  // Nowhere(): they are dropped.  Called with a lock of the connection's held: see Abandon.
  virtual char* PlaceFor(const Meta& meta, size_t bytes) = 0;
  virtual void OnMessage(Connection* connection, Message* msg, size_t bytes) = 0;
  // The socket broke.  For how long the connection may be without one: 0 closes it.
  virtual Poller::Clock::duration Patience(Connection* connection, LinkFault fault) = 0;
  // It had a socket again after so long, and that works; so many messages were sent again.
  virtual void OnResumed(Connection* connection, Poller::Clock::duration after, size_t again) = 0;
  virtual void OnClosed(const ConnectionPtr& connection, const LinkEnding& ending) = 0;
};

// What the connections of a process share.
struct ConnectionSettings {
  // A socket over which the other end's host acknowledges nothing for so long is given up.
  double silence_s = 15;
  // BYTEPS_RECONNECT_TIMEOUT_S
  double reconnect_s = 30;
  auth::Secret secret;
  std::shared_ptr<const tls::Context> tls;  // null: nothing is encrypted
};

class Connection : public Pollable, public std::enable_shared_from_this<Connection> {
 public:
  using Clock = Poller::Clock;

  // `owner` and `settings` outlive the poller's thread.
  Connection(ConnectionOwner* owner, const ConnectionSettings* settings,
             std::shared_ptr<Poller> poller, std::shared_ptr<MemoryPool> pool);
  ~Connection() override;

  // Goes on over `socket`, whose other end has said `hello` and proved it, and is told that it is
  // taken.  Any thread.
  void Adopt(StreamPtr socket, const Hello& hello);

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
  // Whether the peer has received all that was sent, or never will.
  bool all_arrived();
  // Closes when all that was sent has gone to the kernel.
  void CloseWhenFlushed();

  // Any thread.
  void Close(const LinkEnding& ending);
  bool closed();
  // Whether it has a socket over which messages go.
  bool open();

  // Values on their way into these bytes are read elsewhere, and their message is dropped;
  // when this has returned, nothing is written there any more.  Must not be called with a lock
  // held that PlaceFor takes, nor by PlaceFor.
  void Abandon(const void* begin, size_t bytes);

  LinkLoad load();

  // What the peer has proved to be, where it connected to us: the owner's to set, before it adopts
  // a socket.
  PeerIdentity identity;
  // The peer's node id, or Node::kEmpty.
  int peer() const { return peer_; }
  void set_peer(int id) { peer_ = id; }
  // "10.0.0.3:41234"; empty before it is known.
  std::string address();

  bool OnReady(uint32_t events) override;

 private:
  enum class State {
    kDialing,   // who connects: has no socket, or one that is being connected
    kGreeting,  // who connects: says hello
    kWaiting,   // who was connected to: for the other end to connect, again or at last
    kOpen,
    kClosed,
  };
  enum class Phase { kHandshake, kChallenge, kReply, kHead, kMeta, kValues };
  using Socket = StreamPtr;  // stays open while somebody writes to it

  // A message on its way out.
  struct Outgoing {
    std::string head;  // all that is not a value
    std::vector<SArray<char>> values;
    size_t bytes = 0;
    FrameType type = kMessage;
  };
  using OutgoingPtr = std::shared_ptr<Outgoing>;
  using OutgoingList = std::deque<OutgoingPtr>;

  // Read at once beside a value: several small messages, or the next one's meta and little
  // of its values, which has to be copied.
  static constexpr size_t kReadBytes = 16384;

  // ----- connection.cc
  void Finish();
  void OnWritable();
  void SendingFailed(uint64_t epoch, const std::string& reason);
  static OutgoingPtr Frame(FrameType type);
  void Enqueue(OutgoingPtr outgoing);
  // Writes until the socket takes no more or nothing is left.  The caller has set writing_.
  void Drain();
  // Moves what may be written by one call from the queues to the batch; false if there is none.
  bool TakeBatch() PS_REQUIRES(mu_);
  std::vector<iovec> VectorOf(const OutgoingList& batch, size_t done) const;
  static size_t BytesOf(const OutgoingList& list);

  // ----- connection_dial.cc
  void Redial();
  void TryNext();
  void TryAgain(const std::string& error, bool nobody_listens = false);
  void GiveUpAttempt(Clock::duration after, const std::string& complaint);
  // What was read, or the lack of it, ends this connection or this attempt.  Poller's thread.
  void Failed(const std::exception& error);
  void OnConnected();
  // False: not yet, or not any more.
  bool ShakeHands();
  void SayHello(const Socket& socket);
  bool ReadChallenge() PS_REQUIRES(receive_mu_);
  bool ReadReply() PS_REQUIRES(receive_mu_);

  // ----- connection_link.cc
  // The socket of this epoch broke: what becomes of the connection?
  void Break(uint64_t epoch, const LinkEnding& ending);
  // It goes on if it never ended.
  void BeginOutage(const LinkEnding& ending, Clock::duration patience);
  void EndOutageBy(Clock::time_point deadline);
  // The time is over, unless it has another deadline since.
  void OnDeadline();
  // There is a socket: waits until something that is sent over it is acknowledged.
  void AwaitAcknowledgement(size_t again);
  void LookForAcknowledgement(uint64_t epoch, Clock::duration pause);
  bool Acknowledged();
  void EndOutage();
  // Lets go of the socket, and of what came by half.  `state` is the new one.
  void Detach(State state);
  void AdoptHere(const Socket& socket, const Hello& hello);
  // The socket is there, and the other end has received so much.
  void Resume(uint64_t received);
  std::string GivenUp() const;
  // The other end has received so many messages.
  void OnReceived(uint64_t received);
  // What has arrived since there were so many in the list is not read from any more.
  void TakeBackFrom(size_t first);
  // Tells the other end what has come, soon or when there is enough of it.
  void TellReceived();

  // ----- connection_receive.cc
  bool Receive();
  void ReadingFailed(const Socket& socket, ssize_t result, int error);
  uint64_t Epoch();
  Socket CurrentSocket();
  ssize_t Read(const Socket& socket) PS_REQUIRES(receive_mu_);
  // A message that is complete.  False: more bytes are needed.
  bool Parse(Message* msg, bool* drop) PS_REQUIRES(receive_mu_);
  bool ParseHead() PS_REQUIRES(receive_mu_);
  bool ParseMeta() PS_REQUIRES(receive_mu_);
  void BeginValue() PS_REQUIRES(receive_mu_);
  bool ParseValues() PS_REQUIRES(receive_mu_);
  // Null: not there yet.
  const char* Peek(size_t bytes) PS_REQUIRES(receive_mu_);
  void Skip(size_t bytes) PS_REQUIRES(receive_mu_);
  void Need(size_t bytes) PS_REQUIRES(receive_mu_);

  ConnectionOwner* const owner_;
  const ConnectionSettings* const settings_;
  const std::shared_ptr<Poller> poller_;
  const std::shared_ptr<MemoryPool> pool_;
  std::atomic<int> peer_{Node::kEmpty};

  Mutex mu_;
  State state_ PS_GUARDED_BY(mu_) = State::kWaiting;
  Socket socket_ PS_GUARDED_BY(mu_);
  uint64_t epoch_ PS_GUARDED_BY(mu_) =
      0;  // counts sockets: what is about the last one is not about this one
  std::string address_ PS_GUARDED_BY(mu_);
  OutgoingList urgent_ PS_GUARDED_BY(mu_);  // few bytes
  OutgoingList bulk_ PS_GUARDED_BY(mu_);
  OutgoingList again_ PS_GUARDED_BY(mu_);  // were sent over a socket that broke: before all others
  ReplayLog<OutgoingPtr> log_ PS_GUARDED_BY(mu_);  // of messages that were taken to be written
  bool writing_ PS_GUARDED_BY(mu_) = false;        // somebody is in Drain
  bool blocked_ PS_GUARDED_BY(mu_) = false;        // the socket took no more: the poller will tell
  bool writable_ PS_GUARDED_BY(mu_) = false;       // it told while somebody was writing
  bool close_when_flushed_ PS_GUARDED_BY(mu_) = false;
  bool goodbye_sent_ PS_GUARDED_BY(mu_) = false;
  LinkEnding ending_ PS_GUARDED_BY(mu_);
  std::atomic<size_t> queued_bytes_{0};

  // Of who is writing:
  OutgoingList batch_;
  size_t batch_done_ = 0;     // bytes of it that are written
  uint64_t batch_epoch_ = 0;  // it was taken for the socket of this epoch

  // Dialing; of the poller's thread:
  bool active_ = false;
  std::string host_;
  int port_ = 0;
  Hello hello_;
  std::string said_;  // what a proof is over
  std::vector<Address> addresses_;
  size_t next_address_ = 0;
  uint64_t attempt_ = 0;
  Clock::time_point deadline_;
  Clock::duration pause_{};
  std::string last_error_;
  // Of the poller's thread, of a connection that was open:
  bool was_open_ = false;
  uint64_t outages_ = 0;
  LinkOutage outage_;                   // the last
  Clock::time_point longest_deadline_;  // of it, if the other end is known to live
  // It has a socket again, over which nothing was acknowledged yet:
  bool awaits_acknowledgement_ = false;
  bool continues_ = false;       // and that one broke before anything was
  uint64_t greeting_bytes_ = 0;  // that were written to it before
  uint64_t arrived_before_ = 0;  // messages
  Clock::time_point resumed_at_;
  size_t sent_again_ = 0;
  bool broken_by_peer_ = false;
  Clock::time_point listener_gone_at_;

  // Messages of ours that have arrived; let go of without a lock.  Of the poller's thread.
  OutgoingList arrived_;
  uint64_t arrived_number_ = 0;

  Receipts receipts_;

  Mutex receive_mu_;
  // Of the poller's thread, but for place_ and drop_.
  Phase phase_ PS_GUARDED_BY(receive_mu_) = Phase::kHead;
  std::vector<char> buffer_ PS_GUARDED_BY(receive_mu_);
  size_t buffer_begin_ PS_GUARDED_BY(receive_mu_) = 0;
  size_t buffer_end_ PS_GUARDED_BY(receive_mu_) = 0;
  size_t message_bytes_ PS_GUARDED_BY(receive_mu_) = 0;
  FrameHeader header_ PS_GUARDED_BY(receive_mu_);
  Message incoming_ PS_GUARDED_BY(receive_mu_);
  std::vector<uint64_t> sizes_ PS_GUARDED_BY(receive_mu_);
  size_t value_ PS_GUARDED_BY(receive_mu_) = 0;  // index of the value that is being read
  char* place_ PS_GUARDED_BY(receive_mu_) = nullptr;
  size_t place_bytes_ PS_GUARDED_BY(receive_mu_) = 0;
  size_t place_done_ PS_GUARDED_BY(receive_mu_) = 0;
  bool drop_ PS_GUARDED_BY(receive_mu_) = false;
  bool goodbye_received_ PS_GUARDED_BY(receive_mu_) = false;
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_CONNECTION_H_
