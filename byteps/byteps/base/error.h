// The one exception that our code throws.
#ifndef BYTEPS_BASE_ERROR_H_
#define BYTEPS_BASE_ERROR_H_

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace byteps {
namespace core {

// An operation, or the whole job, failed.  The text names what was attempted,
// the peer, the limit, as far as they are known: it is what the user reads.  The place is that of
// the throw, which the log cites.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE())
      : std::runtime_error(what), file_(file), line_(line) {}
  const char* file() const { return file_; }
  int line() const { return line_; }

 private:
  const char* file_;
  int line_;
};

// A value the caller passed, or a variable the user set, cannot be used.
class UsageError : public Error {
 public:
  using Error::Error;
};

// After a system call that failed: "epoll_ctl: Bad file descriptor".
[[noreturn]] inline void ThrowErrno(const char* call, const char* file = __builtin_FILE(),
                                    int line = __builtin_LINE()) {
  throw Error(std::string(call) + ": " + strerror(errno), file, line);
}

}  // namespace core
}  // namespace byteps

namespace ps {
using byteps::core::Error;
using byteps::core::ThrowErrno;
}  // namespace ps
#endif  // BYTEPS_BASE_ERROR_H_
