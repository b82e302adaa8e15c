#include "byteps/net/tcp/van.h"

#include <netinet/in.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/name_service.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/nics.h"
#include "byteps/net/membership/node_membership.h"
#include "byteps/net/tcp/pollers.h"
#include "byteps/net/tcp/socket.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace tcp {}  // namespace tcp

using tcp::Connection;
using tcp::ConnectionPtr;

namespace {

// All TCP connections are in the same plane.
constexpr int kPlane = 0;
// Seconds that a node waits longer than the scheduler's start timeout.
constexpr double kPatience = 5.0;
// Limits of unauthenticated connections: their number and their time. A legitimate node needs two
// round trips, and retries after the limit. So up to 15,000 connections per second can be
// dismissed.
constexpr size_t kPendingPeers = 768;
constexpr size_t kPendingEncrypted = 384;  // each may take 100 KiB
constexpr size_t kPendingLeast = 64;
constexpr auto kGreetingTime = std::chrono::milliseconds(1500);
constexpr auto kLeastGreetingTime = std::chrono::milliseconds(50);
// A thread moves several GB/s; more threads than this would idle.
constexpr int kMaxThreads = 8;
// Planned rate per connection. A connection can carry about 16 Gbit/s each way. More connections
// than needed share the link less evenly, and the slowest one delays the all-reduce.
constexpr double kConnectionGbps = 10;
// Number of connections per pair of nodes, one for each NIC, for which files are always reserved.
constexpr int kUsualNics = 8;
// Assumed rate of a link of unknown rate, and of one inside a host.
constexpr double kUnknownGbps = 40;
constexpr double kLoopbackGbps = 100;
// Files to reserve if the next generation may have any number of workers.
constexpr size_t kAnyNumberOfPeers = 1 << 16;

int Processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return CPU_COUNT(&set);
}

// Returns whether traffic to `node` stays on this host, without a NIC.
bool IsOnThisHost(const Node& node) {
  if (IsLoopback(node.hostname)) return true;
  for (const HostNic& own_nic : ListNics()) {
    if (own_nic.nic.address == node.hostname) return true;
  }
  return false;
}

// Returns the number of threads: a quarter of this worker's share of the host's cores. The
// framework, or the server's reductions, need the other cores.
int DefaultThreads(int workers) { return std::clamp(Processors() / workers / 4, 1, kMaxThreads); }

tcp::ConnectionSettings ConnectionSettingsOf(const VanSettings& van, const tcp::Settings& tcp) {
  tcp::ConnectionSettings settings;
  settings.secret = tcp.secret;
  settings.tls = tcp.tls;
  settings.reconnect_s = van.reconnect_s;
  // Half of the reconnect time is left for reconnecting. Without reconnecting, heartbeats should
  // notice a silent peer before the socket does, because the error of heartbeats says more.
  const double peer_timeout_s = van.membership.peer_timeout_s;
  settings.silence_s = van.reconnect_s > 0 ? van.reconnect_s / 2 : 2 * peer_timeout_s + 2;
  // Another pair of NICs is tried before the peer counts as silent.
  settings.switch_s = std::min(settings.switch_s, peer_timeout_s / 4);
  return settings;
}

}  // namespace

TcpVan::TcpVan(const VanSettings& settings, const tcp::Settings& tcp)
    : LinkVan(settings), tcp_(tcp), settings_(ConnectionSettingsOf(settings, tcp)) {}

TcpVan::~TcpVan() = default;

void TcpVan::Start(int customer_id, bool standalone) {
  if (standalone) throw Error("the TCP van joins a job");
  const Postoffice* post = Postoffice::Get();
  const MembershipSettings& membership = settings().membership;
  host_.secret = &settings_.secret;
  host_.tls = settings_.tls;
  host_.challenge = [this](const tcp::Hello& hello) {
    tcp::Challenge challenge;
    challenge.job = job_.get();
    if (MeansScheduler(hello)) challenge.job = hello.job;
    if (MustWait(hello)) challenge.job = WithGeneration(challenge.job, kNotTold);
    challenge.sender = token_;
    return challenge;
  };
  host_.admit = [this](const tcp::StreamPtr& socket, const tcp::Hello& hello) {
    return Admit(socket, hello);
  };
  host_.done = [this](const tcp::Greeter* greeter) { pending_->Remove(greeter); };
  int threads = tcp_.io_threads;
  if (threads == 0) {
    threads = post->is_scheduler() ? 1 : DefaultThreads(settings().nics.local_size);
  }
  // Only a worker knows its number of connections, and only after it has joined.
  const int most = std::max(tcp_.connections > 0 ? tcp_.connections : kMaxThreads, kUsualNics);
  const int neighbors = membership.backups ? 2 : 0;
  const size_t peers = membership.keep && !post->is_worker() ? kAnyNumberOfPeers
                       : post->is_scheduler() ? post->num_workers() + post->num_servers()
                       : post->is_server()    ? most * (post->num_workers() + neighbors)
                                              : most * post->num_servers();
  const size_t files = tcp::MakeRoomForFiles(peers + kPendingPeers);
  pollers_ = std::make_unique<tcp::Pollers>(threads, tcp_.receive_pool_bytes);
  // A process that may open only few files reserves most of them for the job's own connections.
  const size_t room =
      std::clamp(files / 4, kPendingLeast, settings_.tls ? kPendingEncrypted : kPendingPeers);
  pending_ = std::make_unique<tcp::PendingPeers>(
      pollers_->first().get(),
      tcp::PendingPeers::Limits{room, kLeastGreetingTime, kGreetingTime,
                                "it did not say in time who it is", "have not authenticated"});
  Begin(post->is_scheduler(), membership.scheduler_return_s > 0);
  Van::Start(customer_id, false);
}

