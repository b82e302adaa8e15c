// The side of a connection that dials: it connects, and later returns to its first pair of NICs.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/mutex.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/dial_plan.h"
#include "byteps/net/link/link_outage.h"
#include "byteps/net/tcp/connection.h"
#include "byteps/net/tcp/path_probe.h"
#include "byteps/net/tcp/socket.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace tcp {

namespace {

// Limits of connecting and of the first answer. If packets were lost, the kernel would retry ever
// more slowly.
constexpr auto kConnectTime = std::chrono::seconds(2);
constexpr auto kAnswerTime = std::chrono::seconds(5);
constexpr char kSaidNothing[] = "it took the connection and said nothing";

struct GreetingError : Error {
  GreetingError(GreetingFailure failure, const std::string& text) : Error(text), failure(failure) {}
  const GreetingFailure failure;
};

// `error` is an errno.
std::string WhyNotConnected(const std::string& address, int error) {
  if (error == ECONNREFUSED) return "connection refused: nothing listens at " + address;
  if (error == ETIMEDOUT) {
    return "nothing answers at " + address +
           ": no host has this address, or a firewall drops the packets";
  }
  return address + ": " + strerror(error);
}

}  // namespace

void Connection::Dial(const std::vector<NicPair>& pairs, int port, const Hello& hello,
                      Clock::time_point deadline) {
  active_ = true;
  hello_ = hello;
  {
    MutexLock lock(&mu_);
    state_ = State::kDialing;
  }
  dial_.Begin(pairs, port, deadline);
  poller_->Post([self = shared_from_this()] { self->TryNext(); });
}

// The poller's thread calls this and all functions below.
void Connection::DialAgain(bool elsewhere) {
  hello_.resumes = true;
  dial_.Restart(elsewhere);
  TryNext();
}

void Connection::GiveUpAttempt(Clock::duration after, const std::string& complaint) {
  std::weak_ptr<Connection> weak = shared_from_this();
  const uint64_t attempt = dial_.attempt();
  poller_->At(Clock::now() + after, [weak, attempt, complaint] {
    const ConnectionPtr self = weak.lock();
    if (!self || self->dial_.attempt() != attempt) return;
    {
      MutexLock lock(&self->mu_);
      if (self->state_ != State::kGreeting && self->state_ != State::kDialing) return;
    }
    self->TryAgain(complaint);
  });
}

void Connection::TryNext() {
  if (closed()) return;
  dial_.NextAttempt();
  DialPlan::Route route;
  try {
    route = dial_.Current();
  } catch (const Error& e) {
    return TryAgain(e.what());
  }
  Fd fd = BeginConnect(route.to, route.from);
  if (!fd) return TryAgain(WhyNotConnected(route.Text(), errno), errno == ECONNREFUSED);
  const int number = fd.get();
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    state_ = State::kDialing;
    socket_ = std::make_shared<Stream>(std::move(fd), settings_->tls.get(), Stream::kConnects);
    ends_.text = route.Text();
  }
  try {
    poller_->Watch(number, shared_from_this());
  } catch (const Error& e) {
    return TryAgain(e.what());
  }
  GiveUpAttempt(kConnectTime, WhyNotConnected(route.Text(), ETIMEDOUT));
}

void Connection::TryAgain(const std::string& error, bool nobody_listens) {
  const auto now = Clock::now();
  const auto when = dial_.Failed(error, nobody_listens, now);
  Detach(State::kDialing);
  {
    MutexLock lock(&mu_);
    ends_.error = error;
  }
  if (closed()) return;
  const bool gone = was_open_ && dial_.redial().IsListenerGone(now);
  if (gone) return Close({GivenUp(), outage_.by_peer(), false});
  if (now >= Deadline()) {
    return Close({was_open_ ? GivenUp() : "it cannot be reached: " + error, false, false});
  }
  const uint64_t attempt = dial_.attempt();
  poller_->At(std::min(when, Deadline()), [self = shared_from_this(), attempt] {
    if (self->dial_.attempt() == attempt) self->TryNext();
  });
}

