#ifndef BYTEPS_NET_TCP_LEFTOVERS_H_
#define BYTEPS_NET_TCP_LEFTOVERS_H_

#include <cstddef>

namespace ps {
namespace tcp {

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

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_LEFTOVERS_H_