int TcpVan::Bind(const Node& node, int /*max_retry*/) {
  // The scheduler carries no gradients.
  if (node.role != Node::SCHEDULER) PlacePollers(node);
  // Workers do not listen: servers answer over the connections that the workers have made.
  if (!Listens(node.role)) return 0;
  const bool scheduler = node.role == Node::SCHEDULER;
  const bool every_address = scheduler && settings().on_every_address;
  int port = node.port;
  try {
    // A name may have an IPv4 and an IPv6 address, and peers may use either.
    auto addresses = Resolve(every_address ? "" : node.hostname, port);
    if (!every_address) {
      for (const Nic& nic : node.nics) {
        if (nic.address != node.hostname) addresses.push_back(Resolve(nic.address, port)[0]);
      }
    }
    ListenAt(addresses, &port);
  } catch (const Error& e) {
    listeners_.clear();
    const std::string why = std::string(scheduler ? "the scheduler" : "this node") +
                            " cannot listen on " + JoinHostPort(node.hostname, node.port) + ": " +
                            e.what() +
                            (scheduler ? " (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)"
                                       : " (DMLC_NODE_HOST, DMLC_INTERFACE, BYTEPS_NODE_PORT)");
    // A name may still resolve to an old address, so binding is tried again. A numeric address does
    // not change.
    const bool may_change = dynamic_cast<const UnknownHost*>(&e) != nullptr;
    if (may_change && !IsNumeric(node.hostname)) throw UnknownHost(why);
    throw Error(why);
  }
  // A probe only tests whether it can listen, so it accepts no connections.
  if (scheduler && settings().membership.probe > 0) return port;
  for (auto& listener : listeners_) listener->Start();
  return port;
}

void TcpVan::ListenAt(const std::vector<Address>& addresses, int* port) {
  for (Address address : addresses) {
    // The port is at the same offset in both address families.
    reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port = htons(*port);
    tcp::Fd fd;
    try {
      fd = tcp::Listen(address, port);
    } catch (const Error& e) {
      if (listeners_.empty()) throw;
      // Reasons may be "::1" in a container without IPv6, or a port in use. Connections to this
      // address use another pair of NICs.
      PS_VLOG(1) << "cannot listen on " << address.Text() << ": " << e.what();
      continue;
    }
    listeners_.push_back(std::make_shared<tcp::Listener>(
        pollers_->first().get(), std::move(fd), [this] { return pending_->MayAdd(); },
        [this](tcp::Fd accepted, const Address& from) { OnAccepted(std::move(accepted), from); }));
  }
}

// -------------------------------------------------------------- connections

ConnectionPtr TcpVan::NewConnection(const std::string& address) {
  const tcp::Pollers::Place place = pollers_->Next(address);
  return std::make_shared<Connection>(this, &settings_, place.poller, place.pool);
}

void TcpVan::PlacePollers(const Node& self) {
  std::vector<HostNic> own_nics;
  for (const HostNic& nic : ListNics()) {
    const bool used = std::any_of(self.nics.begin(), self.nics.end(),
                                  [&](const Nic& one) { return one.address == nic.nic.address; });
    if (used) own_nics.push_back(nic);
  }
  pollers_->ServeNics(own_nics, ReadNumaNodes());
}

void TcpVan::OnAccepted(tcp::Fd fd, const Address& address) {
  const auto greeter =
      std::make_shared<tcp::Greeter>(&host_, pollers_->first(), std::move(fd), address.Host());
  pending_->Add(greeter, address);
  try {
    greeter->Start();
  } catch (const Error& e) {
    greeter->End(e.what());
  }
}

int tcp::ConnectionsFor(double gbps, int servers, int threads) {
  const double wanted = std::ceil(gbps / std::max(servers, 1) / kConnectionGbps);
  return static_cast<int>(std::clamp<double>(wanted, 1, threads));
}

