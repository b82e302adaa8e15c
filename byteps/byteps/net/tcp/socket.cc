#include "byteps/net/tcp/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/name_service.h"
#include "byteps/net/link/nics.h"
#include "byteps/net/tcp/fd.h"

namespace ps {
namespace tcp {
namespace {

constexpr int kBacklog = 4096;
// Number of keep-alive probes after which a silent peer counts as lost.
constexpr int kProbes = 3;
// Limit of unsent bytes in the kernel. They keep the link busy while a thread wakes; more bytes
// would delay urgent messages, which queue behind them.
constexpr int kUnsentBytes = 256 << 10;
// Files that a process opens besides its connections.
constexpr size_t kUsualFiles = 1024;

void Set(int fd, int level, int option, int value) {
  // Errors are ignored: options only improve a connection, and old kernels lack some.
  (void)setsockopt(fd, level, option, &value, sizeof(value));
}

// Binds a socket to the local address `from`. Returns false and sets errno if this host does not
// have the address.
bool BindTo(int fd, const std::string& from) {
  if (from.empty()) return true;
  // Outgoing connections to one address may share a local port.
  Set(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
  const Address address = Resolve(from, 0).front();
  return bind(fd, address.get(), address.length) == 0;
}

}  // namespace

HostPair HostsOf(int fd) {
  const auto host = [fd](auto get) -> std::string {
    Address address;
    address.length = sizeof(address.storage);
    if (get(fd, address.get(), &address.length) != 0) return "";
    return address.Host();
  };
  return {host(getsockname), host(getpeername)};
}

Fd Listen(const Address& address, int* port) {
  Fd fd = Fd::Make([&address] {
    return socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  });
  if (!fd) throw Error(strerror(errno));
  Set(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  // IPv4 has a listener of its own.
  if (address.storage.ss_family == AF_INET6) Set(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
  if (bind(fd.get(), address.get(), address.length) != 0 || listen(fd.get(), kBacklog) != 0) {
    if (errno == EADDRNOTAVAIL) {
      throw UnknownHost("this machine has no address " + address.Host());
    }
    throw Error(strerror(errno));
  }
  Address bound;
  bound.length = sizeof(bound.storage);
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0) {
    throw Error(strerror(errno));
  }
  // The port has the same offset in both families.
  *port = ntohs(reinterpret_cast<const sockaddr_in*>(&bound.storage)->sin_port);
  return fd;
}

Fd BeginConnect(const Address& address, const std::string& from) {
  Fd fd = Fd::Make([&address] {
    return socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  });
  if (!fd) return fd;
  if (!BindTo(fd.get(), from) ||
      (connect(fd.get(), address.get(), address.length) != 0 && errno != EINPROGRESS)) {
    const int error = errno;
    fd.Close();
    errno = error;
  }
  return fd;
}

int ConnectError(int fd) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

void SetOptions(int fd, double silence_s) {
  const int seconds = std::max(2, static_cast<int>(silence_s));
  Set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  Set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kUnsentBytes);
  Set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds / 2));
  Set(fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, seconds / 2 / kProbes));
  Set(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  Set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, seconds * 1000);
}

void ResetOnClose(int fd) {
  const linger at_once = {1, 0};
  (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
}

size_t MakeRoomForFiles(size_t connections) {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kUsualFiles;
  const rlim_t wanted = std::min<rlim_t>(connections + kUsualFiles, limit.rlim_max);
  if (limit.rlim_cur < wanted) {
    limit.rlim_cur = wanted;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) getrlimit(RLIMIT_NOFILE, &limit);
  }
  return limit.rlim_cur;
}

}  // namespace tcp
}  // namespace ps
