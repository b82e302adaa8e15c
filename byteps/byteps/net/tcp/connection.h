// One connection to a peer, over as many sockets as it takes.
//
// Sending.  The thread that calls Send writes to the socket, as long as it takes bytes; what
// is left waits in a queue, from which the poller's thread sends when the socket has room, or
// a thread that writes already.  Messages with few bytes overtake those with many that have not
// begun.
//
// Receiving.  The poller's thread reads, or one that serves for it (Poller::ServeReady): below,
// that is the poller's thread, too.  What follows a message's meta is read straight to where the
// owner wants it; a few KiB that came along with the meta are copied there.
//
// A socket that breaks.  Each side counts the messages that it has sent, in the order in which
// it writes them, and those that it has received whole.  It tells the other what it has
// received, with each frame that it sends anyway or by one of its own, and keeps what it has
// sent until the other has told so.  When the socket breaks, who had connected connects again
// and both say what they have received; what is missing is sent again, in the same order.  So
// each message comes exactly once.  A greeting that fails then is one more attempt
// (net/link/admission.h). The outage ends when something that was sent over the new socket has been
// acknowledged, or when nothing is to be sent: a path may carry a greeting and nothing larger.
// After BYTEPS_RECONNECT_TIMEOUT_S of it the connection closes.
//
// Life.  Closed once, by either side, an error, or Close; the owner hears of it once, in the
// poller's thread.
#ifndef BYTEPS_NET_TCP_CONNECTION_H_
#define BYTEPS_NET_TCP_CONNECTION_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/auth/secret.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/dial_plan.h"
#include "byteps/net/link/link_outage.h"
#include "byteps/net/link/link_rate.h"
#include "byteps/net/link/outage_watch.h"
#include "byteps/net/link/peer_table.h"
#include "byteps/net/link/receipts.h"
#include "byteps/net/tcp/frame_reader.h"
#include "byteps/net/tcp/frames.h"
#include "byteps/net/tcp/memory_pool.h"
#include "byteps/net/tcp/poller.h"
#include "byteps/net/tcp/send_queue.h"
#include "byteps/net/tcp/stream.h"
#include "byteps/net/tcp/wire.h"

namespace ps {
namespace tcp {

// What has become of the bytes that were written to a socket.
struct Delivery {
  bool known = false;         // a kernel before 4.1 does not tell
  uint64_t acknowledged = 0;  // bytes, by the other end's host, since the socket was connected
  uint64_t waiting = 0;       // bytes that were written and are not acknowledged

  uint64_t written() const { return acknowledged + waiting; }
};

Delivery DeliveryOf(int fd);

// Reasons that tell more than that a socket broke (kLinkClosed is another).  The kernel closes the
// sockets of a process that ends, and resets those that it had not read to the end.
constexpr char kReset[] = "its connection was reset";
// The other end was silent for ConnectionSettings::silence_s.
constexpr char kTimedOut[] = "its connection timed out";

class Connection;
using ConnectionPtr = std::shared_ptr<Connection>;

// PlaceFor is called with a lock of the connection's held: see Abandon.
class ConnectionOwner : public FramePlaces {
 public:
  // All in the connection's poller thread.

  // Who we connected to says who it is, and has proved it.  A reason is returned to give it up, for
  // good.
  virtual std::string OnChallenge(const ConnectionPtr& connection, const Challenge& challenge) = 0;
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
  // The same where there is another pair of NICs to go on with.
  double switch_s = 4;
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

  // Connects to who listens at `port`, and says `hello`.  Tries again while nobody does, until
  // `deadline`.  Of the pairs of NICs it takes the first one that works, and goes back to an
  // earlier first one when that works again.  Blocks for no longer than it takes to resolve names.
  void Dial(const std::vector<NicPair>& pairs, int port, const Hello& hello,
            Clock::time_point deadline);
  // There are other ways to the peer, as good as the first.  Any thread, after Dial.
  void AddPairs(const std::vector<NicPair>& pairs);

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

  // Values in flight into these bytes are read elsewhere, and their message is dropped;
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
  // Why it is not connected; empty: it is, or there is nothing to say yet.  Any thread.
  std::string dial_error();
  // Whether it has no socket, or one of which the kernel knows that it is of no use any more.  Any
  // thread.
  bool is_broken();

  bool OnReady(uint32_t events) override;

 private:
  // After the first attempts to connect that failed, and at most.
  static constexpr std::chrono::milliseconds kFirstPause{20};
  static constexpr std::chrono::milliseconds kLongestPause{500};

  enum class State {
    kDialing,   // who connects: has no socket, or one that is being connected
    kGreeting,  // who connects: says hello
    kWaiting,   // who was connected to: for the other end to connect, again or at last
    kOpen,
    kClosed,
  };
  // What the side that connects waits for before the first frame.
  enum class Greeting { kOver, kHandshake, kChallenge, kReply };
  using Socket = StreamPtr;  // stays open while somebody writes to it

