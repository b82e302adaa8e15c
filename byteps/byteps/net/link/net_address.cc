#include "byteps/net/link/net_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>

#include "byteps/base/invariant.h"
#include "byteps/net/link/name_service.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

// Returns the numeric form of an IPv4 or IPv6 socket address; "" for other families.
std::string Numeric(const sockaddr* address) {
  char text[NI_MAXHOST];
  socklen_t length = 0;
  if (address->sa_family == AF_INET) length = sizeof(sockaddr_in);
  if (address->sa_family == AF_INET6) length = sizeof(sockaddr_in6);
  if (length == 0) return "";
  if (getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text;
}

// Link-local IPv6 addresses are usable only with an interface's name.
bool IsLinkLocal(const sockaddr* address) {
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// Returns the addresses of `host` without a name service: of a number, or of this host if `host` is
// "". Returns none for a name.
std::vector<Address> AddressesWithout(const std::string& host, int port) {
  addrinfo hints;
  memset(&hints, 0, sizeof(hints));
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | AI_NUMERICHOST | (host.empty() ? AI_PASSIVE : 0);
  addrinfo* list = nullptr;
  if (getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints,
                  &list) != 0) {
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> guard(list, &freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* a = list; a != nullptr; a = a->ai_next) {
    if (a->ai_family == AF_INET || a->ai_family == AF_INET6) {
      addresses.push_back(Address::Of(a->ai_addr));
    }
  }
  return addresses;
}

}  // namespace

std::string LocalAddressTowards(const std::string& host, int port) {
  std::vector<Address> addresses;
  try {
    addresses = Resolve(host, port);
  } catch (const UnknownHost& e) {
    throw UnknownHost(std::string("the scheduler's address (DMLC_PS_ROOT_URI) is not known: ") +
                      e.what());
  }
  int last_errno = 0;
  for (const Address& to : addresses) {
    const int fd = socket(to.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      last_errno = errno;
      continue;
    }
    sockaddr_storage local;
    socklen_t length = sizeof(local);
    std::string text;
    if (connect(fd, to.get(), to.length) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0) {
      text = Numeric(reinterpret_cast<sockaddr*>(&local));
    } else {
      last_errno = errno;
    }
    close(fd);
    if (!text.empty()) return text;
  }
  throw Error("no route to the scheduler at " + JoinHostPort(host, port) + ": " +
              strerror(last_errno) + "; set DMLC_NODE_HOST or DMLC_INTERFACE");
}

std::string AddressOfInterface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    throw Error(std::string("cannot list the network interfaces: ") + strerror(errno));
  }
  std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> guard(list, &freeifaddrs);
  std::set<std::string> names;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
      names.insert(i->ifa_name);
      if (name != i->ifa_name || i->ifa_addr == nullptr) continue;
      if (i->ifa_addr->sa_family != family || IsLinkLocal(i->ifa_addr)) continue;
      const std::string text = Numeric(i->ifa_addr);
      if (!text.empty()) return text;
    }
  }
  std::string known;
  for (const auto& n : names) known += (known.empty() ? "" : ", ") + n;
  throw Error(
      "DMLC_INTERFACE='" + name +
      "' names no interface with an address that other hosts can reach; there are: " + known);
}

std::string NumericAddress(const std::string& host) {
  const std::vector<Address> addresses = Resolve(host, 0);
  const auto v4 = std::find_if(addresses.begin(), addresses.end(),
                               [](const Address& one) { return one.storage.ss_family == AF_INET; });
  return (v4 == addresses.end() ? addresses.front() : *v4).Host();
}

std::string LoopbackAddress() {
  Address address = AddressesWithout("127.0.0.1", 0).front();
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "::1";
  const bool is_there = bind(fd, address.get(), address.length) == 0;
  close(fd);
  return is_there ? "127.0.0.1" : "::1";
}

bool IsLoopback(const std::string& host) {
  in_addr v4;
  in6_addr v6;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) {
    return ntohl(v4.s_addr) >> IN_CLASSA_NSHIFT == IN_LOOPBACKNET;
  }
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

std::string JoinHostPort(const std::string& host, int port) {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

Address Address::Of(const sockaddr* address) {
  Address made;
  memset(&made.storage, 0, sizeof(made.storage));
  if (address == nullptr) return made;
  if (address->sa_family == AF_INET) made.length = sizeof(sockaddr_in);
  if (address->sa_family == AF_INET6) made.length = sizeof(sockaddr_in6);
  memcpy(&made.storage, address, made.length);
  return made;
}

std::string Address::Host() const { return Numeric(get()); }

std::string Address::Text() const {
  // The port has the same offset in both families.
  const int port = ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  const std::string host = Host();
  return host.empty() ? "?" : JoinHostPort(host, port);
}

bool IsNumeric(const std::string& host) { return !AddressesWithout(host, 0).empty(); }

std::vector<Address> Resolve(const std::string& host, int port) {
  std::vector<Address> addresses = AddressesWithout(host, port);
  return addresses.empty() ? NameService::Get()->Find(host, port) : addresses;
}

namespace {

const char* RoleName(Node::Role role) {
  if (role == Node::SCHEDULER) return "scheduler";
  return role == Node::WORKER ? "worker" : "server";
}

}  // namespace

std::string Limit(double seconds, const char* variable) {
  char text[128];
  snprintf(text, sizeof(text), "%.1f s (%s=%g)", seconds, variable, seconds);
  return text;
}

std::string Plural(int n, const char* noun) {
  return std::to_string(n) + " " + noun + (n == 1 ? "" : "s");
}

std::chrono::steady_clock::duration ToDuration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

std::string RoleAndRank(int node_id) {
  return std::string(node_id % 2 ? "worker " : "server ") +
         std::to_string(Postoffice::IDtoRank(node_id));
}

std::string AddressOf(const Node& node) {
  return node.port > 0 ? JoinHostPort(node.hostname, node.port) : node.hostname;
}

std::string Describe(const Node& node) {
  std::string name = RoleName(node.role);
  if (node.role == Node::WORKER && node.aux_id >= 0) name += " " + std::to_string(node.aux_id);
  if (node.role == Node::SERVER && node.id != Node::kEmpty && node.id < kRefusedBase) {
    name += " " + std::to_string(Postoffice::IDtoRank(node.id));
  }
  return name + " (" + AddressOf(node) + ")";
}

}  // namespace ps
