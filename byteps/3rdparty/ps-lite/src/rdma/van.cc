#include "./van.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "../net_address.h"
#include "../node_token.h"
#include "dmlc/logging.h"
#include "ps/internal/postoffice.h"
#include "ps/lasting_memory.h"
#include "ps/verbs_library.h"

namespace ps {

using rdma::Endpoint;
using rdma::Plane;

namespace {

// How long closing waits for queued messages (a goodbye, a failure) to leave, and for the
// devices to give back what they had been asked to do.
constexpr auto kLinger = std::chrono::seconds(1);
constexpr auto kLastCompletions = std::chrono::seconds(2);
constexpr auto kLook = std::chrono::milliseconds(1);

}  // namespace

RdmaVan::~RdmaVan() = default;

void RdmaVan::SetNode(const Node& node) {
  Van::SetNode(node);
  // The scheduler gives an id back with the rest of what this node told of itself.
  if (token_ != 0) SetToken(token_, &my_node_);
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
  ForgetEndpointCounters();
  {
    std::lock_guard<std::mutex> lock(inbox_mu_);
    stopped_ = stop_requested_ = false;
  }
  {
    std::lock_guard<std::mutex> lock(peers_mu_);
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
    const int bound = connector_->Listen(every_address ? "" : NumericAddress(host), port);
    Node self = node;
    self.hostname = host;
    self.port = bound;
    SetNode(self);
    connector_->Run();
    return bound;
  } catch (const dmlc::Error& e) {
    connector_.reset();
    throw dmlc::Error(
        std::string(scheduler ? "the scheduler" : "this node") + " cannot listen on " +
        JoinHostPort(host, port) + " by RDMA: " + e.what() +
        (scheduler ? " (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)"
                   : " (DMLC_NODE_HOST, DMLC_INTERFACE, BYTEPS_NODE_PORT, BYTEPS_RDMA_DEVICE)"));
  }
}

std::shared_ptr<Endpoint> RdmaVan::NewEndpoint(Plane plane, int index, int peer_id, bool active) {
  auto counters = NewEndpointCounters(rdma::NameOf(plane), index);
  counters->peer = peer_id;
  return std::make_shared<Endpoint>(this, plane, index, active, settings_, std::move(counters));
}

void RdmaVan::Connect(const Node& node) {
  CHECK_NE(node.id, Node::kEmpty);
  const bool self =
      node.id == my_node_.id || (node.role == my_node_.role && node.role == Node::SCHEDULER);
  if (self || node.role == my_node_.role) return;
  // A node comes to the scheduler, and a worker to a server, by itself.
  const bool comes = my_node_.role == Node::SCHEDULER ||
                     (my_node_.role == Node::SERVER && node.role == Node::WORKER);
  if (comes) return NamePeer(TokenOf(node), node.id);

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
    std::lock_guard<std::mutex> lock(peers_mu_);
    peers_[node.id] = peer;
  }
  for (auto& endpoint : endpoints) {
    connector_->Connect(endpoint, node.hostname, node.port, TokenOf(node));
  }
}

void RdmaVan::NamePeer(uint64_t token, int node_id) {
  std::lock_guard<std::mutex> lock(peers_mu_);
  auto it = peers_by_token_.find(token);
  if (it == peers_by_token_.end()) {
    // A worker that has not connected yet will say who it is.
    if (my_node_.role == Node::SCHEDULER) {
      LOG(WARNING) << "no RDMA connection came from node " << node_id
                   << ", which wants to join: is DMLC_ENABLE_RDMA the same on every node?";
    }
    return;
  }
  const PeerPtr& peer = it->second;
  peer->id = node_id;
  peers_[node_id] = peer;
  // Of the connections of a worker, which come in any order, some may be missing yet; they
  // will say whose they are.
  if (peer->control) peer->control->counters()->peer = node_id;
}

std::shared_ptr<Endpoint>* RdmaVan::SlotOf(Peer* peer, Plane plane, int index) {
  if (plane == Plane::kControl) return &peer->control;
  if (peer->data.size() <= static_cast<size_t>(index)) peer->data.resize(index + 1);
  return &peer->data[index];
}

std::shared_ptr<Endpoint> RdmaVan::OnRequest(const rdma::ConnectRequest& request,
                                             const std::string& /*address*/, std::string* refusal) {
  const Plane plane = request.is_data_plane ? Plane::kData : Plane::kControl;
  auto endpoint = NewEndpoint(plane, request.index, request.node_id, false);
  std::shared_ptr<Endpoint> superseded;
  {
    std::lock_guard<std::mutex> lock(peers_mu_);
    if (stopping_) {
      *refusal = "this node is leaving the job";
      return nullptr;
    }
    PeerPtr& peer = peers_by_token_[request.sender];
    if (!peer) peer = std::make_shared<Peer>();
    if (request.node_id != Node::kEmpty) {
      peer->id = request.node_id;
      peers_[request.node_id] = peer;
    }
    auto* slot = SlotOf(peer.get(), plane, request.index);
    superseded = std::move(*slot);
    *slot = endpoint;
  }
  // The peer has given it up, or it would not ask again.
  if (superseded) connector_->Disconnect(superseded);
  return endpoint;
}

std::vector<std::shared_ptr<Endpoint>> RdmaVan::AllEndpoints() {
  std::lock_guard<std::mutex> lock(peers_mu_);
  std::vector<std::shared_ptr<Endpoint>> all;
  const auto add = [&all](const PeerPtr& peer) {
    if (peer->control) all.push_back(peer->control);
    for (const auto& data : peer->data) {
      if (data) all.push_back(data);
    }
  };
  for (const auto& entry : peers_) add(entry.second);
  for (const auto& entry : peers_by_token_) {
    const auto named = peers_.find(entry.second->id);
    if (named == peers_.end() || named->second != entry.second) add(entry.second);
  }
  return all;
}

bool RdmaVan::BreakEndpoint(int node_id, Plane plane, int index) {
  std::shared_ptr<Endpoint> endpoint;
  {
    std::lock_guard<std::mutex> lock(peers_mu_);
    auto it = peers_.find(node_id);
    if (it == peers_.end()) return false;
    endpoint = *SlotOf(it->second.get(), plane, index);
  }
  if (!endpoint) return false;
  endpoint->Fail("it was broken for a test");
  return true;
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
  {
    std::unique_lock<std::mutex> lock(inbox_mu_);
    stopped_ = true;  // also when it never started
    inbox_cond_.wait(lock, [this] { return senders_ == 0; });
  }
  if (connector_) {
    FlushEndpoints();
    {
      std::lock_guard<std::mutex> lock(peers_mu_);
      stopping_ = true;
    }
    const auto transport = connector_->transport();
    for (const auto& endpoint : AllEndpoints()) endpoint->Fail("this node closed it");
    {
      std::lock_guard<std::mutex> lock(peers_mu_);
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
    LastingMemory::ForgetRegistrations();
    connector_.reset();  // and the transport, but for memory that somebody still holds
  }
  std::lock_guard<std::mutex> lock(inbox_mu_);
  for (auto& inbox : inbox_) inbox.clear();
}

}  // namespace ps
