// Connection requests: sending them, and answering them.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/name_service.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/rdma/connector.h"
#include "byteps/net/rdma/verbs.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace rdma {

namespace {

constexpr int kResolveMs = 2000;
// Limit of one attempt to reconnect. After lost packets, the connection manager would wait ever
// longer between its own retries.
constexpr auto kAttemptTime = std::chrono::seconds(5);
// Pause between checks while the device returns requests.
constexpr auto kLook = std::chrono::milliseconds(5);
// The connection manager's codes for "no listener" and for a refusal by the listener.
constexpr int kNobodyListens = 8;
constexpr int kRefused = 28;

}  // namespace

void Connector::Connect(std::shared_ptr<Endpoint> endpoint, const std::vector<NicPair>& pairs,
                        int port, uint64_t receiver) {
  auto link = std::make_shared<LinkPtr>(std::make_unique<Link>());
  (*link)->endpoint = std::move(endpoint);
  (*link)->active = true;
  (*link)->receiver = receiver;
  (*link)->dial.Begin(pairs, port, Clock::now() + ToDuration(settings_.start_timeout_s));
  Post([this, link] { Try(std::move(*link)); });
}

void Connector::AddPairs(std::shared_ptr<Endpoint> endpoint, std::vector<NicPair> pairs) {
  Post([this, endpoint, pairs] {
    if (Link* const link = LinkOf(endpoint.get())) link->dial.Add(pairs);
  });
}

void Connector::Try(LinkPtr link) {
  if (link->endpoint->closed()) return;
  if (!link->endpoint->MayConnect()) {
    Wake(*link->endpoint);
    link->next_try = Clock::now() + kLook;
    return waiting_.push_back(std::move(link));
  }
  link->attempt_deadline = Clock::now() + kAttemptTime;
  try {
    link->id = NewId();
    rdma_cm_id* const id = link->id.get();
    Link* const raw = link.get();
    const DialPlan::Route route = link->dial.Current();
    Address to = route.to;
    Address from;
    if (!route.from.empty()) from = Resolve(route.from, 0).front();
    links_[id] = std::move(link);
    const bool same_family = !route.from.empty() && from.storage.ss_family == to.storage.ss_family;
    if (rdma_resolve_addr(id, same_family ? from.get() : nullptr, to.get(), kResolveMs) != 0) {
      const int error = errno;
      TryAgain(raw, std::string("its address leads through no RDMA device: ") + strerror(error));
    }
  } catch (const UnknownHost& e) {
    link->id.reset();
    Postpone(std::move(link), e.what(), false, false);
  } catch (const Error& e) {
    if (link) link->endpoint->Fail(e.what());
  }
}

void Connector::TryAgain(Link* raw, const std::string& error, bool nobody_listens,
                         bool again_soon) {
  LinkPtr link = Take(raw->id.get());
  link->id.reset();
  // The peer has made the connection, and may retry.
  if (!link->active) return link->endpoint->Break(error, LinkFault::kBroken);
  if (link->endpoint->closed()) return;
  link->challenge.clear();
  // The next attempt may use another device, so this device's queue pair and memory are dropped.
  if (link->dial.has_several_pairs() && !again_soon) link->endpoint->Discard();
  const std::string route = link->dial.Current().Text();
  PS_VLOG(1) << "connecting to node " << link->endpoint->peer() << " by " << route
             << " failed: " << error;
  Postpone(std::move(link), route + ": " + error, nobody_listens, again_soon);
}

void Connector::Postpone(LinkPtr link, const std::string& error, bool nobody_listens,
                         bool again_soon) {
  const auto now = Clock::now();
  link->next_try =
      again_soon ? link->dial.Postponed(error, now) : link->dial.Failed(error, nobody_listens, now);
  if (link->resumes) {  // EndOutages has the deadline for reconnecting
    if (link->dial.redial().IsListenerGone(now)) return link->endpoint->GiveUp(error, true);
    return waiting_.push_back(std::move(link));
  }
  if (link->next_try < link->dial.deadline()) {
    waiting_.push_back(std::move(link));
    return;
  }
  link->endpoint->Fail("it did not answer within " +
                       Limit(settings_.start_timeout_s, "BYTEPS_START_TIMEOUT_S") + ": " + error);
}

