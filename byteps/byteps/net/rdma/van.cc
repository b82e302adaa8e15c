#include "byteps/net/rdma/van.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/name_service.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/rdma/connector.h"
#include "byteps/net/rdma/device.h"
#include "byteps/net/rdma/pool.h"
#include "byteps/net/rdma/settings.h"
#include "byteps/net/rdma/transport.h"
#include "byteps/net/rdma/verbs.h"
#include "ps/internal/postoffice.h"

namespace ps {

using rdma::Endpoint;
using rdma::Plane;

namespace {

// Time for devices to return requests when closing.
constexpr auto kLastCompletions = std::chrono::seconds(2);
constexpr auto kLook = std::chrono::milliseconds(1);
// Time for peers to receive the messages in flight before their endpoints are closed.
constexpr auto kFarewell = std::chrono::seconds(5);
// Time that Abandon waits for peers to finish their writes into the memory. Then it breaks the
// connection.
constexpr auto kAbandonTime = std::chrono::seconds(1);
// Limit of a worker's rank, so that its node id is valid.
constexpr int kMaxRank = 1 << 24;

// Number of this node's endpoints in a complete job.
uint64_t NumEndpoints(const rdma::Settings& settings, bool backups, size_t nics) {
  const Postoffice& office = *Postoffice::Get();
  const uint64_t workers = std::max(0, office.num_workers());
  const uint64_t servers = std::max(0, office.num_servers());
  if (office.is_scheduler()) return workers + servers;
  const uint64_t peers = office.is_worker() ? servers : workers;
  const uint64_t others = 1 + (office.is_server() && backups ? 2 : 0);
  if (!settings.data_plane) return others + peers;
  // Peers are assumed to have as many NICs as this node.
  return others + peers * (1 + std::max<uint64_t>(settings.data_endpoints, nics));
}

// Returns the addresses of a node's NICs, its own first.
std::vector<std::string> HostsOf(const std::string& own, const std::vector<Nic>& nics) {
  std::vector<std::string> hosts = {own};
  for (const Nic& nic : nics) {
    if (nic.address != own) hosts.push_back(nic.address);
  }
  return hosts;
}

}  // namespace

RdmaVan::RdmaVan(const VanSettings& settings, const rdma::Settings& rdma)
    : LinkVan(settings), settings_(rdma) {}

RdmaVan::~RdmaVan() = default;

void RdmaVan::Start(int customer_id, bool standalone) {
  if (standalone) throw Error("the RDMA van joins a job");
  rdma::LoadVerbsLibraries();
  // This call must precede any registration. Otherwise, after a fork (e.g. for a data loader), this
  // process could write to copies of pages while the device still reads the original pages. New
  // kernels prevent that by themselves.
  if (int error = ibv_fork_init()) {
    BPS_LOG(WARNING) << "RDMA is not safe here in a process that forks: " << strerror(error);
  }
  ForgetEndpointCounters();
  Begin(Postoffice::Get()->is_scheduler(), settings().membership.scheduler_return_s > 0);
  Van::Start(customer_id, false);
}

int RdmaVan::Bind(const Node& node, int /*max_retry*/) {
  const bool scheduler = node.role == Node::SCHEDULER;
  const bool every_address = scheduler && settings().on_every_address;
  const bool given = scheduler || settings().nics.names_address;
  const int port = node.port;  // with port 0 the kernel chooses a port
  std::string host = node.hostname;
  try {
    if (!scheduler) host = rdma::AddressOfDevice(settings_, host, given);
    settings_.FitSlots(NumEndpoints(settings_, settings().membership.backups, node.nics.size()));
    connector_ = std::make_unique<rdma::Connector>(this, settings_, token_);
    int bound = 0;
    if (Listens(node.role)) {
      bound = connector_->Listen(
          every_address ? std::vector<std::string>{""} : HostsOf(NumericAddress(host), node.nics),
          port);
    } else {
      connector_->UseDevicesOf(HostsOf(NumericAddress(host), node.nics));
    }
    Node self = node;
    self.hostname = host;
    self.port = bound;
    SetNode(self);
    // A probe only tests whether it can listen, so it does not answer.
    if (!scheduler || settings().membership.probe == 0) connector_->Run();
    return bound;
  } catch (const UnknownHost&) {
    connector_.reset();
    throw;
  } catch (const Error& e) {
    connector_.reset();
    if (!Listens(node.role)) {
      throw Error("this node cannot use RDMA from " + host + ": " + e.what() +
                  " (DMLC_NODE_HOST, DMLC_INTERFACE, BYTEPS_RDMA_DEVICE)");
    }
    throw Error(std::string(scheduler ? "the scheduler" : "this node") + " cannot listen on " +
                JoinHostPort(host, port) + " by RDMA: " + e.what() +
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

void RdmaVan::Dial(const Node& node) {
  auto peer = std::make_shared<Peers::Peer>();
  peer->id = node.id;
  int data = 0;
  // Messages between servers must keep their order, so there is no data plane between them.
  if (node.role != Node::SCHEDULER && !AreServers(node.role) && settings_.data_plane) {
    data = std::max(settings_.data_endpoints, LeastConnections(this->node().nics, node.nics));
  }
  for (int i = 0; i < data; ++i) {
    peer->links[static_cast<int>(Plane::kData)].push_back(
        NewEndpoint(Plane::kData, i, node.id, true));
  }
  peer->links[static_cast<int>(Plane::kControl)] = {NewEndpoint(Plane::kControl, 0, node.id, true)};
  const auto endpoints = Peers::LinksOf(*peer);
  peers_.Add(std::move(peer));
  const auto pairs = PairsWith(node, std::max(data, 1));
  for (const auto& endpoint : endpoints) {
    connector_->Connect(endpoint, pairs[endpoint->index()], node.port, TokenOf(node));
  }
}

std::vector<std::vector<NicPair>> RdmaVan::PairsWith(const Node& node, int count) {
  const Node self = this->node();
  const bool scheduler = node.role == Node::SCHEDULER;
  // The scheduler's NICs become known with its answer, and are added to existing links.
  const int turn = scheduler ? 0 : Postoffice::IDtoRank(my_id_) + Postoffice::IDtoRank(node.id);
  auto pairs = PairNics(self.nics, node, count, turn);
  for (auto& tries : pairs) {
    // A device must be known before connections use it.
    for (NicPair& pair : tries) {
      if (pair.from.empty()) pair.from = self.hostname;
    }
  }
  return pairs;
}

void RdmaVan::LearnPairs(const Node& scheduler) {
  const auto pairs = PairsWith(scheduler, 1);
  for (const auto& endpoint : peers_.Of(kScheduler)) connector_->AddPairs(endpoint, pairs[0]);
}

void RdmaVan::NamePeer(const Node& node) {
  if (peers_.Name(TokenOf(node), node.id).is_there) return;
  PutLoss(node.id, nullptr, {"its connection closed", true, false});
}

std::shared_ptr<Endpoint> RdmaVan::LinkTo(const Node& node) {
  return NewEndpoint(Plane::kControl, 0, node.id, false);
}

int32_t RdmaVan::Rank(int peer) {
  const int id = my_id_;
  if (my_role_ == Node::SERVER && IsServerId(peer)) return Postoffice::IDtoRank(id);
  if (my_role_ != Node::WORKER) return -1;
  return id == Node::kEmpty ? settings().membership.rank : Postoffice::IDtoRank(id);
}

uint64_t RdmaVan::JobTold(const rdma::ConnectRequest& request) {
  return LooksForScheduler(request.job, request.resumes) ? request.job : job_.get();
}

std::shared_ptr<Endpoint> RdmaVan::OnRequest(const rdma::ConnectRequest& request,
                                             const std::string& /*address*/,
                                             rdma::Refusal* refusal) {
  const Plane plane = request.is_data_plane ? Plane::kData : Plane::kControl;
  Applicant applicant;
  applicant.who = {request.sender, request.role, request.rank};
  applicant.job = request.job;
  // The node id follows from the rank in the request.
  const bool between_servers = AreServers(request.role);
  if (request.rank >= 0 && request.rank < kMaxRank) {
    applicant.node_id = between_servers ? Postoffice::ServerRankToID(request.rank)
                                        : Postoffice::WorkerRankToID(request.rank);
  }
  applicant.plane = static_cast<int>(plane);
  applicant.index = request.index;
  applicant.resumes = request.resumes;
  applicant.returns = LooksForScheduler(request.job, request.resumes);
  const uint64_t job = job_.get();
  const bool is_expected = between_servers && peers_.Expects(request.sender, applicant.node_id);
  refusal->reason = ReasonToRefuse(applicant, my_role_, token_, job, is_expected);
  // The scheduler announces the two servers to each other, and one may connect before the other has
  // heard of it. A peer that resumes was here before, so it is not early.
  const bool early =
      settings().membership.backups && between_servers && !is_expected && !request.resumes;
  refusal->again_soon = !refusal->reason.empty() && (early || IsBehind(job, request.job));
  if (!refusal->reason.empty()) return nullptr;
  const auto again = between_servers ? Peers::Again::kTakesTheLink : Peers::Again::kMakesAnother;
  const auto admitted = peers_.Admit(applicant, is_scheduler_, again, [&](int id) {
    return NewEndpoint(plane, applicant.index, id, false);
  });
  refusal->reason = admitted.refusal;
  if (admitted.replaced) connector_->Disconnect(admitted.replaced);
  return admitted.link;
}

LinkOutage::Clock::duration RdmaVan::Patience(Endpoint* endpoint, LinkFault fault) {
  return LinkPatience(endpoint->peer(), is_scheduler_, settings_.reconnect_s, fault);
}

void RdmaVan::OnBroken(Endpoint* endpoint, bool path_failed) {
  PS_VLOG(1) << "the " << rdma::NameOf(endpoint->plane()) << " connection with node "
             << endpoint->peer() << " broke; waiting for another one";
  connector_->Reconnect(endpoint->shared_from_this(), path_failed);
}

void RdmaVan::OnResumed(Endpoint* endpoint, LinkOutage::Clock::duration after, size_t again) {
  LogResumed(std::string("the ") + rdma::NameOf(endpoint->plane()) + " connection " +
                 std::to_string(endpoint->index()),
             endpoint->peer(), endpoint->path(), after, again);
}

std::string RdmaVan::OnReply(Endpoint* endpoint, const rdma::ConnectReply& reply) {
  return job_.Hear(reply.job, endpoint->peer() == kScheduler);
}

void RdmaVan::Disconnect(int node_id) {
  if (!is_scheduler_) {
    for (const auto& endpoint : peers_.Forget(node_id)) connector_->Disconnect(endpoint);
    return;
  }
  for (const auto& endpoint : peers_.Of(node_id)) {
    endpoint->CloseWhenFlushed();
    connector_->FailLater(endpoint, kFarewell);
  }
}

void RdmaVan::Abandon(const void* begin, size_t bytes) {
  if (!inbox_.BeginUse()) return;
  const auto deadline = Endpoint::Clock::now() + kAbandonTime;
  for (const auto& endpoint : peers_.All()) endpoint->Abandon(begin, bytes, deadline);
  inbox_.EndUse();
}

// --------------------------------------------------------------- stopping

void RdmaVan::Stop() {
  Van::Stop();  // Stop ends and joins the receiving thread
  inbox_.Close();
  if (connector_) {
    Flush();
    peers_.Stop();
    const auto transport = connector_->transport();
    for (const auto& endpoint : peers_.All()) endpoint->Fail("this node closed it");
    peers_.Clear();
    if (transport) {
      const auto deadline = std::chrono::steady_clock::now() + kLastCompletions;
      for (auto& poller : transport->pollers) {
        poller->Wake();
        while (poller->size() > 0 && std::chrono::steady_clock::now() < deadline) {
          // The wait is ended by the last completion; deadline: kLastCompletions.
          std::this_thread::sleep_for(kLook);
        }
        if (poller->size() > 0) BPS_LOG(WARNING) << "an RDMA device keeps requests after their end";
      }
    }
    RegistrationCache::ForgetRegistrations();
    connector_.reset();  // the transport goes, too, except for memory that is still in use
  }
  inbox_.Clear();
}

// ----- sending and delivering messages

using rdma::Endpoint;
using rdma::Plane;

// ---------------------------------------------------------------- sending

void RdmaVan::Transmit(const Message& msg) {
  const Plane plane = IsValidPushpull(msg) ? Plane::kData : Plane::kControl;
  const int peer = msg.meta.recver;
  const auto exchange = rdma::ExchangeOf(msg.meta);
  const bool is_answer = msg.meta.control.empty() && !msg.meta.request;
  const auto endpoint = peers_.Choose(peer, static_cast<int>(plane), [&](Endpoint& one) {
    return is_answer && one.HasOffer(exchange);
  });
  if (!endpoint) {
    // The membership watches peers, and informs waiting threads.
    PS_VLOG(1) << "no connection to node " << peer << "; dropped " << msg.DebugString();
    return;
  }
  try {
    const auto transport = connector_->transport();
    auto message =
        rdma::MakeOutgoing(EncodeMeta(msg.meta), msg.data, msg.meta.key, settings_.inline_bytes,
                           settings_.slot_bytes(), transport->devices, transport->pool.get());
    message->exchange = exchange;
    message->is_answer = is_answer;
    message->place = PlaceOf(msg.answer, *transport);
    endpoint->Send(std::move(message));
  } catch (const Error& e) {
    char key[32];
    snprintf(key, sizeof(key), "key 0x%llx: ", static_cast<unsigned long long>(msg.meta.key));
    endpoint->Fail((plane == Plane::kData ? key : "") + std::string(e.what()));
  }
}

rdma::Place RdmaVan::PlaceOf(const SArray<char>& answer, const rdma::Transport& transport) const {
  if (answer.size() <= settings_.inline_bytes) return {};  // the answer comes in a frame
  // Registering takes long, so the memory is registered only when the answer's RTS arrives.
  auto region = rdma::RegionToReceive(answer.data(), answer.size(), false, transport.devices);
  if (!region) return {};
  return {answer.data(), answer.size(), std::move(region)};
}

// -------------------------------------------------------------- receiving

char* RdmaVan::PlaceFor(Endpoint* /*endpoint*/, const Meta& meta, size_t bytes) {
  const auto& finder = Postoffice::Get()->handlers().place_for;
  char* const place = meta.control.empty() && finder ? finder(meta, bytes) : nullptr;
  // The device must write the values somewhere. BYTEPS_RDMA_RECEIVE_WINDOW_BYTES limits the memory
  // for that.
  return place == Nowhere() ? nullptr : place;
}

void RdmaVan::OnMessage(Endpoint* endpoint, rdma::Received received) {
  Deliver(endpoint, &received.msg, received.bytes);
}

void RdmaVan::OnClosed(Endpoint* endpoint, const LinkEnding& ending) {
  auto loss = peers_.LetGo(endpoint);
  PS_VLOG(1) << "the " << rdma::NameOf(endpoint->plane()) << " endpoint of node " << loss.id
             << " closed: " << ending.reason;
  if (loss.link) connector_->Disconnect(loss.link);
  // A peer that is lost while it first connects may connect again, so no loss is reported.
  if (!loss.peer || !(endpoint->was_open() || endpoint->active())) return;
  LinkEnding named = ending;
  // A link with the scheduler has only one plane.
  if (!is_scheduler_ && loss.id != kScheduler) {
    named.reason =
        std::string("the ") + rdma::NameOf(endpoint->plane()) + " plane: " + ending.reason;
  }
  PutLoss(loss.id, loss.peer, std::move(named));
}

void RdmaVan::OnLinkLost(int id, const LinkEnding& ending) {
  membership()->OnLinkLost(id, ending.reason, ending.by_peer);
}

}  // namespace ps
