#ifndef BYTEPS_NET_TCP_LEFTOVERS_H_
#define BYTEPS_NET_TCP_LEFTOVERS_H_

#include <cstddef>

namespace ps {
namespace tcp {

// Reads and drops the bytes that a refused peer still sends. If bytes stayed unread, the kernel
// would reset the socket when it is closed, and the peer might never get the refusal.
class Leftovers {
 public:
  enum Result { kMore, kNothingYet, kEnd };
  // Reads a few bytes, so that other sockets are served soon. kEnd: the peer has closed the socket,
  // or has sent too many bytes.
  Result Read(int fd);

 private:
  size_t bytes_ = 0;
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_LEFTOVERS_H_
