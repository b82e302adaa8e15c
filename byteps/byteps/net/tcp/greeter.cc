#include "byteps/net/tcp/greeter.h"

#include <arpa/inet.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/mutex.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace tcp {
namespace {

// While no file can be opened, connections wait in the kernel's queue for so long.
constexpr auto kPause = std::chrono::milliseconds(100);
// The same while there is no room for one that has not authenticated.
constexpr auto kShortPause = std::chrono::milliseconds(5);
// Connections that are accepted before others of the poller's thread have their turn: fewer than it
// serves in that turn, so that those that are here get on first.
constexpr int kTurn = 16;

}  // namespace

Listener::Listener(Poller* poller, Fd fd, MayAccept may_accept, OnAccept on_accept)
    : poller_(poller),
      fd_(std::move(fd)),
      may_accept_(std::move(may_accept)),
      on_accept_(std::move(on_accept)) {}

void Listener::Start() { poller_->Watch(fd_.get(), shared_from_this()); }

void Listener::Stop() { poller_->Forget(fd_.get()); }

bool Listener::OnReady(uint32_t /*events*/) {
  for (int i = 0; i < kTurn; ++i) {
    if (!may_accept_()) {
      Pause(kShortPause);
      return false;
    }
    Address peer;
    peer.length = sizeof(peer.storage);
    Fd fd = Fd::Make([&] {
      return accept4(fd_.get(), reinterpret_cast<sockaddr*>(&peer.storage), &peer.length,
                     SOCK_NONBLOCK | SOCK_CLOEXEC);
    });
    if (fd) {
      on_accept_(std::move(fd), peer);
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
    if (!complained_) {
      complained_ = true;
      BPS_LOG(WARNING) << "a connection cannot be accepted: " << strerror(errno)
                       << "; raise the limit of open files (ulimit -n)";
    }
    Pause(kPause);
    return false;
  }
  return true;
}

void Listener::Pause(Poller::Clock::duration pause) {
  if (paused_) return;
  paused_ = true;
  poller_->At(Poller::Clock::now() + pause, [self = shared_from_this()] {
    self->paused_ = false;
    self->TakeTurn();
  });
}

void Listener::TakeTurn() {
  if (OnReady(0)) poller_->Post([self = shared_from_this()] { self->TakeTurn(); });
}

namespace {

// A flood is one line of the log, and another after so long.
constexpr auto kWarnAgain = std::chrono::minutes(1);

}  // namespace

std::string OriginOf(const Address& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (address.storage.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address.storage);
    inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text));
    return text;
  }
  if (address.storage.ss_family != AF_INET6) return text;
  in6_addr network = reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr;
  const bool loopback = IN6_IS_ADDR_LOOPBACK(&network);
  if (!loopback) memset(network.s6_addr + 8, 0, 8);
  inet_ntop(AF_INET6, &network, text, sizeof(text));
  return loopback ? text : std::string(text) + "/64";
}

bool PendingPeers::MayAdd() const {
  return entries_.size() < limits_.room ||
         Poller::Clock::now() - entries_.front().since >= limits_.least;
}

void PendingPeers::Add(Ptr peer, const Address& address) {
  while (!entries_.empty() && entries_.size() >= limits_.room) EvictOne();
  const PendingPeer* const key = peer.get();
  Entry entry{std::move(peer), OriginOf(address), Poller::Clock::now()};
  ++per_origin_[entry.origin];
  places_[key] = entries_.insert(entries_.end(), std::move(entry));
  ArmTimer();
}

void PendingPeers::Remove(const PendingPeer* peer) {
  const auto place = places_.find(peer);
  if (place == places_.end()) return;
  const auto count = per_origin_.find(place->second->origin);
  if (--count->second == 0) per_origin_.erase(count);
  const Ptr last = std::move(place->second->peer);
  entries_.erase(place->second);
  places_.erase(place);
}

void PendingPeers::Clear() {
  places_.clear();
  per_origin_.clear();
  entries_.clear();
}