void Connection::Failed(const std::exception& error) {
  bool greets = false;
  {
    MutexLock lock(&mu_);
    greets = state_ == State::kDialing || state_ == State::kGreeting;
  }
  const auto* const said = dynamic_cast<const GreetingError*>(&error);
  const auto failure = said != nullptr ? said->failure : GreetingFailure::kMaybeDamaged;
  if (!greets || !IsOneMoreAttempt(failure, was_open_)) {
    return Close({outage_.Refused(error.what()), false, false});
  }
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
    address = ends_.text;
  }
  if (const int error = ConnectError(socket->fd())) {
    return TryAgain(WhyNotConnected(address, error), error == ECONNREFUSED);
  }
  SetOptions(socket->fd(), Silence());
  const uint64_t nics = CountAtNic(socket);
  {
    MutexLock lock(&receive_mu_);
    greeting_ = socket->encrypted() ? Greeting::kHandshake : Greeting::kChallenge;
    reader_.buffer()->Clear();
  }
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    state_ = State::kGreeting;
    ends_.nics = nics;
    ends_.error = address + ": " + kSaidNothing;
  }
  dial_.NextAttempt();
  GiveUpAttempt(kAnswerTime, address + ": " + kSaidNothing);
  socket->encrypted() ? (void)ShakeHands() : SayHello(socket);
}

