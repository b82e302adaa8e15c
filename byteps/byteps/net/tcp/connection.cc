#include "byteps/net/tcp/connection.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/wire_bytes.h"
#include "byteps/net/link/meta_codec.h"
#include "byteps/net/tcp/handover.h"
#include "dmlc/logging.h"

namespace ps {
namespace tcp {
namespace {

// Messages of at most this size go before larger ones, several by one call.
constexpr size_t kUrgentBytes = 4096;
constexpr size_t kBatchBytes = 65536;
constexpr size_t kMaxVectors = 64;

}  // namespace

Connection::Connection(ConnectionOwner* owner, const ConnectionSettings* settings,
                       std::shared_ptr<Poller> poller, std::shared_ptr<MemoryPool> pool)
    : owner_(owner),
      settings_(settings),
      poller_(std::move(poller)),
      pool_(std::move(pool)),
      buffer_(kReadBytes) {}

Connection::~Connection() = default;

std::string Connection::address() {
  MutexLock lock(&mu_);
  return address_;
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
  return {state_ == State::kOpen, state_ == State::kClosed, queued_bytes_};
}

// ----------------------------------------------------------------- sending

bool Connection::Send(const Message& msg) {
  const std::string meta = EncodeMeta(msg.meta);
  auto outgoing = std::make_shared<Outgoing>();
  FrameHeader header;
  header.values = static_cast<uint8_t>(msg.data.size());
  header.meta_bytes = static_cast<uint32_t>(meta.size());
  outgoing->head.reserve(kFrameHeaderBytes + 8 * msg.data.size() + meta.size());
  ByteWriter head(&outgoing->head);
  head.Bytes(header.Encode());
  for (const auto& value : msg.data) head.Int<uint64_t>(value.size());
  head.Bytes(meta);
  outgoing->values = msg.data;
  outgoing->bytes = outgoing->head.size();
  for (const auto& value : msg.data) outgoing->bytes += value.size();
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return false;
  }
  Enqueue(std::move(outgoing));
  return true;
}

Connection::OutgoingPtr Connection::Frame(FrameType type) {
  auto outgoing = std::make_shared<Outgoing>();
  FrameHeader header;
  header.type = outgoing->type = type;
  outgoing->head = header.Encode();
  outgoing->bytes = outgoing->head.size();
  return outgoing;
}

void Connection::SayGoodbye() { Enqueue(Frame(kGoodbye)); }

void Connection::Enqueue(OutgoingPtr outgoing) {
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed || goodbye_sent_) return;
    // Of use for this socket alone.
    if (outgoing->type != kMessage && state_ != State::kOpen) return;
    goodbye_sent_ = outgoing->type == kGoodbye;
    queued_bytes_ += outgoing->bytes;
    const bool urgent = outgoing->bytes <= kUrgentBytes && outgoing->type != kGoodbye;
    (urgent ? urgent_ : bulk_).push_back(std::move(outgoing));
    if (state_ != State::kOpen || writing_ || blocked_) return;
    writing_ = true;
  }
  Drain();
}

bool Connection::TakeBatch() {
  size_t bytes = 0, vectors = 0;
  const uint64_t received = receipts_.received();
  while (vectors < kMaxVectors) {
    auto& queue = !again_.empty() ? again_ : !urgent_.empty() ? urgent_ : bulk_;
    if (queue.empty()) break;
    // A large message goes alone, or last, so that urgent ones need not wait for several.
    if (bytes > 0 && bytes + queue.front()->bytes > kBatchBytes) break;
    const OutgoingPtr next = std::move(queue.front());
    queue.pop_front();
    bytes += next->bytes;
    vectors += 1 + next->values.size();
    if (next->type == kMessage) log_.Add(next);
    std::string told;
    ByteWriter(&told).Int<uint64_t>(received);
    next->head.replace(kReceivedOffset, told.size(), told);
    batch_.push_back(next);
  }
  batch_done_ = 0;
  if (batch_.empty()) return false;
  receipts_.Told(received);
  return true;
}

size_t Connection::BytesOf(const OutgoingList& list) {
  size_t bytes = 0;
  for (const auto& outgoing : list) bytes += outgoing->bytes;
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
    add(outgoing->head.data(), outgoing->head.size());
    for (const auto& value : outgoing->values) add(value.data(), value.size());
  }
  return vector;
}

