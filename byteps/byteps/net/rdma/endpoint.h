// A link to a peer: what waits to be sent, what is being received, over as many connections
// (queue pairs, one at a time) as it takes.
//
// Sending.  The caller queues a message; it leaves at once if there is room.  The rest
// happens in the plane's polling thread, which hands completions in.
//
// Receiving.  A peer that requests to send a value is cleared to write it where the owner
// says that it belongs, or into the pool's memory.  Those in flight at a time are bounded by
// BYTEPS_RDMA_RECEIVE_WINDOW_BYTES; others wait.  Memory that has to be registered first is
// found by the registrar's thread.
//
// A connection that breaks.  The queue pair is stopped, and destroyed when its device has given
// all requests back: nothing is read or written any more.  What was being received is dropped;
// what was being sent waits.  Who had connected connects again, with another queue pair, and
// each side first says how many messages it has received (net/link/replay_log.h).  That may be by
// another device: all memory is registered with each.  What the peer
// has not is sent again, in the same order, and nothing else before that is known.  So each message
// comes exactly once.  After BYTEPS_RECONNECT_TIMEOUT_S without a connection the endpoint closes.
//
// No thread waits in here, but for Abandon.
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
  // Where a value belongs, or null.  The polling or the registrar's thread, with a lock of
  // the endpoint's held: see Abandon.
  virtual char* PlaceFor(Endpoint* endpoint, const Meta& meta, size_t bytes) = 0;
  // The polling thread.  Throws Error when the peer may not send this.
  virtual void OnMessage(Endpoint* endpoint, Received received) = 0;
  // The connection broke.  For how long the endpoint may be without one: 0 closes it.  Any
  // thread, with a lock of the endpoint's held.
  virtual LinkOutage::Clock::duration Patience(Endpoint* endpoint, LinkFault fault) = 0;
  // The endpoint needs another connection, once MayConnect.  `path_failed`: a device could not
  // send, or was not answered, so that another path is better.  Any thread.
  virtual void OnBroken(Endpoint* endpoint, bool path_failed) = 0;
  // It has one, after so long; so many messages are sent again.  The polling thread.
  virtual void OnResumed(Endpoint* endpoint, LinkOutage::Clock::duration after, size_t again) = 0;
  // Once, in any thread.
  virtual void OnClosed(Endpoint* endpoint, const LinkEnding& ending) = 0;
};

// Any thread may call any public function, but for those that say otherwise.
class Endpoint : public std::enable_shared_from_this<Endpoint> {
 public:
  using Clock = AwakeClock;

  // `active`: this side connects.
  Endpoint(EndpointOwner* owner, Plane plane, int index, bool active, const Settings& settings,
           std::shared_ptr<EndpointCounters> counters);
  // Nothing may be in flight any more: see finished().
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  Plane plane() const { return plane_; }
  // Null before the first Prepare.  In the connector's thread.
  Poller* poller() const { return resources_.poller; }
  int index() const { return index_; }
  bool active() const { return active_; }
  EndpointCounters* counters() { return counters_.get(); }
  // The peer's node id, or Node::kEmpty.
  int peer() const { return counters_->peer; }
  void set_peer(int id) { counters_->peer = id; }

  // What the process at the other end has proved to be, where it connected to us: the owner's to
  // set, before there is a connection.
  PeerIdentity identity;

  // ----- making a connection; one thread, before Open

  // Whether one can be made: nothing is left of the last one.
  bool MayConnect();
  // Whether one has to be made, as soon as one can.
  bool NeedsConnection();
  // What the connections of a process share.
  struct Resources {
    std::shared_ptr<Pool> pool;
    std::shared_ptr<Registrar> registrar;
    Devices devices;
    Poller* poller = nullptr;  // of this endpoint, for as long as it lives
  };
  // What is known of a connection before it is there.
  struct Path {
    std::shared_ptr<Device> device;       // among the process's
    ibv_comp_channel* channel = nullptr;  // that tells of completions
    rdma_cm_id* id = nullptr;
    bool may_move = false;  // the side that connects knows other paths
  };
  // Makes the queue pair and posts all receives.
  void Prepare(const Resources& resources, const Path& path);
  // Takes the queue pair to where it sends; `peer_mtu` is an ibv_mtu or 0.
  void Attach(rdma_cm_id* id, int peer_mtu);
  bool prepared();
  // The attempt to connect has failed: lets go of what was prepared for it, after which MayConnect
  // tells.
  void Discard();
  void SetPeerSlots(uint32_t slots);
  // The peer, too, can receive now.
  void Open();
  uint32_t queue_pair_number();

  // ----- a connection that broke

