#include "byteps/net/tcp/greeter.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/mutex.h"
#include "byteps/net/tcp/socket.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace tcp {
namespace {}  // namespace

namespace {

// Logs refusals of one kind, rate-limited so that repeated attempts do not fill the log.
class RefusalLog {
 public:
  // Logs a refusal, at most one per minute; further refusals are only counted.
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

// The socket closes when the peer has closed, or when the limit of time or bytes is reached.
void Greeter::Refuse(const std::string& bytes, const std::string& reason) {
  if (!bytes.empty()) socket_->Say(bytes);
  shutdown(number_, SHUT_WR);
  phase_ = Phase::kRefused;
  refused_because_ = reason;
}

bool Greeter::OnReady(uint32_t events) {
  // The socket is writable, and the peer has sent nothing.
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
    Refuse("", e.what());  // a TLS alert has told the peer
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
