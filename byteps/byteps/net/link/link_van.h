// LinkVan: the part of a van that all transports share: identity, links, and the queue of messages
// and losses for Van's receiving thread.
#ifndef BYTEPS_NET_LINK_LINK_VAN_H_
#define BYTEPS_NET_LINK_LINK_VAN_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/peer_table.h"
#include "ps/internal/postoffice.h"
#include "ps/internal/van.h"

namespace ps {

// Queue of a van's receiving thread.
//
// The queue holds messages, and events of lost peers. It also knows whether threads may use the
// van: they may from Open until End or Close.
template <typename Event>
class VanInbox {
 public:
  void Open() {
    MutexLock lock(&mu_);
    closed_ = ended_ = false;
  }

  bool is_open() {
    MutexLock lock(&mu_);
    return !closed_;
  }

  // Returns whether the caller may use the van. If so, the caller must call EndUse afterwards.
  // Close waits until all users have done so.
  bool BeginUse() {
    MutexLock lock(&mu_);
    if (closed_) return false;
    ++users_;
    return true;
  }
  void EndUse() {
    MutexLock lock(&mu_);
    // Only the last user wakes Close. (A notification per message would also wake the thread in
    // Take.)
    if (--users_ == 0 && closed_) cond_.NotifyAll();
  }

  void Put(Event event) {
    {
      MutexLock lock(&mu_);
      events_.push_back(std::move(event));
    }
    cond_.NotifyAll();
  }

  // Waits for an event. Returns false after End, even if events are left.
  bool Take(Event* event) {
    MutexLock lock(&mu_);
    // The wait is ended by End; deadline: none, the receiving thread's.
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return ended_ || !events_.empty(); });
    if (ended_) return false;
    *event = std::move(events_.front());
    events_.pop_front();
    return true;
  }

  // Makes Take return false, and closes.
  void End() {
    MutexLock lock(&mu_);
    closed_ = ended_ = true;
    cond_.NotifyAll();
  }

  // Blocks until no thread uses the van any more.
  void Close() {
    MutexLock lock(&mu_);
    closed_ = true;  // set even if Open was never called
    // The wait is ended by the sending threads, none of which blocks; deadline: none.
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return users_ == 0; });
  }

  void Clear() {
    MutexLock lock(&mu_);
    events_.clear();
  }

 private:
  Mutex mu_;
  CondVar cond_;
  std::deque<Event> events_ PS_GUARDED_BY(mu_);
  bool closed_ PS_GUARDED_BY(mu_) = true;
  bool ended_ PS_GUARDED_BY(mu_) = false;
  int users_ PS_GUARDED_BY(mu_) = 0;
};

// Link has what PeerTable requires, and the functions SayGoodbye, flushed and all_arrived.
// Derived is called without virtual dispatch, since Transmit runs for each message. Derived has
//   void Transmit(const Message& msg): sends over a link to another node
//   void OnLinkLost(int id, const LinkEnding& ending): tells the membership that a link is lost
//   void Dial(const Node& node): makes the links to a node
//   LinkPtr LinkTo(const Node& node): makes the first link of a node that will connect
//   void NamePeer(const Node& node): gives a connected process its node id
//   void LearnPairs(const Node& scheduler): takes note of the scheduler's NICs
template <typename Derived, typename Link>
class LinkVan : public Van, public OfAJob {
 public:
  using Van::Van;

  void SetNode(const Node& node) override {
    Node self = node;
    // The scheduler returns this node's record without its token.
    if (token_ != 0) SetToken(token_, &self);
    Van::SetNode(self);
    my_id_ = node.id;
  }

  bool AllArrived() override {
    const auto links = peers_.All();
    return std::all_of(links.begin(), links.end(),
                       [](const auto& link) { return link->all_arrived(); });
  }

  void SetGeneration(int generation) override { job_.SetGeneration(generation); }
  JobNumber* job_number() override { return &job_; }

 protected:
  using Peers = PeerTable<Link>;

  // Begins a job. Call before Van::Start. `may_follow`: whether a scheduler may take over a dead
  // scheduler's job.
  void Begin(bool is_scheduler, bool may_follow) {
    token_ = NewToken();
    may_follow_ = is_scheduler && may_follow;
    job_.Set(is_scheduler ? NewJob() : 0);
    inbox_.Open();
    peers_.Open();
  }

  // Connects to a node that the membership announces, perhaps again.
  void Connect(const Node& node) final {
    if (node.id == Node::kEmpty) throw Error("a node to connect to has no id");
    Derived* const van = static_cast<Derived*>(this);
    const int rank = Postoffice::IDtoRank(node.id);
    if (AreServers(node.role)) {
      if (DialsNeighbor(Postoffice::IDtoRank(my_id_), rank)) return van->Dial(node);
      return peers_.Expect({TokenOf(node), Node::SERVER, rank}, node.id, van->LinkTo(node));
    }
    if (!ConnectsTo(my_role_, node.role)) {
      // The scheduler alone names processes that connect; a worker tells a server its own id.
      if (is_scheduler_ && node.role != Node::SCHEDULER) van->NamePeer(node);
      return;
    }
    const bool again = node.role == Node::SCHEDULER && !peers_.Of(kScheduler).empty();
    again ? van->LearnPairs(node) : van->Dial(node);
  }

