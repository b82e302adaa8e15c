// One connection: a queue pair, its slots, its credits, and what waits for them.
//
// Whoever sends queues a message; it leaves at once if there is room.  The rest happens in
// the plane's polling thread, which hands completions in.  No thread ever waits in here.
#ifndef PS_RDMA_ENDPOINT_H_
#define PS_RDMA_ENDPOINT_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "./message_parts.h"
#include "./pool.h"
#include "./settings.h"
#include "./verbs.h"
#include "./wire.h"
#include "ps/endpoint_counters.h"
#include "ps/internal/message.h"

namespace ps {
namespace rdma {

enum class Plane { kControl = 0, kData = 1 };

inline const char* NameOf(Plane plane) { return plane == Plane::kData ? "data" : "control"; }

class Endpoint;

// Why an endpoint was closed.
struct Ending {
  std::string reason;
  bool orderly = false;  // the peer had said goodbye
  bool by_peer = false;  // and this side has nothing to say of the reason
};

class EndpointOwner {
 public:
  virtual ~EndpointOwner() = default;
  // The frame's parts; the polling thread.  Throws dmlc::Error when the meta is none.
  virtual void OnMessage(Endpoint* endpoint, Received received) = 0;
  // Once, in any thread.
  virtual void OnClosed(Endpoint* endpoint, const Ending& ending) = 0;
};

// Any thread may call any public function, but for those that say otherwise.
class Endpoint {
 public:
  // `active`: this side connects.
  Endpoint(EndpointOwner* owner, Plane plane, int index, bool active, const Settings& settings,
           std::shared_ptr<EndpointCounters> counters);
  // Nothing may be under way any more: see finished().
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  Plane plane() const { return plane_; }
  int index() const { return index_; }
  bool active() const { return active_; }
  EndpointCounters* counters() { return counters_.get(); }

  // ----- making the connection; one thread, before Open

  // Makes the queue pair for the connection `id` and posts all receives.  Completions are
  // told through `channel`.
  void Prepare(std::shared_ptr<Pool> pool, std::shared_ptr<Device> device,
               ibv_comp_channel* channel, rdma_cm_id* id);
  // Takes the queue pair to where it sends; `peer_mtu` is an ibv_mtu or 0.
  void Attach(rdma_cm_id* id, int peer_mtu);
  bool prepared() const { return qp_ != nullptr; }
  void SetPeerSlots(uint32_t slots);
  // The peer, too, can receive now.
  void Open();
  uint32_t queue_pair_number() const { return qp_->qp_num; }

  // ----- sending

  // Sends `message` when it can.  Drops it once closed.
  void Send(OutgoingPtr message);
  // Tells the peer that nothing more will come, after all that was sent.
  void SayGoodbye();
  // Whether all that was to be sent has been received.
  bool flushed();
  size_t queued_bytes();

  // ----- ending

  // The connection was closed, by whomever: what was received before still comes.
  void Disconnected();
  // Closes with an error.  Only the first reason counts.
  void Fail(const std::string& reason);
  bool closed();
  // Whether the peer ever was there.
  bool was_open();
  // Whether the device is done with all memory.
  bool finished();

  // ----- the polling thread

  ibv_cq* completion_queue() { return cq_.get(); }
  // Handles what has completed; false when there was nothing.
  bool Poll();

 private:
  // The reason when there is none but that.
  static constexpr char kClosed[] = "its connection closed";

  enum class State { kConnecting, kOpen, kClosed };

  // What a call has to do once the lock is released.
  struct Turn {
    std::vector<Received> received;
    std::vector<OutgoingPtr> done;
    bool closed = false;
    Ending ending;
  };

  // A request to the device that has not completed.
  struct Sending {
    OutgoingPtr message;  // to be let go of then
    uint8_t type = 0;     // a FrameType; 0: a write
    uint64_t key = 0;     // of the message
    uint32_t bytes = 0;   // of a write
  };

  struct Incoming {
    Received parts;
    uint32_t meta_in_region = 0;  // bytes
    std::vector<uint64_t> sizes;
    SArray<char> region;
  };

  struct Grant {
    uint32_t id;
    GrantBody body;
  };

  void Finish(Turn* turn);
  void Pump(Turn* turn);
  bool MayWrite() const {
    return !writes_.empty() && posted_bytes_ + max_write_ <= settings_.window_bytes;
  }
  bool CanSend() const { return !free_slots_.empty() && credits_ > 1; }
  char* SlotOf(uint32_t slot) { return slots_.get() + static_cast<size_t>(slot) * slot_bytes_; }
  bool PostReceive(uint32_t slot);
  void SendFrame(FrameType type, uint32_t id, const Outgoing* content, const GrantBody* grant,
                 Turn* turn);
  void SendNext(Turn* turn);
  void WriteNext(Turn* turn);
  void PostSend(ibv_send_wr* request, Turn* turn);
  void Complete(const ibv_wc& wc, Turn* turn);
  void CompleteSend(const ibv_wc& wc, Turn* turn);
  void CompleteReceive(const ibv_wc& wc, Turn* turn);
  void ReadFrame(const char* frame, uint32_t bytes, Turn* turn);
  // These throw dmlc::Error when the peer says what it may not.
  void ReadContent(const FrameHeader& header, const char* body, uint32_t bytes, Turn* turn);
  void ReadGrant(const FrameHeader& header, const char* body, uint32_t bytes);
  void ReadImmediate(uint32_t cookie, Turn* turn);
  void Deliver(Received parts, Turn* turn);
  void Close(const std::string& reason, Turn* turn, bool by_peer = false);
  // For a request that the device did not take.
  void CloseFor(const char* what, int error, Turn* turn);
  void StopQueuePair();

  EndpointOwner* const owner_;
  const Plane plane_;
  const int index_;
  const bool active_;
  const Settings settings_;
  const uint32_t slot_bytes_;
  const std::shared_ptr<EndpointCounters> counters_;

  // Made by Prepare.  Members go in the reverse order: the queue pair first.
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<Device> device_;
  uint32_t max_write_ = 0;
  struct FreeSlots {
    void operator()(char* memory) const;
  };
  std::unique_ptr<char, FreeSlots> slots_;  // those of sends, then those of receives
  std::unique_ptr<Region> slots_region_;
  Owned<ibv_cq> cq_;
  Owned<ibv_qp> qp_;

  std::mutex mu_;
  // All below is guarded by mu_.
  State state_ = State::kConnecting;
  bool was_open_ = false;
  bool disconnected_ = false;
  bool goodbye_received_ = false;
  bool goodbye_wanted_ = false;
  bool goodbye_sent_ = false;
  uint32_t receives_posted_ = 0;
  uint32_t credits_ = 0;  // slots of the peer that are free
  uint32_t owed_ = 0;     // slots of ours that are free again, and the peer does not know
  std::vector<uint32_t> free_slots_;
  std::vector<Sending> sending_;  // by slot
  std::deque<OutgoingPtr> outbox_;
  std::deque<Grant> grants_;
  std::deque<OutgoingPtr> writes_;                     // granted
  std::unordered_map<uint32_t, OutgoingPtr> offered_;  // by id
  std::unordered_map<uint32_t, Incoming> incoming_;    // by cookie
  uint32_t last_id_ = 0;
  uint32_t last_cookie_ = 0;
  size_t queued_bytes_ = 0;
  uint64_t posted_bytes_ = 0;  // of writes that have not completed
};

}  // namespace rdma
}  // namespace ps
#endif  // PS_RDMA_ENDPOINT_H_
