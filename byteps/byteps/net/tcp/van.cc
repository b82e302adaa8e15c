#include "byteps/net/tcp/van.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <utility>

#include "byteps/net/link/net_address.h"
#include "byteps/net/link/who_connects.h"
#include "byteps/net/membership/node_membership.h"
#include "dmlc/logging.h"
#include "ps/internal/postoffice.h"

namespace ps {

using tcp::Connection;
using tcp::ConnectionPtr;
using tcp::Ending;

namespace {

// How long closing waits for queued messages (a goodbye, a failure) to leave.
constexpr auto kLinger = std::chrono::seconds(1);
constexpr auto kLook = std::chrono::milliseconds(1);
constexpr double kPatience = 5.0;  // seconds
// Connections that have not authenticated: so many at once, each for so long.  An honest node needs
// two round trips, and connects again if that was too little.  15,000 of them per second are let
// go.
constexpr size_t kPendingPeers = 768;
constexpr size_t kPendingEncrypted = 384;  // each may take some 100 KiB
constexpr size_t kPendingLeast = 64;
constexpr auto kGreetingTime = std::chrono::milliseconds(1500);
constexpr auto kLeastGreetingTime = std::chrono::milliseconds(50);
// Of the pair of a worker and a server, or of a node and the scheduler.
constexpr int kMaxConnections = 64;
// One thread moves some gigabytes a second; more than this many find nothing left to do.
constexpr int kMaxThreads = 8;
// A connection carries some 16 Gbit/s each way at once.  More connections than the link needs share
// it less evenly, and what is late holds up a sum.
constexpr double kConnectionGbps = 10;
// A link that nobody has told of, and one inside a host.
constexpr double kUnknownGbps = 40;
constexpr double kLoopbackGbps = 100;
// Room for so many where the next incarnation of the job may bring any number of workers.
constexpr size_t kAnyNumberOfPeers = 1 << 16;

double Seconds(const char* name, double fallback) {
  const char* text = Environment::Get()->find(name);
  return text == nullptr ? fallback : atof(text);
}

size_t Bytes(const char* name, size_t fallback) {
  const char* text = Environment::Get()->find(name);
  return text == nullptr ? fallback : strtoull(text, nullptr, 10);
}

int Processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return CPU_COUNT(&set);
}

int WorkersOfThisHost() {
  return std::max(GetEnv("BYTEPS_LOCAL_SIZE", 1), GetEnv("LOCAL_WORLD_SIZE", 1));
}

// A quarter of the processors that each of this host's workers has: the others belong to
// the framework, or to the server's additions.
int DefaultThreads() { return std::clamp(Processors() / WorkersOfThisHost() / 4, 1, kMaxThreads); }

}  // namespace

TcpVan::~TcpVan() = default;

void TcpVan::SetNode(const Node& node) {
  Node self = node;
  // The scheduler gives an id back with the rest of what this node told of itself.
  if (token_ != 0) SetToken(token_, &self);
  Van::SetNode(self);
  my_id_ = node.id;
}