ConnectRequest Connector::RequestOf(const Link& link) {
  ConnectRequest request;
  request.job = owner_->Job();
  request.sender = token_;
  request.role = owner_->Role();
  request.rank = owner_->Rank(link.endpoint->peer());
  request.authenticates = settings_.secret.is_there();
  request.resumes = link.resumes;
  request.may_move = link.may_move();
  request.is_data_plane = link.endpoint->plane() == Plane::kData;
  request.index = static_cast<uint8_t>(link.endpoint->index());
  request.mtu = static_cast<uint8_t>(settings_.path_mtu());
  request.slots = settings_.receive_depth;
  request.slot_bytes = settings_.slot_bytes();
  request.attempt = static_cast<uint16_t>(link.dial.attempt());
  return request;
}

ConnectRequest Connector::MakeRequest(Link* link) {
  ConnectRequest request = RequestOf(*link);
  link->said = request.Claims() + link->challenge;
  if (link->challenge.empty()) return request;
  request.proof = settings_.secret.Prove(kWhoConnects, link->said).substr(0, kRequestProofBytes);
  return request;
}

bool Connector::Proves(const std::string& proof, const char* who, const std::string& said) const {
  const auth::Secret& secret = settings_.secret;
  if (!secret.is_there()) return true;
  return !proof.empty() && secret.Proves(proof.data(), who, said, proof.size());
}

void Connector::GreetingFailed(Link* link, const std::string& error, bool proved) {
  const auto failure = proved ? GreetingFailure::kDecided : GreetingFailure::kMaybeDamaged;
  if (IsOneMoreAttempt(failure, link->resumes)) return TryAgain(link, error);
  link->endpoint->Fail(error);
  Drop(link);
}

void Connector::OnChallenge(Link* raw, const Challenge& challenge) {
  // The challenge had expired when the peer got this node's proof.
  if (!raw->challenge.empty()) return TryAgain(raw, "it asked for a proof once more");
  const bool proved = Proves(challenge.proof, kWhoChallenges, raw->said + challenge.Claims());
  if (raw->receiver != 0 && challenge.sender != raw->receiver) {
    return GreetingFailed(raw, "another process listens at this address now", proved);
  }
  if (raw->resumes && !proved) return TryAgain(raw, "its challenge was damaged in flight");
  raw->challenge = challenge.Encode();
  LinkPtr link = Take(raw->id.get());
  link->id.reset();
  Try(std::move(link));
}

void Connector::OnResolved(Link* link, rdma_cm_event_type what) {
  rdma_cm_id* id = link->id.get();
  if (what == RDMA_CM_EVENT_ADDR_RESOLVED) {
    if (rdma_resolve_route(id, kResolveMs) != 0) {
      TryAgain(link, std::string("it could not be reached: ") + strerror(errno));
    }
    return;
  }
  try {
    if (!link->endpoint->prepared()) {
      Prepare(link->endpoint, id, link->may_move());
      link->endpoint->poller()->Add(link->endpoint);
    }
    const std::string request = MakeRequest(link).Encode();
    auto parameters = Parameters(request, link->endpoint->queue_pair_number());
    if (rdma_connect(id, &parameters) != 0) Throw("cannot connect", errno);
  } catch (const Error& e) {
    if (link->resumes) return TryAgain(link, e.what());
    link->endpoint->Fail(e.what());
    Drop(link);
  }
}