bool Connection::ShakeHands() {
  {
    MutexLock lock(&receive_mu_);
    if (greeting_ != Greeting::kHandshake) return true;
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
      throw Error(std::string("it does not encrypt, and this node does: ") + tls::kAdvice);
    case tls::Session::Step::kDone:
      break;
  }
  {
    MutexLock lock(&receive_mu_);
    greeting_ = Greeting::kChallenge;
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

bool Connection::ReadGreeting() {
  if (greeting_ == Greeting::kHandshake) return false;
  return greeting_ == Greeting::kChallenge ? ReadChallenge() : ReadReply();
}

bool Connection::ReadChallenge() {
  ReadBuffer* const buffer = reader_.buffer();
  if (buffer->size() >= kPreambleBytes) {
    const std::string mismatch = Mismatch(buffer->data());
    if (!mismatch.empty()) throw Error(mismatch);
  }
  const char* data = buffer->Peek(kChallengeBytes);
  if (data == nullptr) return false;
  size_t refusal_bytes = 0;
  const Challenge challenge = DecodeChallenge(data, &refusal_bytes);
  data = buffer->Peek(kChallengeBytes + refusal_bytes);
  if (data == nullptr) return false;
  const std::string refusal(data + kChallengeBytes, refusal_bytes);
  buffer->Skip(kChallengeBytes + refusal_bytes);
  if (!refusal.empty()) throw Error(RefusedBecause(refusal, false));
  const auth::Secret& secret = settings_->secret;
  if (secret.is_there() && !challenge.authenticates) {
    throw Error(std::string("it goes without a secret, and this node has one: ") + auth::kAdvice);
  }
  said_ += challenge.Claims();
  if (!secret.Proves(challenge.proof.data(), kWhoListens, said_)) {
    // The answer is an invalid proof. It tells the listener, too, that the secrets differ.
    if (const Socket socket = CurrentSocket()) socket->Say(std::string(auth::kProofBytes, '\0'));
    throw Error(std::string("the two nodes have different job secrets: ") + auth::kAdvice);
  }
  const std::string complaint = owner_->OnChallenge(shared_from_this(), challenge);
  if (!complaint.empty()) {
    const bool behind = IsBehind(challenge.job, hello_.job);
    throw GreetingError(behind ? GreetingFailure::kWillPass : GreetingFailure::kDecided, complaint);
  }
  // From now on only this process may resume the connection, and only in this generation.
  hello_.receiver = challenge.sender;
  hello_.job = challenge.job;
  greeting_ = Greeting::kReply;
  if (const Socket socket = CurrentSocket()) socket->Say(secret.Prove(kWhoConnects, said_));
  return true;
}

bool Connection::ReadReply() {
  ReadBuffer* const buffer = reader_.buffer();
  const char* data = buffer->Peek(kReplyBytes);
  if (data == nullptr) return false;
  const std::string mismatch = Mismatch(data);
  if (!mismatch.empty()) throw Error(mismatch);
  size_t refusal_bytes = 0;
  Reply reply = DecodeReply(data, &refusal_bytes);
  data = buffer->Peek(kReplyBytes + refusal_bytes);
  if (data == nullptr) return false;
  reply.refusal.assign(data + kReplyBytes, refusal_bytes);
  buffer->Skip(kReplyBytes + refusal_bytes);
  const bool proved =
      settings_->secret.Proves(reply.proof.data(), kWhoReplies, said_ + reply.Claims());
  if (!reply.refusal.empty()) {
    const bool authenticated = proved && settings_->secret.is_there();
    const std::string refusal = RefusedBecause(reply.refusal, authenticated);
    if (proved) throw GreetingError(GreetingFailure::kDecided, refusal);
    throw Error(refusal);
  }
  if (!proved) throw Error("its answer was damaged in flight");
  greeting_ = Greeting::kOver;
  try {
    Resume(reply.received);
  } catch (const Error& e) {
    throw GreetingError(GreetingFailure::kDecided, e.what());
  }
  return true;
}

// ----- return to the first pair of NICs

double Connection::Silence() const {
  if (!dial_.has_several_pairs()) return settings_->silence_s;
  return std::min(settings_->silence_s, settings_->switch_s);
}

void Connection::AddPairs(const std::vector<NicPair>& pairs) {
  poller_->Post([self = shared_from_this(), pairs] {
    self->dial_.Add(pairs);
    // While another pair of NICs remains to be tried, the current socket may be closed earlier.
    const Socket socket = self->CurrentSocket();
    if (socket) SetOptions(socket->fd(), self->Silence());
  });
}

// The poller's thread calls this and all functions below.
void Connection::LookHome() {
  std::weak_ptr<Connection> weak = shared_from_this();
  const uint64_t epoch = Epoch();
  poller_->At(Clock::now() + dial_.NextLook(), [weak, epoch] {
    const ConnectionPtr self = weak.lock();
    // If the connection has another socket by now, that socket has scheduled a probe of its own.
    if (self && self->Epoch() == epoch && self->open()) self->TryHome();
  });
}

void Connection::WarnThatAway() {
  LogAway(peer_, dial_.home().Text(), dial_.redial().last_error(), address());
}

void Connection::TryHome() {
  std::weak_ptr<Connection> weak = shared_from_this();
  const uint64_t epoch = Epoch();
  PathProbe::Start(poller_, dial_.home(), [weak, epoch](bool works) {
    const ConnectionPtr self = weak.lock();
    if (!self || self->Epoch() != epoch || !self->open()) return;
    works ? self->GoHome() : self->LookHome();
  });
}

// Breaks the connection on purpose. As after any outage, messages in flight are sent again.
void Connection::GoHome() {
  bool ends = false;
  {
    MutexLock lock(&receive_mu_);
    ends = reader_.goodbye();
  }
  {
    MutexLock lock(&mu_);
    ends = ends || state_ != State::kOpen || closing_.goodbye_sent || closing_.when_flushed;
  }
  const LinkFault fault = LinkFault::kBroken;
  const auto patience = ends ? Clock::duration::zero() : owner_->Patience(this, fault);
  if (patience <= Clock::duration::zero()) return;
  LogHome(peer_, dial_.home().Text());
  BeginOutage({"it went back to its NIC", false, false}, patience);
  Detach(State::kDialing);
  hello_.resumes = true;
  dial_.GoHome();
  TryNext();
}

}  // namespace tcp
}  // namespace ps