  // Lets go of the connection, which is of no use any more.
  void Break(const std::string& reason, LinkFault fault);
  // Breaks it to make another one over another path, unless it is closing.  False: it stays.
  bool Leave(const std::string& reason);
  // Where nothing is in flight, has the peer's device acknowledge something; if it does not, the
  // connection breaks.
  void AskWhetherItWorks();
  // "10.0.0.1 to 10.0.0.2"; empty where there is no other path.
  std::string path();
  // By when there must be another connection; Clock::time_point::max() if there is one.
  Clock::time_point resume_deadline();
  // There will be none.
  void GiveUp(const std::string& last_error, bool listener_gone);

  // ----- sending

  // Sends `message` when it can.  Drops it once closed.
  void Send(OutgoingPtr message);
  // Whether the peer has offered a place for this answer on the connection that there is.
  bool HasOffer(const Exchange& exchange);
  // Tells the peer that nothing more will come, after all that was sent.
  void SayGoodbye();
  // The same, and closes when the peer has received it all.
  void CloseWhenFlushed();
  // Whether all that was to be sent has been received.
  bool flushed();
  // Whether the peer has received all that was sent, or never will.
  bool all_arrived();
  LinkLoad load();

  // ----- receiving

  // Values in flight into these bytes are received elsewhere, and their message is
  // dropped.  Waits until `deadline` for those that the peer is writing there, and then
  // breaks the endpoint; at once if they were offered to it: who knows when it would write.  When
  // this has returned, nothing is written there any more.  Must
  // not be called with a lock held that PlaceFor takes, nor by PlaceFor.
  void Abandon(const void* begin, size_t bytes, Clock::time_point deadline);

  // ----- ending

  // The connection was closed, by whomever: what was received before still comes.
  void Disconnected();
  // Closes with an error, for good.  Only the first reason counts.
  void Fail(const std::string& reason);
  bool closed();
  // Whether the peer ever was there.
  bool was_open();
  // Whether the device is done with all memory.
  bool finished();

  // ----- the polling thread

  // Asks for an event when something completes; 0 or an errno.
  int Arm();
  // Handles what has completed; false when there was nothing.
  bool Poll();
  // After Poll.  Whether AskWhatArrived must be called soon.
  bool Watch();
  void AskWhatArrived();

 private:
  enum class State {
    kConnecting,  // there is no connection, or one is being made
    kOpen,
    kBroken,  // the last connection is not gone yet
    kClosed,
  };

  // What a call has to do once the lock is released.
  struct Turn {
    std::vector<Received> received;
    OutgoingList done;
    bool broken = false;
    bool path_failed = false;
    bool resumed = false;
    Clock::duration after{};  // it was without a connection for so long
    size_t again = 0;         // messages sent again
    bool closed = false;
    LinkEnding ending;

    bool is_empty() const { return received.empty() && !broken && !resumed && !closed; }
  };

  // wr_id: the number of a send; the slot of a receive, and this.
  static constexpr uint64_t kReceiveFlag = 1ull << 63;

  struct Goodbye {
    bool received = false;
    bool wanted = false;
    bool sent = false;
    bool closes = false;  // when the peer has received it all
  };

  struct FreeSlots {
    void operator()(char* memory) const;
  };

  // What belongs to one connection and goes with it, in the reverse order: the queue pair first.
  struct Connection {
    Connection(const Path& path, uint32_t depth, uint64_t window_bytes);

    const std::shared_ptr<Device> device;
    const bool may_move;
    NicCounters* const nic;   // of this host
    const std::string nics;   // "10.0.0.1 to 10.0.0.2"
    const uint64_t nics_key;  // tells such pairs apart
    uint32_t max_write = 0;
    std::unique_ptr<char, FreeSlots> slots;  // those of sends, then those of receives
    std::unique_ptr<Region> slots_region;
    Owned<ibv_cq> cq;
    Owned<ibv_qp> qp;
    bool attached = false;
    bool disconnected = false;
    bool told_received = false;  // the peer what has come
    bool resumed = false;        // the peer has told the same: messages may be sent
    uint32_t inline_bytes = 0;   // of a send that the device takes with the request
    uint32_t receives_posted = 0;
    uint32_t credits = 0;  // slots of the peer that are free
    uint32_t owed = 0;     // slots of ours that are free again, and the peer does not know
    PostedSends sends;

    // Whether the device has none of the messages in the log: it has given those of the last
    // connection back, and this one was sent none yet.
    bool reads_no_message() const { return !resumed || sends.empty(); }
    bool drained() const { return receives_posted == 0 && sends.empty(); }
    bool can_send() const { return sends.has_room() && credits > 1; }
  };

