#include "byteps/net/tcp/greeter.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "byteps/base/error.h"
#include "byteps/base/log.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace tcp {
namespace {

// Once for each kind: who tries again and again must not fill the log.
void WarnOnce(std::atomic<bool>* warned, const std::string& reason) {
  if (warned->exchange(true)) return;
  BPS_LOG(WARNING) << "refused a connection: " << reason << " (later ones are not logged)";
}
std::atomic<bool> warned_of_secret{false};
std::atomic<bool> warned_of_plain{false};
std::atomic<bool> warned_of_encryption{false};

}  // namespace

Greeter::Greeter(const Host* host, std::shared_ptr<Poller> poller, Fd fd)
    : host_(host), poller_(std::move(poller)), number_(fd.get()), fd_(std::move(fd)) {}

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
    WarnOnce(&warned_of_encryption, e.what());
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
    if (n < 0 && socket_->Refused(error)) WarnOnce(&warned_of_encryption, reason);
    End(reason);
    return false;
  }
  there_ += n;
  if (phase_ == Phase::kHello && there_ >= kPreambleBytes) {
    const std::string mismatch = Mismatch(buffer_.data());
    if (!mismatch.empty()) {
      if (LooksEncrypted(buffer_.data())) WarnOnce(&warned_of_plain, mismatch);
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
    WarnOnce(&warned_of_plain,
             std::string("it does not encrypt, and this job does: ") + tls::kAdvice);
    return Refuse(challenge.Encode(), "it does not encrypt");
  }
  if (challenge.authenticates && !hello_.authenticates) {
    challenge.refusal =
        std::string("this job has a secret, and the peer has none: ") + auth::kAdvice;
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
    WarnOnce(&warned_of_secret, "the two nodes have different job secrets");
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
