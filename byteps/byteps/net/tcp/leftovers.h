#ifndef BYTEPS_NET_TCP_LEFTOVERS_H_
#define BYTEPS_NET_TCP_LEFTOVERS_H_

#include <cstddef>

namespace ps {
namespace tcp {

// Reads and drops what a refused peer still sends. Otherwise the refusal could be lost: the kernel
// resets a socket that is closed with unread data.
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