void Connection::Drain() {
  const ConnectionPtr keep = shared_from_this();
  OutgoingList sent;  // let go of without a lock: its owners may call Send
  ssize_t written = 0;
  int error = 0;
  Socket socket;
  while (true) {
    sent.clear();
    {
      MutexLock lock(&mu_);
      if (batch_epoch_ != epoch_) {  // meanwhile there is another socket, or none
        sent.swap(batch_);
        batch_epoch_ = epoch_;
        error = 0;
      } else if (written > 0 && state_ == State::kOpen) {  // Close counts what is left
        PS_INVARIANT_NOTED("bytes queued are those of the messages queued",
                           queued_bytes_ >= static_cast<size_t>(written),
                           std::to_string(written) + " bytes were written, and " +
                               std::to_string(queued_bytes_) + " queued");
        queued_bytes_ -= written;
        batch_done_ += written;
        if (batch_done_ == BytesOf(batch_)) sent.swap(batch_);
      }
      written = 0;
      if (state_ != State::kOpen) {
        if (sent.empty()) sent.swap(batch_);
        writing_ = false;
        return;
      }
      if (error == EAGAIN || error == EWOULDBLOCK) {
        if (!writable_) {
          writing_ = false;
          blocked_ = true;
          return;
        }
        writable_ = false;  // since then it has room
      } else if (error != 0) {
        writing_ = false;
        blocked_ = true;  // as long as there is this socket
        const uint64_t epoch = epoch_;
        lock.Unlock();
        return SendingFailed(epoch, "sending failed: " + socket->Text(error));
      }
      if (batch_.empty() && !TakeBatch()) {
        PS_INVARIANT_NOTED("bytes queued are those of the messages queued", queued_bytes_ == 0,
                           std::to_string(queued_bytes_) + " without a message");
        writing_ = false;
        const bool close = close_when_flushed_;
        lock.Unlock();
        if (close) Close({"this node closed it", false, true});
        return;
      }
      socket = socket_;
    }
    const auto vector = VectorOf(batch_, batch_done_);
    for (const auto& piece : vector) NoteRead(piece);
    for (const auto& outgoing : batch_) {
      for (const auto& value : outgoing->values) HandOver(value.data());
    }
    const NotedAlready noted;
    do {
      written = socket->Write(vector.data(), static_cast<int>(vector.size()));
      error = written < 0 ? errno : 0;
    } while (error == EINTR);
  }
}

// The peer may have said why, or goodbye, before it closed: that is read first.
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
  MutexLock lock(&mu_);
  if (state_ == State::kClosed || state_ == State::kDialing || state_ == State::kWaiting) {
    return true;
  }
  return again_.empty() && urgent_.empty() && bulk_.empty() && !writing_ && !blocked_;
}

bool Connection::all_arrived() {
  MutexLock lock(&mu_);
  if (state_ == State::kClosed) return true;
  return again_.empty() && urgent_.empty() && bulk_.empty() && log_.empty();
}

void Connection::CloseWhenFlushed() {
  {
    MutexLock lock(&mu_);
    close_when_flushed_ = true;
    if (state_ == State::kWaiting) {  // nothing will flush it
      lock.Unlock();
      return Close({"this node closed it", false, true});
    }
    if (writing_ || blocked_ || state_ != State::kOpen) return;
    writing_ = true;
  }
  Drain();
}

// ------------------------------------------------------------------ closing

void Connection::Close(const LinkEnding& ending) {
  OutgoingList urgent, bulk, again, flying, batch;  // let go of without a lock
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    state_ = State::kClosed;
    ending_ = ending;
    urgent.swap(urgent_);
    bulk.swap(bulk_);
    again.swap(again_);
    flying = log_.TakeAll();
    // Who is writing sees that it is closed, and lets go of the batch.
    if (!writing_) batch.swap(batch_);
    queued_bytes_ = 0;
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
    ending = ending_;
  }
  {
    // A message that had begun to come will not end.
    MutexLock lock(&receive_mu_);
    place_ = nullptr;
    incoming_ = Message();
    ending.orderly = ending.orderly || goodbye_received_;
  }
  owner_->OnClosed(shared_from_this(), ending);
}

bool Connection::OnReady(uint32_t events) {
  State state;
  {
    MutexLock lock(&mu_);
    state = state_;
  }
  try {
    if (state == State::kClosed || state == State::kWaiting) return false;
    if (state == State::kDialing) {
      if (events != 0) OnConnected();
      return false;
    }
    if (events & EPOLLOUT) OnWritable();
    return Receive();
  } catch (const std::bad_alloc&) {
    Close({"the node that it was lost to is out of memory", false, false});
    return false;
  } catch (const std::exception& e) {
    Failed(e);
    return false;
  }
}

}  // namespace tcp
}  // namespace ps
