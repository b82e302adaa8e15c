#include "relay.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "dmlc/logging.h"

namespace connection_test {
namespace {

constexpr size_t kReadBytes = 65536;
// Of a direction that its reader does not take.
constexpr size_t kPendingBytes = 1 << 20;
constexpr int kLookMs = 5;

sockaddr_in Loopback(int port, int host = 1) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl((IN_LOOPBACKNET << IN_CLASSA_NSHIFT) + host);
  return address;
}

int NewSocket() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  CHECK_GE(fd, 0) << strerror(errno);
  return fd;
}

}  // namespace

Relay::Relay() : wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  CHECK_GE(wake_, 0) << strerror(errno);
  thread_ = std::thread(&Relay::Loop, this);
}

Relay::~Relay() {
  {
    ps::MutexLock lock(&mu_);
    stop_ = true;
  }
  Wake();
  thread_.join();
  ps::MutexLock lock(&mu_);
  for (Pair& pair : pairs_) End(&pair, false);
  for (const Route& route : routes_) {
    if (route.listener >= 0) close(route.listener);
  }
  close(wake_);
}

void Relay::Wake() {
  const uint64_t one = 1;
  CHECK_EQ(write(wake_, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
}

void Relay::Listen(Route* route) {
  route->listener = NewSocket();
  const int one = 1;
  setsockopt(route->listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  sockaddr_in address = Loopback(route->port, route->host);
  socklen_t length = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  CHECK_EQ(bind(route->listener, any, length), 0) << strerror(errno);
  CHECK_EQ(listen(route->listener, 16), 0) << strerror(errno);
  CHECK_EQ(getsockname(route->listener, any, &length), 0) << strerror(errno);
  route->port = ntohs(address.sin_port);
}

int Relay::AddRoute(int port, int host, int own) {
  Route route;
  route.leads_to = port;
  route.host = host;
  route.port = own;
  Listen(&route);
  int number = 0;
  {
    ps::MutexLock lock(&mu_);
    number = static_cast<int>(routes_.size());
    routes_.push_back(route);
  }
  Wake();
  return number;
}

int Relay::PortOf(int route) {
  ps::MutexLock lock(&mu_);
  return routes_[route].port;
}

void Relay::SetDown(int route, bool down) {
  {
    ps::MutexLock lock(&mu_);
    Route& one = routes_[route];
    if (down == (one.listener < 0)) return;
    if (down) {
      close(std::exchange(one.listener, -1));
      one.reset = true;
    } else {
      Listen(&one);
    }
  }
  Wake();
}

void Relay::Reset(int route, const Damage& damage) {
  {
    ps::MutexLock lock(&mu_);
    routes_[route].damage = damage;
    routes_[route].done = false;
    routes_[route].reset = true;
  }
  Wake();
}

bool Relay::damaged(int route) {
  ps::MutexLock lock(&mu_);
  return routes_[route].done;
}

size_t Relay::CarriedBy(int route, bool to_listener) {
  ps::MutexLock lock(&mu_);
  const Pair* last = routes_[route].last;
  return last == nullptr ? 0 : last->flows[to_listener].carried;
}

void Relay::End(Pair* pair, bool by_reset) {
  if (std::exchange(pair->over, true)) return;
  for (const Flow& flow : pair->flows) {
    const linger at_once = {1, 0};
    if (by_reset) setsockopt(flow.from, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    close(flow.from);
  }
}

void Relay::Accept(int route) {
  const int client = accept4(routes_[route].listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (client < 0) return;
  const int server = NewSocket();
  const sockaddr_in address = Loopback(routes_[route].leads_to);
  if (connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 &&
      errno != EINPROGRESS) {
    close(client);
    close(server);
    return;
  }
  const int one = 1;
  for (const int fd : {client, server}) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  }
  pairs_.emplace_back();
  Pair& pair = pairs_.back();
  pair.route = route;
  pair.flows[true].from = pair.flows[false].to = client;
  pair.flows[true].to = pair.flows[false].from = server;
  routes_[route].last = &pair;
}

// Damages what has come by the way, and puts it behind what is to be written.
void Relay::Take(Pair* pair, Flow* flow, bool to_listener, std::string bytes) {
  Route& route = routes_[pair->route];
  const Damage& damage = route.damage;
  const size_t before = flow->carried;
  flow->carried += bytes.size();
  const bool here = !route.done && damage.kind != Damage::Kind::kNone && route.last == pair &&
                    damage.to_listener == to_listener && damage.place >= before &&
                    damage.place < flow->carried;
  if (!here) {
    (flow->held.empty() ? flow->pending : flow->held) += bytes;
    return;
  }
  route.done = true;
  const size_t at = damage.place - before;
  switch (damage.kind) {
    case Damage::Kind::kNone:
      break;
    case Damage::Kind::kFlip:
      bytes[at] = static_cast<char>(bytes[at] ^ damage.bits);
      flow->pending += bytes;
      break;
    case Damage::Kind::kInsert:
      bytes.insert(at, 1, static_cast<char>(damage.bits));
      flow->pending += bytes;
      break;
    case Damage::Kind::kCut:
      flow->pending += bytes.substr(0, at);
      flow->ended = true;
      break;
    case Damage::Kind::kDelay:
      flow->pending += bytes.substr(0, at);
      flow->held = bytes.substr(at);
      flow->until = Clock::now() + damage.delay;
      break;
  }
}

void Relay::Carry(Pair* pair, bool to_listener) {
  Flow& flow = pair->flows[to_listener];
  char bytes[kReadBytes];
  while (!flow.ended && flow.pending.size() < kPendingBytes) {
    const ssize_t n = recv(flow.from, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == ENOTCONN)) break;
    if (n < 0) return End(pair, true);
    if (n == 0) flow.ended = true;
    if (n > 0) Take(pair, &flow, to_listener, std::string(bytes, n));
  }
  if (!flow.held.empty() && Clock::now() >= flow.until) {
    flow.pending += std::exchange(flow.held, "");
  }
  while (!flow.pending.empty()) {
    const ssize_t n =
        send(flow.to, flow.pending.data(), flow.pending.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == ENOTCONN)) break;
    if (n < 0) return End(pair, true);
    flow.pending.erase(0, n);
  }
  if (flow.ended && flow.pending.empty() && flow.held.empty()) End(pair, false);
}

void Relay::Loop() {
  while (true) {
    std::vector<pollfd> items = {{wake_, POLLIN, 0}};
    int wait = -1;
    {
      ps::MutexLock lock(&mu_);
      for (const Route& route : routes_) items.push_back({route.listener, POLLIN, 0});
      for (const Pair& pair : pairs_) {
        for (const Flow& flow : pair.flows) {
          items.push_back({flow.from, static_cast<int16_t>(flow.ended ? 0 : POLLIN), 0});
          // Until it is connected, or takes more, or the delay is over.
          if (!flow.pending.empty() || !flow.held.empty()) wait = kLookMs;
        }
      }
    }
    poll(items.data(), items.size(), wait);
    uint64_t count = 0;
    (void)!read(wake_, &count, sizeof(count));
    ps::MutexLock lock(&mu_);
    if (stop_) return;
    for (size_t route = 0; route < routes_.size(); ++route) {
      if (std::exchange(routes_[route].reset, false)) {
        for (Pair& pair : pairs_) {
          if (pair.route == static_cast<int>(route)) End(&pair, true);
        }
      }
      Accept(static_cast<int>(route));
    }
    for (Pair& pair : pairs_) {
      for (const bool to_listener : {true, false}) {
        if (!pair.over) Carry(&pair, to_listener);
      }
    }
    for (Route& route : routes_) {
      if (route.last != nullptr && route.last->over) route.last = nullptr;
    }
    pairs_.remove_if([](const Pair& pair) { return pair.over; });
  }
}

}  // namespace connection_test
