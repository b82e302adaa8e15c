// The connector's part for nodes with several NICs: a link leaves a pair of NICs that fails, looks
// now and then whether its first pair works, and goes back.
#include <algorithm>
#include <chrono>
#include <utility>

#include "byteps/base/error.h"
#include "byteps/net/rdma/connector.h"

namespace ps {
namespace rdma {
namespace {

constexpr auto kProbeTime = std::chrono::seconds(2);
constexpr int kResolveMs = 2000;
constexpr auto kAskPause = std::chrono::seconds(1);
// How the connection manager says that the process that listens has rejected a request.
constexpr int kRejectedByListener = 28;

}  // namespace

// The thread's, like all below.
void Connector::OnEstablished(Link* link) {
  const auto now = Clock::now();
  link->established = true;
  link->last_id.reset();
  DialPlan* const dial = &link->dial;
  link->look_at = dial->is_away() ? now + dial->NextLook() : Clock::time_point::max();
  if (dial->is_away() && !link->resumes) {
    LogAway(link->endpoint->peer(), dial->home().Text(), dial->redial().last_error(),
            dial->Current().Text());
  }
  dial->Succeeded(now);
}

void Connector::LeaveNic(const ibv_context* context, int port) {
  for (const auto& entry : links_) {
    const Link& link = *entry.second;
    if (!link.established || !link.may_move()) continue;
    if (link.id->verbs != context || link.id->port_num != port) continue;
    link.endpoint->Leave("the link of its NIC is down");
  }
}

void Connector::LookHome(Clock::time_point now) {
  for (const auto& entry : links_) {
    if (entry.second->look_at <= now) StartProbe(entry.second.get());
  }
  std::vector<rdma_cm_id*> late;
  for (const auto& entry : probes_) {
    if (entry.second.deadline <= now) late.push_back(entry.first);
  }
  for (rdma_cm_id* id : late) EndProbe(id, false);
}

void Connector::StartProbe(Link* link) {
  link->look_at = Clock::time_point::max();  // until the probe has ended
  Probe probe;
  probe.id = NewId();
  probe.endpoint = link->endpoint;
  probe.deadline = Clock::now() + kProbeTime;
  rdma_cm_id* const id = probe.id.get();
  probes_[id] = std::move(probe);
  const DialPlan::Route& home = link->dial.home();
  Address from = Resolve(home.from, 0).front();
  Address to = home.to;
  // Where this fails at once, such as with a NIC that is down, the deadline ends it.
  (void)rdma_resolve_addr(id, from.get(), to.get(), kResolveMs);
}

void Connector::OnProbeEvent(const rdma_cm_event& event) {
  rdma_cm_id* const id = event.id;
  const Probe& probe = probes_.at(id);
  bool goes_on = false;
  if (event.event == RDMA_CM_EVENT_ADDR_RESOLVED) {
    goes_on = IsActive(*id) && rdma_resolve_route(id, kResolveMs) == 0;
  } else if (event.event == RDMA_CM_EVENT_ROUTE_RESOLVED) {
    const auto endpoint = probe.endpoint.lock();
    Link* const link = endpoint ? LinkOf(endpoint.get()) : nullptr;
    if (link != nullptr) {
      ConnectRequest request = RequestOf(*link);
      request.probes = true;
      const std::string data = request.Encode();
      auto parameters = Parameters(data, 0);
      goes_on = rdma_connect(id, &parameters) == 0;
    }
  }
  if (goes_on) return;
  const bool answered =
      event.event == RDMA_CM_EVENT_REJECTED && event.status == kRejectedByListener;
  EndProbe(id, answered);
}

void Connector::EndProbe(rdma_cm_id* id, bool works) {
  const auto it = probes_.find(id);
  const Probe probe = std::move(it->second);
  probes_.erase(it);
  const auto endpoint = probe.endpoint.lock();
  Link* const link = endpoint ? LinkOf(endpoint.get()) : nullptr;
  if (link == nullptr || !link->established || !link->dial.is_away()) return;
  if (!works) {
    link->look_at = Clock::now() + link->dial.NextLook();
    return;
  }
  const std::string home = link->dial.home().Text();
  const int peer = endpoint->peer();
  if (!endpoint->Leave("it went back to its NIC")) return;
  LogHome(peer, home);
  link->dial.GoHome();
}

void Connector::AskIdle(Clock::time_point now) {
  if (ask_at_ > now) return;
  ask_at_ = now + kAskPause;
  for (const auto& entry : links_) {
    const Link& link = *entry.second;
    if (link.established && link.may_move()) link.endpoint->AskWhetherItWorks();
  }
}

}  // namespace rdma
}  // namespace ps