void Connector::OnResponse(Link* link, const rdma_cm_event& event) {
  ConnectReply reply;
  const auto* data = static_cast<const char*>(event.param.conn.private_data);
  const size_t bytes = event.param.conn.private_data_len;
  std::string error = Mismatch(data, bytes);
  if (error.empty() && !reply.Decode(data, bytes)) error = "its reply does not parse";
  if (error.empty() && !Proves(reply.proof, kWhoListens, link->said + reply.Claims())) {
    error = std::string("the two nodes have different job secrets: ") + auth::kAdvice;
  }
  const bool proved = error.empty();
  if (proved && link->receiver != 0 && reply.sender != link->receiver) {
    error = "another process listens at this address now";
  }
  if (error.empty()) error = owner_->OnReply(link->endpoint.get(), reply);
  if (!error.empty()) {
    rdma_reject(link->id.get(), nullptr, 0);
    return GreetingFailed(link, error, proved);
  }
  try {
    link->receiver = reply.sender;  // after a break only the same process may resume the connection
    link->endpoint->Attach(link->id.get(), reply.mtu);
    // The credits are set before the peer can send, because this side must then be able to answer.
    link->endpoint->SetPeerSlots(reply.slots);
    if (rdma_establish(link->id.get()) != 0) Throw("cannot establish the connection", errno);
    OnEstablished(link);
    link->endpoint->Open();
  } catch (const Error& e) {
    rdma_reject(link->id.get(), nullptr, 0);
    if (link->resumes) {
      link->endpoint->Break(e.what(), LinkFault::kBroken);
      return TryAgain(link, e.what());
    }
    link->endpoint->Fail(e.what());
    Drop(link);
  }
}

void Connector::OnRejected(Link* link, const rdma_cm_event& event) {
  if (event.status == kNobodyListens)
    return TryAgain(link, "connection refused: nothing listens there", true);
  if (event.status != kRefused || !link->active) {
    return TryAgain(link,
                    "it rejected the connection (status " + std::to_string(event.status) + ")");
  }
  Challenge challenge;
  Refusal refusal;
  const auto* data = static_cast<const char*>(event.param.conn.private_data);
  if (settings_.secret.is_there() && challenge.Decode(data, event.param.conn.private_data_len)) {
    return OnChallenge(link, challenge);
  }
  bool proved = refusal.Decode(data, event.param.conn.private_data_len);
  if (!proved) refusal.reason = "it gave no reason";
  proved = proved && Proves(refusal.proof, kWhoRefuses, link->said + refusal.Claims());
  if (refusal.again_soon) {
    return TryAgain(link, ForeignText(refusal.reason), false, true);
  }
  GreetingFailed(link, RefusedBecause(refusal.reason, proved && settings_.secret.is_there()),
                 proved);
}

// ----- answering requests

namespace {

// Seconds of a challenge's period. A challenge is valid in its period and in the next one.
constexpr int64_t kPeriodS = 5;
// Reasons of a refusal. The text continues with auth::kAdvice.
constexpr char kPeerHasNone[] = "the job has a secret, the peer none: ";
constexpr char kPeerHasAnother[] = "the two nodes have different job secrets: ";
static_assert(std::max(sizeof(kPeerHasNone), sizeof(kPeerHasAnother)) + sizeof(auth::kAdvice) - 2 <=
                  kMaxReason,
              "what to do is not cut");

int64_t Period() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::seconds>(now).count() / kPeriodS;
}

}  // namespace

void Connector::OnRequest(const rdma_cm_event& event) {
  ConnectRequest request;
  const auto* data = static_cast<const char*>(event.param.conn.private_data);
  const size_t bytes = event.param.conn.private_data_len;
  const std::string address = Address::Of(rdma_get_peer_addr(event.id)).Text();
  Refusal refusal;
  std::string& reason = refusal.reason;
  reason = Mismatch(data, bytes);
  if (reason.empty() && !request.Decode(data, bytes)) reason = "its request does not parse";
  if (reason.empty() && request.probes) return Reject(event.id, "");
  std::string said;
  if (reason.empty() && !IsProved(event.id, request, &said, &reason) && reason.empty()) return;
  if (reason.empty() && request.slot_bytes != settings_.slot_bytes()) {
    reason = "BYTEPS_RDMA_INLINE_BYTES differs: " + std::to_string(settings_.inline_bytes) +
             " on this node; set the same on all";
  }
  std::shared_ptr<Endpoint> endpoint;
  if (reason.empty()) endpoint = owner_->OnRequest(request, address, &refusal);
  if (reason.empty()) MakeReady(endpoint.get(), &refusal);
  if (reason.empty()) {
    try {
      return Accept(event.id, request, said, endpoint);
    } catch (const std::exception& e) {
      reason = e.what();
      endpoint->Break(reason, LinkFault::kBroken);
      refusal.again_soon = !endpoint->closed();
    }
  }
  if (!said.empty()) {
    refusal.proof = settings_.secret.Prove(kWhoRefuses, said + refusal.Claims());
    refusal.proof.resize(kAnswerProofBytes);
  }
  if (!refusal.again_soon) {
    BPS_LOG(WARNING) << "refused an RDMA connection from " << address << ": " << reason;
  } else if (endpoint) {
    // Without this call the poller would not look again if the last completion came while a thread
    // was looking for memory (LetGoIfDrained).
    Wake(*endpoint);
  }
  Refuse(event.id, refusal);
}

