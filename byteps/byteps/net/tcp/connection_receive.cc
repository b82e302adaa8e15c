// What a connection reads.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "byteps/base/mutex.h"
#include "byteps/base/probe.h"
#include "byteps/base/wire_bytes.h"
#include "byteps/net/link/invariant.h"
#include "byteps/net/link/meta_codec.h"
#include "byteps/net/link/nowhere.h"
#include "byteps/net/tcp/connection.h"
#include "byteps/net/tcp/handover.h"
#include "dmlc/logging.h"

namespace ps {
namespace tcp {
namespace {

// Read from one connection before the others of its thread have their turn.
constexpr size_t kTurnBytes = 4 << 20;
// What a peer that is no member of the job may say at once.
constexpr size_t kStrangersMetaBytes = 65536;

}  // namespace

bool Connection::Receive() {
  if (!ShakeHands()) return false;
  for (size_t turn = 0; turn < kTurnBytes;) {
    const Socket socket = CurrentSocket();
    if (!socket) break;  // it was closed, or another one is on its way
    MutexLock lock(&receive_mu_);
    const ssize_t n = Read(socket);
    if (n <= 0) {
      const int error = errno;
      lock.Unlock();
      if (n < 0 && error == EINTR) continue;
      if (n < 0 && (error == EAGAIN || error == EWOULDBLOCK)) break;
      ReadingFailed(socket, n, error);
      return false;
    }
    turn += n;
    Message msg;
    bool drop = false;
    while (Parse(&msg, &drop)) {
      const size_t bytes = message_bytes_;
      lock.Unlock();  // the owner may call Abandon
      receipts_.Came(bytes);
      if (!drop) owner_->OnMessage(this, &msg, bytes);
      msg = Message();
      arrived_.clear();
      if (closed()) return false;
      lock.Lock();
    }
    lock.Unlock();
    arrived_.clear();
    if (closed()) return false;
    if (turn >= kTurnBytes) {
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
    greeting = phase_ == Phase::kChallenge || phase_ == Phase::kReply;
  }
  if (result < 0 && greeting && socket->Refused(error)) throw dmlc::Error(socket->Text(error));
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

ssize_t Connection::Read(const Socket& socket) {
  iovec vector[2];
  int count = 0;
  // What goes nowhere is read into the buffer.
  const size_t missing =
      phase_ == Phase::kValues && place_ != nullptr ? place_bytes_ - place_done_ : 0;
  if (missing > 0) vector[count++] = {place_ + place_done_, missing};
  if (buffer_begin_ == buffer_end_) buffer_begin_ = buffer_end_ = 0;
  vector[count++] = {buffer_.data() + buffer_end_, buffer_.size() - buffer_end_};
  const ssize_t n = socket->Read(vector, count);
  if (n <= 0) return n;
  const size_t placed = std::min<size_t>(n, missing);
  place_done_ += placed;
  buffer_end_ += n - placed;
  PS_INVARIANT("nothing is read beyond its place",
               place_done_ <= place_bytes_ && buffer_end_ <= buffer_.size(),
               std::to_string(place_done_) + " of " + std::to_string(place_bytes_) + " bytes");
  return n;
}

const char* Connection::Peek(size_t bytes) {
  if (buffer_end_ - buffer_begin_ >= bytes) return buffer_.data() + buffer_begin_;
  Need(bytes);
  return nullptr;
}

// Makes room, so that the next reads can complete what begins at buffer_begin_.
void Connection::Need(size_t bytes) {
  if (buffer_begin_ > 0) {
    memmove(buffer_.data(), buffer_.data() + buffer_begin_, buffer_end_ - buffer_begin_);
    buffer_end_ -= buffer_begin_;
    buffer_begin_ = 0;
  }
  if (buffer_.size() < bytes) buffer_.resize(bytes);
}

void Connection::Skip(size_t bytes) {
  buffer_begin_ += bytes;
  message_bytes_ += bytes;
}

bool Connection::Parse(Message* msg, bool* drop) {
  while (true) {
    switch (phase_) {
      case Phase::kHandshake:
        return false;
      case Phase::kChallenge:
        if (!ReadChallenge()) return false;
        break;
      case Phase::kReply:
        if (!ReadReply()) return false;
        break;
      case Phase::kHead:
        if (!ParseHead()) return false;
        break;
      case Phase::kMeta:
        if (!ParseMeta()) return false;
        break;
      case Phase::kValues:
        if (!ParseValues()) return false;
        *msg = std::move(incoming_);
        *drop = drop_;
        incoming_ = Message();
        phase_ = Phase::kHead;
        return true;
    }
  }
}

bool Connection::ParseHead() {
  const char* data = Peek(kFrameHeaderBytes);
  if (data == nullptr) return false;
  message_bytes_ = 0;
  if (!DecodeFrameHeader(data, &header_)) throw dmlc::Error("it sent what is no message");
  Skip(kFrameHeaderBytes);
  OnReceived(header_.received);
  if (header_.type == kGoodbye) goodbye_received_ = true;
  if (header_.type != kMessage) return true;
  const bool stranger = peer_ == Node::kEmpty;
  if (stranger && (header_.meta_bytes > kStrangersMetaBytes || header_.values > 0)) {
    throw dmlc::Error("it sent values, or a long message, before it was a member of the job");
  }
  phase_ = Phase::kMeta;
  return true;
}

bool Connection::ParseMeta() {
  const size_t sizes_bytes = header_.values * sizeof(uint64_t);
  const char* data = Peek(sizes_bytes + header_.meta_bytes);
  if (data == nullptr) return false;
  ByteReader in(data, sizes_bytes);
  sizes_.resize(header_.values);
  for (uint64_t& size : sizes_) {
    in.Int(&size);
    if (size > kMaxValueBytes) throw dmlc::Error("it sent a message of impossible size");
  }
  if (!DecodeMeta(data + sizes_bytes, header_.meta_bytes, &incoming_.meta)) {
    throw dmlc::Error("it sent a message whose meta of " + std::to_string(header_.meta_bytes) +
                      " bytes does not parse");
  }
  Skip(sizes_bytes + header_.meta_bytes);
  if (buffer_.size() > kReadBytes && buffer_end_ - buffer_begin_ <= kReadBytes) {
    Need(0);
    buffer_.resize(kReadBytes);
    buffer_.shrink_to_fit();
  }
  drop_ = false;
  value_ = 0;
  phase_ = Phase::kValues;
  BeginValue();
  return true;
}

// Sets where the next value is read to.
void Connection::BeginValue() {
  place_ = nullptr;
  place_bytes_ = place_done_ = 0;
  if (value_ == sizes_.size()) return;
  place_bytes_ = sizes_[value_];
  SArray<char> values;
  if (place_bytes_ > 0) {
    const bool one = sizes_.size() == 1;
    const uint64_t all = std::accumulate(sizes_.begin(), sizes_.end(), uint64_t{0});
    char* const place = owner_->PlaceFor(incoming_.meta, all);
    if (one || place == Nowhere()) place_ = place;
    if (place_ != nullptr && place_ != Nowhere()) {
      // The peer answers only what it has received, and the answer may lie where that was.
      TakeBack(place_);
      values.reset(place_, place_bytes_, [](char*) {});
    }
  }
  if (place_bytes_ > 0 && place_ == nullptr) {
    try {
      values = pool_->Take(place_bytes_);
      place_ = values.data();
    } catch (const std::bad_alloc&) {
      place_ = Nowhere();  // for the owner to say of whose values that is
    }
  }
  if (place_ == Nowhere()) {
    incoming_.meta.data_size = static_cast<int>(place_bytes_);
    place_ = nullptr;
  }
  incoming_.data.push_back(values);
}

bool Connection::ParseValues() {
  while (value_ < sizes_.size()) {
    const size_t there =
        std::min(place_bytes_ - place_done_, buffer_end_ - buffer_begin_);  // came with the meta
    if (there > 0) {
      if (place_ != nullptr) memcpy(place_ + place_done_, buffer_.data() + buffer_begin_, there);
      place_done_ += there;
      buffer_begin_ += there;
    }
    if (place_done_ < place_bytes_) return false;
    message_bytes_ += place_bytes_;
    ++value_;
    BeginValue();
  }
  return true;
}

void Connection::Abandon(const void* begin, size_t bytes) {
  MutexLock lock(&receive_mu_);
  if (phase_ != Phase::kValues || place_ == nullptr) return;
  const char* first = static_cast<const char*>(begin);
  if (place_ >= first + bytes || place_ + place_bytes_ <= first) return;
  SArray<char> elsewhere = pool_->Take(place_bytes_);
  place_ = elsewhere.data();
  incoming_.data.back() = elsewhere;
  drop_ = true;
  PS_PROBE(kAbandoned);
  PS_INVARIANT_NOTED("what is abandoned is not written to",
                     place_ >= first + bytes || place_ + place_bytes_ <= first,
                     std::to_string(place_bytes_) + " bytes are read into it");
}

}  // namespace tcp
}  // namespace ps
