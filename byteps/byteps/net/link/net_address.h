// Network addresses and nodes: how they are chosen, and what they are called in errors and the log.
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
  // Of any family but these two an address without a text.
  static Address Of(const sockaddr* address);
  // "10.0.0.1:9000", "[::1]:9000"
  std::string Text() const;
  // "10.0.0.1"; empty: it has none.
  std::string Host() const;
};

// All addresses of `host`; "" stands for every address of this host.  Blocks, if it is a name.
// Throws UnknownHost (name_service.h).
std::vector<Address> Resolve(const std::string& host, int port);

// Whether `host` is an address, of which no name service is asked; or "".
bool IsNumeric(const std::string& host);

// The numeric local address that the kernel would use to reach `host`:`port`,
// found by connecting a UDP socket, which sends nothing.  A node that several
// networks reach thus announces itself on the one that leads to the scheduler,
// with no interface named anywhere.  Throws UnknownHost when `host` does not
// resolve, Error when no route leads to it.
std::string LocalAddressTowards(const std::string& host, int port);

// The first numeric address, IPv4 before IPv6, of the interface called `name`
// exactly.  Throws Error listing the interfaces there are.
std::string AddressOfInterface(const std::string& name);

// `host` as a number: itself if it is one, else what it resolves to, IPv4 first.
// Throws UnknownHost when it does not resolve.
std::string NumericAddress(const std::string& host);

// The address of this host's loopback: "127.0.0.1", or "::1" where there is no IPv4.
std::string LoopbackAddress();

// Whether what is sent to `host`, an address or "localhost", stays on this host.
bool IsLoopback(const std::string& host);

// "host:port", with brackets around an IPv6 address.
std::string JoinHostPort(const std::string& host, int port);

// How nodes, limits and numbers of things are called in errors and in the log.
struct Node;

// Ids of nodes that are refused: far from those that are admitted.
constexpr int kRefusedBase = 1 << 24;

std::chrono::steady_clock::duration ToDuration(double seconds);

// "30.0 s (BYTEPS_PEER_TIMEOUT_S=30)"
std::string Limit(double seconds, const char* variable);

// "1 worker", "2 workers"
std::string Plural(int n, const char* noun);

// "worker 1", from a node id
std::string RoleAndRank(int node_id);

// "10.0.0.2:40123"; without a port of a worker, which listens nowhere.
std::string AddressOf(const Node& node);

// "worker 1 (10.0.0.3)", "server 0 (10.0.0.2:40123)"
std::string Describe(const Node& node);

}  // namespace ps

#endif  // BYTEPS_NET_LINK_NET_ADDRESS_H_
