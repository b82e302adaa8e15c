// Link to a peer, with messages to send and to receive, over a succession of connections (one queue
// pair at a time).
//
// Sending: a message is sent at once if there is room. Otherwise it is queued, and the plane's
// polling thread, which handles completions, sends it.
//
// Receiving: when a peer requests to send a value, the endpoint tells it a destination, which is
// the memory that the value's owner names, or pooled memory. BYTEPS_RDMA_RECEIVE_WINDOW_BYTES
// limits the bytes of values in flight; further requests wait. The registrar's thread provides
// memory that must be registered first.
//
// Broken connections: the queue pair is stopped. It is destroyed when the device has returned all
// requests, so that memory is no longer read or written. The receiver drops incomplete messages,
// and the sender keeps them. The side that made the connection makes another one, possibly over
// another device (memory is registered with all devices). Both sides first tell how many messages
// they have received (net/link/replay_log.h). Then each side sends the missing messages again, in
// the same order. So each message arrives exactly once. After BYTEPS_RECONNECT_TIMEOUT_S without a
// connection the endpoint closes.
//
// No function blocks, except Abandon.
#ifndef BYTEPS_NET_RDMA_ENDPOINT_H_
#define BYTEPS_NET_RDMA_ENDPOINT_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/counters.h"
#include "byteps/net/link/dial_plan.h"
#include "byteps/net/link/link_outage.h"
#include "byteps/net/link/outage_watch.h"
#include "byteps/net/link/peer_table.h"
#include "byteps/net/rdma/device.h"
#include "byteps/net/rdma/inbox.h"
#include "byteps/net/rdma/outbox.h"
#include "byteps/net/rdma/pool.h"
#include "byteps/net/rdma/posted_sends.h"
#include "byteps/net/rdma/queues.h"
#include "byteps/net/rdma/region.h"
#include "byteps/net/rdma/registrar.h"
#include "byteps/net/rdma/settings.h"
#include "byteps/net/rdma/wire.h"
#include "ps/internal/message.h"

namespace ps {
namespace rdma {

enum class Plane { kControl = 0, kData = 1 };

inline const char* NameOf(Plane plane) { return plane == Plane::kData ? "data" : "control"; }

class Endpoint;
class Poller;

class EndpointOwner {
 public:
  virtual ~EndpointOwner() = default;
  // Returns the buffer for a received value, or null to use pooled memory. Called by the polling
  // thread or the registrar's thread, with a lock of the endpoint held: see Abandon.
  virtual char* PlaceFor(Endpoint* endpoint, const Meta& meta, size_t bytes) = 0;
  // Called by the polling thread. Throws Error if the peer may not send this message.
  virtual void OnMessage(Endpoint* endpoint, Received received) = 0;
  // Called when the connection broke, by any thread, with a lock of the endpoint held. Returns how
  // long the endpoint may be without a connection; 0 closes the endpoint.
  virtual LinkOutage::Clock::duration Patience(Endpoint* endpoint, LinkFault fault) = 0;
  // Called by any thread when the endpoint needs another connection, as soon as MayConnect returns
  // true. `path_failed`: whether a device could not send or got no answer, so that another path is
  // preferable.
  virtual void OnBroken(Endpoint* endpoint, bool path_failed) = 0;
  // Called by the polling thread when a new connection works. `after`: time that the endpoint had
  // no connection. `again`: number of messages that were sent again.
  virtual void OnResumed(Endpoint* endpoint, LinkOutage::Clock::duration after, size_t again) = 0;
  // Called once, by any thread, when the endpoint has closed for good.
  virtual void OnClosed(Endpoint* endpoint, const LinkEnding& ending) = 0;
};

// Public functions are thread-safe, unless stated otherwise.
class Endpoint : public std::enable_shared_from_this<Endpoint> {
 public:
  using Clock = AwakeClock;

  // `active`: whether this side makes the connections.
  Endpoint(EndpointOwner* owner, Plane plane, int index, bool active, const Settings& settings,
           std::shared_ptr<EndpointCounters> counters);
  // Requires finished(), because the device must no longer use the endpoint's memory.
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  Plane plane() const { return plane_; }
  // Returns the poller of this endpoint; null before the first Prepare. Called by the connector's
  // thread.
  Poller* poller() const { return resources_.poller; }
  int index() const { return index_; }
  bool active() const { return active_; }
  EndpointCounters* counters() { return counters_.get(); }
  // The peer's node id, or Node::kEmpty.
  int peer() const { return counters_->peer; }
  void set_peer(int id) { counters_->peer = id; }

