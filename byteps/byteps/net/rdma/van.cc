#include "byteps/net/rdma/van.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "byteps/net/link/net_address.h"
#include "byteps/net/link/node_token.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/link/who_connects.h"
#include "byteps/net/rdma/verbs_library.h"
#include "dmlc/logging.h"
#include "ps/internal/postoffice.h"

namespace ps {

using rdma::Endpoint;
using rdma::Plane;

namespace {

// How long closing waits for queued messages (a goodbye, a failure) to leave, and for the
// devices to give back what they had been asked to do.
constexpr auto kLinger = std::chrono::seconds(1);
constexpr auto kLastCompletions = std::chrono::seconds(2);
constexpr auto kLook = std::chrono::milliseconds(1);
// How long a peer may take to receive what was sent before its endpoints are closed.
constexpr auto kFarewell = std::chrono::seconds(5);
// How long values may go on coming into memory that is given up.
constexpr auto kAbandonTime = std::chrono::seconds(1);
// Of a worker: its node id must be a number.
constexpr int kMaxRank = 1 << 24;

}  // namespace

RdmaVan::~RdmaVan() = default;

void RdmaVan::SetNode(const Node& node) {
  Node self = node;
  // The scheduler gives an id back with the rest of what this node told of itself.
  if (token_ != 0) SetToken(token_, &self);
  Van::SetNode(self);
  my_id_ = node.id;
}

void RdmaVan::Start(int customer_id, bool standalone) {
  CHECK(!standalone) << "the RDMA van joins a job";
  rdma::LoadVerbsLibraries();
  settings_ = rdma::Settings::Get();
  // Before anything is registered.  A process that forks (data loaders do) would else write
  // into copies of pages that the device goes on reading; newer kernels see to it themselves.
  if (int error = ibv_fork_init()) {
    LOG(WARNING) << "RDMA is not safe here in a process that forks: " << strerror(error);
  }
  token_ = NewToken();
  job_ = Postoffice::Get()->is_scheduler() ? NewJob() : 0;
  ForgetEndpointCounters();
  inbox_.Open();
  {
    MutexLock lock(&peers_mu_);
    stopping_ = false;
  }
  Van::Start(customer_id, false);
}

int RdmaVan::Bind(const Node& node, int /*max_retry*/) {
  const bool scheduler = node.role == Node::SCHEDULER;
  const bool every_address = scheduler && GetEnv("DMLC_USE_KUBERNETES", 0) > 0;
  const bool given =
      scheduler || GetEnv("DMLC_NODE_HOST", "")[0] != 0 || GetEnv("DMLC_INTERFACE", "")[0] != 0;
  const int port = node.port;  // 0: the kernel chooses
  std::string host = node.hostname;
  try {
    if (!scheduler) host = rdma::AddressOfDevice(settings_, host, given);
    connector_ = std::make_unique<rdma::Connector>(this, settings_, token_);
    int bound = 0;
    if (Listens(node.role)) {
      bound = connector_->Listen(every_address ? "" : NumericAddress(host), port);
    } else {
      connector_->UseDeviceOf(NumericAddress(host));
    }
    Node self = node;
    self.hostname = host;
    self.port = bound;
    SetNode(self);
    // Where it is only looked whether a scheduler can listen, nobody is answered.
    if (!scheduler || GetEnv("BYTEPS_PROBE", 0) == 0) connector_->Run();
    return bound;
  } catch (const dmlc::Error& e) {
    connector_.reset();
    if (!Listens(node.role)) {
      throw dmlc::Error("this node cannot use RDMA from " + host + ": " + e.what() +
                        " (DMLC_NODE_HOST, DMLC_INTERFACE, BYTEPS_RDMA_DEVICE)");
    }
    throw dmlc::Error(std::string(scheduler ? "the scheduler" : "this node") +
                      " cannot listen on " + JoinHostPort(host, port) + " by RDMA: " + e.what() +
                      (scheduler ? " (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)"
                                 : " (DMLC_NODE_HOST, DMLC_INTERFACE, BYTEPS_NODE_PORT, "
                                   "BYTEPS_RDMA_DEVICE)"));
  }
}

std::shared_ptr<Endpoint> RdmaVan::NewEndpoint(Plane plane, int index, int peer_id, bool active) {
  auto counters = NewEndpointCounters(rdma::NameOf(plane), index);
  counters->peer = peer_id;
  return std::make_shared<Endpoint>(this, plane, index, active, settings_, std::move(counters));
}

void RdmaVan::Connect(const Node& node) {
  CHECK_NE(node.id, Node::kEmpty);
  if (!ConnectsTo(my_role_, node.role)) {
    // Only the scheduler gives names to who comes; to a server a worker says its own.
    if (is_scheduler_ && node.role != Node::SCHEDULER) NamePeer(node);
    return;
  }

  auto peer = std::make_shared<Peer>();
  peer->id = node.id;
  peer->control = NewEndpoint(Plane::kControl, 0, node.id, true);
  if (node.role != Node::SCHEDULER && settings_.data_plane) {
    for (int i = 0; i < settings_.data_endpoints; ++i) {
      peer->data.push_back(NewEndpoint(Plane::kData, i, node.id, true));
    }
  }
  std::vector<std::shared_ptr<Endpoint>> endpoints = peer->data;
  endpoints.push_back(peer->control);
  {
    MutexLock lock(&peers_mu_);
    peers_[node.id] = peer;
  }
  for (auto& endpoint : endpoints) {
    connector_->Connect(endpoint, node.hostname, node.port, TokenOf(node));
  }
}

void RdmaVan::NamePeer(const Node& node) {
  MutexLock lock(&peers_mu_);
  PeerPtr& named = peers_[node.id];
  auto it = peers_by_token_.find(TokenOf(node));
  if (it == peers_by_token_.end()) {  // it came, and has gone already
    named = std::make_shared<Peer>();
    named->id = node.id;
    Event event;
    event.peer = node.id;
    event.lost = named;
    event.reason = "its connection closed";
    event.closed = true;
    return inbox_.Put(std::move(event));
  }
  // It may have had another name.
  const auto last = peers_.find(it->second->id);
  if (last != peers_.end() && last->first != node.id && last->second == it->second) {
    peers_.erase(last);
  }
  named = it->second;
  named->id = node.id;
  for (const auto& endpoint : EndpointsOf(*named)) endpoint->counters()->peer = node.id;
}

std::vector<std::shared_ptr<Endpoint>> RdmaVan::EndpointsOf(const Peer& peer) {
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  if (peer.control) endpoints.push_back(peer.control);
  for (const auto& data : peer.data) {
    if (data) endpoints.push_back(data);
  }
  return endpoints;
}

std::shared_ptr<Endpoint>* RdmaVan::SlotOf(Peer* peer, Plane plane, int index) {
  if (plane == Plane::kControl) return &peer->control;
  if (peer->data.size() <= static_cast<size_t>(index)) peer->data.resize(index + 1);
  return &peer->data[index];
}

int32_t RdmaVan::Rank() {
  if (my_role_ != Node::WORKER) return -1;
  const int id = my_id_;
  return id == Node::kEmpty ? GetEnv("DMLC_WORKER_ID", -1) : Postoffice::IDtoRank(id);
}

std::string RdmaVan::ReasonToRefuse(const rdma::ConnectRequest& request) {
  if (stopping_) return "this node is leaving the job";
  if (is_scheduler_) {
    if (request.job != (request.resumes ? job_.load() : 0)) return NotOurs(request.job, job_);
    return request.is_data_plane ? "the scheduler has no data plane" : "";
  }
  if (job_ == 0) return "this node is in no job yet";
  if (request.job != job_) return NotOurs(request.job, job_);
  if (request.role != Node::WORKER || request.rank < 0 || request.rank >= kMaxRank) {
    return "it is no worker";
  }
  const int node_id = Postoffice::WorkerRankToID(request.rank);
  const auto named = peers_.find(node_id);
  const auto mine = peers_by_token_.find(request.sender);
  const bool is_new = mine == peers_by_token_.end();
  // Who has lost all its endpoints is not there any more.
  const bool taken = named != peers_.end() && (is_new || named->second != mine->second) &&
                     !EndpointsOf(*named->second).empty();
  const bool renamed = !is_new && mine->second->id != Node::kEmpty && mine->second->id != node_id;
  return taken || renamed ? "another process is connected under its node id" : "";
}

std::shared_ptr<Endpoint> RdmaVan::OnRequest(const rdma::ConnectRequest& request,
                                             const std::string& /*address*/,
                                             rdma::Refusal* refusal) {
  if (request.resumes) return OnResumption(request, refusal);
  const Plane plane = request.is_data_plane ? Plane::kData : Plane::kControl;
  std::shared_ptr<Endpoint> endpoint;
  std::shared_ptr<Endpoint> superseded;
  {
    MutexLock lock(&peers_mu_);
    refusal->reason = ReasonToRefuse(request);
    refusal->again_soon = IsBehind(job_, request.job);
    if (!refusal->reason.empty()) return nullptr;
    PeerPtr& peer = peers_by_token_[request.sender];
    if (!peer) peer = std::make_shared<Peer>();
    if (!is_scheduler_) {
      peer->id = Postoffice::WorkerRankToID(request.rank);
      peers_[peer->id] = peer;
    }
    endpoint = NewEndpoint(plane, request.index, peer->id, false);
    endpoint->token = request.sender;
    endpoint->role = request.role;
    endpoint->rank = request.rank;
    auto* slot = SlotOf(peer.get(), plane, request.index);
    superseded = std::move(*slot);
    *slot = endpoint;
  }
  // The peer has given it up, or it would not ask again.
  if (superseded) connector_->Disconnect(superseded);
  return endpoint;
}

std::shared_ptr<Endpoint> RdmaVan::OnResumption(const rdma::ConnectRequest& request,
                                                rdma::Refusal* refusal) {
  const Plane plane = request.is_data_plane ? Plane::kData : Plane::kControl;
  std::shared_ptr<Endpoint> endpoint;
  {
    MutexLock lock(&peers_mu_);
    refusal->reason = ReasonToRefuse(request);
    if (!refusal->reason.empty()) return nullptr;
    const auto peer = peers_by_token_.find(request.sender);
    if (peer != peers_by_token_.end()) {
      endpoint = *SlotOf(peer->second.get(), plane, request.index);
    }
  }
  if (!endpoint || endpoint->closed()) {
    refusal->reason = "this node has given the connection up";
    return nullptr;
  }
  if (endpoint->role != request.role || endpoint->rank != request.rank) {
    refusal->reason = "it was another role or rank before";
    return nullptr;
  }
  if (endpoint->MayConnect()) return endpoint;
  // This side has not noticed; perhaps not even that the connection had been there.
  endpoint->Open();
  endpoint->Break("its connection broke", LinkFault::kBroken);
  refusal->reason = "the connection that broke is not closed yet";
  refusal->again_soon = !endpoint->closed();
  return endpoint;
}

LinkOutage::Clock::duration RdmaVan::Patience(Endpoint* endpoint, LinkFault fault) {
  return LinkPatience(endpoint->peer(), is_scheduler_, settings_.reconnect_s, fault);
}

void RdmaVan::OnBroken(Endpoint* endpoint) {
  PS_VLOG(1) << "the " << rdma::NameOf(endpoint->plane()) << " connection with node "
             << endpoint->peer() << " broke; waiting for another one";
  connector_->Reconnect(endpoint->shared_from_this());
}

void RdmaVan::OnResumed(Endpoint* endpoint, LinkOutage::Clock::duration after, size_t again) {
  LogResumed(std::string("the ") + rdma::NameOf(endpoint->plane()) + " connection " +
                 std::to_string(endpoint->index()),
             endpoint->peer(), "", after, again);
}

std::string RdmaVan::OnReply(Endpoint* endpoint, const rdma::ConnectReply& reply) {
  if (reply.job == 0) return "it is in no job";
  if (endpoint->peer() == kScheduler && job_ == 0) job_ = reply.job;
  return reply.job == job_ ? "" : NotOurs(reply.job, job_);
}

std::vector<std::shared_ptr<Endpoint>> RdmaVan::AllEndpoints() {
  MutexLock lock(&peers_mu_);
  std::vector<std::shared_ptr<Endpoint>> all;
  const auto add = [&all](const Peer& peer) {
    for (auto& endpoint : EndpointsOf(peer)) all.push_back(std::move(endpoint));
  };
  for (const auto& entry : peers_) add(*entry.second);
  for (const auto& entry : peers_by_token_) {
    const auto named = peers_.find(entry.second->id);
    if (named == peers_.end() || named->second != entry.second) add(*entry.second);
  }
  return all;
}

void RdmaVan::Disconnect(int node_id) {
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  {
    MutexLock lock(&peers_mu_);
    auto it = peers_.find(node_id);
    if (it != peers_.end()) endpoints = EndpointsOf(*it->second);
    // One that has gone already, and was named only to be closed.
    if (it != peers_.end() && endpoints.empty()) peers_.erase(it);
  }
  for (const auto& endpoint : endpoints) {
    endpoint->CloseWhenFlushed();
    connector_->FailLater(endpoint, kFarewell);
  }
}

void RdmaVan::SetIncarnation(int incarnation) { job_ = WithIncarnation(job_, incarnation); }

void RdmaVan::Abandon(const void* begin, size_t bytes) {
  if (!inbox_.BeginUse()) return;
  const auto deadline = Endpoint::Clock::now() + kAbandonTime;
  for (const auto& endpoint : AllEndpoints()) endpoint->Abandon(begin, bytes, deadline);
  inbox_.EndUse();
}

bool RdmaVan::BreakEndpoint(int node_id, Plane plane, int index) {
  std::shared_ptr<Endpoint> endpoint;
  {
    MutexLock lock(&peers_mu_);
    auto it = peers_.find(node_id);
    if (it == peers_.end()) return false;
    endpoint = *SlotOf(it->second.get(), plane, index);
  }
  if (!endpoint) return false;
  endpoint->Break("it was broken for a test", LinkFault::kBroken);
  return true;
}

bool RdmaVan::AllArrived() {
  const auto endpoints = AllEndpoints();
  return std::all_of(endpoints.begin(), endpoints.end(),
                     [](const auto& endpoint) { return endpoint->all_arrived(); });
}

// --------------------------------------------------------------- stopping

void RdmaVan::FlushEndpoints() {
  const auto endpoints = AllEndpoints();
  for (const auto& endpoint : endpoints) endpoint->SayGoodbye();
  const auto deadline = std::chrono::steady_clock::now() + kLinger;
  for (const auto& endpoint : endpoints) {
    while (!endpoint->flushed() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kLook);
    }
  }
}

void RdmaVan::Stop() {
  Van::Stop();  // ends and joins the receiving thread
  inbox_.Close();
  if (connector_) {
    FlushEndpoints();
    {
      MutexLock lock(&peers_mu_);
      stopping_ = true;
    }
    const auto transport = connector_->transport();
    for (const auto& endpoint : AllEndpoints()) endpoint->Fail("this node closed it");
    {
      MutexLock lock(&peers_mu_);
      peers_.clear();
      peers_by_token_.clear();
    }
    if (transport) {
      const auto deadline = std::chrono::steady_clock::now() + kLastCompletions;
      for (auto& poller : transport->pollers) {
        poller->Wake();
        while (poller->size() > 0 && std::chrono::steady_clock::now() < deadline) {
          std::this_thread::sleep_for(kLook);
        }
        if (poller->size() > 0) LOG(WARNING) << "an RDMA device keeps requests after their end";
      }
    }
    RegistrationCache::ForgetRegistrations();
    connector_.reset();  // and the transport, but for memory that somebody still holds
  }
  inbox_.Clear();
}

}  // namespace ps
