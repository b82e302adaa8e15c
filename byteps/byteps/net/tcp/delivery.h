// What has become of the bytes that were written to a socket.
#ifndef BYTEPS_NET_TCP_DELIVERY_H_
#define BYTEPS_NET_TCP_DELIVERY_H_

#include <cstdint>

namespace ps {
namespace tcp {

struct Delivery {
  bool known = false;         // a kernel before 4.1 does not tell
  uint64_t acknowledged = 0;  // bytes, by the other end's host, since the socket was connected
  uint64_t waiting = 0;       // bytes that were written and are not acknowledged

  uint64_t written() const { return acknowledged + waiting; }
};

Delivery DeliveryOf(int fd);

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_DELIVERY_H_
