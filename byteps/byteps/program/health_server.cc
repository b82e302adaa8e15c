#include "byteps/program/health_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"

namespace byteps {
namespace core {
namespace {

constexpr int kBacklog = 16;
constexpr double kAnswerTimeoutS = 1.0;  // limit for a client that does not read

sockaddr_un SocketAddress(const std::string& path) {
  sockaddr_un address;
  memset(&address, 0, sizeof(address));
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    throw UsageError("BYTEPS_HEALTH_SOCKET='" + path + "' is longer than the " +
                     std::to_string(sizeof(address.sun_path) - 1) + " bytes of a socket's path");
  }
  memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

void SetTimeout(int fd, double seconds) {
  timeval limit;
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_usec = static_cast<suseconds_t>((seconds - std::floor(seconds)) * 1e6);
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

bool Connect(int fd, const sockaddr_un& address) {
  return connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

int NewSocket() {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) throw Error(std::string("socket: ") + strerror(errno));
  return fd;
}

// Returns whether a process listens at `address`. After a process was killed, only the socket's
// name is left.
bool IsServed(const sockaddr_un& address) {
  const int fd = NewSocket();
  const bool served = Connect(fd, address);
  close(fd);
  return served;
}

}  // namespace

HealthServer::HealthServer(const std::string& path, std::function<std::string()> describe)
    : path_(path), describe_(std::move(describe)) {
  const sockaddr_un address = SocketAddress(path_);
  if (IsServed(address)) {
    throw UsageError("BYTEPS_HEALTH_SOCKET='" + path_ + "' is in use by another process");
  }
  unlink(path_.c_str());
  listener_ = NewSocket();
  if (bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener_, kBacklog) != 0) {
    const std::string reason = strerror(errno);
    close(listener_);
    throw UsageError("BYTEPS_HEALTH_SOCKET='" + path_ + "': " + reason);
  }
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_ < 0) {
    close(listener_);
    throw Error(std::string("eventfd: ") + strerror(errno));
  }
  thread_ = std::thread(&HealthServer::Run, this);
}

HealthServer::~HealthServer() {
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0 && errno != EAGAIN) abort();
  // The thread was told to stop, so this wait is ended by its return; deadline: none.
  thread_.join();
  unlink(path_.c_str());
  close(listener_);
  close(wake_);
}

void HealthServer::Run() {
  while (true) {
    pollfd items[2] = {{listener_, POLLIN, 0}, {wake_, POLLIN, 0}};
    // The wait is ended by a question or the destructor; deadline: none, an idle thread's.
    if (poll(items, 2, -1) < 0) continue;
    if (items[1].revents != 0) return;
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    SetTimeout(fd, kAnswerTimeoutS);
    const std::string line = describe_() + "\n";
    // If the client is gone, the failed send is ignored, without SIGPIPE.
    (void)!send(fd, line.data(), line.size(), MSG_NOSIGNAL);
    close(fd);
  }
}

std::string AskHealth(const std::string& path, double timeout_s) {
  const sockaddr_un address = SocketAddress(path);
  const int fd = NewSocket();
  SetTimeout(fd, timeout_s);
  if (!Connect(fd, address)) {
    const std::string reason = strerror(errno);
    close(fd);
    throw Error("nobody answers at " + path + ": " + reason);
  }
  std::string answer;
  char buffer[256];
  ssize_t count;
  while ((count = recv(fd, buffer, sizeof(buffer), 0)) > 0) answer.append(buffer, count);
  const int error = errno;
  close(fd);
  if (count < 0) {
    const bool late = error == EAGAIN || error == EWOULDBLOCK;
    throw Error("no answer from " + path +
                (late ? " in time" : ": " + std::string(strerror(error))));
  }
  if (answer.empty() || answer.back() != '\n') throw Error("half an answer from " + path);
  answer.pop_back();
  return answer;
}

}  // namespace core
}  // namespace byteps
