// NameService: resolves host names. The addresses of a name may change, and may become known only
// later.
#ifndef BYTEPS_NET_LINK_NAME_SERVICE_H_
#define BYTEPS_NET_LINK_NAME_SERVICE_H_

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/net/link/net_address.h"

namespace ps {

// Thrown while a host name does not resolve.
struct UnknownHost : public Error {
  using Error::Error;
};

// Resolver for all lookups of this process.
class NameService {
 public:
  virtual ~NameService() = default;

  // Returns all addresses of the host name. Blocks. Throws UnknownHost.
  virtual std::vector<Address> Find(const std::string& host, int port) = 0;

  // Returns the resolver of the system, or of a test. Thread-safe.
  static std::shared_ptr<NameService> Get();
  // Replaces the resolver. Null restores the resolver of the system.
  static void Set(std::shared_ptr<NameService> service);
};

// Logs that this process waits, for the reason `why`.
void SayWaiting(const std::string& why);

// Returns the result of `find`. Retries while `find` throws UnknownHost, for `limit_s`
// (BYTEPS_START_TIMEOUT_S); then throws Error.
template <typename Find>
auto AwaitHost(double limit_s, const Find& find) -> decltype(find()) {
  constexpr auto kPause = std::chrono::milliseconds(200);
  const auto deadline = std::chrono::steady_clock::now() + ToDuration(limit_s);
  for (bool first = true;; first = false) {
    try {
      return find();
    } catch (const UnknownHost& e) {
      if (first) SayWaiting(e.what());
      if (std::chrono::steady_clock::now() + kPause >= deadline) {
        throw Error(std::string(e.what()) + "; this was so for " +
                    Limit(limit_s, "BYTEPS_START_TIMEOUT_S"));
      }
    }
    // The pause is ended by the time; deadline: the next attempt.
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace ps

#endif  // BYTEPS_NET_LINK_NAME_SERVICE_H_
