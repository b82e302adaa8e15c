// The van's part that sends messages and hands them on.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "byteps/base/mutex.h"
#include "byteps/net/link/meta_codec.h"
#include "byteps/net/link/node_token.h"
#include "byteps/net/link/nowhere.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/rdma/van.h"
#include "dmlc/logging.h"
#include "ps/internal/postoffice.h"

namespace ps {

using rdma::Endpoint;
using rdma::Plane;

// ---------------------------------------------------------------- sending

std::shared_ptr<Endpoint> RdmaVan::Choose(int node_id, Plane plane) {
  MutexLock lock(&peers_mu_);
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
  if (msg.meta.control.cmd == Control::TERMINATE) {
    inbox_.End();
    return 0;
  }
  if (!inbox_.BeginUse()) return -1;
  const int bytes = Transmit(msg);
  inbox_.EndUse();
  return bytes;
}

int RdmaVan::Transmit(const Message& msg) {
  const Plane plane = IsValidPushpull(msg) ? Plane::kData : Plane::kControl;
  const int peer = msg.meta.recver;
  std::string meta = EncodeMeta(msg.meta);
  uint64_t total = meta.size();
  for (const auto& value : msg.data) total += value.size();
  const int bytes = static_cast<int>(std::min<uint64_t>(total, 1 << 30));
  if (peer == my_id_) {
    Event event;
    event.msg = msg;
    event.msg.meta.sender = peer;
    inbox_.Put(std::move(event));
    return bytes;
  }
  const auto endpoint = Choose(peer, plane);
  if (!endpoint) {
    // Whoever watches the peers tells those who wait for it.
    PS_VLOG(1) << "no connection to node " << peer << "; dropped " << msg.DebugString();
    return bytes;
  }
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

char* RdmaVan::PlaceFor(Endpoint* /*endpoint*/, const Meta& meta, size_t bytes) {
  const auto& finder = Postoffice::Get()->handlers().place_for;
  char* const place = meta.control.empty() && finder ? finder(meta, bytes) : nullptr;
  // A device writes somewhere; no more at a time than BYTEPS_RDMA_RECEIVE_WINDOW_BYTES.
  return place == Nowhere() ? nullptr : place;
}

void RdmaVan::OnMessage(Endpoint* endpoint, rdma::Received received) {
  Message& msg = received.msg;
  msg.meta.sender = endpoint->peer();
  msg.meta.recver = my_id_;
  const bool is_stranger = endpoint->peer() == Node::kEmpty;
  if (msg.meta.control.empty()) {
    if (is_stranger) throw dmlc::Error("it is no member of the job");
    const auto& handler = Postoffice::Get()->handlers().on_message;
    if (handler) handler(&msg);
    return;
  }
  const auto& control = msg.meta.control;
  if (is_stranger && control.cmd != Control::ADD_NODE) {
    throw dmlc::Error("it is no member of the job and sent more than that it wants to join");
  }
  // It cannot speak for another process.
  if (control.cmd == Control::ADD_NODE && is_scheduler_ &&
      (control.node.size() != 1 || TokenOf(control.node[0]) != endpoint->token ||
       control.node[0].role != endpoint->role || control.node[0].aux_id != endpoint->rank)) {
    throw dmlc::Error("it wants to join as another process, or in another role or rank");
  }
  Event event;
  event.msg = std::move(msg);
  event.bytes = static_cast<int>(std::min<uint64_t>(received.bytes, 1 << 30));
  event.from = endpoint->shared_from_this();
  inbox_.Put(std::move(event));
}

void RdmaVan::OnClosed(Endpoint* endpoint, const rdma::Ending& ending) {
  std::shared_ptr<Endpoint> mine;
  const auto let_go = [&](Peer* peer) {
    if (peer->control.get() == endpoint) mine = std::move(peer->control);
    for (auto& data : peer->data) {
      if (data.get() == endpoint) mine = std::move(data);
    }
  };
  Event event;
  {
    MutexLock lock(&peers_mu_);
    if (stopping_) return;
    for (const auto& entry : peers_) {
      let_go(entry.second.get());
      if (mine == nullptr) continue;
      event.peer = entry.first;
      event.lost = entry.second;
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
             << " closed: " << ending.reason;
  if (mine) connector_->Disconnect(mine);
  // One that comes to us, and never was there, may come again.
  if (event.peer == Node::kEmpty || !(endpoint->was_open() || endpoint->active())) return;
  event.orderly = ending.orderly;
  event.closed = ending.by_peer;
  event.plane = endpoint->plane();
  event.reason = ending.reason;
  inbox_.Put(std::move(event));
}

void RdmaVan::HandleLoss(const Event& event) {
  {
    // Another process may have taken its place meanwhile, under the same id.
    MutexLock lock(&peers_mu_);
    auto it = peers_.find(event.peer);
    if (it == peers_.end() || it->second != event.lost) return;
    if (EndpointsOf(*it->second).empty()) peers_.erase(it);
  }
  if (event.orderly) return OnDisconnect(event.peer);
  // With the scheduler there is but one plane.
  const bool scheduler = is_scheduler_ || event.peer == kScheduler;
  const std::string plane = std::string("the ") + rdma::NameOf(event.plane) + " plane: ";
  membership()->OnLinkLost(event.peer, (scheduler ? "" : plane) + event.reason, event.closed);
}

int RdmaVan::RecvMsg(Message* msg) {
  while (true) {
    Event event;
    if (!inbox_.Take(&event)) {
      *msg = Message();
      msg->meta.control.cmd = Control::TERMINATE;
      return 0;
    }
    if (event.lost) {
      HandleLoss(event);
      continue;
    }
    *msg = std::move(event.msg);
    // Only now: a message before may have given this node, or the peer, its id.
    if (event.from) msg->meta.sender = event.from->peer();
    msg->meta.recver = my_id_;
    return event.bytes;
  }
}

}  // namespace ps