void TcpVan::Start(int customer_id, bool standalone) {
  CHECK(!standalone) << "the TCP van joins a job";
  const Postoffice* post = Postoffice::Get();
  settings_.secret = auth::Secret::FromEnvironment();
  settings_.tls = tls::Context::FromEnvironment(settings_.secret);
  settings_.reconnect_s = Seconds("BYTEPS_RECONNECT_TIMEOUT_S", 30);
  // So that half of the time to reconnect is left.  Where nobody reconnects: later than the
  // heartbeats, which know more of who is silent.
  const double peer_timeout_s = Seconds("BYTEPS_PEER_TIMEOUT_S", 30);
  settings_.silence_s =
      settings_.reconnect_s > 0 ? settings_.reconnect_s / 2 : 2 * peer_timeout_s + 2;
  host_.secret = &settings_.secret;
  host_.tls = settings_.tls;
  host_.challenge = [this] {
    tcp::Challenge challenge;
    challenge.job = job_;
    challenge.sender = token_;
    return challenge;
  };
  host_.admit = [this](const tcp::StreamPtr& socket, const tcp::Hello& hello) {
    return Admit(socket, hello);
  };
  host_.done = [this](const tcp::Greeter* greeter) { pending_->Remove(greeter); };
  start_timeout_s_ = Seconds("BYTEPS_START_TIMEOUT_S", 30);
  int threads = GetEnv("BYTEPS_IO_THREADS", 0);
  if (threads == 0) threads = post->is_scheduler() ? 1 : DefaultThreads();
  connections_per_server_ = GetEnv("BYTEPS_TCP_CONNECTIONS", 0);
  // Only a worker knows how many connections it makes, and only when it has joined.
  const int most = connections_per_server_ > 0 ? connections_per_server_ : kMaxThreads;
  const size_t peers = GetEnv("BYTEPS_KEEP", 0) > 0 && !post->is_worker() ? kAnyNumberOfPeers
                       : post->is_scheduler() ? post->num_workers() + post->num_servers()
                       : post->is_server()    ? most * post->num_workers()
                                              : most * post->num_servers();
  const size_t files = tcp::MakeRoomForFiles(peers + kPendingPeers);
  token_ = NewToken();
  job_ = post->is_scheduler() ? NewJob() : 0;
  pool_ = std::make_shared<tcp::MemoryPool>(Bytes("BYTEPS_RECEIVE_POOL_BYTES", 1 << 30));
  pollers_.clear();
  for (int i = 0; i < threads; ++i) pollers_.push_back(std::make_shared<tcp::Poller>(i));
  // Where few files may be open, most of them are for the job's own connections.
  const size_t room =
      std::clamp(files / 4, kPendingLeast, settings_.tls ? kPendingEncrypted : kPendingPeers);
  pending_ = std::make_unique<tcp::PendingPeers>(
      pollers_[0].get(),
      tcp::PendingPeers::Limits{room, kLeastGreetingTime, kGreetingTime,
                                "it did not say in time who it is", "have not authenticated"});
  inbox_.Open();
  {
    MutexLock lock(&peers_mu_);
    stopping_ = false;
  }
  Van::Start(customer_id, false);
}

int TcpVan::Bind(const Node& node, int /*max_retry*/) {
  // A worker is answered along the connections that it made.
  if (!Listens(node.role)) return 0;
  const bool scheduler = node.role == Node::SCHEDULER;
  const bool every_address = scheduler && GetEnv("DMLC_USE_KUBERNETES", 0) > 0;
  int port = node.port;
  try {
    // A name may stand for an IPv4 and an IPv6 address: who connects may choose either.
    for (auto& address : tcp::Resolve(every_address ? "" : node.hostname, port)) {
      // Both in_port fields lie at the same place.
      reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port = htons(port);
      tcp::Fd fd;
      try {
        fd = tcp::Listen(address, &port);
      } catch (const dmlc::Error&) {
        if (listeners_.empty()) throw;
        continue;  // such as "::1" in a container without IPv6
      }
      listeners_.push_back(std::make_shared<tcp::Listener>(
          pollers_[0].get(), std::move(fd), [this] { return pending_->MayAdd(); },
          [this](tcp::Fd accepted, const tcp::Address& from) {
            OnAccepted(std::move(accepted), from);
          }));
    }
  } catch (const dmlc::Error& e) {
    listeners_.clear();
    throw dmlc::Error(std::string(scheduler ? "the scheduler" : "this node") +
                      " cannot listen on " + JoinHostPort(node.hostname, node.port) + ": " +
                      e.what() +
                      (scheduler ? " (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)"
                                 : " (DMLC_NODE_HOST, DMLC_INTERFACE, BYTEPS_NODE_PORT)"));
  }
  // Where it is only looked whether a scheduler can listen, nobody may be told that it does.
  if (scheduler && GetEnv("BYTEPS_PROBE", 0) > 0) return port;
  for (auto& listener : listeners_) listener->Start();
  return port;
}