  bool AreServers(uint8_t role) const { return my_role_ == Node::SERVER && role == Node::SERVER; }

  // Returns whether an applicant that knows a job number looks for the scheduler of that job,
  // possibly a restarted one. The membership then decides.
  bool LooksForScheduler(uint64_t job, bool resumes) const {
    return may_follow_ && job != 0 && !resumes;
  }

  // Sends a message. Never blocks. Returns the number of bytes of the message's values, or -1 after
  // Stop.
  int SendMsg(Message& msg) final {
    if (msg.meta.control.cmd == Control::TERMINATE) {
      inbox_.End();
      return 0;
    }
    if (!inbox_.BeginUse()) return -1;
    size_t bytes = 0;
    for (const auto& value : msg.data) bytes += value.size();
    if (msg.meta.recver == my_id_) {
      Event event;
      event.msg = msg;
      event.msg.meta.sender = my_id_;
      inbox_.Put(std::move(event));
    } else {
      static_cast<Derived*>(this)->Transmit(msg);
    }
    inbox_.EndUse();
    return AsInt(bytes);
  }

  int RecvMsg(Message* msg) final {
    while (true) {
      Event event;
      if (!inbox_.Take(&event)) {
        *msg = Message();
        msg->meta.control.cmd = Control::TERMINATE;
        return 0;
      }
      if (event.is_loss) {
        HandleLoss(event);
        continue;
      }
      *msg = std::move(event.msg);
      // The sender's id is read only now, because an earlier message may have given this node or
      // the peer its id.
      if (event.from) msg->meta.sender = event.from->peer();
      msg->meta.recver = my_id_;
      return AsInt(event.bytes);
    }
  }

  // Handles a received message. Calls the data handler in this thread, but leaves control messages
  // to the receiving thread. Throws Error if the peer may not send this message.
  void Deliver(Link* from, Message* msg, size_t bytes) {
    msg->meta.sender = from->peer();
    msg->meta.recver = my_id_;
    if (msg->meta.control.empty()) {
      CheckMember(msg->meta.sender);
      const auto& handler = Postoffice::Get()->handlers().on_message;
      if (handler) handler(msg);
      return;
    }
    CheckControl(msg->meta.control, msg->meta.sender, from->identity, is_scheduler_);
    Event event;
    event.msg = std::move(*msg);
    event.bytes = bytes;
    event.from = from->shared_from_this();
    inbox_.Put(std::move(event));
  }

  // Queues the loss of a link to node `id` for the receiving thread, behind the messages that were
  // received before.
  void PutLoss(int id, typename Peers::PeerPtr peer, LinkEnding ending) {
    Event event;
    event.is_loss = true;
    event.lost_id = id;
    event.lost = std::move(peer);
    event.ending = std::move(ending);
    inbox_.Put(std::move(event));
  }

  // Waits until queued messages (a goodbye, a failure) are written, at most 1 s.
  void Flush() {
    const auto links = peers_.All();
    for (const auto& link : links) link->SayGoodbye();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    for (const auto& link : links) {
      while (!link->flushed() && std::chrono::steady_clock::now() < deadline) {
        // The pause is ended by the queues being flushed; deadline: a second for all links.
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }

  // Work for the receiving thread: a message, or the loss of a peer.
  struct Event {
    Message msg;
    size_t bytes = 0;
    std::shared_ptr<Link> from;  // null: a message of this node to itself, or a loss
    bool is_loss = false;
    int lost_id = Node::kEmpty;
    typename Peers::PeerPtr lost;  // null: the process was gone before it got a node id
    LinkEnding ending;
  };

  uint64_t token_ = 0;
  bool may_follow_ = false;  // this scheduler may take over a dead scheduler's job
  JobNumber job_;
  std::atomic<int> my_id_{Node::kEmpty};
  Peers peers_;
  VanInbox<Event> inbox_;  // used by threads in SendMsg or Abandon, which may use links meanwhile

 private:
  static int AsInt(size_t bytes) { return static_cast<int>(std::min<size_t>(bytes, 1 << 30)); }

  void HandleLoss(const Event& event) {
    // If another process has already taken the node id, the loss does not matter.
    if (peers_.IsReplaced(event.lost_id, event.lost)) return;
    if (event.ending.orderly) return OnDisconnect(event.lost_id);
    static_cast<Derived*>(this)->OnLinkLost(event.lost_id, event.ending);
  }
};

}  // namespace ps

#endif  // BYTEPS_NET_LINK_LINK_VAN_H_
