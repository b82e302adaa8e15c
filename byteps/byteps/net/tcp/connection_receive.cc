// What a connection reads.
#include <cerrno>

#include "byteps/base/error.h"
#include "byteps/base/mutex.h"
#include "byteps/net/tcp/connection.h"

namespace ps {
namespace tcp {
namespace {

// Read from one connection before the others of its thread have their turn.
constexpr size_t kTurnBytes = 4 << 20;
// What a peer that is no member of the job may say at once.
constexpr size_t kStrangersMetaBytes = 65536;
// A message with values that has no more bytes is of a short sum: what follows it comes soon.
constexpr size_t kShortBytes = 16384;

}  // namespace

bool Connection::Receive(bool to_the_end) {
  if (!ShakeHands()) return false;
  bool drained = false;
  for (size_t turn = 0; turn < kTurnBytes && !drained;) {
    const Socket socket = CurrentSocket();
    if (!socket) break;  // it was closed, or another one is being made
    MutexLock lock(&receive_mu_);
    bool all = false;
    const ssize_t n = reader_.Read(socket.get(), &all);
    if (n <= 0) {
      const int error = errno;
      lock.Unlock();
      if (n < 0 && error == EINTR) continue;
      if (n < 0 && (error == EAGAIN || error == EWOULDBLOCK)) break;
      ReadingFailed(socket, n, error);
      return false;
    }
    turn += n;
    // Whatever comes from now on is told of anew: not to look for it saves a call.
    drained = all && !to_the_end;
    Message msg;
    size_t bytes = 0;
    bool drop = false;
    while (Parse(&msg, &bytes, &drop)) {
      lock.Unlock();  // the owner may call Abandon
      receipts_.Came(bytes);
      if (!msg.data.empty() && bytes <= kShortBytes) poller_->StayAwake();
      if (!drop) owner_->OnMessage(this, &msg, bytes);
      msg = Message();
      heard_.arrived.clear();
      if (closed()) return false;
      lock.Lock();
    }
    lock.Unlock();
    heard_.arrived.clear();
    if (closed()) return false;
    if (turn >= kTurnBytes && !drained) {
      TellReceived();
      return true;
    }
  }
  TellReceived();
  return false;
}

void Connection::ReadingFailed(const Socket& socket, ssize_t result, int error) {
  bool greeting = false;
  {
    MutexLock lock(&receive_mu_);
    greeting = greeting_ == Greeting::kChallenge || greeting_ == Greeting::kReply;
  }
  if (result < 0 && greeting && socket->Refused(error)) throw Error(socket->Text(error));
  const std::string reason = result == 0           ? kLinkClosed
                             : error == ECONNRESET ? kReset
                             : error == ETIMEDOUT ? kTimedOut
                                                  : "its connection failed: " + socket->Text(error);
  // Nothing was said yet, so that nothing is lost.
  greeting ? TryAgain(reason) : Break(Epoch(), {reason, true, false});
}

Connection::Socket Connection::CurrentSocket() {
  MutexLock lock(&mu_);
  return socket_;
}

uint64_t Connection::Epoch() {
  MutexLock lock(&mu_);
  return epoch_;
}

bool Connection::Parse(Message* msg, size_t* bytes, bool* drop) {
  while (greeting_ != Greeting::kOver) {
    if (!ReadGreeting()) return false;
  }
  while (true) {
    switch (reader_.Next()) {
      case FrameReader::Step::kMore:
        return false;
      case FrameReader::Step::kHead:
        OnFrame(reader_.header());
        break;
      case FrameReader::Step::kMessage:
        *drop = !reader_.Take(msg, bytes);
        return true;
    }
  }
}

void Connection::OnFrame(const FrameHeader& header) {
  OnReceived(header.received);
  const bool stranger = peer_ == Node::kEmpty;
  reader_.SetSender(peer_);
  if (stranger && (header.meta_bytes > kStrangersMetaBytes || header.values > 0)) {
    throw Error("it sent values, or a long message, before it was a member of the job");
  }
}

void Connection::Abandon(const void* begin, size_t bytes) {
  MutexLock lock(&receive_mu_);
  reader_.Abandon(begin, bytes);
}

}  // namespace tcp
}  // namespace ps
