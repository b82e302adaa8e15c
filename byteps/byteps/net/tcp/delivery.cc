#include "byteps/net/tcp/delivery.h"

// The kernel's: that of the C library, which cannot be included as well, lacks what is new.
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstddef>

namespace ps {
namespace tcp {

Delivery DeliveryOf(int fd) {
  Delivery delivery;
  tcp_info info{};
  socklen_t length = sizeof(info);
  int waiting = 0;
  constexpr size_t kWanted = offsetof(tcp_info, tcpi_bytes_acked) + sizeof(info.tcpi_bytes_acked);
  delivery.known = getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 &&
                   length >= kWanted && ioctl(fd, SIOCOUTQ, &waiting) == 0;
  if (!delivery.known) return delivery;
  delivery.acknowledged = info.tcpi_bytes_acked;
  delivery.waiting = waiting;
  return delivery;
}

}  // namespace tcp
}  // namespace ps