  void Finish(Turn* turn);
  void CloseIfFlushed(Turn* turn) PS_REQUIRES(mu_);
  void Pump(Turn* turn) PS_REQUIRES(mu_);
  bool MayWrite() const PS_REQUIRES(mu_) {
    return outbox_.writing() != nullptr &&
           connection_->sends.bytes() + connection_->max_write <= settings_.window_bytes;
  }
  // Also after something was posted that broke the connection.
  bool CanSend() const PS_REQUIRES(mu_) {
    return state_ == State::kOpen && connection_->can_send();
  }
  // `body`: what follows the header.  False: the device did not take it, and all is broken.
  bool SendFrame(FrameHeader header, const std::string& body, const Outgoing* content, Turn* turn)
      PS_REQUIRES(mu_);
  void SendBare(FrameType type, Turn* turn) PS_REQUIRES(mu_);
  void SendResume(Turn* turn) PS_REQUIRES(mu_);
  void SendCts(Turn* turn) PS_REQUIRES(mu_);
  void SendNext(Turn* turn) PS_REQUIRES(mu_);
  // Where this answer goes without being asked for.
  bool TakeOffer(const Outgoing& message, Offer* offer) PS_REQUIRES(mu_);
  void WriteNext(Turn* turn) PS_REQUIRES(mu_);
  bool PostSend(ibv_send_wr* request, const PostedSends::Request& what, Turn* turn)
      PS_REQUIRES(mu_);
  // Posts a signalled request that does nothing; 0 or an errno.  It tells that all before it are
  // over, and costs the peer neither a receive nor a completion.
  int PostNothing() PS_REQUIRES(mu_);
  // The device has the request that completes the message, and tells when it has arrived.
  void Sent(OutgoingPtr message) PS_REQUIRES(mu_);
  void Complete(const ibv_wc& wc, Turn* turn) PS_REQUIRES(mu_);
  void CompleteSend(const ibv_wc& wc, Turn* turn) PS_REQUIRES(mu_);
  void BreakAfter(const ibv_wc& wc, const std::string& what, Turn* turn) PS_REQUIRES(mu_);
  void CompleteReceive(const ibv_wc& wc, Turn* turn) PS_REQUIRES(mu_);
  void ReadFrame(const char* frame, uint32_t bytes, Turn* turn) PS_REQUIRES(mu_);
  // These throw Error when the peer says what it may not.
  void ReadContent(const FrameHeader& header, const char* body, uint32_t bytes, Turn* turn)
      PS_REQUIRES(mu_);
  void ReadCts(const FrameHeader& header, const char* body, uint32_t bytes) PS_REQUIRES(mu_);
  void ReadResume(const char* body, uint32_t bytes, Turn* turn) PS_REQUIRES(mu_);
  void ReadImmediate(uint32_t cookie, Turn* turn) PS_REQUIRES(mu_);
  void Deliver(Received parts, Turn* turn) PS_REQUIRES(mu_);
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
  // The connection is of no use any more: what becomes of the endpoint?
  void BreakOff(const std::string& reason, LinkFault fault, Turn* turn) PS_REQUIRES(mu_);
  // For a request that the device did not take.
  void BreakFor(const char* what, int error, Turn* turn) PS_REQUIRES(mu_);
  // Lets go of a connection that broke, once the device is done with it.  The polling thread.
  void LetGoIfDrained() PS_REQUIRES(mu_);
  void StopQueuePair() PS_REQUIRES(mu_);

  // ----- endpoint_receive.cc
  void ClearWaiting();
  void ClearSlowly();
  bool MayClear() const PS_REQUIRES(mu_);
  // Finds memory for the first that waits and has the peer told.  False: the registrar must.
  bool ClearFirst(bool may_block);
  bool FindMemory(const Incoming& incoming, char* place, bool may_block, Memory* memory,
                  const Region** region);
  // Waits until done() or `deadline`, and returns done(), which is called with mu_ held.
  template <typename Done>
  bool Await(Clock::time_point deadline, Done done) PS_REQUIRES(mu_);
  void Close(const std::string& reason, Turn* turn, bool by_peer = false) PS_REQUIRES(mu_);

  EndpointOwner* const owner_;
  const Plane plane_;
  const int index_;
  const bool active_;
  const Settings settings_;
  const uint32_t slot_bytes_;
  const std::shared_ptr<EndpointCounters> counters_;

  Resources resources_;  // set by the first Prepare

  // Held while the owner says where a value belongs, until that is noted.
  Mutex place_mu_;

  Mutex mu_ PS_ACQUIRED_AFTER(place_mu_);
  CondVar cond_;  // something has completed
  State state_ PS_GUARDED_BY(mu_) = State::kConnecting;
  bool was_open_ PS_GUARDED_BY(mu_) = false;
  // Null: there is none.  Only the polling thread lets go of one while the endpoint lives.
  std::unique_ptr<Connection> connection_ PS_GUARDED_BY(mu_);
  OutageWatch outage_ PS_GUARDED_BY(mu_);  // lasts until both ends have said what they have
  Outbox outbox_ PS_GUARDED_BY(mu_);
  Inbox inbox_ PS_GUARDED_BY(mu_);
  Goodbye goodbye_ PS_GUARDED_BY(mu_);
  std::thread::id polling_thread_ PS_GUARDED_BY(mu_);
  Turn later_ PS_GUARDED_BY(mu_);  // what the polling thread saw while it waited in Abandon
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_ENDPOINT_H_
