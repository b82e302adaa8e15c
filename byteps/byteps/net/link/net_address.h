// Network addresses: resolving names, choosing this node's address, and texts for errors and logs.
#ifndef BYTEPS_NET_LINK_NET_ADDRESS_H_
#define BYTEPS_NET_LINK_NET_ADDRESS_H_

#include <sys/socket.h>

#include <chrono>
#include <string>
#include <vector>

namespace ps {

// An IPv4 or IPv6 address with a port.
struct Address {
  sockaddr_storage storage;
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  // Copies an IPv4 or IPv6 address. The text of other families' addresses is empty.
  static Address Of(const sockaddr* address);
  // Returns text such as "10.0.0.1:9000" or "[::1]:9000".
  std::string Text() const;
  // Returns text such as "10.0.0.1"; "" for other families.
  std::string Host() const;
};

// Returns all addresses of `host`; "" means any address of this host. Blocks if `host` is a name.
// Throws UnknownHost (name_service.h).
std::vector<Address> Resolve(const std::string& host, int port);

// Returns whether `host` is "" or a numeric address, so no name service is needed.
bool IsNumeric(const std::string& host);

// Returns the numeric local address that the kernel would use to reach `host`:`port`. It only
// connects a UDP socket, and sends nothing. So a node on several networks announces its address on
// the scheduler's network, without configuration. Throws UnknownHost if `host` does not resolve,
// and Error if there is no route.
std::string LocalAddressTowards(const std::string& host, int port);

// Returns the first numeric address, IPv4 before IPv6, of the interface with exactly this name.
// Otherwise throws Error with a list of the interfaces.
std::string AddressOfInterface(const std::string& name);

// Returns `host` if it is numeric. Otherwise returns an address that it resolves to, IPv4 before
// IPv6. Throws UnknownHost.
std::string NumericAddress(const std::string& host);

// Returns the loopback address: "127.0.0.1", or "::1" without IPv4.
std::string LoopbackAddress();

// Returns whether `host`, an address or "localhost", is on the loopback interface.
bool IsLoopback(const std::string& host);

// Returns "host:port", with brackets around an IPv6 address.
std::string JoinHostPort(const std::string& host, int port);

struct Node;

// First id of refused nodes, far above the ids of admitted ones.
constexpr int kRefusedBase = 1 << 24;

std::chrono::steady_clock::duration ToDuration(double seconds);

// Returns text such as "30.0 s (BYTEPS_PEER_TIMEOUT_S=30)".
std::string Limit(double seconds, const char* variable);

// Returns text such as "1 worker" or "2 workers".
std::string Plural(int n, const char* noun);

// Returns text such as "worker 1" for a node id.
std::string RoleAndRank(int node_id);

// Returns text such as "10.0.0.2:40123"; without a port for a worker, which does not listen.
std::string AddressOf(const Node& node);

// Returns text such as "worker 1 (10.0.0.3)" or "server 0 (10.0.0.2:40123)".
std::string Describe(const Node& node);

}  // namespace ps

#endif  // BYTEPS_NET_LINK_NET_ADDRESS_H_
