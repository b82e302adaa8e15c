// NameService: addresses of host names, which change, or become known only later.
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

// No address of a host is known at the moment.
struct UnknownHost : public Error {
  using Error::Error;
};

// Source of addresses for all lookups of this process.
class NameService {
 public:
  virtual ~NameService() = default;

  // All addresses of `host`, which is a name.  Blocks.  Throws UnknownHost.
  virtual std::vector<Address> Find(const std::string& host, int port) = 0;

  // The system's, unless a test has set another one.  Any thread.
  static std::shared_ptr<NameService> Get();
  // Null: the system's.
  static void Set(std::shared_ptr<NameService> service);
};

// Says in the log what is waited for.
void SayWaiting(const std::string& why);

// Returns what `find` does, which is called again while it throws UnknownHost, for `limit_s`
// (BYTEPS_START_TIMEOUT_S).  Then throws Error.
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
    // Ended by the time; deadline: the next attempt.
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace ps

#endif  // BYTEPS_NET_LINK_NAME_SERVICE_H_
