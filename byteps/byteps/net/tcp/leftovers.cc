#include "byteps/net/tcp/leftovers.h"

#include <sys/socket.h>

#include <cerrno>

namespace ps {
namespace tcp {
namespace {

// Limits of the bytes that are read from a refused peer, in total and per call.
constexpr size_t kLeftoverBytes = 256 << 10;
constexpr size_t kTurnBytes = 16 << 10;

}  // namespace

Leftovers::Result Leftovers::Read(int fd) {
  char rest[4096];
  for (size_t turn = 0; turn < kTurnBytes;) {
    const ssize_t n = recv(fd, rest, sizeof(rest), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return kNothingYet;
    if (n <= 0) return kEnd;
    turn += n;
    bytes_ += n;
    if (bytes_ >= kLeftoverBytes) return kEnd;
  }
  return kMore;
}

}  // namespace tcp
}  // namespace ps
