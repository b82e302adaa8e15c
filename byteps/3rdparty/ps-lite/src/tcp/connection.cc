#include "./connection.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "../meta_codec.h"
#include "dmlc/logging.h"
#include "ps/wire_bytes.h"

namespace ps {
namespace tcp {
namespace {

// Messages of at most this size go before larger ones, several by one call.
constexpr size_t kUrgentBytes = 4096;
constexpr size_t kBatchBytes = 65536;
constexpr size_t kMaxVectors = 64;

}  // namespace

Connection::Connection(ConnectionOwner* owner, std::shared_ptr<Poller> poller,
                       std::shared_ptr<MemoryPool> pool, double timeout_s)
    : owner_(owner),
      poller_(std::move(poller)),
      pool_(std::move(pool)),
      timeout_s_(timeout_s),
      buffer_(kReadBytes) {}

Connection::~Connection() = default;

std::string Connection::address() {
  std::lock_guard<std::mutex> lock(mu_);
  return address_;
}

bool Connection::closed() {
  std::lock_guard<std::mutex> lock(mu_);
  return state_ == State::kClosed;
}

// ----------------------------------------------------------------- sending

bool Connection::Send(const Message& msg) {
  const std::string meta = EncodeMeta(msg.meta);
  Outgoing outgoing;
  outgoing.head.reserve(kFrameHeaderBytes + 8 * msg.data.size() + meta.size());
  ByteWriter head(&outgoing.head);
  head.Int<uint8_t>(kMessage);
  head.Int<uint8_t>(msg.data.size());
  head.Int<uint16_t>(0);
  head.Int<uint32_t>(meta.size());
  for (const auto& value : msg.data) head.Int<uint64_t>(value.size());
  head.Bytes(meta);
  outgoing.values = msg.data;
  outgoing.bytes = outgoing.head.size();
  for (const auto& value : msg.data) outgoing.bytes += value.size();
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ == State::kClosed) return false;
  }
  Enqueue(std::move(outgoing));
  return true;
}

void Connection::SayGoodbye() {
  Outgoing outgoing;
  ByteWriter head(&outgoing.head);
  head.Int<uint8_t>(kGoodbye);
  head.Int<uint8_t>(0);
  head.Int<uint16_t>(0);
  head.Int<uint32_t>(0);
  outgoing.bytes = outgoing.head.size();
  outgoing.is_goodbye = true;
  Enqueue(std::move(outgoing));
}

void Connection::Enqueue(Outgoing outgoing) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ == State::kClosed || goodbye_sent_) return;
    if (outgoing.is_goodbye && state_ != State::kOpen) return;
    goodbye_sent_ = outgoing.is_goodbye;
    queued_bytes_ += outgoing.bytes;
    const bool urgent = outgoing.bytes <= kUrgentBytes && !outgoing.is_goodbye;
    (urgent ? urgent_ : bulk_).push_back(std::move(outgoing));
    if (state_ != State::kOpen || writing_ || blocked_) return;
    writing_ = true;
  }
  Drain();
}

