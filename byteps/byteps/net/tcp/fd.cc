#include "byteps/net/tcp/fd.h"

#include <unistd.h>

namespace ps {
namespace tcp {

void Fd::Close() {
  if (fd_ < 0) return;
  // A forked copy has already closed the descriptor; its number may belong to another file.
  if (!IsForkedCopy()) {
    const HoldForks hold;
    KeepInChild(fd_);
    close(fd_);
  }
  fd_ = -1;
}

}  // namespace tcp
}  // namespace ps
