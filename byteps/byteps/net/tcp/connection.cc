#include "byteps/net/tcp/connection.h"

#include <poll.h>
#include <sys/epoll.h>

#include <cerrno>
#include <new>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/base/process.h"
#include "byteps/net/tcp/poller.h"
#include "byteps/net/tcp/socket.h"

namespace ps {
namespace tcp {

Connection::Connection(ConnectionOwner* owner, const ConnectionSettings* settings,
                       std::shared_ptr<Poller> poller, std::shared_ptr<MemoryPool> pool)
    : owner_(owner),
      settings_(settings),
      poller_(std::move(poller)),
      outage_(settings->reconnect_s),
      reader_(owner, std::move(pool)) {}

Connection::~Connection() = default;

std::string Connection::dial_error() {
  MutexLock lock(&mu_);
  return state_ == State::kOpen ? "" : ends_.error;
}

bool Connection::is_broken() {
  const Socket socket = CurrentSocket();
  if (!socket || !open()) return true;
  pollfd item{socket->fd(), POLLRDHUP, 0};
  return poll(&item, 1, 0) != 0;
}

std::string Connection::address() {
  MutexLock lock(&mu_);
  return ends_.text;
}

bool Connection::closed() {
  MutexLock lock(&mu_);
  return state_ == State::kClosed;
}

bool Connection::open() {
  MutexLock lock(&mu_);
  return state_ == State::kOpen;
}

LinkLoad Connection::load() {
  MutexLock lock(&mu_);
  return {state_ == State::kOpen,
          state_ == State::kClosed,
          queue_.bytes(),
          queue_.bytes_in_flight(),
          ends_.nics,
          rate_.bytes_per_ns()};
}

// ----------------------------------------------------------------- sending

bool Connection::Send(const Message& msg) {
  OutgoingPtr outgoing = MakeMessage(msg);
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return false;
  }
  Enqueue(std::move(outgoing));
  return true;
}

void Connection::SayGoodbye() { Enqueue(MakeFrame(kGoodbye)); }

void Connection::Enqueue(OutgoingPtr outgoing) {
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed || closing_.goodbye_sent) return;
    // A frame without a message is useful for the current socket only.
    if (outgoing->type != kMessage && state_ != State::kOpen) return;
    closing_.goodbye_sent = outgoing->type == kGoodbye;
    queue_.Push(std::move(outgoing));
    if (state_ != State::kOpen || writing_.is_on || writing_.blocked) return;
    writing_.is_on = true;
  }
  Drain();
}

void Connection::Drain() {
  const ConnectionPtr keep = shared_from_this();
  // Destroyed without a lock, because owners may call Send from their destructors.
  OutgoingList sent;
  ssize_t written = 0;
  int error = 0;
  Socket socket;
  while (true) {
    sent.clear();
    {
      MutexLock lock(&mu_);
      if (batch_.epoch != epoch_) {  // the connection has another socket by now, or none
        sent.swap(batch_.list);
        batch_.epoch = epoch_;
        error = 0;
      } else if (written > 0 && state_ == State::kOpen) {  // Close counts what is left
        queue_.Written(written);
        batch_.done += written;
        if (batch_.done == BytesOf(batch_.list)) sent.swap(batch_.list);
      }
      written = 0;
      if (state_ != State::kOpen) {
        if (sent.empty()) sent.swap(batch_.list);
        writing_.is_on = false;
        return;
      }
      if (error == EAGAIN || error == EWOULDBLOCK) {
        if (!writing_.writable) {
          writing_.is_on = false;
          writing_.blocked = true;
          return;
        }
        writing_.writable = false;  // the socket has had room since
      } else if (error != 0) {
        writing_.is_on = false;
        writing_.blocked = true;  // the writing thread is blocked until the socket changes
        const uint64_t epoch = epoch_;
        lock.Unlock();
        return SendingFailed(epoch, "sending failed: " + socket->Text(error));
      }
      if (batch_.list.empty()) {
        const uint64_t received = receipts_.received();
        batch_.done = 0;
        if (!queue_.TakeBatch(received, &batch_.list)) {
          writing_.is_on = false;
          const bool close = closing_.when_flushed;
          lock.Unlock();
          if (close) Close({"this node closed it", false, true});
          return;
        }
        rate_.Update(queue_.bytes_in_flight(), 0, byteps::core::SteadyNs());
        receipts_.Told(received);
      }
      socket = socket_;
    }
    const auto vector = VectorOf(batch_.list, batch_.done);
    for (const auto& piece : vector) NoteRead(piece);
    for (const auto& outgoing : batch_.list) {
      for (const auto& value : outgoing->values) HandOver(value.data());
    }
    const NotedAlready noted;
    do {
      written = socket->Write(vector.data(), static_cast<int>(vector.size()));
      error = written < 0 ? errno : 0;
    } while (error == EINTR);
  }
}