bool Connection::TakeBatch() {
  size_t bytes = 0, vectors = 0;
  while (vectors < kMaxVectors && (!urgent_.empty() || !bulk_.empty())) {
    auto& queue = urgent_.empty() ? bulk_ : urgent_;
    // A large message goes alone, or last, so that urgent ones need not wait for several.
    if (bytes > 0 && bytes + queue.front().bytes > kBatchBytes) break;
    bytes += queue.front().bytes;
    vectors += 1 + queue.front().values.size();
    batch_.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  batch_done_ = 0;
  return !batch_.empty();
}

size_t Connection::BytesOf(const OutgoingList& batch) {
  size_t bytes = 0;
  for (const auto& outgoing : batch) bytes += outgoing.bytes;
  return bytes;
}

std::vector<iovec> Connection::VectorOf(const OutgoingList& batch, size_t done) const {
  std::vector<iovec> vector;
  const auto add = [&](const char* data, size_t size) {
    const size_t skipped = std::min(done, size);
    done -= skipped;
    if (size > skipped) vector.push_back({const_cast<char*>(data) + skipped, size - skipped});
  };
  for (const auto& outgoing : batch) {
    add(outgoing.head.data(), outgoing.head.size());
    for (const auto& value : outgoing.values) add(value.data(), value.size());
  }
  return vector;
}

void Connection::Drain() {
  // The socket stays while this object does: its descriptor cannot become another's.
  const ConnectionPtr keep = shared_from_this();
  OutgoingList sent;  // let go of without a lock: its owners may call Send
  while (true) {
    sent.clear();
    int fd = -1;
    {
      std::unique_lock<std::mutex> lock(mu_);
      if (state_ == State::kClosed) {
        sent.swap(batch_);
        writing_ = false;
        lock.unlock();
        return;
      }
      if (batch_.empty() && !TakeBatch()) {
        writing_ = false;
        const bool close = close_when_flushed_;
        lock.unlock();
        if (close) Close({"this node closed it", false, true});
        return;
      }
      fd = fd_.get();
    }
    const auto vector = VectorOf(batch_, batch_done_);
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(vector.data());
    message.msg_iovlen = vector.size();
    const ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      queued_bytes_ -= n;
      batch_done_ += n;
      if (batch_done_ == BytesOf(batch_)) sent.swap(batch_);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      return SendingFailed(std::string("sending failed: ") + strerror(errno));
    }
    std::lock_guard<std::mutex> lock(mu_);
    if (writable_) {  // since then it has room
      writable_ = false;
      continue;
    }
    writing_ = false;
    blocked_ = true;
    return;
  }
}

// The peer may have said why, or goodbye, before it closed: that is read first.
void Connection::SendingFailed(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    writing_ = false;
    blocked_ = true;  // for ever
  }
  poller_->Post([self = shared_from_this(), reason] {
    while (self->OnReady(0)) continue;
    self->Close({reason, true, false});
  });
}

void Connection::OnWritable() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ != State::kOpen) return;
    if (writing_) {
      writable_ = true;
      return;
    }
    if (!blocked_) return;
    blocked_ = false;
    writing_ = true;
  }
  Drain();
}

bool Connection::flushed() {
  std::lock_guard<std::mutex> lock(mu_);
  if (state_ == State::kClosed || state_ == State::kDialing) return true;
  return urgent_.empty() && bulk_.empty() && !writing_ && !blocked_;
}

void Connection::CloseWhenFlushed() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    close_when_flushed_ = true;
    if (writing_ || blocked_ || state_ != State::kOpen) return;
    writing_ = true;
  }
  Drain();
}

// ------------------------------------------------------------------ closing

void Connection::Close(const Ending& ending) {
  OutgoingList urgent, bulk, batch;  // let go of without a lock
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ == State::kClosed) return;
    state_ = State::kClosed;
    ending_ = ending;
    urgent.swap(urgent_);
    bulk.swap(bulk_);
    // Who is writing sees that it is closed, and lets go of the batch.
    if (!writing_) batch.swap(batch_);
    queued_bytes_ = 0;
    if (fd_) shutdown(fd_.get(), SHUT_RDWR);
  }
  poller_->Post([self = shared_from_this()] { self->Finish(); });
}

void Connection::Finish() {
  Ending ending;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (fd_) poller_->Forget(fd_.get());
    ending = ending_;
  }
  {
    // A message that had begun to come will not end.
    std::lock_guard<std::mutex> lock(receive_mu_);
    place_ = nullptr;
    incoming_ = Message();
    ending.orderly = ending.orderly || goodbye_received_;
  }
  owner_->OnClosed(shared_from_this(), ending);
}

bool Connection::OnReady(uint32_t events) {
  State state;
  {
    std::lock_guard<std::mutex> lock(mu_);
    state = state_;
  }
  try {
    if (state == State::kClosed) return false;
    if (state == State::kDialing) {
      if (events != 0) OnConnected();
      return false;
    }
    if (events & EPOLLOUT) OnWritable();
    return Receive();
  } catch (const std::exception& e) {
    Close({e.what(), false, false});
    return false;
  }
}

}  // namespace tcp
}  // namespace ps
