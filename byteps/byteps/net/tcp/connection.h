// Connection to a peer. It survives broken sockets.
//
// Sending: the thread that calls Send writes to the socket until the socket is full. The rest waits
// in a queue. When the socket has room again, the poller's thread sends it, or another thread that
// is already writing. Small messages overtake large ones that have not begun.
//
// Receiving: the poller's thread reads. Another thread may serve for it (Poller::ServeReady), and
// then counts as the poller's thread below. Values are read straight into their destination, except
// for a few KiB that arrived together with the meta and are copied.
//
// Broken sockets: each side counts the messages that it has written, and those that it has received
// completely. It acknowledges received messages in each frame, or in a frame of its own, and keeps
// sent messages until they are acknowledged. When the socket breaks, the side that made the
// connection connects again, and both sides tell their counts. Missing messages are sent again in
// the same order, so each message arrives exactly once. A greeting that fails over a new socket
// counts as one attempt (net/link/admission.h). The outage ends when a message sent over the new
// socket is acknowledged, or at once if no message has to be sent. The new socket alone does not
// end it, because a path may carry a greeting and nothing larger. After an outage of
// BYTEPS_RECONNECT_TIMEOUT_S the connection closes.
//
// End: either side, an error or Close closes the connection, for good. The poller's thread then
// calls ConnectionOwner::OnClosed, once.
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

// State of the bytes that were written to a socket.
struct Delivery {
  bool known = false;         // false: the kernel does not say (Linux before 4.1)
  uint64_t acknowledged = 0;  // bytes acknowledged by the peer's host since connecting
  uint64_t waiting = 0;       // bytes written and not acknowledged

  uint64_t written() const { return acknowledged + waiting; }
};

Delivery DeliveryOf(int fd);

// Reasons for the end of a connection that say more than "its socket broke". kLinkClosed is another
// one.
constexpr char kReset[] = "its connection was reset";
// The peer has acknowledged nothing for ConnectionSettings::silence_s.
constexpr char kTimedOut[] = "its connection timed out";

class Connection;
using ConnectionPtr = std::shared_ptr<Connection>;

// PlaceFor is called with a lock of the connection held: see Abandon.
class ConnectionOwner : public FramePlaces {
 public:
  // The connection's poller thread calls all these functions.

  // Called when the listening side has authenticated and identified itself. Returns "", or the
  // reason to close the connection for good.
  virtual std::string OnChallenge(const ConnectionPtr& connection, const Challenge& challenge) = 0;
  virtual void OnMessage(Connection* connection, Message* msg, size_t bytes) = 0;
  // Called when the socket broke. Returns how long the connection may have no socket; 0 closes it.
  virtual Poller::Clock::duration Patience(Connection* connection, LinkFault fault) = 0;
  // Called when a new socket works. `after`: time that the connection had no socket. `again`:
  // number of messages that were sent again.
  virtual void OnResumed(Connection* connection, Poller::Clock::duration after, size_t again) = 0;
  virtual void OnClosed(const ConnectionPtr& connection, const LinkEnding& ending) = 0;
};

// Settings shared by a process's connections.
struct ConnectionSettings {
  // Seconds without an acknowledgement after which the socket is closed, if the connection has only
  // one pair of NICs.
  double silence_s = 15;
  // The same time for a connection that can use another pair of NICs.
  double switch_s = 4;
  // BYTEPS_RECONNECT_TIMEOUT_S
  double reconnect_s = 30;
  auth::Secret secret;
  std::shared_ptr<const tls::Context> tls;  // null: no encryption
};

class Connection : public Pollable, public std::enable_shared_from_this<Connection> {
 public:
  using Clock = Poller::Clock;

  // `owner` and `settings` must outlive the poller's thread.
  Connection(ConnectionOwner* owner, const ConnectionSettings* settings,
             std::shared_ptr<Poller> poller, std::shared_ptr<MemoryPool> pool);
  ~Connection() override;

  // Adopts `socket`. The peer has authenticated and sent `hello`; sends it an acceptance.
  // Thread-safe.
  void Adopt(StreamPtr socket, const Hello& hello);

  // Connects to `port` of the peer and sends `hello`. While nothing listens there, retries until
  // `deadline`. Uses the first pair of NICs that works, and returns to an earlier pair when that
  // works again. Blocks only to resolve names.
  void Dial(const std::vector<NicPair>& pairs, int port, const Hello& hello,
            Clock::time_point deadline);
  // Adds pairs of NICs, which are as good as the first pair. Thread-safe. Call after Dial.
  void AddPairs(const std::vector<NicPair>& pairs);

