// The one exception of the engine.
#ifndef BYTEPS_BASE_ERROR_H_
#define BYTEPS_BASE_ERROR_H_

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

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_ERROR_H_
