// The connector's part that answers those who ask for connections.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <utility>

#include "byteps/base/log.h"
#include "byteps/net/rdma/connector.h"

namespace ps {
namespace rdma {
namespace {

// A challenge is good in the period in which it was made, and in the next.
constexpr int64_t kPeriodS = 5;
// Of a refusal, before auth::kAdvice.
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
  if (reason.empty() && request.resumes) MakeReady(endpoint.get(), &refusal);
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
    // The last completion may have come while a thread looked for memory (LetGoIfDrained): nothing
    // else has its poller look again.
    Wake(*endpoint);
  }
  Refuse(event.id, refusal);
}

void Connector::MakeReady(Endpoint* endpoint, Refusal* refusal) {
  if (endpoint->MayConnect()) return;
  // This side has not noticed; perhaps not even that the connection had been there.
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
    // Heard by somebody else, and said again.
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
  reply.job = owner_->Job();
  reply.sender = token_;
  reply.slots = settings_.receive_depth;
  reply.slot_bytes = settings_.slot_bytes();
  reply.mtu = static_cast<uint8_t>(settings_.path_mtu());
  reply.proof = settings_.secret.Prove(kWhoListens, said + reply.Claims());
  const std::string data = reply.Encode();
  auto parameters = Parameters(data, endpoint->queue_pair_number());
  transport()->PollerOf(*endpoint)->Add(endpoint);
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
