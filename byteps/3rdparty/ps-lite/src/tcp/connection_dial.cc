// How a connection begins: dialing, and the hello of both sides.
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "./connection.h"
#include "dmlc/logging.h"

namespace ps {
namespace tcp {
namespace {

constexpr auto kHelloTime = std::chrono::seconds(5);
constexpr auto kFirstPause = std::chrono::milliseconds(20);
constexpr auto kLongestPause = std::chrono::seconds(1);

}  // namespace

void Connection::Accept(Fd fd) {
  SetOptions(fd.get(), timeout_s_);
  Address address;
  address.length = sizeof(address.storage);
  const bool known =
      getpeername(fd.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.length) == 0;
  const int number = fd.get();
  {
    std::lock_guard<std::mutex> lock(mu_);
    state_ = State::kGreeting;
    fd_ = std::move(fd);
    if (known) address_ = address.Text();
  }
  poller_->Watch(number, shared_from_this());
  ExpectGreeting(Clock::now() + kHelloTime, "it connected and said nothing");
}

void Connection::Dial(const std::string& host, int port, const Hello& hello,
                      Clock::time_point deadline) {
  active_ = true;
  host_ = host;
  port_ = port;
  hello_ = hello;
  deadline_ = deadline;
  pause_ = kFirstPause;
  try {
    addresses_ = Resolve(host, port);
  } catch (const dmlc::Error& e) {
    last_error_ = e.what();
  }
  poller_->Post([self = shared_from_this()] { self->TryNext(); });
}

void Connection::ExpectGreeting(Clock::time_point deadline, const std::string& complaint) {
  std::weak_ptr<Connection> weak = shared_from_this();
  poller_->At(deadline, [weak, complaint] {
    const ConnectionPtr self = weak.lock();
    if (!self) return;
    {
      std::lock_guard<std::mutex> lock(self->mu_);
      if (self->state_ != State::kGreeting && self->state_ != State::kDialing) return;
    }
    self->Close({complaint, false, false});
  });
}

// Poller's thread, like all below.
void Connection::TryNext() {
  if (closed()) return;
  if (addresses_.empty()) {  // the name may be known later
    try {
      addresses_ = Resolve(host_, port_);
    } catch (const dmlc::Error& e) {
      return TryAgain(e.what());
    }
  }
  const Address& address = addresses_[next_address_];
  Fd fd = BeginConnect(address);
  if (!fd) return TryAgain(address.Text() + ": " + strerror(errno));
  const int number = fd.get();
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ == State::kClosed) return;
    state_ = State::kDialing;
    fd_ = std::move(fd);
    address_ = address.Text();
  }
  try {
    poller_->Watch(number, shared_from_this());
  } catch (const dmlc::Error& e) {
    TryAgain(e.what());
  }
}

void Connection::TryAgain(const std::string& error) {
  last_error_ = error;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ == State::kClosed) return;
    state_ = State::kDialing;
    if (fd_) poller_->Forget(fd_.get());
    fd_.Reset(-1);
  }
  const auto now = Clock::now();
  if (now >= deadline_) {
    return Close({"it cannot be reached: " + last_error_, false, false});
  }
  // Another address of the same host at once, and the first again after a while.
  next_address_ = addresses_.empty() ? 0 : (next_address_ + 1) % addresses_.size();
  auto when = now;
  if (next_address_ == 0) {
    when += pause_;
    pause_ = std::min<Clock::duration>(pause_ * 2, kLongestPause);
  }
  poller_->At(std::min(when, deadline_), [self = shared_from_this()] { self->TryNext(); });
}

void Connection::OnConnected() {
  int number = -1;
  std::string address;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (!fd_) return;
    number = fd_.get();
    address = address_;
  }
  if (const int error = ConnectError(number)) {
    return TryAgain(address + ": " + strerror(error));
  }
  SetOptions(number, timeout_s_);
  {
    std::lock_guard<std::mutex> lock(receive_mu_);
    phase_ = Phase::kReply;
    buffer_begin_ = buffer_end_ = 0;
  }
  {
    std::lock_guard<std::mutex> lock(mu_);
    state_ = State::kGreeting;
  }
  ExpectGreeting(std::max(deadline_, Clock::now() + kHelloTime),
                 "it took the connection and said nothing");
  SendGreeting(hello_.Encode());
}

// The first bytes on a connection: the kernel has room for them.
void Connection::SendGreeting(const std::string& bytes) {
  int fd = -1;
  {
    std::lock_guard<std::mutex> lock(mu_);
    fd = fd_.get();
  }
  const ssize_t n = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n == static_cast<ssize_t>(bytes.size())) return;
  // That it is closed is read soon.
  DLOG(INFO) << "a hello could not be sent: " << strerror(errno);
}

bool Connection::ReadHello() {
  const size_t there = buffer_end_ - buffer_begin_;
  if (there >= kPreambleBytes) {
    const std::string mismatch = Mismatch(buffer_.data() + buffer_begin_);
    if (!mismatch.empty()) {
      HelloReply reply;
      reply.refusal = "its peer " + mismatch;
      SendGreeting(reply.Encode());
      throw dmlc::Error(mismatch);
    }
  }
  const char* data = Peek(kHelloBytes);
  if (data == nullptr) return false;
  const Hello hello = DecodeHello(data);
  Skip(kHelloBytes);
  phase_ = Phase::kHead;
  const HelloReply reply = owner_->OnHello(shared_from_this(), hello);
  SendGreeting(reply.Encode());
  if (!reply.refusal.empty()) throw dmlc::Error("it was refused: " + reply.refusal);
  Open();
  return true;
}

bool Connection::ReadReply() {
  const size_t there = buffer_end_ - buffer_begin_;
  if (there >= kPreambleBytes) {
    const std::string mismatch = Mismatch(buffer_.data() + buffer_begin_);
    if (!mismatch.empty()) throw dmlc::Error(mismatch);
  }
  const char* data = Peek(kHelloReplyBytes);
  if (data == nullptr) return false;
  size_t refusal_bytes = 0;
  HelloReply reply = DecodeHelloReply(data, &refusal_bytes);
  data = Peek(kHelloReplyBytes + refusal_bytes);
  if (data == nullptr) return false;
  reply.refusal.assign(data + kHelloReplyBytes, refusal_bytes);
  Skip(kHelloReplyBytes + refusal_bytes);
  phase_ = Phase::kHead;
  if (!reply.refusal.empty()) throw dmlc::Error("it refused the connection: " + reply.refusal);
  const std::string complaint = owner_->OnReply(shared_from_this(), reply);
  if (!complaint.empty()) throw dmlc::Error(complaint);
  Open();
  return true;
}

void Connection::Open() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ != State::kGreeting) return;
    state_ = State::kOpen;
    if (writing_) return;
    writing_ = true;
    blocked_ = writable_ = false;
  }
  Drain();
}

}  // namespace tcp
}  // namespace ps
