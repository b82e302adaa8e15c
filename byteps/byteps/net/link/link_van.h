// What the vans of all transports share: who this node is, whom it has links with, and the messages
// and losses that Van's receiving thread hears of.
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

// What a van's receiving thread has to do, from threads that hear of it.

// Of messages and news of lost peers.  It also knows whether the van may be used: not before Open,
// and not after End or Close.
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

  // False once closed.  Otherwise Close waits for EndUse.
  bool BeginUse() {
    MutexLock lock(&mu_);
    if (closed_) return false;
    ++users_;
    return true;
  }
  void EndUse() {
    MutexLock lock(&mu_);
    // Else it would wake the thread that waits for events, with each message that is sent.
    if (--users_ == 0 && closed_) cond_.NotifyAll();
  }

  void Put(Event event) {
    {
      MutexLock lock(&mu_);
      events_.push_back(std::move(event));
    }
    cond_.NotifyAll();
  }

  // Waits for an event.  False once ended: those that are left are not taken.
  bool Take(Event* event) {
    MutexLock lock(&mu_);
    // Ended by End; deadline: none, the receiving thread's.
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return ended_ || !events_.empty(); });
    if (ended_) return false;
    *event = std::move(events_.front());
    events_.pop_front();
    return true;
  }

  // Has Take return; closes.
  void End() {
    MutexLock lock(&mu_);
    closed_ = ended_ = true;
    cond_.NotifyAll();
  }

  // Returns when nobody uses the van any more.
  void Close() {
    MutexLock lock(&mu_);
    closed_ = true;  // also when it never was open
    // Ended by those who send, none of whom blocks; deadline: none.
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

// Link: see PeerTable; it also has SayGoodbye, flushed and all_arrived.
// Derived, which is called without a virtual call for each message, has
//   void Transmit(const Message& msg)                   sends it by a link to another node
//   void OnLinkLost(int id, const LinkEnding& ending)   tells the membership
//   void Dial(const Node& node)                         makes links to another node
//   LinkPtr LinkTo(const Node& node)                    for the first by which it will come
//   void NamePeer(const Node& node)                     who has come is that node
//   void LearnPairs(const Node& scheduler)              it has told of its NICs
template <typename Derived, typename Link>
class LinkVan : public Van, public OfAJob {
 public:
  using Van::Van;

  void SetNode(const Node& node) override {
    Node self = node;
    // The scheduler gives an id back with the rest of what this node told of itself.
    if (token_ != 0) SetToken(token_, &self);
    Van::SetNode(self);
    my_id_ = node.id;
  }

  bool AllArrived() override {
    const auto links = peers_.All();
    return std::all_of(links.begin(), links.end(),
                       [](const auto& link) { return link->all_arrived(); });
  }

  void SetIncarnation(int incarnation) override { job_.SetIncarnation(incarnation); }
  JobNumber* job_number() override { return &job_; }

 protected:
  using Peers = PeerTable<Link>;

  // Before Van::Start.  `may_follow`: a scheduler may go on with the job of one that died.
  void Begin(bool is_scheduler, bool may_follow) {
    token_ = NewToken();
    may_follow_ = is_scheduler && may_follow;
    job_.Set(is_scheduler ? NewJob() : 0);
    inbox_.Open();
    peers_.Open();
  }

  // The membership tells of a node, perhaps again.
  void Connect(const Node& node) final {
    if (node.id == Node::kEmpty) throw Error("a node to connect to has no id");
    Derived* const van = static_cast<Derived*>(this);
    const int rank = Postoffice::IDtoRank(node.id);
    if (AreServers(node.role)) {
      if (DialsNeighbor(Postoffice::IDtoRank(my_id_), rank)) return van->Dial(node);
      return peers_.Expect({TokenOf(node), Node::SERVER, rank}, node.id, van->LinkTo(node));
    }
    if (!ConnectsTo(my_role_, node.role)) {
      // Only the scheduler gives names to who comes; to a server a worker says its own.
      if (is_scheduler_ && node.role != Node::SCHEDULER) van->NamePeer(node);
      return;
    }
    const bool again = node.role == Node::SCHEDULER && !peers_.Of(kScheduler).empty();
    again ? van->LearnPairs(node) : van->Dial(node);
  }

  bool AreServers(uint8_t role) const { return my_role_ == Node::SERVER && role == Node::SERVER; }

  // Whether who asks, and knows such a job, was in it before, and means its scheduler, whichever
  // process that is now.  Then membership says whether this is one.
  bool LooksForScheduler(uint64_t job, bool resumes) const {
    return may_follow_ && job != 0 && !resumes;
  }

  // Never blocks.  Returns the bytes of the message's values, or -1 after Stop.
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
      // Only now: a message before may have given this node, or the peer, its id.
      if (event.from) msg->meta.sender = event.from->peer();
      msg->meta.recver = my_id_;
      return AsInt(event.bytes);
    }
  }

  // A message has come: data is handed to its handler, in this thread.  Throws Error where
  // the peer may not send this.
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

  // Has the receiving thread hear that a link with node `id` is lost, behind what came before.
  void PutLoss(int id, typename Peers::PeerPtr peer, LinkEnding ending) {
    Event event;
    event.is_loss = true;
    event.lost_id = id;
    event.lost = std::move(peer);
    event.ending = std::move(ending);
    inbox_.Put(std::move(event));
  }

  // Waits until what is queued (a goodbye, a failure) has left, for a second at most.
  void Flush() {
    const auto links = peers_.All();
    for (const auto& link : links) link->SayGoodbye();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    for (const auto& link : links) {
      while (!link->flushed() && std::chrono::steady_clock::now() < deadline) {
        // Ended by what was queued having left; deadline: a second for all links.
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }

  // What the receiving thread has to do: hand on a message, or hear of a loss.
  struct Event {
    Message msg;
    size_t bytes = 0;
    std::shared_ptr<Link> from;  // null: a message to itself, or a loss
    bool is_loss = false;
    int lost_id = Node::kEmpty;
    typename Peers::PeerPtr lost;  // null: one that had gone before it was named
    LinkEnding ending;
  };

  uint64_t token_ = 0;
  bool may_follow_ = false;  // this scheduler may go on with the job of one that died
  JobNumber job_;
  std::atomic<int> my_id_{Node::kEmpty};
  Peers peers_;
  VanInbox<Event> inbox_;  // whose users are in SendMsg or Abandon; links stay as long

 private:
  static int AsInt(size_t bytes) { return static_cast<int>(std::min<size_t>(bytes, 1 << 30)); }

  void HandleLoss(const Event& event) {
    // Another process may have its place by now.
    if (peers_.IsReplaced(event.lost_id, event.lost)) return;
    if (event.ending.orderly) return OnDisconnect(event.lost_id);
    static_cast<Derived*>(this)->OnLinkLost(event.lost_id, event.ending);
  }
};

}  // namespace ps

#endif  // BYTEPS_NET_LINK_LINK_VAN_H_