// -------------------------------------------------------------- connections

ConnectionPtr TcpVan::NewConnection() {
  const auto& poller = pollers_[next_poller_++ % pollers_.size()];
  return std::make_shared<Connection>(this, &settings_, poller, pool_);
}

void TcpVan::OnAccepted(tcp::Fd fd, const tcp::Address& address) {
  const auto greeter = std::make_shared<tcp::Greeter>(&host_, pollers_[0], std::move(fd));
  pending_->Add(greeter, address);
  try {
    greeter->Start();
  } catch (const dmlc::Error& e) {
    greeter->End(e.what());
  }
}

int tcp::ConnectionsFor(double gbps, int servers, int threads) {
  const double wanted = std::ceil(gbps / std::max(servers, 1) / kConnectionGbps);
  return static_cast<int>(std::clamp<double>(wanted, 1, threads));
}

ConnectionPtr tcp::BestOf(const std::vector<ConnectionPtr>& connections) {
  ConnectionPtr best;
  bool best_is_open = false;
  for (const auto& connection : connections) {
    if (!connection) continue;
    const bool is_open = connection->open();
    const bool fewer = !best || connection->queued_bytes() < best->queued_bytes();
    if (is_open == best_is_open ? !fewer : best_is_open) continue;
    best = connection;
    best_is_open = is_open;
  }
  return best;
}

int TcpVan::ConnectionsWith(const Node& node) {
  if (node.role == Node::SCHEDULER) return 1;
  if (connections_per_server_ > 0) return connections_per_server_;
  double gbps = membership()->AsNode()->link_mbps() / 1e3;
  if (IsLoopback(node.hostname)) gbps = kLoopbackGbps;
  if (gbps == 0) gbps = kUnknownGbps;
  return tcp::ConnectionsFor(gbps / WorkersOfThisHost(), Postoffice::Get()->num_servers(),
                             static_cast<int>(pollers_.size()));
}

void TcpVan::Connect(const Node& node) {
  CHECK_NE(node.id, Node::kEmpty);
  if (!ConnectsTo(my_role_, node.role)) {
    // Only the scheduler gives names to who comes; to a server a worker says its own.
    if (is_scheduler_ && node.role != Node::SCHEDULER) NamePeer(node);
    return;
  }

  auto peer = std::make_shared<Peer>();
  peer->id = node.id;
  const int count = ConnectionsWith(node);
  for (int i = 0; i < count; ++i) {
    peer->connections.push_back(NewConnection());
    peer->connections.back()->peer = node.id;
  }
  const auto connections = peer->connections;
  {
    MutexLock lock(&peers_mu_);
    peers_[node.id] = peer;
  }
  // Longer than who waits for the scheduler does, whose error says more.
  const auto limit = std::chrono::duration<double>(start_timeout_s_ + kPatience);
  const auto deadline =
      Connection::Clock::now() + std::chrono::duration_cast<Connection::Clock::duration>(limit);
  tcp::Hello hello;
  hello.job = job_;
  hello.sender = token_;
  hello.receiver = TokenOf(node);
  hello.node_id = my_id_;
  hello.role = my_role_;
  if (my_role_ == Node::WORKER) {
    hello.rank =
        my_id_ == Node::kEmpty ? GetEnv("DMLC_WORKER_ID", -1) : Postoffice::IDtoRank(my_id_);
  }
  for (int i = 0; i < count; ++i) {
    hello.index = i;
    connections[i]->Dial(node.hostname, node.port, hello, deadline);
  }
}