int TcpVan::ConnectionsWith(const Node& node) {
  if (node.role == Node::SCHEDULER) return 1;
  if (tcp_.connections > 0) return tcp_.connections;
  // Between two servers, the NICs of this one decide, because it sends its state to one neighbor.
  const bool worker = my_role_ == Node::WORKER;
  double gbps =
      (worker ? membership()->AsNode()->link_mbps() : HostMbps(this->node(), settings().nics)) /
      1e3;
  if (IsLoopback(node.hostname)) gbps = kLoopbackGbps;
  if (gbps == 0) gbps = kUnknownGbps;
  const int wanted =
      tcp::ConnectionsFor(gbps / (worker ? settings().nics.local_size : 1),
                          worker ? Postoffice::Get()->num_servers() : 1, pollers_->size());
  return IsOnThisHost(node) ? wanted
                            : std::max(wanted, LeastConnections(this->node().nics, node.nics));
}

std::vector<std::vector<NicPair>> TcpVan::PairsWith(const Node& node, int count) {
  if (node.role == Node::SCHEDULER || IsOnThisHost(node)) {
    return std::vector<std::vector<NicPair>>(count, {{"", node.hostname}});
  }
  const int turn = Postoffice::IDtoRank(my_id_) + Postoffice::IDtoRank(node.id);
  return PairNics(this->node().nics, node, count, turn);
}

void TcpVan::LearnPairs(const Node& scheduler) {
  if (IsOnThisHost(scheduler)) return;
  const auto pairs = PairNics(node().nics, scheduler, 1, 0);
  for (const auto& connection : peers_.Of(kScheduler)) connection->AddPairs(pairs[0]);
}

void TcpVan::Dial(const Node& node) {
  auto peer = std::make_shared<Peers::Peer>();
  peer->id = node.id;
  const int count = ConnectionsWith(node);
  Peers::Links& connections = peer->links[kPlane];
  const auto pairs = PairsWith(node, count);
  for (const auto& tries : pairs) {
    connections.push_back(NewConnection(tries.front().from));
    connections.back()->set_peer(node.id);
  }
  // The list is copied, because the table's lock guards the peer's own list from now on.
  const Peers::Links dialed = connections;
  peers_.Add(std::move(peer));
  // This limit is longer than the wait for the scheduler, because the scheduler's error is more
  // specific.
  const auto limit =
      std::chrono::duration<double>(settings().membership.start_timeout_s + kPatience);
  const auto deadline =
      Connection::Clock::now() + std::chrono::duration_cast<Connection::Clock::duration>(limit);
  tcp::Hello hello;
  hello.job = job_.get();
  hello.sender = token_;
  hello.receiver = TokenOf(node);
  hello.node_id = my_id_;
  hello.role = my_role_;
  const int my_rank = my_id_ == Node::kEmpty ? -1 : Postoffice::IDtoRank(my_id_);
  if (AreServers(node.role)) hello.rank = my_rank;
  if (my_role_ == Node::WORKER) {
    hello.rank = my_rank < 0 ? settings().membership.rank : my_rank;
  }
  for (int i = 0; i < count; ++i) {
    hello.index = i;
    dialed[i]->Dial(pairs[i], node.port, hello, deadline);
  }
}

void TcpVan::NamePeer(const Node& node) {
  const auto named = peers_.Name(TokenOf(node), node.id);
  if (!named.is_there) return PutLoss(node.id, nullptr, {"its connection closed", false, false});
  for (const auto& connection : named.displaced) {
    connection->Close({"another process has its place", false, true});
  }
}

ConnectionPtr TcpVan::LinkTo(const Node& node) {
  ConnectionPtr connection = NewConnection("");
  connection->set_peer(node.id);
  return connection;
}

bool TcpVan::MeansScheduler(const tcp::Hello& hello) const {
  return hello.receiver == 0 && LooksForScheduler(hello.job, hello.resumes);
}

bool TcpVan::MustWait(const tcp::Hello& hello) {
  if (!settings().membership.backups || !AreServers(hello.role)) return false;
  // A peer that resumes was announced before, and this node has forgotten it since.
  return !hello.resumes && !peers_.Expects(hello.sender, hello.node_id);
}

