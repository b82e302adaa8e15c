#ifndef BYTEPS_NET_TCP_LEFTOVERS_H_
#define BYTEPS_NET_TCP_LEFTOVERS_H_

#include <cstddef>

namespace ps {
namespace tcp {

// Reads and drops what a refused peer still sends. Closing a socket with unread data resets it, and
// the peer could lose the refusal.
class Leftovers {
 public:
  enum Result { kMore, kNothingYet, kEnd };
  // Reads a little, so that other sockets get their turn. kEnd: the peer has closed, or sent too
  // much.
  Result Read(int fd);

 private:
  size_t bytes_ = 0;
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_LEFTOVERS_H_