void TcpVan::NamePeer(const Node& node) {
  MutexLock lock(&peers_mu_);
  auto it = peers_by_token_.find(TokenOf(node));
  if (it == peers_by_token_.end()) {  // it came, and has gone already
    Event event;
    event.is_loss = true;
    event.lost_id = node.id;
    event.ending.reason = "its connection closed";
    inbox_.Put(std::move(event));
    return;
  }
  // It may have had another name.
  const auto last = peers_.find(it->second->id);
  if (last != peers_.end() && last->first != node.id && last->second == it->second) {
    peers_.erase(last);
  }
  it->second->id = node.id;
  const PeerPtr before = std::exchange(peers_[node.id], it->second);
  for (const auto& connection : it->second->connections) {
    if (connection) connection->peer = node.id;
  }
  if (!before || before == it->second) return;
  for (const auto& connection : before->connections) {
    if (connection) connection->Close({"another process has its place", false, true});
  }
}

std::string TcpVan::ReasonToRefuse(const tcp::Hello& hello) const {
  const bool scheduler = my_role_ == Node::SCHEDULER;
  const auto role = static_cast<Node::Role>(hello.role);
  const uint64_t job = job_;
  if (hello.job != job && !(scheduler && hello.job == 0)) return NotOurs(hello.job, job);
  if (hello.receiver != 0 && hello.receiver != token_) {
    return "the process that is meant is not here any more";
  }
  if (hello.sender == 0 || hello.index >= kMaxConnections || hello.role > Node::SCHEDULER) {
    return "its hello does not parse";
  }
  if (job == 0) return "this node is in no job yet";
  if (!ConnectsTo(role, my_role_)) return "its role has nothing to say to this node";
  if (scheduler) return "";
  if (!IsWorkerId(hello.node_id)) return "it is no worker";
  if (Postoffice::IDtoRank(hello.node_id) != hello.rank)
    return "its rank is not that of its node id";
  return "";
}

// The first poller's thread.
std::string TcpVan::Admit(const tcp::StreamPtr& socket, const tcp::Hello& hello) {
  const std::string refusal = ReasonToRefuse(hello);
  if (!refusal.empty()) return refusal;
  ConnectionPtr connection;
  {
    MutexLock lock(&peers_mu_);
    if (stopping_) return "this node is leaving the job";
    const auto by_token = peers_by_token_.find(hello.sender);
    PeerPtr peer = by_token == peers_by_token_.end() ? nullptr : by_token->second;
    if (my_role_ != Node::SCHEDULER) {
      const auto known = peers_.find(hello.node_id);
      const bool taken = known != peers_.end() && known->second != peer;
      if (taken || (peer && peer->id != Node::kEmpty && peer->id != hello.node_id)) {
        return "another process is connected under its node id";
      }
    }
    if (peer && peer->connections.size() > hello.index) connection = peer->connections[hello.index];
    if (connection && connection->closed()) return "this node has closed the connection";
    if (connection &&
        (connection->hello.role != hello.role || connection->hello.rank != hello.rank)) {
      return "it was another role or rank before";
    }
    if (!connection) {
      if (hello.resumes) return "this node has given the connection up";
      if (!peer) peer = peers_by_token_[hello.sender] = std::make_shared<Peer>();
      connection = NewConnection();
      connection->token = hello.sender;
      connection->hello = hello;
      if (my_role_ != Node::SCHEDULER) {
        peer->id = hello.node_id;
        peers_[hello.node_id] = peer;
      }
      // Who comes once more to the scheduler, over another connection, has its name already.
      connection->peer = peer->id;
      if (peer->connections.size() <= hello.index) peer->connections.resize(hello.index + 1);
      peer->connections[hello.index] = connection;
    }
  }
  connection->Adopt(socket, hello);
  return "";
}

std::string TcpVan::OnChallenge(const ConnectionPtr& connection, const tcp::Challenge& challenge) {
  if (challenge.job == 0) return "it is in no job";
  if (connection->peer == kScheduler && job_ == 0) job_ = challenge.job;
  return challenge.job == job_ ? "" : NotOurs(challenge.job, job_);
}

Connection::Clock::duration TcpVan::Patience(Connection* connection, LinkFault fault) {
  PS_VLOG(1) << "the connection with node " << connection->peer << " (" << connection->address()
             << ") broke";
  return LinkPatience(connection->peer, is_scheduler_, settings_.reconnect_s, fault);
}

