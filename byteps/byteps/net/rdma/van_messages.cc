// The van's part that sends messages and hands them on.
#include <cstdio>
#include <utility>

#include "byteps/base/error.h"
#include "byteps/net/link/meta_codec.h"
#include "byteps/net/link/nowhere.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/rdma/message_parts.h"
#include "byteps/net/rdma/van.h"
#include "ps/internal/postoffice.h"

namespace ps {

using rdma::Endpoint;
using rdma::Plane;

// ---------------------------------------------------------------- sending

void RdmaVan::Transmit(const Message& msg) {
  const Plane plane = IsValidPushpull(msg) ? Plane::kData : Plane::kControl;
  const int peer = msg.meta.recver;
  const auto endpoint = peers_.Choose(peer, static_cast<int>(plane));
  if (!endpoint) {
    // The membership, which watches the peers, tells the threads that wait for it.
    PS_VLOG(1) << "no connection to node " << peer << "; dropped " << msg.DebugString();
    return;
  }
  try {
    const auto transport = connector_->transport();
    endpoint->Send(rdma::MakeOutgoing(EncodeMeta(msg.meta), msg.data, msg.meta.key,
                                      settings_.inline_bytes, settings_.slot_bytes(),
                                      transport->devices, transport->pool.get()));
  } catch (const Error& e) {
    char key[32];
    snprintf(key, sizeof(key), "key 0x%llx: ", static_cast<unsigned long long>(msg.meta.key));
    endpoint->Fail((plane == Plane::kData ? key : "") + std::string(e.what()));
  }
}

// -------------------------------------------------------------- receiving

char* RdmaVan::PlaceFor(Endpoint* /*endpoint*/, const Meta& meta, size_t bytes) {
  const auto& finder = Postoffice::Get()->handlers().place_for;
  char* const place = meta.control.empty() && finder ? finder(meta, bytes) : nullptr;
  // A device writes somewhere; no more at a time than BYTEPS_RDMA_RECEIVE_WINDOW_BYTES.
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
  // One that comes to us, and never was there, may come again.
  if (!loss.peer || !(endpoint->was_open() || endpoint->active())) return;
  LinkEnding named = ending;
  // With the scheduler there is but one plane.
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
