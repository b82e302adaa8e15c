#ifndef BYTEPS_NET_TCP_FD_H_
#define BYTEPS_NET_TCP_FD_H_

#include <utility>

#include "byteps/base/process.h"

namespace ps {
namespace tcp {

// Owns a file descriptor. Forked children close it (base/process.h).
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) { CloseInChild(fd); }
  // Owns the result of `open`: a descriptor, or -1 with errno set. A concurrent fork cannot leave
  // the descriptor open in the child. Does not allocate.
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

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_FD_H_