  // Takes over the message, even before there is a socket. Returns false if the connection has
  // closed. Never blocks. Thread-safe.
  bool Send(const Message& msg);

  // Tells the peer, after all queued messages, that this end will close.
  void SayGoodbye();
  // Returns whether the kernel has taken all messages, or there is no socket.
  bool flushed();
  // Returns whether the peer has received all messages, or the connection has closed.
  bool all_arrived();
  // Closes the connection once the kernel has taken all messages.
  void CloseWhenFlushed();

  // Thread-safe.
  void Close(const LinkEnding& ending);
  bool closed();
  // Returns whether the connection has a working socket.
  bool open();

  // Drops messages whose values are being received into these bytes. When this returns, no thread
  // writes there any more. Must not be called by PlaceFor, nor with a lock that PlaceFor takes.
  void Abandon(const void* begin, size_t bytes);

  LinkLoad load();

  // Identity that a connecting peer has proved. The owner sets it before Adopt.
  PeerIdentity identity;
  // The peer's node id, or Node::kEmpty.
  int peer() const { return peer_; }
  void set_peer(int id) { peer_ = id; }
  // Returns "10.0.0.3:41234"; "" while unknown.
  std::string address();
  // Returns why the connection has no socket; "" if it has one, or if the reason is unknown.
  // Thread-safe.
  std::string dial_error();
  // Returns whether the connection has no socket, or a socket that the kernel knows to be dead.
  // Thread-safe.
  bool is_broken();

  bool OnReady(uint32_t events) override;

 private:
  // Pause after the first round of failed attempts, and the longest pause.
  static constexpr std::chrono::milliseconds kFirstPause{20};
  static constexpr std::chrono::milliseconds kLongestPause{500};

  enum class State {
    kDialing,   // connecting side: no socket, or not connected yet
    kGreeting,  // connecting side: greeting
    kWaiting,   // listening side: waits for the peer to connect (again)
    kOpen,
    kClosed,
  };
  // Next part of the greeting that the connecting side expects.
  enum class Greeting { kOver, kHandshake, kChallenge, kReply };
  using Socket = StreamPtr;  // Socket that stays open while a thread writes to it.

  // Addresses of a socket.
  struct Ends {
    std::string text;   // the peer's address, or both addresses
    std::string error;  // error of the last attempt to connect
    uint64_t nics = 0;  // identifies the pair of hosts' addresses, without ports
  };
  // State of writing to the socket.
  struct Writing {
    bool is_on = false;     // whether a thread is in Drain
    bool blocked = false;   // whether the socket was full; the poller will report room
    bool writable = false;  // whether the poller has reported room during a write
  };
  // Messages that are being written.
  struct Batch {
    OutgoingList list;
    size_t done = 0;     // bytes already written
    uint64_t epoch = 0;  // epoch of the socket to which the batch is written
  };
  struct Closing {
    bool when_flushed = false;
    bool goodbye_sent = false;
    LinkEnding ending;
  };
  // Acknowledgements by the peer.
  struct Heard {
    OutgoingList arrived;         // messages that have arrived; destroyed without a lock
    uint64_t received = 0;        // the peer's latest count of received messages
    uint64_t before = 0;          // `received` when this socket was adopted
    uint64_t greeting_bytes = 0;  // bytes written to this socket before any message
  };

  // ----- connection.cc
  void Finish();
  void OnWritable();
  void SendingFailed(uint64_t epoch, const std::string& reason);
  void Enqueue(OutgoingPtr outgoing);
  // Writes until the socket is full or the queue is empty. The caller has set writing_.
  void Drain();

  // ----- connection_dial.cc
  void DialAgain(bool elsewhere);
  void TryNext();
  void TryAgain(const std::string& error, bool nobody_listens = false);
  void GiveUpAttempt(Clock::duration after, const std::string& complaint);
  // Ends this attempt or connection, because the greeting is invalid or missing. Called by the
  // poller's thread.
  void Failed(const std::exception& error);
  void OnConnected();
  // Continues the TLS handshake. Returns false if it is incomplete, or has failed.
  bool ShakeHands();
  void SayHello(const Socket& socket);
  bool ReadGreeting() PS_REQUIRES(receive_mu_);
  bool ReadChallenge() PS_REQUIRES(receive_mu_);
  bool ReadReply() PS_REQUIRES(receive_mu_);

