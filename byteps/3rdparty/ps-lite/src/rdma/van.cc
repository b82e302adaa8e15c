#include "./van.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "../meta.h"
#include "../net_address.h"
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

uint64_t NewToken() {
  std::random_device source;
  uint64_t token = 0;
  while (token == 0) token = (static_cast<uint64_t>(source()) << 32) | source();
  return token;
}

uint64_t TokenOf(const Node& node) {
  uint64_t token = 0;
  if (node.endpoint_name_len == sizeof(token)) memcpy(&token, node.endpoint_name, sizeof(token));
  return token;
}

// Whether `bytes` hold all that their own counts promise.
bool MetaIsWhole(const std::string& bytes) {
  if (bytes.size() < sizeof(RawMeta)) return false;
  RawMeta raw;
  memcpy(&raw, bytes.data(), sizeof(raw));
  if (raw.body_size < 0 || raw.data_type_size < 0 || raw.control.node_size < 0) return false;
  const uint64_t need = sizeof(RawMeta) + static_cast<uint64_t>(raw.body_size) +
                        static_cast<uint64_t>(raw.data_type_size) * sizeof(int) +
                        static_cast<uint64_t>(raw.control.node_size) * sizeof(RawNode);
  return need <= bytes.size();
}

}  // namespace

RdmaVan::~RdmaVan() = default;

void RdmaVan::SetNode(const Node& node) {
  Van::SetNode(node);
  // The scheduler gives an id back with the rest of what this node told of itself.
  if (token_ != 0) {
    memcpy(my_node_.endpoint_name, &token_, sizeof(token_));
    my_node_.endpoint_name_len = sizeof(token_);
  }
  my_id_ = node.id;
}

void RdmaVan::Start(int customer_id, bool standalone) {
  CHECK(!standalone) << "the RDMA van joins a job";
  settings_ = rdma::Settings::Get();
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
  const int port = scheduler ? node.port : 0;
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
    throw dmlc::Error(std::string(scheduler ? "the scheduler" : "this node") +
                      " cannot listen on " + JoinHostPort(host, port) + " by RDMA: " + e.what() +
                      (scheduler ? " (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)"
                                 : " (DMLC_NODE_HOST, DMLC_INTERFACE, BYTEPS_RDMA_DEVICE)"));
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
  it->second->id = node_id;
  peers_[node_id] = it->second;
  it->second->control->counters()->peer = node_id;
}

std::shared_ptr<Endpoint>* RdmaVan::SlotOf(Peer* peer, Plane plane, int index) {
  if (plane == Plane::kControl) return &peer->control;
  if (peer->data.size() <= static_cast<size_t>(index)) peer->data.resize(index + 1);
  return &peer->data[index];
}

