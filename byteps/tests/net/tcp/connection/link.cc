#include "link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "byteps/net/tcp/socket.h"
#include "dmlc/logging.h"

namespace connection_test {
namespace {

constexpr size_t kReadBytes = 65536;
// Limit of bytes that a direction's reader has not taken.
constexpr size_t kPendingBytes = 1 << 20;
constexpr int kLookMs = 5;
constexpr int kAnyHost = 0;

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
    if (route.reserved >= 0) close(route.reserved);
  }
  close(wake_);
}

void Relay::Wake() {
  const uint64_t one = 1;
  CHECK_EQ(write(wake_, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
}

// Returns a bound socket that does not listen. It keeps the port: the kernel gives it to no other
// process and refuses connections to it.
int Relay::Bind(int host, int port) {
  const int fd = NewSocket();
  const int one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  sockaddr_in address = Loopback(port, host);
  if (host == kAnyHost) address.sin_addr.s_addr = htonl(INADDR_ANY);
  CHECK_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0) << strerror(errno);
  return fd;
}

void Relay::Listen(Route* route) {
  route->listener = Bind(route->host, route->port);
  CHECK_EQ(listen(route->listener, 16), 0) << strerror(errno);
}

int Relay::AddRoute(int port, int host, int own) {
  Route route;
  route.leads_to = port;
  route.host = host;
  route.port = own;
  if (own == 0) {
    route.reserved = Bind(kAnyHost, 0);
    sockaddr_in address{};
    socklen_t length = sizeof(address);
    CHECK_EQ(getsockname(route.reserved, reinterpret_cast<sockaddr*>(&address), &length), 0)
        << strerror(errno);
    route.port = ntohs(address.sin_port);
  }
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

// Applies the damage to the received bytes, and queues them for writing.
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
          // The relay waits until a socket is connected or writable, or the delay is over.
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

using ps::MutexLock;
using ps::tcp::Connection;
using ps::tcp::ConnectionPtr;
using ps::tcp::Poller;

namespace {

constexpr char kSecret[] = "what both ends know";
constexpr char kOtherSecret[] = "what nobody else knows";
constexpr uint64_t kConnects = 0x1111;
constexpr uint64_t kListens = 0x2222;
// Node ids of a worker and of a server.
constexpr int kWorkerId = 9;
constexpr int kServerId = 8;
constexpr size_t kManyFiles = 4096;

std::shared_ptr<const ps::tls::Context> NewContext(const ps::auth::Secret& secret) {
  return std::make_shared<const ps::tls::Context>(secret, ps::tls::Files());
}

}  // namespace

Hub::Hub(bool encrypts)
    : pool(std::make_shared<ps::tcp::MemoryPool>(1 << 20)),
      connects(std::make_shared<Poller>(0)),
      listens(std::make_shared<Poller>(1)) {
  ps::tcp::MakeRoomForFiles(kManyFiles);
  pending = std::make_unique<ps::tcp::PendingPeers>(
      listens.get(), ps::tcp::PendingPeers::Limits{.room = kManyFiles,
                                                   .least = {},
                                                   .time = std::chrono::milliseconds(1500),
                                                   .late = "it did not say in time who it is",
                                                   .has_not_done = "authenticated"});
  settings.secret = ps::auth::Secret(kSecret);
  settings.reconnect_s = 30;
  settings.silence_s = 15;
  if (encrypts) settings.tls = NewContext(settings.secret);
}

Hub::~Hub() {
  connects->Stop();
  listens->Stop();
}

// ---------------------------------------------------------------------- end

std::vector<std::string> End::texts() { return seen_->get().texts; }

std::string End::ending() {
  const auto state = seen_->get();
  if (state.closed == 0) return "";
  return state.ending.reason.empty() ? "closed" : state.ending.reason;
}

int End::times_resumed() { return seen_->get().resumed; }

size_t End::sent_again() { return seen_->get().again; }

void End::ReceiveAt(char* place) { seen_->ReceiveAt(place); }

std::string End::OnChallenge(const ConnectionPtr& /*connection*/,
                             const ps::tcp::Challenge& challenge) {
  return challenge.job == kJob ? "" : "it belongs to another job";
}

char* End::PlaceFor(const ps::Meta& /*meta*/, size_t /*bytes*/) { return seen_->place(); }

void End::OnMessage(Connection* /*connection*/, ps::Message* msg, size_t /*bytes*/) {
  std::string text;
  for (const auto& value : msg->data) text.append(value.data(), value.size());
  seen_->Came(std::move(text));
}

Poller::Clock::duration End::Patience(Connection* /*connection*/, ps::LinkFault /*fault*/) {
  return std::chrono::duration_cast<Poller::Clock::duration>(
      std::chrono::duration<double>(hub_->settings.reconnect_s));
}

void End::OnResumed(Connection* /*connection*/, Poller::Clock::duration /*after*/, size_t again) {
  seen_->Resumed(again);
}

void End::OnClosed(const ConnectionPtr& /*connection*/, const ps::LinkEnding& ending) {
  seen_->Closed(ending);
}

// --------------------------------------------------------------------- link

Link::Link(Hub* hub, uint64_t listeners_job, contract::Seen* connecting, contract::Seen* listening,
           int nics)
    : connecting(hub, connecting),
      listening(hub, listening),
      hub_(hub),
      other_secret_(kOtherSecret),
      other_tls_(hub->settings.tls ? NewContext(other_secret_) : nullptr),
      job_(listeners_job) {
  host_.secret = &hub->settings.secret;
  host_.tls = hub->settings.tls;
  host_.challenge = [this](const ps::tcp::Hello&) {
    MutexLock lock(&mu_);
    ps::tcp::Challenge challenge;
    challenge.job = job_;
    challenge.sender = kListens;
    return challenge;
  };
  host_.admit = [this](const ps::tcp::StreamPtr& socket, const ps::tcp::Hello& hello) {
    return Admit(socket, hello);
  };
  host_.done = [this](const ps::tcp::Greeter* greeter) {
    hub_->pending->Remove(greeter);
    greeters_.remove_if([=](const auto& one) { return one.get() == greeter; });
  };
  ps::tcp::Fd fd = ps::tcp::Listen(ps::Resolve("127.0.0.1", 0)[0], &port_);
  listener_ = std::make_shared<ps::tcp::Listener>(
      hub->listens.get(), std::move(fd), [] { return true; },
      [this](ps::tcp::Fd accepted, const ps::Address& address) {
        const auto greeter = std::make_shared<ps::tcp::Greeter>(&host_, hub_->listens,
                                                                std::move(accepted), "127.0.0.1");
        greeters_.push_back(greeter);
        hub_->pending->Add(greeter, address);
        greeter->Start();
      });
  listener_->Start();
  route = hub->relay.AddRoute(port_);

  connects_ =
      std::make_shared<Connection>(&this->connecting, &hub->settings, hub->connects, hub->pool);
  connects_->set_peer(kServerId);
  ps::tcp::Hello hello;
  hello.job = kJob;
  hello.sender = kConnects;
  hello.node_id = kWorkerId;
  hello.role = ps::Node::WORKER;
  hello.rank = 0;
  std::vector<ps::NicPair> pairs = {{"", "127.0.0.1"}};
  if (nics == 2) {
    other_route = hub->relay.AddRoute(port_, 2, hub->relay.PortOf(route));
    pairs = {{"127.0.0.1", "127.0.0.1"}, {"127.0.0.2", "127.0.0.2"}};
  }
  connects_->Dial(pairs, hub->relay.PortOf(route), hello,
                  Connection::Clock::now() + std::chrono::seconds(60));
}

Link::~Link() {
  const auto close = [](const ConnectionPtr& connection, End* end) {
    if (!connection) return;
    connection->Close({"the test is over", false, true});
    CHECK(WaitUntil([&] { return !end->ending().empty(); }));
  };
  close(connects_, &connecting);
  close(EndOf(false), &listening);
  listener_->Stop();
  // The poller's thread must finish its work for the greeters before they are destroyed.
  std::atomic<bool> done{false};
  hub_->listens->Post([&] {
    while (!greeters_.empty()) greeters_.front()->End("the test is over");
    done = true;
  });
  CHECK(WaitUntil([&] { return done.load(); }));
}

ConnectionPtr Link::EndOf(bool to_listener) {
  if (to_listener) return connects_;
  MutexLock lock(&mu_);
  return listens_;
}

std::string Link::Admit(const ps::tcp::StreamPtr& socket, const ps::tcp::Hello& hello) {
  ConnectionPtr connection;
  {
    MutexLock lock(&mu_);
    if (given_up_) return "this node has given the connection up";
    if (hello.receiver != 0 && hello.receiver != kListens) return "another process is meant";
    if (hello.resumes != (listens_ != nullptr)) return "it is not as it was before";
    if (!listens_) {
      listens_ =
          std::make_shared<Connection>(&listening, &hub_->settings, hub_->listens, hub_->pool);
      listens_->set_peer(kWorkerId);
    }
    connection = listens_;
  }
  connection->Adopt(socket, hello);
  return "";
}

void Link::Send(bool to_listener, const std::string& text) {
  ps::SArray<char> value(text.size());
  memcpy(value.data(), text.data(), text.size());
  Send(to_listener, value);
}

void Link::Send(bool to_listener, const ps::SArray<char>& value) {
  ps::Message msg;
  msg.data.push_back(value);
  EndOf(to_listener)->Send(msg);
}

bool Link::Has(const std::vector<std::string>& at_listener, const std::vector<std::string>& back) {
  return listening.texts() == at_listener && connecting.texts() == back;
}

std::string Link::Text() {
  const auto of = [](End* end) {
    std::string text = std::to_string(end->texts().size()) + " messages, resumed " +
                       std::to_string(end->times_resumed()) + " times";
    return text + (end->ending().empty() ? "" : ", closed: " + end->ending());
  };
  return "who connects: " + of(&connecting) + "; who listens: " + of(&listening);
}

void Link::GiveUp() {
  MutexLock lock(&mu_);
  given_up_ = true;
}

void Link::BelongTo(uint64_t job) {
  MutexLock lock(&mu_);
  job_ = job;
}

void Link::ForgetTheSecret() {
  std::atomic<bool> done{false};
  hub_->listens->Post([&] {
    host_.secret = &other_secret_;
    host_.tls = other_tls_;
    done = true;
  });
  CHECK(WaitUntil([&] { return done.load(); }));
}

}  // namespace connection_test