  // Identity that a connecting peer has proved. The owner sets it before there is a connection.
  PeerIdentity identity;

  // ----- making a connection: by one thread, before Open

  // Returns whether the last connection is gone, so that a new one can be made.
  bool MayConnect();
  // Returns whether a new connection is needed, as soon as one can be made.
  bool NeedsConnection();
  // Resources shared by a process's endpoints.
  struct Resources {
    std::shared_ptr<Pool> pool;
    std::shared_ptr<Registrar> registrar;
    Devices devices;
    Poller* poller = nullptr;  // serves this endpoint for its whole life
  };
  // The path of a new connection.
  struct Path {
    std::shared_ptr<Device> device;       // one of this process's devices
    ibv_comp_channel* channel = nullptr;  // reports completions
    rdma_cm_id* id = nullptr;
    bool may_move = false;  // whether the connecting side knows other paths
  };
  // Makes the queue pair and posts all receives.
  void Prepare(const Resources& resources, const Path& path);
  // Moves the queue pair to the sending state. `peer_mtu`: an ibv_mtu, or 0.
  void Attach(rdma_cm_id* id, int peer_mtu);
  bool prepared();
  // Drops the objects that Prepare has made, after a failed attempt to connect. When they are gone,
  // MayConnect returns true.
  void Discard();
  void SetPeerSlots(uint32_t slots);
  // Lets the endpoint send, because the peer can receive now.
  void Open();
  uint32_t queue_pair_number();

  // ----- broken connections

  // Drops the unusable connection.
  void Break(const std::string& reason, LinkFault fault);
  // Breaks the connection to switch paths. Returns false if the connection stays, because the
  // endpoint is closing.
  bool Leave(const std::string& reason);
  // If nothing is in flight, sends a request that the peer's device must acknowledge. Without the
  // acknowledgement the connection breaks.
  void AskWhetherItWorks();
  // Returns text such as "10.0.0.1 to 10.0.0.2"; "" without another path.
  std::string path();
  // Time by which the endpoint must have a new connection; time_point::max() if it has one.
  Clock::time_point resume_deadline();
  // Closes the endpoint, because there will be no new connection.
  void GiveUp(const std::string& last_error, bool listener_gone);

  // ----- sending

  // Sends `message` as soon as possible. Drops it if the endpoint is closed.
  void Send(OutgoingPtr message);
  // Returns whether the peer has offered a destination for this answer on the current connection.
  bool HasOffer(const Exchange& exchange);
  // Sends a goodbye after all messages. The peer then knows that no further message comes.
  void SayGoodbye();
  // Says goodbye, and closes the endpoint when the peer has received all messages.
  void CloseWhenFlushed();
  // Returns whether the peer has received all messages and the goodbye. Returns true without a
  // connection, too.
  bool flushed();
  // Returns whether the peer has received all messages, or can receive no more.
  bool all_arrived();
  LinkLoad load();

  // ----- receiving

  // Drops messages whose values are being received into these bytes. When this returns, no device
  // writes there any more. Waits until `deadline` for writes in flight, then breaks the connection.
  // If these bytes were offered to the peer, which could write at any time, breaks the connection
  // at once. Must not be called by PlaceFor, nor with a lock that PlaceFor takes.
  void Abandon(const void* begin, size_t bytes, Clock::time_point deadline);

  // ----- ending

  // Handles a connection that either side has closed. Messages that were received before are still
  // delivered.
  void Disconnected();
  // Closes the endpoint with an error, for good. Later calls change nothing.
  void Fail(const std::string& reason);
  bool closed();
  // Returns whether the peer was ever connected.
  bool was_open();
  // Returns whether the device no longer uses any memory.
  bool finished();

  // ----- the polling thread

  // Requests an event for the next completion. Returns 0 or an errno.
  int Arm();
  // Handles completions. Returns false if there were none.
  bool Poll();
  // Returns whether AskWhatArrived must be called soon. Call after Poll.
  bool Watch();
  void AskWhatArrived();

 private:
  enum class State {
    kConnecting,  // no connection, or one is being made
    kOpen,
    kBroken,  // the last connection is not gone yet
    kClosed,
  };

