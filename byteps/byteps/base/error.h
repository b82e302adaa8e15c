// The one exception of the engine.
#ifndef BYTEPS_BASE_ERROR_H_
#define BYTEPS_BASE_ERROR_H_

#include <stdexcept>
#include <string>

namespace byteps {
namespace core {

// An operation, or the whole job, failed.  The text names what was attempted,
// the peer, the limit, as far as they are known: it is what the user reads.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what) : std::runtime_error(what) {}
};

// A value the caller passed, or a variable the user set, cannot be used.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& what) : Error(what) {}
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_ERROR_H_
