#include "byteps/net/tcp/stream.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "byteps/base/log.h"
#include "byteps/net/tcp/fd.h"
#include "byteps/net/tcp/socket.h"

namespace ps {
namespace tcp {
namespace {

void Count(ssize_t bytes, std::atomic<uint64_t>* counter) {
  counter->fetch_add(static_cast<uint64_t>(bytes), std::memory_order_relaxed);
}

}  // namespace

Stream::Stream(Fd fd, const tls::Context* tls, Side side) : fd_(std::move(fd)) {
  if (tls != nullptr) {
    tls_ = std::make_unique<tls::Session>(tls, fd_.get(), side == kConnects);
  }
}

ssize_t Stream::Read(const iovec* vector, int count) {
  const ssize_t n = tls_ ? tls_->Read(vector, count) : readv(fd_.get(), vector, count);
  if (n > 0 && counters_ != nullptr) Count(n, &counters_->bytes_received);
  return n;
}

ssize_t Stream::Write(const iovec* vector, int count) {
  const ssize_t n = tls_ ? tls_->Write(vector, count) : WritePlain(vector, count);
  if (n > 0 && counters_ != nullptr) Count(n, &counters_->bytes_sent);
  return n;
}

ssize_t Stream::WritePlain(const iovec* vector, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(vector);
  message.msg_iovlen = count;
  return SendMessage(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Stream::Say(const std::string& bytes) {
  const iovec whole = {const_cast<char*>(bytes.data()), bytes.size()};
  if (Write(&whole, 1) == static_cast<ssize_t>(bytes.size())) return;
  BPS_LOG(DEBUG) << "a greeting could not be sent: " << strerror(errno);
}

std::string Stream::Text(int error) {
  const std::string failure = tls_ && error == EPROTO ? tls_->failure() : "";
  return failure.empty() ? strerror(error) : failure;
}

}  // namespace tcp
}  // namespace ps
