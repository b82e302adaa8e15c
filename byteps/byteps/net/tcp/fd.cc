#include "byteps/net/tcp/fd.h"

#include <unistd.h>

namespace ps {
namespace tcp {

void Fd::Close() {
  if (fd_ < 0) return;
  // In a forked copy it was closed, and the number may be another file's.
  if (!IsForkedCopy()) {
    const HoldForks hold;
    KeepInChild(fd_);
    close(fd_);
  }
  fd_ = -1;
}

}  // namespace tcp
}  // namespace ps