  // Actions to take when the lock is released.
  struct Deferred {
    std::vector<Received> received;
    OutgoingList done;
    bool broken = false;
    bool path_failed = false;
    bool resumed = false;
    Clock::duration after{};  // duration of the outage
    size_t again = 0;         // messages sent again
    bool closed = false;
    LinkEnding ending;

    bool is_empty() const { return received.empty() && !broken && !resumed && !closed; }
  };

  // wr_id: the number of a send; the slot of a receive with kReceiveFlag.
  static constexpr uint64_t kReceiveFlag = 1ull << 63;

  struct Goodbye {
    bool received = false;
    bool wanted = false;
    bool sent = false;
    bool closes = false;  // whether to close the endpoint when the peer has received all messages
  };

  struct FreeSlots {
    void operator()(char* memory) const;
  };

  // State of a connection. Members are destroyed in reverse order, so the queue pair goes first.
  struct Connection {
    Connection(const Path& path, uint32_t depth, uint64_t window_bytes);

    const std::shared_ptr<Device> device;
    const bool may_move;
    NicCounters* const nic;   // counters of this host's NIC
    const std::string nics;   // "10.0.0.1 to 10.0.0.2"
    const uint64_t nics_key;  // identifies the pair of NICs
    uint32_t max_write = 0;
    std::unique_ptr<char, FreeSlots> slots;  // send slots, then receive slots
    std::unique_ptr<Region> slots_region;
    Owned<ibv_cq> cq;
    Owned<ibv_qp> qp;
    bool attached = false;
    bool disconnected = false;
    bool told_received = false;  // whether the peer knows what this side has received
    // Whether this side knows what the peer has received, and so may send messages.
    bool resumed = false;
    uint32_t inline_bytes = 0;  // limit of bytes that a send can carry inline
    uint32_t receives_posted = 0;
    uint32_t credits = 0;  // free slots of the peer
    uint32_t owed = 0;     // free slots of this side that the peer does not know
    PostedSends sends;

    // Returns whether the device reads no message of the log: the previous connection's requests
    // have returned, and this connection has sent none.
    bool reads_no_message() const { return !resumed || sends.empty(); }
    bool drained() const { return receives_posted == 0 && sends.empty(); }
    bool can_send() const { return sends.has_room() && credits > 1; }
  };

  void Finish(Deferred* deferred);
  void CloseIfFlushed(Deferred* deferred) PS_REQUIRES(mu_);
  void Pump(Deferred* deferred) PS_REQUIRES(mu_);
  bool MayWrite() const PS_REQUIRES(mu_) {
    return outbox_.writing() != nullptr &&
           connection_->sends.bytes() + connection_->max_write <= settings_.window_bytes;
  }
  // Returns whether a frame can be sent now. Returns false after an error of posting, too, which
  // breaks the connection.
  bool CanSend() const PS_REQUIRES(mu_) {
    return state_ == State::kOpen && connection_->can_send();
  }
  // Sends a frame; `body` follows the header. Returns false if the device refused the frame, so
  // that the connection broke.
  bool SendFrame(FrameHeader header, const std::string& body, const Outgoing* content,
                 Deferred* deferred) PS_REQUIRES(mu_);
  void SendBare(FrameType type, Deferred* deferred) PS_REQUIRES(mu_);
  void SendResume(Deferred* deferred) PS_REQUIRES(mu_);
  void SendCts(Deferred* deferred) PS_REQUIRES(mu_);
  void SendNext(Deferred* deferred) PS_REQUIRES(mu_);
  // Takes the destination that the peer has offered for this answer.
  bool TakeOffer(const Outgoing& message, Offer* offer) PS_REQUIRES(mu_);
  void WriteNext(Deferred* deferred) PS_REQUIRES(mu_);
  bool PostSend(ibv_send_wr* request, const PostedSends::Request& what, Deferred* deferred)
      PS_REQUIRES(mu_);
  // Posts a signalled request that does nothing. Its completion shows that all earlier requests are
  // done. It uses no receive and no completion of the peer. Returns 0 or an errno.
  int PostNothing() PS_REQUIRES(mu_);
  // Logs a message whose last request was given to the device. The message has arrived when that
  // request completes.
  void Sent(OutgoingPtr message) PS_REQUIRES(mu_);
  void Complete(const ibv_wc& wc, Deferred* deferred) PS_REQUIRES(mu_);
  void CompleteSend(const ibv_wc& wc, Deferred* deferred) PS_REQUIRES(mu_);
  void BreakAfter(const ibv_wc& wc, const std::string& what, Deferred* deferred) PS_REQUIRES(mu_);
  void CompleteReceive(const ibv_wc& wc, Deferred* deferred) PS_REQUIRES(mu_);
  void ReadFrame(const char* frame, uint32_t bytes, Deferred* deferred) PS_REQUIRES(mu_);
  // The Read functions throw Error if the peer breaks the protocol.
  void ReadContent(const FrameHeader& header, const char* body, uint32_t bytes, Deferred* deferred)
      PS_REQUIRES(mu_);
  void ReadCts(const FrameHeader& header, const char* body, uint32_t bytes) PS_REQUIRES(mu_);
  void ReadResume(const char* body, uint32_t bytes, Deferred* deferred) PS_REQUIRES(mu_);
  void ReadImmediate(uint32_t cookie, Deferred* deferred) PS_REQUIRES(mu_);
  void Deliver(Received parts, Deferred* deferred) PS_REQUIRES(mu_);
  void PutInPlace(Received* received);
  bool Finished() const PS_REQUIRES(mu_) {
    return state_ == State::kClosed && (!connection_ || connection_->drained());
  }