  // Between which addresses the socket is.
  struct Ends {
    std::string text;   // the peer's, or of both
    std::string error;  // of the last attempt to connect
    uint64_t nics = 0;  // tells apart the pairs of addresses, whatever their ports
  };
  // Who writes to the socket.
  struct Writing {
    bool is_on = false;     // somebody is in Drain
    bool blocked = false;   // the socket took no more: the poller will tell
    bool writable = false;  // it told while somebody was writing
  };
  // What is being written.
  struct Batch {
    OutgoingList list;
    size_t done = 0;     // bytes of it that are written
    uint64_t epoch = 0;  // it was taken for the socket of this epoch
  };
  struct Closing {
    bool when_flushed = false;
    bool goodbye_sent = false;
    LinkEnding ending;
  };
  // What this end has heard from the other.
  struct Heard {
    OutgoingList arrived;         // messages of ours; let go of without a lock
    uint64_t received = 0;        // so many have come, it said last
    uint64_t before = 0;          // and so many when this socket was there
    uint64_t greeting_bytes = 0;  // that were written to it before
  };

  // ----- connection.cc
  void Finish();
  void OnWritable();
  void SendingFailed(uint64_t epoch, const std::string& reason);
  void Enqueue(OutgoingPtr outgoing);
  // Writes until the socket takes no more or nothing is left.  The caller has set writing_.
  void Drain();

  // ----- connection_dial.cc
  void DialAgain(bool elsewhere);
  void TryNext();
  void TryAgain(const std::string& error, bool nobody_listens = false);
  void GiveUpAttempt(Clock::duration after, const std::string& complaint);
  // What was read, or the lack of it, ends this connection or this attempt.  Poller's thread.
  void Failed(const std::exception& error);
  void OnConnected();
  // False: not yet, or not any more.
  bool ShakeHands();
  void SayHello(const Socket& socket);
  bool ReadGreeting() PS_REQUIRES(receive_mu_);
  bool ReadChallenge() PS_REQUIRES(receive_mu_);
  bool ReadReply() PS_REQUIRES(receive_mu_);

  // ----- connection_dial.cc
  // The connection is away from its first pair of NICs: tries now and then whether that works.
  void LookHome();
  void WarnThatAway();
  void TryHome();
  void GoHome();
  // When a socket over which nothing is acknowledged is given up, in seconds.
  double Silence() const;

  // ----- connection_link.cc
  // The socket is connected: its bytes count at its NIC.  Returns Ends::nics.
  static uint64_t CountAtNic(const Socket& socket);
  // The socket of this epoch broke: what becomes of the connection?
  void Break(uint64_t epoch, const LinkEnding& ending);
  // It goes on if it never ended.
  void BeginOutage(const LinkEnding& ending, Clock::duration patience);
  void ArmDeadline();
  // By when it must be connected, for the first time or again.
  Clock::time_point Deadline() const;
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

  // ----- connection.cc
  // Not `to_the_end`: epoll will tell of what is behind what the kernel holds now.
  bool Receive(bool to_the_end);
  void ReadingFailed(const Socket& socket, ssize_t result, int error);
  uint64_t Epoch();
  Socket CurrentSocket();
  // A message that is complete, but for one that was abandoned.  False: more bytes are needed.
  bool Parse(Message* msg, size_t* bytes, bool* drop) PS_REQUIRES(receive_mu_);
  void OnFrame(const FrameHeader& header) PS_REQUIRES(receive_mu_);

  ConnectionOwner* const owner_;
  const ConnectionSettings* const settings_;
  const std::shared_ptr<Poller> poller_;
  std::atomic<int> peer_{Node::kEmpty};

  Mutex mu_;
  State state_ PS_GUARDED_BY(mu_) = State::kWaiting;
  Socket socket_ PS_GUARDED_BY(mu_);
  uint64_t epoch_ PS_GUARDED_BY(mu_) =
      0;  // counts sockets: what is about the last one is not about this one
  Ends ends_ PS_GUARDED_BY(mu_);
  SendQueue queue_ PS_GUARDED_BY(mu_);
  LinkRate rate_ PS_GUARDED_BY(mu_);
  Writing writing_ PS_GUARDED_BY(mu_);
  Closing closing_ PS_GUARDED_BY(mu_);
  Batch batch_;  // of the thread that is writing

  // Of the poller's thread, but for dial_ and hello_, which are set before it is told of them:
  bool active_ = false;  // this side connects
  DialPlan dial_{kFirstPause, kLongestPause};
  Hello hello_;
  std::string said_;  // what a proof is over
  bool was_open_ = false;
  OutageWatch outage_;
  Heard heard_;
  Receipts receipts_;

  Mutex receive_mu_;
  // Of the poller's thread, but for Abandon.
  Greeting greeting_ PS_GUARDED_BY(receive_mu_) = Greeting::kOver;
  FrameReader reader_ PS_GUARDED_BY(receive_mu_);
};

}  // namespace tcp
}  // namespace ps

#endif  // BYTEPS_NET_TCP_CONNECTION_H_