void TcpVan::OnResumed(Connection* connection, Connection::Clock::duration after, size_t again) {
  LogResumed("the connection", connection->peer, connection->address(), after, again);
}

ConnectionPtr TcpVan::Choose(int node_id) {
  MutexLock lock(&peers_mu_);
  auto it = peers_.find(node_id);
  return it == peers_.end() ? nullptr : tcp::BestOf(it->second->connections);
}

std::vector<ConnectionPtr> TcpVan::AllConnections() {
  MutexLock lock(&peers_mu_);
  std::vector<ConnectionPtr> all;
  const auto add = [&all](const Peer& peer) {
    for (const auto& connection : peer.connections) {
      if (connection) all.push_back(connection);
    }
  };
  for (const auto& entry : peers_) add(*entry.second);
  for (const auto& entry : peers_by_token_) {
    if (entry.second->id == Node::kEmpty) add(*entry.second);
  }
  return all;
}

bool TcpVan::IsEmpty(const Peer& peer) {
  return std::none_of(peer.connections.begin(), peer.connections.end(),
                      [](const auto& connection) { return connection != nullptr; });
}

void TcpVan::Disconnect(int node_id) {
  std::vector<ConnectionPtr> connections;
  {
    MutexLock lock(&peers_mu_);
    auto it = peers_.find(node_id);
    if (it == peers_.end()) return;
    connections = it->second->connections;
  }
  for (const auto& connection : connections) {
    if (!connection) continue;
    connection->SayGoodbye();
    connection->CloseWhenFlushed();
  }
}

void TcpVan::OnClosed(const ConnectionPtr& connection, const Ending& ending) {
  PS_VLOG(1) << "the connection of node " << connection->peer << " (" << connection->address()
             << ") closed: " << ending.reason;
  Event event;
  {
    MutexLock lock(&peers_mu_);
    if (stopping_) return;
    const auto let_go = [&](Peer* peer) {
      for (auto& mine : peer->connections) {
        if (mine != connection) continue;
        mine.reset();
        return true;
      }
      return false;
    };
    for (auto it = peers_by_token_.begin(); it != peers_by_token_.end(); ++it) {
      if (!let_go(it->second.get())) continue;
      event.lost = it->second;
      if (IsEmpty(*it->second)) peers_by_token_.erase(it);
      break;
    }
    auto named = peers_.find(connection->peer);
    if (named != peers_.end()) {
      if (let_go(named->second.get())) event.lost = named->second;
      if (named->second == event.lost && IsEmpty(*event.lost)) peers_.erase(named);
    }
    // One that never was more than a connection is nobody's loss.
    if (!event.lost || event.lost->id == Node::kEmpty) return;
  }
  event.is_loss = true;
  event.lost_id = connection->peer;
  event.ending = ending;
  inbox_.Put(std::move(event));
}

// ----------------------------------------------------------------- messages

int TcpVan::SendMsg(Message& msg) {
  if (!inbox_.BeginUse()) return -1;
  const int bytes = Dispatch(msg);
  inbox_.EndUse();
  return bytes;
}

int TcpVan::Dispatch(const Message& msg) {
  size_t bytes = 0;
  for (const auto& value : msg.data) bytes += value.size();
  if (msg.meta.control.cmd == Control::TERMINATE) {
    inbox_.End();
    return 0;
  }
  if (msg.meta.recver == my_id_) {
    Event event;
    event.msg = msg;
    event.msg.meta.sender = my_id_;
    inbox_.Put(std::move(event));
    return 0;
  }
  const ConnectionPtr connection = Choose(msg.meta.recver);
  if (!connection || !connection->Send(msg)) {
    // Whoever watches the peers tells those who wait for it.
    PS_VLOG(1) << "no connection to node " << msg.meta.recver << "; dropped " << msg.DebugString();
  }
  return static_cast<int>(std::min<size_t>(bytes, 1 << 30));
}

