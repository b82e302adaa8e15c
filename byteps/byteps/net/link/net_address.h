// Choosing and printing network addresses.
#ifndef BYTEPS_NET_LINK_NET_ADDRESS_H_
#define BYTEPS_NET_LINK_NET_ADDRESS_H_

#include <sys/socket.h>

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

// All addresses of `host`; "" stands for every address of this host.  Throws Error
// when it does not resolve.
std::vector<Address> Resolve(const std::string& host, int port);

// The numeric local address that the kernel would use to reach `host`:`port`,
// found by connecting a UDP socket, which sends nothing.  A node that several
// networks reach thus announces itself on the one that leads to the scheduler,
// with no interface named anywhere.  Throws Error when `host` does not
// resolve or no route leads to it.
std::string LocalAddressTowards(const std::string& host, int port);

// The first numeric address, IPv4 before IPv6, of the interface called `name`
// exactly.  Throws Error listing the interfaces there are.
std::string AddressOfInterface(const std::string& name);

// `host` as a number: itself if it is one, else what it resolves to, IPv4 first.
// Throws Error when it does not resolve.
std::string NumericAddress(const std::string& host);

// Whether what is sent to `host`, an address or "localhost", stays on this host.
bool IsLoopback(const std::string& host);

// "host:port", with brackets around an IPv6 address.
std::string JoinHostPort(const std::string& host, int port);

}  // namespace ps
#endif  // BYTEPS_NET_LINK_NET_ADDRESS_H_
