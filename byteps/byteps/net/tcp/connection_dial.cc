// The side of a connection that connects: dialing, and what is said before the first message.
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "byteps/base/foreign_text.h"
#include "byteps/base/mutex.h"
#include "byteps/net/link/node_token.h"
#include "byteps/net/tcp/connection.h"
#include "dmlc/logging.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace tcp {
namespace {

constexpr auto kFirstPause = std::chrono::milliseconds(20);
constexpr auto kLongestPause = std::chrono::milliseconds(500);
// A socket that is not connected by then, or over which no answer came: perhaps its packets were
// lost, and the kernel would wait ever longer to send them again.
constexpr auto kConnectTime = std::chrono::seconds(2);
constexpr auto kAnswerTime = std::chrono::seconds(5);

// What the other end has decided, and proved to have said: to try again is of no use.
struct Final : dmlc::Error {
  using dmlc::Error::Error;
};

// What will pass by itself: to try again is of use on a first connection, too.
struct NotYet : dmlc::Error {
  using dmlc::Error::Error;
};

}  // namespace

void Connection::Dial(const std::string& host, int port, const Hello& hello,
                      Clock::time_point deadline) {
  active_ = true;
  host_ = host;
  port_ = port;
  hello_ = hello;
  deadline_ = deadline;
  pause_ = kFirstPause;
  {
    MutexLock lock(&mu_);
    state_ = State::kDialing;
  }
  try {
    addresses_ = Resolve(host, port);
  } catch (const dmlc::Error& e) {
    last_error_ = e.what();
  }
  poller_->Post([self = shared_from_this()] { self->TryNext(); });
}

// Poller's thread, like all below.
void Connection::Redial() {
  hello_.resumes = true;
  last_error_.clear();
  outage_.listener_gone = false;
  next_address_ = 0;
  pause_ = kFirstPause;
  TryNext();
}

void Connection::GiveUpAttempt(Clock::duration after, const std::string& complaint) {
  std::weak_ptr<Connection> weak = shared_from_this();
  const uint64_t attempt = attempt_;
  poller_->At(Clock::now() + after, [weak, attempt, complaint] {
    const ConnectionPtr self = weak.lock();
    if (!self || self->attempt_ != attempt) return;
    {
      MutexLock lock(&self->mu_);
      if (self->state_ != State::kGreeting && self->state_ != State::kDialing) return;
    }
    self->TryAgain(complaint);
  });
}

void Connection::TryNext() {
  if (closed()) return;
  ++attempt_;
  if (addresses_.empty()) {  // the name may be known later
    try {
      addresses_ = Resolve(host_, port_);
    } catch (const dmlc::Error& e) {
      return TryAgain(e.what());
    }
  }
  const Address& address = addresses_[next_address_];
  Fd fd = BeginConnect(address);
  if (!fd) return TryAgain(address.Text() + ": " + strerror(errno), errno == ECONNREFUSED);
  const int number = fd.get();
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    state_ = State::kDialing;
    socket_ = std::make_shared<Stream>(std::move(fd), settings_->tls.get(), Stream::kConnects);
    address_ = address.Text();
  }
  try {
    poller_->Watch(number, shared_from_this());
  } catch (const dmlc::Error& e) {
    return TryAgain(e.what());
  }
  GiveUpAttempt(kConnectTime, address.Text() + ": no answer");
}

void Connection::TryAgain(const std::string& error, bool nobody_listens) {
  last_error_ = error;
  ++attempt_;
  Detach(State::kDialing);
  if (closed()) return;
  const auto now = Clock::now();
  if (was_open_) {
    if (nobody_listens && !outage_.listener_gone) listener_gone_at_ = now;
    outage_.listener_gone = nobody_listens;
    if (nobody_listens && now - listener_gone_at_ >= kListenerGoneTime) {
      return Close({GivenUp(), broken_by_peer_, false});
    }
  }
  if (now >= deadline_) {
    return Close({was_open_ ? GivenUp() : "it cannot be reached: " + last_error_, false, false});
  }
  // Another address of the same host at once, and the first again after a while.
  next_address_ = addresses_.empty() ? 0 : (next_address_ + 1) % addresses_.size();
  auto when = now;
  if (next_address_ == 0) {
    when += pause_;
    pause_ = std::min<Clock::duration>(pause_ * 2, kLongestPause);
  }
  poller_->At(std::min(when, deadline_), [self = shared_from_this(), attempt = attempt_] {
    if (self->attempt_ == attempt) self->TryNext();
  });
}

void Connection::Failed(const std::exception& error) {
  bool greets = false;
  {
    MutexLock lock(&mu_);
    greets = state_ == State::kDialing || state_ == State::kGreeting;
  }
  const bool damaged = was_open_ && dynamic_cast<const Final*>(&error) == nullptr;
  const bool passes = dynamic_cast<const NotYet*>(&error) != nullptr;
  if (!greets || !(damaged || passes)) return Close({error.what(), false, false});
  PS_VLOG(1) << "an attempt to connect to node " << peer_ << " failed: " << error.what();
  TryAgain(error.what());
}

