// Sockets: owned descriptors, addresses, options.
#ifndef BYTEPS_NET_TCP_SOCKET_H_
#define BYTEPS_NET_TCP_SOCKET_H_

#include <cstddef>
#include <string>
#include <utility>

#include "byteps/base/fork.h"
#include "byteps/net/link/net_address.h"

namespace ps {
namespace tcp {

// Owns a file descriptor, which forked children close (base/fork.h).
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) { CloseInChild(fd); }
  // What `open` returns, a descriptor or -1 with errno, also where another thread forks meanwhile.
  // It allocates nothing.
  template <typename Open>
  static Fd Make(const Open& open) {
    const HoldForks hold;
    return Fd(open());
  }
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    other.Close();
    return *this;
  }
  ~Fd() { Close(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void Close();

 private:
  int fd_ = -1;
};

// Listens at `address`; with port 0 the kernel chooses, and `port` tells.  Throws
// Error with the reason.
Fd Listen(const Address& address, int* port);

// Begins to connect, from the address `from` of this host (empty: any); the socket is writable when
// that has ended.  Empty when it failed at once, with errno set.
Fd BeginConnect(const Address& address, const std::string& from = "");

// What became of it: 0, or an errno.
int ConnectError(int fd);

// The addresses, without ports, that a connected socket is between.  Empty: it is not connected any
// more.
struct HostPair {
  std::string here;
  std::string there;
};
HostPair HostsOf(int fd);

// For a connection: no delay of small messages; it breaks when the peer's host is silent for
// about `silence_s`.
void SetOptions(int fd, double silence_s);

// Reads and drops what a peer goes on sending after it was answered: to close over bytes that were
// not read would reset the connection, which could take the answer away from the peer.
class Leftovers {
 public:
  enum Result { kMore, kNothingYet, kEnd };
  // A little of it, so that others have their turn.  kEnd: the peer has closed, or sent too much.
  Result Read(int fd);

 private:
  size_t bytes_ = 0;
};

// When it is closed, the connection is reset: the kernel keeps nothing of it.
void ResetOnClose(int fd);

// Raises the soft limit of open files so that `connections` more fit, as far as the hard
// limit allows.  Returns how many files may be open.
size_t MakeRoomForFiles(size_t connections);

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_SOCKET_H_
