#include "./greeter.h"

#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "dmlc/logging.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace tcp {
namespace {

// For all that has to be said.  An honest peer that was too slow connects again.
constexpr auto kGreetingTime = std::chrono::milliseconds(1500);

// Once: who tries again and again must not fill the log.
void WarnOnce() {
  static std::atomic<bool> warned{false};
  if (warned.exchange(true)) return;
  LOG(WARNING) << "refused a connection that has not this job's secret (later ones are not logged)";
}

void Say(int fd, const std::string& bytes) {
  // The kernel has room for the first bytes; that the other end is gone is read soon.
  (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

Greeter::Greeter(const Host* host, std::shared_ptr<Poller> poller, Fd fd)
    : host_(host), poller_(std::move(poller)), fd_(std::move(fd)) {}

void Greeter::Start() {
  poller_->Watch(fd_.get(), shared_from_this());
  poller_->At(began_ + kGreetingTime, [weak = weak_from_this()] {
    if (const Ptr self = weak.lock()) self->End("it did not say in time who it is");
  });
}

void Greeter::End(const std::string& reason) {
  if (phase_ == Phase::kDone) return;
  phase_ = Phase::kDone;
  PS_VLOG(1) << "a connection was not taken: " << reason;
  const Ptr self = shared_from_this();
  poller_->Forget(fd_.get());
  fd_.Reset(-1);
  host_->done(self);
}

void Greeter::Refuse(const std::string& bytes, const std::string& reason) {
  Say(fd_.get(), bytes);
  // What it has sent behind is read: to close over it would reset the connection, and take the
  // reason away.
  shutdown(fd_.get(), SHUT_WR);
  char rest[4096];
  while (recv(fd_.get(), rest, sizeof(rest), MSG_DONTWAIT) > 0) continue;
  End(reason);
}

bool Greeter::OnReady(uint32_t /*events*/) {
  try {
    while (Read()) continue;
  } catch (const std::exception& e) {
    End(e.what());
  }
  return false;
}

bool Greeter::Read() {
  if (phase_ == Phase::kDone) return false;
  const size_t wanted = phase_ == Phase::kHello ? kHelloBytes : auth::kProofBytes;
  const ssize_t n = recv(fd_.get(), buffer_.data() + there_, wanted - there_, MSG_DONTWAIT);
  if (n < 0 && errno == EINTR) return true;
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (n <= 0) {
    End(n == 0 ? "it closed" : strerror(errno));
    return false;
  }
  there_ += n;
  if (phase_ == Phase::kHello && there_ >= kPreambleBytes) {
    const std::string mismatch = Mismatch(buffer_.data());
    if (!mismatch.empty()) {
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
  Challenge challenge = host_->challenge();
  challenge.authenticates = host_->secret->is_there();
  if (challenge.authenticates && !hello_.authenticates) {
    challenge.refusal =
        std::string("this job has a secret, and the peer has none: ") + auth::kAdvice;
    return Refuse(challenge.Encode(), "it has no secret");
  }
  challenge.nonce = auth::NewNonce();
  said_.assign(buffer_.data(), kHelloBytes);
  said_ += challenge.Claims();
  challenge.proof = host_->secret->Prove(kWhoListens, said_);
  phase_ = Phase::kProof;
  Say(fd_.get(), challenge.Encode());
}

void Greeter::OnProof() {
  Reply reply;
  if (!host_->secret->Proves(buffer_.data(), kWhoConnects, said_)) {
    reply.refusal = std::string("the peer has not this job's secret: ") + auth::kAdvice;
    WarnOnce();
    return Refuse(reply.Encode(), "it has not this job's secret");
  }
  poller_->Forget(fd_.get());
  reply.refusal = host_->admit(&fd_, hello_);
  if (!reply.refusal.empty()) return Refuse(reply.Encode(), "it was refused: " + reply.refusal);
  phase_ = Phase::kDone;
  host_->done(shared_from_this());
}

}  // namespace tcp
}  // namespace ps