// Reads before it acts: the peer may have sent a reason or a goodbye before it closed.
void Connection::SendingFailed(uint64_t epoch, const std::string& reason) {
  poller_->Post([self = shared_from_this(), epoch, reason] {
    while (self->OnReady(0)) continue;
    self->Break(epoch, {reason, true, false});
  });
}

void Connection::OnWritable() {
  {
    MutexLock lock(&mu_);
    if (state_ != State::kOpen) return;
    if (writing_.is_on) {
      writing_.writable = true;
      return;
    }
    if (!writing_.blocked) return;
    writing_.blocked = false;
    writing_.is_on = true;
  }
  Drain();
}

bool Connection::flushed() {
  MutexLock lock(&mu_);
  if (state_ == State::kClosed || state_ == State::kDialing || state_ == State::kWaiting) {
    return true;
  }
  return queue_.empty() && !writing_.is_on && !writing_.blocked;
}

bool Connection::all_arrived() {
  MutexLock lock(&mu_);
  return state_ == State::kClosed || queue_.all_arrived();
}

void Connection::CloseWhenFlushed() {
  {
    MutexLock lock(&mu_);
    closing_.when_flushed = true;
    if (state_ == State::kWaiting) {  // no socket will flush the goodbye
      lock.Unlock();
      return Close({"this node closed it", false, true});
    }
    if (writing_.is_on || writing_.blocked || state_ != State::kOpen) return;
    writing_.is_on = true;
  }
  Drain();
}

// ------------------------------------------------------------------ closing

void Connection::Close(const LinkEnding& ending) {
  OutgoingList left, batch;  // destroyed without a lock, because their owners may call Send
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    state_ = State::kClosed;
    closing_.ending = ending;
    left = queue_.TakeAll();
    // A thread that is writing sees that the connection is closed, and drops the batch.
    if (!writing_.is_on) batch.swap(batch_.list);
    if (socket_) shutdown(socket_->fd(), SHUT_RDWR);
  }
  poller_->Post([self = shared_from_this()] { self->Finish(); });
}

void Connection::Finish() {
  LinkEnding ending;
  Socket socket;  // closed without a lock
  {
    MutexLock lock(&mu_);
    socket.swap(socket_);
    if (socket) poller_->Forget(socket->fd());
    ending = closing_.ending;
  }
  {
    Message half;  // the incomplete message is destroyed without a lock
    MutexLock lock(&receive_mu_);
    half = reader_.Restart();
    ending.orderly = ending.orderly || reader_.goodbye();
  }
  owner_->OnClosed(shared_from_this(), ending);
}

bool Connection::OnReady(uint32_t events) {
  State state;
  bool is_plain = false;
  {
    MutexLock lock(&mu_);
    state = state_;
    is_plain = socket_ && !socket_->encrypted();
  }
  try {
    if (state == State::kClosed || state == State::kWaiting) return false;
    if (state == State::kDialing) {
      if (events != 0) OnConnected();
      return false;
    }
    if (events & EPOLLOUT) OnWritable();
    if (events == EPOLLOUT && is_plain) return false;  // an event of writing: nothing to read
    // These events mean that the peer has sent its last data. epoll does not report more data after
    // them.
    const bool to_the_end = events == 0 || (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    return Receive(to_the_end);
  } catch (const std::bad_alloc&) {
    Close({"the node that it was lost to is out of memory", false, false});
    return false;
  } catch (const std::exception& e) {
    Failed(e);
    return false;
  }
}

// Receiving.

namespace {

// Number of bytes read from one connection before the thread serves other connections.
constexpr size_t kTurnBytes = 4 << 20;
// Limit of a message's meta from a peer that is not in the job yet.
constexpr size_t kStrangersMetaBytes = 65536;
// Limit of values that count as a short partition. Others often follow a short partition at once.
constexpr size_t kShortBytes = 192 << 10;

}  // namespace

bool Connection::Receive(bool to_the_end) {
  if (!ShakeHands()) return false;
  bool drained = false;
  for (size_t turn = 0; turn < kTurnBytes && !drained;) {
    const Socket socket = CurrentSocket();
    if (!socket) break;  // the connection is closed, or its socket is being replaced
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
    // Reading stops here, because another read would be wasted: epoll reports later data.
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
  // The first message has not come, so no message is lost.
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
