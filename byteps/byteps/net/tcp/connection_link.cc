// Outages of a connection: its socket breaks, and another one replaces it.
#include <linux/sockios.h>
#include <linux/tcp.h>  // netinet/tcp.h lacks newer fields, and conflicts with this header
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/base/process.h"
#include "byteps/net/link/counters.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/tcp/connection.h"
#include "byteps/net/tcp/socket.h"
#include "byteps/net/tcp/stream.h"

namespace ps {
namespace tcp {
namespace {

// First and longest pause between checks whether the peer has acknowledged bytes of a new socket.
constexpr auto kFirstLook = std::chrono::milliseconds(5);
constexpr auto kLongestLook = std::chrono::milliseconds(500);

// Reason of an outage that this end has not noticed before the peer connects again.
constexpr char kUnnoticed[] = "its connection broke";

LinkFault FaultOf(const std::string& reason) {
  if (reason == kTimedOut) return LinkFault::kSilent;
  return reason == kLinkClosed ? LinkFault::kClosed : LinkFault::kBroken;
}

}  // namespace

// The poller's thread calls this and all functions below, except Adopt.
void Connection::Break(uint64_t epoch, const LinkEnding& ending) {
  bool in_order = false;
  {
    MutexLock lock(&receive_mu_);
    in_order = reader_.goodbye();
  }
  {
    MutexLock lock(&mu_);
    if (epoch != epoch_ || state_ != State::kOpen) return;
    in_order = in_order || closing_.goodbye_sent || closing_.when_flushed;
  }
  const auto patience =
      in_order ? Clock::duration::zero() : owner_->Patience(this, FaultOf(ending.reason));
  if (patience <= Clock::duration::zero()) return Close(ending);
  BeginOutage(ending, patience);
  Detach(active_ ? State::kDialing : State::kWaiting);
  if (active_) DialAgain(FaultOf(ending.reason) == LinkFault::kSilent);
}

void Connection::BeginOutage(const LinkEnding& ending, Clock::duration patience) {
  if (outage_.awaits_proof() && Acknowledged()) EndOutage();
  const LinkFault fault = FaultOf(ending.reason);
  // The silence before the break counts towards the time that the peer has to reconnect.
  auto counted = Clock::duration::zero();
  if (fault == LinkFault::kSilent) {
    counted = ToDuration(std::min(Silence(), settings_->reconnect_s / 2));
  }
  if (outage_.Begin(ending.reason, fault, ending.by_peer, patience, counted)) ArmDeadline();
}

void Connection::ArmDeadline() {
  std::weak_ptr<Connection> weak = shared_from_this();
  const auto deadline = outage_.deadline();
  poller_->At(deadline, [weak, outage = outage_.number(), deadline] {
    const ConnectionPtr self = weak.lock();
    if (!self || self->outage_.number() != outage || self->outage_.deadline() != deadline) return;
    self->OnDeadline();
  });
}

Connection::Clock::time_point Connection::Deadline() const {
  return was_open_ ? outage_.deadline() : dial_.deadline();
}

void Connection::OnDeadline() {
  bool open = false;
  {
    MutexLock lock(&mu_);
    open = state_ == State::kOpen;
  }
  if (open) {
    if (!outage_.awaits_proof()) return;
    if (Acknowledged()) return EndOutage();
    // The new socket still has time to prove that it works.
    if (Clock::now() < outage_.ChanceUntil()) {
      outage_.PostponeTo(outage_.ChanceUntil());
      return ArmDeadline();
    }
  }
  Close({GivenUp(), outage_.by_peer(), false});
}

void Connection::AwaitAcknowledgement(size_t again) {
  heard_.before = heard_.received;
  outage_.AwaitProof(again);
  ArmDeadline();
  LookForAcknowledgement(Epoch(), kFirstLook);
}

void Connection::LookForAcknowledgement(uint64_t epoch, Clock::duration pause) {
  std::weak_ptr<Connection> weak = shared_from_this();
  poller_->At(Clock::now() + pause, [weak, epoch, pause] {
    const ConnectionPtr self = weak.lock();
    if (!self || !self->outage_.awaits_proof() || self->Epoch() != epoch) return;
    if (self->closed()) return;
    if (self->Acknowledged()) return self->EndOutage();
    self->LookForAcknowledgement(epoch, std::min<Clock::duration>(2 * pause, kLongestLook));
  });
}

bool Connection::Acknowledged() {
  const Socket socket = CurrentSocket();
  const Delivery delivery = socket ? DeliveryOf(socket->fd()) : Delivery();
  // Both acknowledgements count: by the peer's process, and by the kernel of its host.
  if (heard_.received > heard_.before || !delivery.known) return true;
  outage_.NoteUnacknowledged(delivery.waiting);
  return delivery.acknowledged > heard_.greeting_bytes;
}

void Connection::EndOutage() {
  const auto after = outage_.End();
  owner_->OnResumed(this, after, outage_.again());
}

std::string Connection::GivenUp() const {
  const Redial& redial = dial_.redial();
  return outage_.GivenUp(redial.nobody_listens(), active_ ? redial.last_error() : "");
}

void Connection::Detach(State state) {
  Socket socket;  // closed without a lock
  Message half;   // destroyed without a lock
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    socket.swap(socket_);
    ++epoch_;
    state_ = state;
  }
  if (socket) {
    poller_->Forget(socket->fd());
    // A thread that still writes to the socket stops.
    shutdown(socket->fd(), SHUT_RDWR);
  }
  MutexLock lock(&receive_mu_);
  // The peer sends the incomplete message again.
  half = reader_.Restart();
  reader_.buffer()->Clear();
  greeting_ = Greeting::kOver;
}

uint64_t Connection::CountAtNic(const Socket& socket) {
  const HostPair hosts = HostsOf(socket->fd());
  socket->CountAt(CountersOfNic(hosts.here, hosts.there));
  return std::hash<std::string>()(hosts.here + " " + hosts.there);
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
  SetOptions(number, Silence());
  const uint64_t nics = CountAtNic(socket);
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
    if (known) ends_.text = address.Text();
    ends_.nics = nics;
  }
  poller_->Watch(number, shared_from_this());
  Resume(hello.received);
  heard_.arrived.clear();
  // epoll does not report data that TLS has already read.
  while (socket->encrypted() && OnReady(0)) continue;
}