  // ----- connection_dial.cc
  // Schedules a probe of the first pair of NICs, which this connection does not use now.
  void LookHome();
  void WarnThatAway();
  void TryHome();
  void GoHome();
  // Returns the seconds without an acknowledgement after which the socket is closed.
  double Silence() const;

  // ----- connection_link.cc
  // Counts the socket's bytes at its NIC. Returns Ends::nics.
  static uint64_t CountAtNic(const Socket& socket);
  // Handles the failure of this epoch's socket.
  void Break(uint64_t epoch, const LinkEnding& ending);
  // Starts an outage, or continues one.
  void BeginOutage(const LinkEnding& ending, Clock::duration patience);
  void ArmDeadline();
  // Returns the time by which the connection must have a socket: its first, or a new one.
  Clock::time_point Deadline() const;
  // Closes the connection, unless the deadline has moved.
  void OnDeadline();
  // Waits until the peer has acknowledged bytes that were sent over the new socket. `again`: number
  // of messages that are sent again over it.
  void AwaitAcknowledgement(size_t again);
  void LookForAcknowledgement(uint64_t epoch, Clock::duration pause);
  bool Acknowledged();
  void EndOutage();
  // Drops the socket, and the incomplete message. `state` is the new state.
  void Detach(State state);
  void AdoptHere(const Socket& socket, const Hello& hello);
  // Continues on a new socket. `received`: number of messages that the peer has received.
  void Resume(uint64_t received);
  std::string GivenUp() const;
  // Handles the peer's count of received messages.
  void OnReceived(uint64_t received);
  // Takes back the memory of the messages in heard_.arrived from index `first` on. They have
  // arrived, so nothing reads it any more.
  void TakeBackFrom(size_t first);
  // Acknowledges received messages, now or soon.
  void TellReceived();

  // ----- connection.cc
  // Reads and handles frames. Unless `to_the_end`, this may stop when it has read what the kernel
  // holds now, since epoll reports later data.
  bool Receive(bool to_the_end);
  void ReadingFailed(const Socket& socket, ssize_t result, int error);
  uint64_t Epoch();
  Socket CurrentSocket();
  // Parses the bytes that were read. Returns true if a message is complete, in `msg`; `*drop` then
  // says whether it was abandoned. Returns false if more bytes are needed.
  bool Parse(Message* msg, size_t* bytes, bool* drop) PS_REQUIRES(receive_mu_);
  void OnFrame(const FrameHeader& header) PS_REQUIRES(receive_mu_);

  ConnectionOwner* const owner_;
  const ConnectionSettings* const settings_;
  const std::shared_ptr<Poller> poller_;
  std::atomic<int> peer_{Node::kEmpty};

  Mutex mu_;
  State state_ PS_GUARDED_BY(mu_) = State::kWaiting;
  Socket socket_ PS_GUARDED_BY(mu_);
  uint64_t epoch_ PS_GUARDED_BY(mu_) = 0;  // counts sockets, to recognize events of earlier ones
  Ends ends_ PS_GUARDED_BY(mu_);
  SendQueue queue_ PS_GUARDED_BY(mu_);
  LinkRate rate_ PS_GUARDED_BY(mu_);
  Writing writing_ PS_GUARDED_BY(mu_);
  Closing closing_ PS_GUARDED_BY(mu_);
  Batch batch_;  // Only the thread that is writing uses this.

  // Only the poller's thread uses these members. (Another thread may set dial_ and hello_ before
  // the poller's thread knows this connection.)
  bool active_ = false;  // this side connects
  DialPlan dial_{kFirstPause, kLongestPause};
  Hello hello_;
  std::string said_;  // the greeting so far, which proofs cover
  bool was_open_ = false;
  OutageWatch outage_;
  Heard heard_;
  Receipts receipts_;

  Mutex receive_mu_;
  // The poller's thread and Abandon use these members.
  Greeting greeting_ PS_GUARDED_BY(receive_mu_) = Greeting::kOver;
  FrameReader reader_ PS_GUARDED_BY(receive_mu_);
};

}  // namespace tcp
}  // namespace ps

#endif  // BYTEPS_NET_TCP_CONNECTION_H_