void PendingPeers::EvictOne() {
  auto victim = std::find_if(entries_.begin(), entries_.end(),
                             [](const Entry& entry) { return entry.peer->answered(); });
  if (victim == entries_.end()) {
    const auto most =
        std::max_element(per_origin_.begin(), per_origin_.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    // Where each of them has one connection, the oldest of all goes.
    victim = most->second == 1
                 ? entries_.begin()
                 : std::find_if(entries_.begin(), entries_.end(),
                                [&](const Entry& entry) { return entry.origin == most->first; });
    ++evicted_;
    WarnOfFlood(most->first, most->second);
  }
  const Ptr peer = victim->peer;
  peer->ResetOnEnd();
  peer->End("too many connect and do not say who they are");
  Remove(peer.get());  // also one that did not
}

void PendingPeers::WarnOfFlood(const std::string& origin, size_t of_origin) {
  const auto now = Poller::Clock::now();
  if (warned_ && now - last_warning_ < kWarnAgain) return;
  warned_ = true;
  last_warning_ = now;
  BPS_LOG(WARNING)
      << "a flood of connections: " << entries_.size() << " at once " << limits_.has_not_done
      << ", " << of_origin << " of them from " << origin << "; closed " << evicted_
      << " so far to admit new ones (logged at most once a minute). Keep that address away "
         "from this port, by a firewall or a network of the job's own";
}

void PendingPeers::ArmTimer() {
  if (timer_armed_ || entries_.empty()) return;
  timer_armed_ = true;
  poller_->At(entries_.front().since + limits_.time, [this] {
    timer_armed_ = false;
    EndLate();
    ArmTimer();
  });
}

void PendingPeers::EndLate() {
  const auto now = Poller::Clock::now();
  while (!entries_.empty() && entries_.front().since + limits_.time <= now) {
    const Ptr peer = entries_.front().peer;
    peer->End(limits_.late);
    Remove(peer.get());
  }
}

namespace {

// Complaints of one kind: who tries again and again must not fill the log.
class RefusalLog {
 public:
  // At most one line a minute; those in between are counted.
  void Warn(const std::string& reason, const std::string& from) {
    const auto now = Poller::Clock::now();
    uint64_t untold = 0;
    {
      MutexLock lock(&mu_);
      if (warned_ && now - last_ < kWarnAgain) {
        ++untold_;
        return;
      }
      warned_ = true;
      last_ = now;
      std::swap(untold, untold_);
    }
    BPS_LOG(WARNING) << "refused a connection: " << reason << " (from " << from
                     << ", logged at most once a minute"
                     << (untold > 0 ? ", " + std::to_string(untold) + " others since then)" : ")");
  }

 private:
  Mutex mu_;
  bool warned_ PS_GUARDED_BY(mu_) = false;
  Poller::Clock::time_point last_ PS_GUARDED_BY(mu_);
  uint64_t untold_ PS_GUARDED_BY(mu_) = 0;
};

struct RefusalLogs {
  RefusalLog secret, plain, encryption;
};

RefusalLogs* Refusals() {
  static auto* const logs = new RefusalLogs();
  return logs;
}

}  // namespace

Greeter::Greeter(const Host* host, std::shared_ptr<Poller> poller, Fd fd, std::string from)
    : host_(host),
      poller_(std::move(poller)),
      number_(fd.get()),
      from_(std::move(from)),
      fd_(std::move(fd)) {}

void Greeter::Start() { poller_->Watch(number_, shared_from_this()); }

void Greeter::ResetOnEnd() { tcp::ResetOnClose(number_); }

void Greeter::End(const std::string& reason) {
  if (phase_ == Phase::kDone) return;
  phase_ = Phase::kDone;
  PS_VLOG(1) << "a connection was not taken: " << reason;
  const auto self = shared_from_this();
  poller_->Forget(number_);
  socket_.reset();
  fd_.Close();
  host_->done(this);
}

// It is closed when the peer has, or when time or bytes have run out.
void Greeter::Refuse(const std::string& bytes, const std::string& reason) {
  if (!bytes.empty()) socket_->Say(bytes);
  shutdown(number_, SHUT_WR);
  phase_ = Phase::kRefused;
  refused_because_ = reason;
}

bool Greeter::OnReady(uint32_t events) {
  // It can be written to, and has said nothing.
  if (events == EPOLLOUT) return false;
  try {
    if (phase_ == Phase::kSilent) {
      socket_ = std::make_shared<Stream>(std::move(fd_), host_->tls.get(), Stream::kListens);
      phase_ = socket_->encrypted() ? Phase::kHandshake : Phase::kHello;
    }
    if (phase_ == Phase::kHandshake && !ShakeHands() && phase_ != Phase::kRefused) return false;
    while (Read()) continue;
    if (phase_ == Phase::kRefused) {
      const Leftovers::Result result = leftovers_.Read(number_);
      if (result == Leftovers::kEnd) End(refused_because_);
      return result == Leftovers::kMore;
    }
  } catch (const std::exception& e) {
    End(e.what());
  }
  return false;
}

bool Greeter::ShakeHands() {
  tls::Session::Step step;
  try {
    step = socket_->Handshake();
  } catch (const Error& e) {
    Refusals()->encryption.Warn(e.what(), from_);
    Refuse("", e.what());  // it was told by an alert
    return false;
  }
  switch (step) {
    case tls::Session::Step::kMore:
      return false;
    case tls::Session::Step::kClosed:
      End("it closed");
      return false;
    case tls::Session::Step::kPlain:
      socket_->GoPlain();
      break;
    case tls::Session::Step::kDone:
      break;
  }
  phase_ = Phase::kHello;
  return true;
}

bool Greeter::Read() {
  if (phase_ != Phase::kHello && phase_ != Phase::kProof) return false;
  const size_t wanted = phase_ == Phase::kHello ? kHelloBytes : auth::kProofBytes;
  const iovec missing = {buffer_.data() + there_, wanted - there_};
  const ssize_t n = socket_->Read(&missing, 1);
  if (n < 0 && errno == EINTR) return true;
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (n <= 0) {
    const int error = errno;
    const std::string reason = n == 0 ? "it closed" : socket_->Text(error);
    if (n < 0 && socket_->Refused(error)) Refusals()->encryption.Warn(reason, from_);
    End(reason);
    return false;
  }
  there_ += n;
  if (phase_ == Phase::kHello && there_ >= kPreambleBytes) {
    const std::string mismatch = Mismatch(buffer_.data());
    if (!mismatch.empty()) {
      if (LooksEncrypted(buffer_.data())) Refusals()->plain.Warn(mismatch, from_);
      Challenge challenge;
      challenge.refusal = "its peer " + mismatch;
      Refuse(challenge.Encode(), mismatch);
      return false;
    }
  }
  if (there_ < wanted) return true;
  there_ = 0;
  phase_ == Phase::kHello ? OnHello() : OnProof();
  return true;
}

void Greeter::OnHello() {
  hello_ = DecodeHello(buffer_.data());
  Challenge challenge = host_->challenge(hello_);
  challenge.authenticates = host_->secret->is_there();
  if (host_->tls && !socket_->encrypted()) {
    challenge.refusal =
        std::string("this job encrypts its connections, and the peer does not: ") + tls::kAdvice;
    Refusals()->plain.Warn(std::string("it does not encrypt, and this job does: ") + tls::kAdvice,
                           from_);
    return Refuse(challenge.Encode(), "it does not encrypt");
  }
  if (challenge.authenticates && !hello_.authenticates) {
    challenge.refusal =
        std::string("this job has a secret, and the peer has none: ") + auth::kAdvice;
    Refusals()->secret.Warn(std::string("it has no secret, and this job has one: ") + auth::kAdvice,
                            from_);
    return Refuse(challenge.Encode(), "it has no secret");
  }
  challenge.nonce = auth::NewNonce();
  said_ = socket_->binding();
  said_.append(buffer_.data(), kHelloBytes);
  said_ += challenge.Claims();
  challenge.proof = host_->secret->Prove(kWhoListens, said_);
  phase_ = Phase::kProof;
  socket_->Say(challenge.Encode());
}

void Greeter::OnProof() {
  Reply reply;
  if (!host_->secret->Proves(buffer_.data(), kWhoConnects, said_)) {
    reply.refusal = std::string("the two nodes have different job secrets: ") + auth::kAdvice;
    Refusals()->secret.Warn(
        std::string("the two nodes have different job secrets: ") + auth::kAdvice, from_);
    return Refuse(reply.Encode(), "the two nodes have different job secrets");
  }
  poller_->Forget(number_);
  hello_.said = said_;
  reply.refusal = host_->admit(socket_, hello_);
  reply.proof = host_->secret->Prove(kWhoReplies, said_ + reply.Claims());
  if (!reply.refusal.empty()) {
    poller_->Watch(number_, shared_from_this());
    return Refuse(reply.Encode(), "it was refused: " + reply.refusal);
  }
  phase_ = Phase::kDone;
  socket_.reset();
  host_->done(this);
}

}  // namespace tcp
}  // namespace ps