void Connection::OnConnected() {
  Socket socket;
  std::string address;
  {
    MutexLock lock(&mu_);
    if (!socket_) return;
    socket = socket_;
    address = address_;
  }
  if (const int error = ConnectError(socket->fd())) {
    return TryAgain(address + ": " + strerror(error), error == ECONNREFUSED);
  }
  SetOptions(socket->fd(), settings_->silence_s);
  {
    MutexLock lock(&receive_mu_);
    phase_ = socket->encrypted() ? Phase::kHandshake : Phase::kChallenge;
    buffer_begin_ = buffer_end_ = 0;
  }
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    state_ = State::kGreeting;
  }
  ++attempt_;
  GiveUpAttempt(kAnswerTime, address + ": it took the connection and said nothing");
  socket->encrypted() ? (void)ShakeHands() : SayHello(socket);
}

bool Connection::ShakeHands() {
  {
    MutexLock lock(&receive_mu_);
    if (phase_ != Phase::kHandshake) return true;
  }
  const Socket socket = CurrentSocket();
  if (!socket) return false;
  switch (socket->Handshake()) {
    case tls::Session::Step::kMore:
      return false;
    case tls::Session::Step::kClosed:
      TryAgain(kLinkClosed);
      return false;
    case tls::Session::Step::kPlain:
      throw dmlc::Error(std::string("it does not encrypt, and this node does: ") + tls::kAdvice);
    case tls::Session::Step::kDone:
      break;
  }
  {
    MutexLock lock(&receive_mu_);
    phase_ = Phase::kChallenge;
  }
  SayHello(socket);
  return true;
}

void Connection::SayHello(const Socket& socket) {
  hello_.authenticates = settings_->secret.is_there();
  hello_.received = receipts_.received();
  hello_.nonce = auth::NewNonce();
  const std::string hello = hello_.Encode();
  said_ = socket->binding() + hello;
  socket->Say(hello);
}

bool Connection::ReadChallenge() {
  const size_t there = buffer_end_ - buffer_begin_;
  if (there >= kPreambleBytes) {
    const std::string mismatch = Mismatch(buffer_.data() + buffer_begin_);
    if (!mismatch.empty()) throw dmlc::Error(mismatch);
  }
  const char* data = Peek(kChallengeBytes);
  if (data == nullptr) return false;
  size_t refusal_bytes = 0;
  const Challenge challenge = DecodeChallenge(data, &refusal_bytes);
  data = Peek(kChallengeBytes + refusal_bytes);
  if (data == nullptr) return false;
  const std::string refusal(data + kChallengeBytes, refusal_bytes);
  Skip(kChallengeBytes + refusal_bytes);
  if (!refusal.empty()) throw dmlc::Error(RefusedBecause(refusal, false));
  const auth::Secret& secret = settings_->secret;
  if (secret.is_there() && !challenge.authenticates) {
    throw dmlc::Error(std::string("it goes without a secret, and this node has one: ") +
                      auth::kAdvice);
  }
  said_ += challenge.Claims();
  if (!secret.Proves(challenge.proof.data(), kWhoListens, said_)) {
    throw dmlc::Error(std::string("it has not this job's secret: ") + auth::kAdvice);
  }
  const std::string complaint = owner_->OnChallenge(shared_from_this(), challenge);
  if (!complaint.empty() && IsBehind(challenge.job, hello_.job)) throw NotYet(complaint);
  if (!complaint.empty()) throw Final(complaint);
  // Should the connection break, it is this very process that is meant, in this incarnation.
  hello_.receiver = challenge.sender;
  hello_.job = challenge.job;
  phase_ = Phase::kReply;
  if (const Socket socket = CurrentSocket()) socket->Say(secret.Prove(kWhoConnects, said_));
  return true;
}

bool Connection::ReadReply() {
  const char* data = Peek(kReplyBytes);
  if (data == nullptr) return false;
  const std::string mismatch = Mismatch(data);
  if (!mismatch.empty()) throw dmlc::Error(mismatch);
  size_t refusal_bytes = 0;
  Reply reply = DecodeReply(data, &refusal_bytes);
  data = Peek(kReplyBytes + refusal_bytes);
  if (data == nullptr) return false;
  reply.refusal.assign(data + kReplyBytes, refusal_bytes);
  Skip(kReplyBytes + refusal_bytes);
  const bool proved =
      settings_->secret.Proves(reply.proof.data(), kWhoReplies, said_ + reply.Claims());
  if (!reply.refusal.empty()) {
    const bool authenticated = proved && settings_->secret.is_there();
    const std::string refusal = RefusedBecause(reply.refusal, authenticated);
    if (proved) throw Final(refusal);
    throw dmlc::Error(refusal);
  }
  if (!proved) throw dmlc::Error("its answer was damaged on the way");
  phase_ = Phase::kHead;
  try {
    Resume(reply.received);
  } catch (const dmlc::Error& e) {
    throw Final(e.what());
  }
  return true;
}

}  // namespace tcp
}  // namespace ps