char* TcpVan::PlaceFor(const Meta& meta, size_t bytes) {
  const auto& finder = Postoffice::Get()->handlers().place_for;
  return meta.control.empty() && finder ? finder(meta, bytes) : nullptr;
}

void TcpVan::OnMessage(Connection* connection, Message* msg, size_t bytes) {
  msg->meta.sender = connection->peer;
  msg->meta.recver = my_id_;
  if (!msg->meta.control.empty()) {
    const auto& control = msg->meta.control;
    if (connection->peer == Node::kEmpty && control.cmd != Control::ADD_NODE) {
      throw dmlc::Error("it is no member of the job and sent more than that it wants to join");
    }
    // It cannot speak for another process.
    if (control.cmd == Control::ADD_NODE && is_scheduler_ &&
        (control.node.size() != 1 || TokenOf(control.node[0]) != connection->token ||
         control.node[0].role != connection->hello.role ||
         control.node[0].aux_id != connection->hello.rank)) {
      throw dmlc::Error("it wants to join as another process, or in another role or rank");
    }
    Event event;
    event.msg = std::move(*msg);
    event.bytes = bytes;
    event.from = connection->shared_from_this();
    return inbox_.Put(std::move(event));
  }
  if (connection->peer == Node::kEmpty) throw dmlc::Error("it is no member of the job");
  const auto& handler = Postoffice::Get()->handlers().on_message;
  if (handler) handler(msg);
}

void TcpVan::HandleLoss(const Event& event) {
  {
    // Another process may have its place by now.
    MutexLock lock(&peers_mu_);
    auto it = peers_.find(event.lost_id);
    if (it != peers_.end() && it->second != event.lost) return;
  }
  if (event.ending.orderly) return OnDisconnect(event.lost_id);
  membership()->OnLinkLost(event.lost_id, event.ending.reason, event.ending.by_peer);
}

int TcpVan::RecvMsg(Message* msg) {
  while (true) {
    Event event;
    if (!inbox_.Take(&event)) {
      *msg = Message();
      msg->meta.control.cmd = Control::TERMINATE;
      return 0;
    }
    if (event.is_loss) {
      HandleLoss(event);
      continue;
    }
    *msg = std::move(event.msg);
    // Only now: a message before may have given this node, or the peer, its id.
    if (event.from) msg->meta.sender = event.from->peer;
    msg->meta.recver = my_id_;
    return static_cast<int>(std::min<size_t>(event.bytes, 1 << 30));
  }
}

void TcpVan::Abandon(const void* begin, size_t bytes) {
  if (!inbox_.BeginUse()) return;
  for (const auto& connection : AllConnections()) connection->Abandon(begin, bytes);
  inbox_.EndUse();
}

bool TcpVan::AllArrived() {
  const auto connections = AllConnections();
  return std::all_of(connections.begin(), connections.end(),
                     [](const auto& connection) { return connection->all_arrived(); });
}

// ----------------------------------------------------------------- stopping

void TcpVan::FlushConnections() {
  const auto connections = AllConnections();
  for (const auto& connection : connections) connection->SayGoodbye();
  const auto deadline = std::chrono::steady_clock::now() + kLinger;
  for (const auto& connection : connections) {
    while (!connection->flushed() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kLook);
    }
  }
}

void TcpVan::Stop() {
  Van::Stop();     // ends and joins the receiving thread
  inbox_.Close();  // waits for those who send
  for (auto& listener : listeners_) listener->Stop();
  FlushConnections();
  {
    MutexLock lock(&peers_mu_);
    stopping_ = true;
  }
  for (const auto& connection : AllConnections()) {
    connection->Close({"this node closed it", false, true});
  }
  for (auto& poller : pollers_) poller->Stop();
  if (pending_) pending_->Clear();
  {
    MutexLock lock(&peers_mu_);
    peers_.clear();
    peers_by_token_.clear();
  }
  inbox_.Clear();
  listeners_.clear();
  pollers_.clear();
}

}  // namespace ps
