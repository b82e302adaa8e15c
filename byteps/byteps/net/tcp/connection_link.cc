// What becomes of a connection whose socket broke.
#include <algorithm>
#include <utility>

#include "byteps/base/mutex.h"
#include "byteps/base/probe.h"
#include "byteps/net/tcp/connection.h"
#include "byteps/net/tcp/delivery.h"
#include "byteps/net/tcp/handover.h"
#include "dmlc/logging.h"

namespace ps {
namespace tcp {
namespace {

// What a new socket has at least for the first acknowledgement, or a quarter of
// BYTEPS_RECONNECT_TIMEOUT_S; and when that is looked for.
constexpr auto kAcknowledgementTime = std::chrono::seconds(5);
constexpr auto kFirstLook = std::chrono::milliseconds(5);
constexpr auto kLongestLook = std::chrono::milliseconds(500);

// A connection was made again before this end had noticed that it broke.
constexpr char kUnnoticed[] = "its connection broke";

LinkFault FaultOf(const std::string& reason) {
  if (reason == kTimedOut) return LinkFault::kSilent;
  return reason == kLinkClosed ? LinkFault::kClosed : LinkFault::kBroken;
}

Poller::Clock::duration ToDuration(double seconds) {
  return std::chrono::duration_cast<Poller::Clock::duration>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

// Poller's thread, like all below but Adopt.
void Connection::Break(uint64_t epoch, const LinkEnding& ending) {
  bool in_order = false;
  {
    MutexLock lock(&receive_mu_);
    in_order = goodbye_received_;
  }
  {
    MutexLock lock(&mu_);
    if (epoch != epoch_ || state_ != State::kOpen) return;
    in_order = in_order || goodbye_sent_ || close_when_flushed_;
  }
  const auto patience =
      in_order ? Clock::duration::zero() : owner_->Patience(this, FaultOf(ending.reason));
  if (patience <= Clock::duration::zero()) return Close(ending);
  BeginOutage(ending, patience);
  Detach(active_ ? State::kDialing : State::kWaiting);
  if (active_) Redial();
}

void Connection::BeginOutage(const LinkEnding& ending, Clock::duration patience) {
  if (awaits_acknowledgement_ && Acknowledged()) EndOutage();
  const LinkFault fault = FaultOf(ending.reason);
  LinkOutage next = LinkOutage::Of(ending.reason, fault, patience, settings_->reconnect_s);
  // That it was silent for so long has counted already.
  auto counted = Clock::duration::zero();
  if (fault == LinkFault::kSilent) {
    counted = ToDuration(std::min(settings_->silence_s, settings_->reconnect_s / 2));
  }
  next.deadline -= counted;
  // The last one is not over.
  continues_ = std::exchange(awaits_acknowledgement_, false);
  if (continues_ && outage_.deadline <= next.deadline) return;
  broken_by_peer_ = ending.by_peer;
  if (continues_) {
    next.begin = outage_.begin;
    next.unacknowledged = outage_.unacknowledged;
  } else {
    longest_deadline_ = next.begin + ToDuration(settings_->reconnect_s) - counted;
  }
  outage_ = next;
  ++outages_;
  EndOutageBy(outage_.deadline);
}

void Connection::EndOutageBy(Clock::time_point deadline) {
  deadline_ = outage_.deadline = deadline;
  std::weak_ptr<Connection> weak = shared_from_this();
  poller_->At(deadline, [weak, outage = outages_, deadline] {
    const ConnectionPtr self = weak.lock();
    if (self && self->outages_ == outage && self->deadline_ == deadline) self->OnDeadline();
  });
}

void Connection::OnDeadline() {
  bool open = false;
  {
    MutexLock lock(&mu_);
    open = state_ == State::kOpen;
  }
  if (open) {
    if (!awaits_acknowledgement_) return;
    if (Acknowledged()) return EndOutage();
    // A socket that is there since a moment has its chance, too.
    const auto chance =
        std::min<Clock::duration>(kAcknowledgementTime, ToDuration(settings_->reconnect_s / 4));
    if (Clock::now() < resumed_at_ + chance) return EndOutageBy(resumed_at_ + chance);
  }
  Close({GivenUp(), broken_by_peer_, false});
}

void Connection::AwaitAcknowledgement(size_t again) {
  awaits_acknowledgement_ = true;
  arrived_before_ = arrived_number_;
  resumed_at_ = Clock::now();
  sent_again_ = again;
  // The other end lives, and that was in doubt.
  outage_.briefly = false;
  EndOutageBy(std::max(outage_.deadline, longest_deadline_));
  LookForAcknowledgement(Epoch(), kFirstLook);
}

void Connection::LookForAcknowledgement(uint64_t epoch, Clock::duration pause) {
  std::weak_ptr<Connection> weak = shared_from_this();
  poller_->At(Clock::now() + pause, [weak, epoch, pause] {
    const ConnectionPtr self = weak.lock();
    if (!self || !self->awaits_acknowledgement_ || self->Epoch() != epoch) return;
    if (self->closed()) return;
    if (self->Acknowledged()) return self->EndOutage();
    self->LookForAcknowledgement(epoch, std::min<Clock::duration>(2 * pause, kLongestLook));
  });
}

bool Connection::Acknowledged() {
  const Socket socket = CurrentSocket();
  const Delivery delivery = socket ? DeliveryOf(socket->fd()) : Delivery();
  // By the other end's process, or by its host.
  if (arrived_number_ > arrived_before_ || !delivery.known) return true;
  outage_.unacknowledged = std::max(outage_.unacknowledged, delivery.waiting);
  return delivery.acknowledged > greeting_bytes_;
}

void Connection::EndOutage() {
  awaits_acknowledgement_ = false;
  outage_.unacknowledged = 0;
  owner_->OnResumed(this, resumed_at_ - outage_.begin, sent_again_);
}

std::string Connection::GivenUp() const {
  return outage_.GivenUp(settings_->reconnect_s, active_ ? last_error_ : "");
}

void Connection::Detach(State state) {
  Socket socket;  // closed without a lock
  Message half;   // likewise
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    socket.swap(socket_);
    ++epoch_;
    state_ = state;
  }
  if (socket) {
    poller_->Forget(socket->fd());
    // Whoever still writes to it is told.
    shutdown(socket->fd(), SHUT_RDWR);
  }
  MutexLock lock(&receive_mu_);
  // What came by half comes again.
  std::swap(half, incoming_);
  place_ = nullptr;
  phase_ = Phase::kHead;
  buffer_begin_ = buffer_end_ = 0;
}

void Connection::Adopt(StreamPtr socket, const Hello& hello) {
  poller_->Post([self = shared_from_this(), socket = std::move(socket), hello] {
    try {
      self->AdoptHere(socket, hello);
    } catch (const std::exception& e) {
      self->Close({e.what(), false, false});
    }
  });
}

void Connection::AdoptHere(const Socket& socket, const Hello& hello) {
  Reply reply;
  const auto answer = [&] {
    reply.proof = settings_->secret.Prove(kWhoReplies, hello.said + reply.Claims());
    socket->Say(reply.Encode());
  };
  if (closed()) {
    reply.refusal = "this node has closed the connection";
    return answer();
  }
  bool unnoticed = false;
  {
    MutexLock lock(&mu_);
    unnoticed = state_ == State::kOpen;
  }
  if (unnoticed) BeginOutage({kUnnoticed, true, false}, ToDuration(settings_->reconnect_s));
  Detach(State::kWaiting);
  const int number = socket->fd();
  SetOptions(number, settings_->silence_s);
  reply.received = receipts_.received();
  answer();
  Address address;
  address.length = sizeof(address.storage);
  const bool known =
      getpeername(number, reinterpret_cast<sockaddr*>(&address.storage), &address.length) == 0;
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    socket_ = socket;
    if (known) address_ = address.Text();
  }
  poller_->Watch(number, shared_from_this());
  Resume(hello.received);
  arrived_.clear();
  // What was read and not asked for yet, no socket tells of.
  while (socket->encrypted() && OnReady(0)) continue;
}

void Connection::Resume(uint64_t received) {
  size_t again = 0;
  OutgoingList replayed;
  bool writes = false;
  bool sends = false;
  // Before anything behind the greeting is written.
  if (const Socket socket = CurrentSocket()) greeting_bytes_ = DeliveryOf(socket->fd()).written();
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    const size_t first = arrived_.size();
    // A socket that broke may have had some of them again already.
    for (auto& message : log_.Resume(received, &arrived_)) replayed.push_back(std::move(message));
    for (auto& message : again_) replayed.push_back(std::move(message));
    again_.swap(replayed);
    TakeBackFrom(first);
    again = again_.size();
    sends = again > 0 || !urgent_.empty() || !bulk_.empty();
    queued_bytes_ = BytesOf(again_) + BytesOf(urgent_) + BytesOf(bulk_);
    state_ = State::kOpen;
    blocked_ = writable_ = false;
    writes = !writing_;  // else who wrote to the last socket goes on with this one
    writing_ = true;
  }
  // The other end has got something over the last socket, which this end did not hear.
  if (continues_ && received > arrived_number_) {
    longest_deadline_ = Clock::now() + ToDuration(settings_->reconnect_s);
  }
  arrived_number_ = received;
  if (again > 0) PS_PROBE(kSentAgain);
  if (was_open_) {
    AwaitAcknowledgement(again);
    if (!sends) EndOutage();
  }
  was_open_ = true;
  outage_.listener_gone = false;
  if (writes) Drain();
}

void Connection::OnReceived(uint64_t received) {
  if (received == arrived_number_) return;
  MutexLock lock(&mu_);
  // Closing has taken all that was in flight.
  if (state_ == State::kClosed) return;
  const size_t first = arrived_.size();
  log_.Arrived(received, &arrived_);
  arrived_number_ = received;
  TakeBackFrom(first);
}

void Connection::TakeBackFrom(size_t first) {
  for (size_t i = first; i < arrived_.size(); ++i) {
    for (const auto& value : arrived_[i]->values) TakeBack(value.data());
  }
}

void Connection::TellReceived() {
  switch (receipts_.Next()) {
    case Receipts::Tell::kNothing:
      return;
    case Receipts::Tell::kNow:
      return Enqueue(Frame(kReceived));
    case Receipts::Tell::kSoon:
      break;
  }
  std::weak_ptr<Connection> weak = shared_from_this();
  poller_->At(Clock::now() + Receipts::kSoon, [weak] {
    const ConnectionPtr self = weak.lock();
    if (self && self->receipts_.IsDue()) self->Enqueue(Frame(kReceived));
  });
}

}  // namespace tcp
}  // namespace ps