std::shared_ptr<Endpoint> RdmaVan::OnRequest(const rdma::ConnectRequest& request,
                                             const std::string& /*address*/, std::string* refusal) {
  const Plane plane = request.isDataPlane ? Plane::kData : Plane::kControl;
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

// ---------------------------------------------------------------- sending

std::shared_ptr<Endpoint> RdmaVan::Choose(int node_id, Plane plane) {
  std::lock_guard<std::mutex> lock(peers_mu_);
  auto it = peers_.find(node_id);
  if (it == peers_.end()) return nullptr;
  const Peer& peer = *it->second;
  if (plane == Plane::kControl || peer.data.empty()) return peer.control;
  std::shared_ptr<Endpoint> best;
  for (const auto& endpoint : peer.data) {
    if (!endpoint || endpoint->closed()) continue;
    if (!best || endpoint->queued_bytes() < best->queued_bytes()) best = endpoint;
  }
  return best;
}

int RdmaVan::SendMsg(Message& msg) {
  {
    std::lock_guard<std::mutex> lock(inbox_mu_);
    if (stopped_) return -1;
    if (msg.meta.control.cmd == Control::TERMINATE) {
      stopped_ = stop_requested_ = true;
      inbox_cond_.notify_all();
      return 0;
    }
    ++senders_;  // Stop waits for it
  }
  const int bytes = Transmit(msg);
  std::lock_guard<std::mutex> lock(inbox_mu_);
  if (--senders_ == 0) inbox_cond_.notify_all();
  return bytes;
}

int RdmaVan::Transmit(const Message& msg) {
  const Plane plane = IsValidPushpull(msg) ? Plane::kData : Plane::kControl;
  const int peer = msg.meta.recver;
  std::string meta(GetPackMetaLen(msg.meta), '\0');
  int bytes = static_cast<int>(meta.size());
  for (const auto& value : msg.data) bytes += static_cast<int>(value.size());
  if (peer == my_id_) {
    Event event;
    event.msg = msg;
    event.msg.meta.sender = peer;
    Put(plane, std::move(event));
    return bytes;
  }
  const auto endpoint = Choose(peer, plane);
  if (!endpoint) {
    // Whoever watches the peers tells those who wait for it.
    PS_VLOG(1) << "no connection to node " << peer << "; dropped " << msg.DebugString();
    return bytes;
  }
  char* buffer = &meta[0];
  int size = bytes;
  PackMeta(msg.meta, &buffer, &size);
  try {
    const auto transport = connector_->transport();
    endpoint->Send(rdma::MakeOutgoing(std::move(meta), msg.data, msg.meta.key,
                                      settings_.inline_bytes, settings_.slot_bytes(),
                                      transport->device, transport->pool.get()));
  } catch (const dmlc::Error& e) {
    char key[32];
    snprintf(key, sizeof(key), "key 0x%llx: ", static_cast<unsigned long long>(msg.meta.key));
    endpoint->Fail((plane == Plane::kData ? key : "") + std::string(e.what()));
  }
  return bytes;
}

// -------------------------------------------------------------- receiving

void RdmaVan::Put(Plane plane, Event event) {
  {
    std::lock_guard<std::mutex> lock(inbox_mu_);
    inbox_[static_cast<int>(plane)].push_back(std::move(event));
  }
  inbox_cond_.notify_one();
}

void RdmaVan::OnMessage(Endpoint* endpoint, rdma::Received received) {
  if (!MetaIsWhole(received.meta)) {
    throw dmlc::Error("it sent a message whose meta of " + std::to_string(received.meta.size()) +
                      " bytes does not parse");
  }
  Event event;
  UnpackMeta(received.meta.data(), static_cast<int>(received.meta.size()), &event.msg.meta);
  event.msg.meta.sender = endpoint->counters()->peer;
  event.msg.data = std::move(received.values);
  event.bytes = static_cast<int>(received.bytes);
  Put(endpoint->plane(), std::move(event));
}

void RdmaVan::OnClosed(Endpoint* endpoint, const std::string& reason, bool orderly) {
  std::shared_ptr<Endpoint> mine;
  const auto let_go = [&](Peer* peer) {
    auto* slot = SlotOf(peer, endpoint->plane(), endpoint->index());
    if (slot->get() == endpoint) mine = std::move(*slot);
  };
  Event event;
  {
    std::lock_guard<std::mutex> lock(peers_mu_);
    if (stopping_) return;
    for (const auto& entry : peers_) {
      let_go(entry.second.get());
      if (mine == nullptr) continue;
      event.peer = entry.first;
      break;
    }
    for (auto it = peers_by_token_.begin(); it != peers_by_token_.end();) {
      let_go(it->second.get());
      const auto& data = it->second->data;
      const bool gone = !it->second->control && std::count(data.begin(), data.end(), nullptr) ==
                                                    static_cast<long>(data.size());
      it = gone ? peers_by_token_.erase(it) : std::next(it);
    }
  }
  PS_VLOG(1) << "the " << rdma::NameOf(endpoint->plane()) << " endpoint of node " << event.peer
             << " closed: " << reason;
  if (mine) connector_->Disconnect(mine);
  // One that comes to us, and never was there, may come again.
  if (event.peer == Node::kEmpty || !(endpoint->was_open() || endpoint->active())) return;
  event.lost = true;
  event.orderly = orderly;
  event.plane = endpoint->plane();
  event.reason = reason;
  Put(endpoint->plane(), std::move(event));
}

void RdmaVan::HandleLoss(const Event& event) {
  if (event.orderly) return OnDisconnect(event.peer);
  // With the scheduler there is but one plane.
  const bool scheduler = is_scheduler_ || event.peer == kScheduler;
  const std::string plane = std::string("the ") + rdma::NameOf(event.plane) + " plane: ";
  membership()->OnLinkLost(event.peer, (scheduler ? "" : plane) + event.reason);
}

int RdmaVan::RecvMsg(Message* msg) {
  while (true) {
    Event event;
    {
      std::unique_lock<std::mutex> lock(inbox_mu_);
      inbox_cond_.wait(
          lock, [this] { return stop_requested_ || !inbox_[0].empty() || !inbox_[1].empty(); });
      if (stop_requested_) {
        *msg = Message();
        msg->meta.control.cmd = Control::TERMINATE;
        return 0;
      }
      auto& inbox = inbox_[inbox_[0].empty() ? 1 : 0];
      event = std::move(inbox.front());
      inbox.pop_front();
    }
    if (event.lost) {
      HandleLoss(event);
      continue;
    }
    *msg = std::move(event.msg);
    msg->meta.recver = my_node_.id;
    return event.bytes;
  }
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
    connector_.reset();  // and the transport, but for memory that somebody still holds
  }
  std::lock_guard<std::mutex> lock(inbox_mu_);
  for (auto& inbox : inbox_) inbox.clear();
}

}  // namespace ps