// The first poller's thread calls this.
std::string TcpVan::Admit(const tcp::StreamPtr& socket, const tcp::Hello& hello) {
  Applicant applicant;
  applicant.who = {hello.sender, hello.role, hello.rank};
  applicant.job = hello.job;
  applicant.receiver = hello.receiver;
  applicant.node_id = hello.node_id;
  applicant.plane = kPlane;
  applicant.index = hello.index;
  applicant.resumes = hello.resumes;
  applicant.returns = MeansScheduler(hello);
  const bool is_expected = peers_.Expects(hello.sender, hello.node_id);
  const std::string refusal = ReasonToRefuse(applicant, my_role_, token_, job_.get(), is_expected);
  if (!refusal.empty()) return refusal;
  const auto admitted =
      peers_.Admit(applicant, is_scheduler_, Peers::Again::kTakesTheLink, [&](int id) {
        const tcp::HostPair hosts = tcp::HostsOf(socket->fd());
        // Traffic inside the host uses no NIC.
        ConnectionPtr connection = NewConnection(hosts.here == hosts.there ? "" : hosts.here);
        connection->set_peer(id);
        return connection;
      });
  if (!admitted.refusal.empty()) return admitted.refusal;
  admitted.link->Adopt(socket, hello);
  return "";
}

std::string TcpVan::OnChallenge(const ConnectionPtr& connection, const tcp::Challenge& challenge) {
  const bool scheduler = connection->peer() == kScheduler;
  if (!scheduler && challenge.job == WithGeneration(job_.get(), kNotTold)) {
    return "the scheduler has not told it of this node";
  }
  return job_.Hear(challenge.job, scheduler);
}

Connection::Clock::duration TcpVan::Patience(Connection* connection, LinkFault fault) {
  PS_VLOG(1) << "the connection with node " << connection->peer() << " (" << connection->address()
             << ") broke";
  return LinkPatience(connection->peer(), is_scheduler_, settings_.reconnect_s, fault);
}

std::string TcpVan::DialError(int node_id) {
  for (const auto& connection : peers_.Of(node_id)) {
    const std::string error = connection->dial_error();
    if (!error.empty()) return error;
  }
  return "";
}

bool TcpVan::IsBroken(int node_id) {
  const auto connections = peers_.Of(node_id);
  return std::any_of(connections.begin(), connections.end(),
                     [](const auto& connection) { return connection->is_broken(); });
}

void TcpVan::OnResumed(Connection* connection, Connection::Clock::duration after, size_t again) {
  LogResumed("the connection", connection->peer(), connection->address(), after, again);
}

void TcpVan::Disconnect(int node_id) {
  if (!is_scheduler_) {
    for (const auto& connection : peers_.Forget(node_id)) {
      connection->SayGoodbye();
      connection->Close({"this node closed it", false, true});
    }
    return;
  }
  for (const auto& connection : peers_.Of(node_id)) {
    connection->SayGoodbye();
    connection->CloseWhenFlushed();
  }
}

void TcpVan::OnClosed(const ConnectionPtr& connection, const LinkEnding& ending) {
  PS_VLOG(1) << "the connection of node " << connection->peer() << " (" << connection->address()
             << ") closed: " << ending.reason;
  const auto loss = peers_.LetGo(connection.get());
  if (loss.peer) PutLoss(loss.id, loss.peer, ending);
}

void TcpVan::OnLinkLost(int id, const LinkEnding& ending) {
  membership()->OnLinkLost(id, ending.reason, ending.by_peer);
}

// ----------------------------------------------------------------- messages

void TcpVan::Transmit(const Message& msg) {
  const ConnectionPtr connection = peers_.Choose(msg.meta.recver, kPlane);
  if (connection && connection->Send(msg)) return;
  // The membership watches peers, and informs waiting threads.
  PS_VLOG(1) << "no connection to node " << msg.meta.recver << "; dropped " << msg.DebugString();
}

char* TcpVan::PlaceFor(const Meta& meta, size_t bytes) {
  const auto& finder = Postoffice::Get()->handlers().place_for;
  return meta.control.empty() && finder ? finder(meta, bytes) : nullptr;
}

void TcpVan::OnMessage(Connection* connection, Message* msg, size_t bytes) {
  Deliver(connection, msg, bytes);
}

void TcpVan::Abandon(const void* begin, size_t bytes) {
  if (!inbox_.BeginUse()) return;
  for (const auto& connection : peers_.All()) connection->Abandon(begin, bytes);
  inbox_.EndUse();
}

void TcpVan::ReceiveReady() {
  if (!inbox_.BeginUse()) return;
  pollers_->ServeReady();
  inbox_.EndUse();
}

// ----------------------------------------------------------------- stopping

void TcpVan::Stop() {
  Van::Stop();     // Stop ends and joins the receiving thread
  inbox_.Close();  // Close waits for sending threads
  for (auto& listener : listeners_) listener->Stop();
  Flush();
  peers_.Stop();
  for (const auto& connection : peers_.All()) {
    connection->Close({"this node closed it", false, true});
  }
  if (pollers_) pollers_->Stop();
  if (pending_) pending_->Clear();
  peers_.Clear();
  inbox_.Clear();
  listeners_.clear();
  pollers_.reset();
}

}  // namespace ps