  // ----- endpoint_connection.cc
  std::unique_ptr<Connection> MakeConnection(const Path& path);
  char* SlotOf(uint32_t slot) const PS_REQUIRES(mu_) {
    return connection_->slots.get() + static_cast<size_t>(slot) * slot_bytes_;
  }
  bool PostReceive(uint32_t slot) PS_REQUIRES(mu_);
  // Handles an unusable connection.
  void BreakOff(const std::string& reason, LinkFault fault, Deferred* deferred) PS_REQUIRES(mu_);
  // Handles a request that the device refused.
  void BreakFor(const char* what, int error, Deferred* deferred) PS_REQUIRES(mu_);
  // Drops a broken connection once the device has returned all requests. Called by the polling
  // thread.
  void LetGoIfDrained() PS_REQUIRES(mu_);
  void StopQueuePair() PS_REQUIRES(mu_);

  // ----- endpoint_receive.cc
  void ClearWaiting();
  void ClearSlowly();
  bool MayClear() const PS_REQUIRES(mu_);
  // Provides memory for the first waiting message, and tells the peer. Returns false if only the
  // registrar's thread can provide the memory.
  bool ClearFirst(bool may_block);
  bool FindMemory(const Incoming& incoming, char* place, bool may_block, Memory* memory,
                  const Region** region);
  // Waits until done() returns true, or until `deadline`. Calls done() with mu_ held. Returns the
  // last result of done().
  template <typename Done>
  bool Await(Clock::time_point deadline, Done done) PS_REQUIRES(mu_);
  void Close(const std::string& reason, Deferred* deferred, bool by_peer = false) PS_REQUIRES(mu_);

  EndpointOwner* const owner_;
  const Plane plane_;
  const int index_;
  const bool active_;
  const Settings settings_;
  const uint32_t slot_bytes_;
  const std::shared_ptr<EndpointCounters> counters_;

  Resources resources_;  // set by the first Prepare

  // Held from the time at which the owner chooses a value's destination until the inbox has
  // recorded it.
  Mutex place_mu_;

  Mutex mu_ PS_ACQUIRED_AFTER(place_mu_);
  CondVar cond_;  // notified after completions
  State state_ PS_GUARDED_BY(mu_) = State::kConnecting;
  bool was_open_ PS_GUARDED_BY(mu_) = false;
  // Current connection; null if there is none. While the endpoint lives, only the polling thread
  // drops it.
  std::unique_ptr<Connection> connection_ PS_GUARDED_BY(mu_);
  // An outage ends when both sides know which messages have arrived.
  OutageWatch outage_ PS_GUARDED_BY(mu_);
  Outbox outbox_ PS_GUARDED_BY(mu_);
  Inbox inbox_ PS_GUARDED_BY(mu_);
  Goodbye goodbye_ PS_GUARDED_BY(mu_);
  std::thread::id polling_thread_ PS_GUARDED_BY(mu_);
  Deferred later_ PS_GUARDED_BY(mu_);  // completions that the polling thread saw in Abandon
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_ENDPOINT_H_