void Connection::Resume(uint64_t received) {
  size_t again = 0;
  bool writes = false;
  bool sends = false;
  // The bytes of the greeting are counted before anything follows it.
  if (const Socket socket = CurrentSocket()) {
    heard_.greeting_bytes = DeliveryOf(socket->fd()).written();
  }
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    const size_t first = heard_.arrived.size();
    again = queue_.Resume(received, &heard_.arrived);
    rate_ = LinkRate();  // the new socket may use other NICs
    TakeBackFrom(first);
    sends = !queue_.empty();
    state_ = State::kOpen;
    writing_.blocked = writing_.writable = false;
    writes = !writing_.is_on;  // a thread that is already writing continues by itself
    writing_.is_on = true;
  }
  if (received > heard_.received) outage_.HearProofOfTheLast();
  heard_.received = received;
  if (again > 0) PS_PROBE(kSentAgain);
  if (was_open_) {
    AwaitAcknowledgement(again);
    if (!sends) EndOutage();
  }
  const bool first = !std::exchange(was_open_, true);
  if (dial_.is_away()) {
    if (first) WarnThatAway();
    LookHome();
  }
  dial_.Succeeded(Clock::now());
  if (writes) Drain();
}

void Connection::OnReceived(uint64_t received) {
  if (received == heard_.received) return;
  MutexLock lock(&mu_);
  // If the connection is closed, Close has already taken the messages in flight.
  if (state_ == State::kClosed) return;
  const size_t first = heard_.arrived.size();
  const size_t before = queue_.bytes_in_flight();
  queue_.Arrived(received, &heard_.arrived);
  const size_t in_flight = queue_.bytes_in_flight();
  rate_.Update(in_flight, before - in_flight, byteps::core::SteadyNs());
  heard_.received = received;
  TakeBackFrom(first);
}

void Connection::TakeBackFrom(size_t first) {
  for (size_t i = first; i < heard_.arrived.size(); ++i) {
    for (const auto& value : heard_.arrived[i]->values) TakeBack(value.data());
  }
}

void Connection::TellReceived() {
  switch (receipts_.Next()) {
    case Receipts::Tell::kNothing:
      return;
    case Receipts::Tell::kNow:
      return Enqueue(MakeFrame(kReceived));
    case Receipts::Tell::kSoon:
      break;
  }
  std::weak_ptr<Connection> weak = shared_from_this();
  poller_->At(Clock::now() + Receipts::kSoon, [weak] {
    const ConnectionPtr self = weak.lock();
    if (self && self->receipts_.IsDue()) self->Enqueue(MakeFrame(kReceived));
  });
}

Delivery DeliveryOf(int fd) {
  Delivery delivery;
  tcp_info info{};
  socklen_t length = sizeof(info);
  int waiting = 0;
  constexpr size_t kWanted = offsetof(tcp_info, tcpi_bytes_acked) + sizeof(info.tcpi_bytes_acked);
  delivery.known = getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 &&
                   length >= kWanted && ioctl(fd, SIOCOUTQ, &waiting) == 0;
  if (!delivery.known) return delivery;
  delivery.acknowledged = info.tcpi_bytes_acked;
  delivery.waiting = waiting;
  return delivery;
}

}  // namespace tcp
}  // namespace ps
