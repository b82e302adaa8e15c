#include "byteps/net/link/name_service.h"

#include <netdb.h>
#include <sys/socket.h>

#include <cstring>
#include <utility>

#include "byteps/base/log.h"

namespace ps {
namespace {

class SystemNames : public NameService {
 public:
  std::vector<Address> Find(const std::string& host, int port) override {
    addrinfo hints;
    memset(&hints, 0, sizeof(hints));
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    addrinfo* list = nullptr;
    const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
    if (rc != 0) throw UnknownHost("the host '" + host + "' does not resolve: " + gai_strerror(rc));
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> guard(list, &freeaddrinfo);
    std::vector<Address> addresses;
    for (const addrinfo* a = list; a != nullptr; a = a->ai_next) {
      if (a->ai_family == AF_INET || a->ai_family == AF_INET6) {
        addresses.push_back(Address::Of(a->ai_addr));
      }
    }
    if (addresses.empty()) {
      throw UnknownHost("the host '" + host + "' has neither an IPv4 nor an IPv6 address");
    }
    return addresses;
  }
};

// The resolver is never destroyed, because a lookup may run until after main returns.
struct Current {
  Mutex mu;
  std::shared_ptr<NameService> service PS_GUARDED_BY(mu) = std::make_shared<SystemNames>();
};

Current* TheCurrent() {
  static auto* const current = new Current();
  return current;
}

}  // namespace

std::shared_ptr<NameService> NameService::Get() {
  Current* const current = TheCurrent();
  MutexLock lock(&current->mu);
  return current->service;
}

void NameService::Set(std::shared_ptr<NameService> service) {
  if (!service) service = std::make_shared<SystemNames>();
  Current* const current = TheCurrent();
  MutexLock lock(&current->mu);
  current->service = std::move(service);
}

void SayWaiting(const std::string& why) { BPS_LOG(INFO) << "waiting: " << why; }

}  // namespace ps