void Connector::MakeReady(Endpoint* endpoint, Refusal* refusal) {
  if (endpoint->MayConnect()) return;
  // This side has not yet noticed that the old connection broke, or even that it was made.
  endpoint->Open();
  endpoint->Break("its connection broke", LinkFault::kBroken);
  refusal->reason = "the connection that broke is not closed yet";
  refusal->again_soon = !endpoint->closed();
}

std::string Connector::ChallengeTo(const ConnectRequest& request, int64_t period) const {
  Challenge challenge;
  challenge.sender = token_;
  challenge.nonce = challenges_.Prove(std::to_string(period), request.Claims());
  challenge.proof = settings_.secret.Prove(kWhoChallenges, request.Claims() + challenge.Claims());
  challenge.proof.resize(kAnswerProofBytes);
  return challenge.Encode();
}

bool Connector::IsProved(rdma_cm_id* id, const ConnectRequest& request, std::string* said,
                         std::string* refusal) {
  const auth::Secret& secret = settings_.secret;
  if (!secret.is_there()) return true;
  if (!request.authenticates) {
    *refusal = std::string(kPeerHasNone) + auth::kAdvice;
    return false;
  }
  const int64_t now = Period();
  if (!request.has_proof()) {
    Reject(id, ChallengeTo(request, now));
    return false;
  }
  for (const int64_t period : {now, now - 1}) {
    *said = request.Claims() + ChallengeTo(request, period);
    if (!secret.Proves(request.proof.data(), kWhoConnects, *said, kRequestProofBytes)) continue;
    for (auto it = used_proofs_.begin(); it != used_proofs_.end();) {
      it = it->second < now - 1 ? used_proofs_.erase(it) : std::next(it);
    }
    // A proof that was used before has been overheard, so it is refused.
    if (!used_proofs_.emplace(request.proof, period).second) break;
    return true;
  }
  said->clear();
  *refusal = std::string(kPeerHasAnother) + auth::kAdvice;
  return false;
}

void Connector::Accept(rdma_cm_id* id, const ConnectRequest& request, const std::string& said,
                       std::shared_ptr<Endpoint> endpoint) {
  Forget(endpoint.get());
  Prepare(endpoint, id, request.may_move);
  endpoint->Attach(id, request.mtu);
  endpoint->SetPeerSlots(request.slots);
  ConnectReply reply;
  reply.job = owner_->JobTold(request);
  reply.sender = token_;
  reply.slots = settings_.receive_depth;
  reply.slot_bytes = settings_.slot_bytes();
  reply.mtu = static_cast<uint8_t>(settings_.path_mtu());
  reply.proof = settings_.secret.Prove(kWhoListens, said + reply.Claims());
  const std::string data = reply.Encode();
  auto parameters = Parameters(data, endpoint->queue_pair_number());
  endpoint->poller()->Add(endpoint);
  if (rdma_accept(id, &parameters) != 0) Throw("cannot accept a connection", errno);
  auto link = std::make_unique<Link>();
  link->endpoint = std::move(endpoint);
  link->id.reset(id);
  links_[id] = std::move(link);
}

void Connector::Refuse(rdma_cm_id* id, const Refusal& refusal) { Reject(id, refusal.Encode()); }

void Connector::Reject(rdma_cm_id* id, const std::string& data) {
  rdma_reject(id, data.data(), static_cast<uint8_t>(data.size()));
  rdma_destroy_id(id);
}

}  // namespace rdma
}  // namespace ps
