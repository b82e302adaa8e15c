#include "byteps/net/rdma/connector.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/rdma/van.h"
#include "byteps/net/rdma/verbs.h"

namespace ps {
namespace rdma {
Connector::Connector(ConnectorOwner* owner, const Settings& settings, uint64_t token)
    : owner_(owner), settings_(settings), token_(token) {
  channel_.reset(rdma_create_event_channel());
  if (!channel_) {
    Throw("RDMA cannot be used on this host (no connection manager; is rdma_ucm loaded?)", errno);
  }
  DontBlock(channel_->fd);
  channel_in_child_.emplace(channel_->fd);
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) Throw("eventfd", errno);
}

Connector::~Connector() {
  stop_ = true;
  const uint64_t one = 1;
  if (write(wake_fd_, &one, sizeof(one)) < 0) BPS_LOG(WARNING) << "eventfd: " << strerror(errno);
  // The thread was told to stop, so this wait is ended by its return; deadline: none.
  if (thread_.joinable()) thread_.join();
  close(wake_fd_);
}

void Connector::Run() {
  thread_ = std::thread(&Connector::Loop, this);
  pthread_setname_np(thread_.native_handle(), "bps-rdma-cm");
}

void Connector::Post(std::function<void()> task) {
  {
    MutexLock lock(&mu_);
    tasks_.push_back(std::move(task));
  }
  const uint64_t one = 1;
  if (write(wake_fd_, &one, sizeof(one)) < 0 && errno != EAGAIN) ThrowErrno("eventfd");
}

void Connector::FailLater(std::shared_ptr<Endpoint> endpoint, std::chrono::seconds after) {
  const auto when = Clock::now() + after;
  Post([this, endpoint, when] { failing_.emplace_back(when, endpoint); });
}

void Connector::Disconnect(std::shared_ptr<Endpoint> endpoint) {
  Post([this, endpoint] {
    Wake(*endpoint);  // the endpoint may be finished
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(),
                                  [&](const auto& link) { return link->endpoint == endpoint; }),
                   waiting_.end());
    for (auto it = links_.begin(); it != links_.end(); ++it) {
      if (it->second->endpoint != endpoint) continue;
      Drop(it->second.get());
      return;
    }
  });
}

void Connector::Reconnect(std::shared_ptr<Endpoint> endpoint, bool elsewhere) {
  Post([this, endpoint, elsewhere] { ReconnectHere(endpoint, elsewhere); });
}

void Connector::Wake(const Endpoint& endpoint) {
  if (endpoint.poller() != nullptr) endpoint.poller()->Wake();
}

void Connector::ReconnectHere(const std::shared_ptr<Endpoint>& endpoint, bool elsewhere) {
  if (std::find(broken_.begin(), broken_.end(), endpoint) == broken_.end()) {
    broken_.push_back(endpoint);
  }
  if (!endpoint->NeedsConnection()) return;  // the endpoint has another connection already
  if (!endpoint->active()) return Forget(endpoint.get());
  for (const auto& entry : links_) {
    if (entry.second->endpoint != endpoint || !entry.second->established) continue;
    LinkPtr link = Take(entry.first);
    link->last_id = std::move(link->id);
    link->established = false;
    link->resumes = true;
    link->look_at = Clock::time_point::max();
    link->dial.Restart(elsewhere || !IsActive(*link->last_id));
    link->challenge.clear();
    link->next_try = Clock::now();
    link->dial.NextAttempt();
    waiting_.push_back(std::move(link));
    return;
  }
}

void Connector::Forget(const Endpoint* endpoint) {
  for (auto it = links_.begin(); it != links_.end(); ++it) {
    if (it->second->endpoint.get() != endpoint) continue;
    LinkPtr link = std::move(it->second);
    links_.erase(it);
    if (link->established) {
      rdma_disconnect(link->id.get());
    } else if (!link->active) {
      rdma_cm_id* const id = link->id.get();
      forgotten_[id] = std::move(link->id);
    }
    return;
  }
}

void Connector::EndForgotten(rdma_cm_id* id, rdma_cm_event_type what) {
  if (what == RDMA_CM_EVENT_ESTABLISHED) rdma_disconnect(id);
  forgotten_.erase(id);
}

std::string Connector::LastError(const Endpoint* endpoint) const {
  const Link* const link = LinkOf(endpoint);
  return link == nullptr ? "" : link->dial.redial().last_error();
}

rdma_conn_param Connector::Parameters(const std::string& data, uint32_t queue_pair) {
  rdma_conn_param parameters;
  memset(&parameters, 0, sizeof(parameters));
  parameters.private_data = data.data();
  parameters.private_data_len = static_cast<uint8_t>(data.size());
  parameters.qp_num = queue_pair;
  parameters.responder_resources = 1;
  parameters.initiator_depth = 1;
  return parameters;  // each side sets its number of retries itself (Endpoint::Attach)
}

// --------------------------------------------------------------- the thread

void Connector::Loop() {
  while (!stop_) {
    auto shared = transport();
    std::vector<pollfd> items = {{channel_->fd, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
    for (const auto& device : shared ? shared->devices : Devices()) {
      items.push_back({device->context()->async_fd, POLLIN, 0});
    }
    // The wait is ended by an event or Wake; deadline: the next task that is due.
    if (poll(items.data(), items.size(), MillisecondsToWait()) < 0 && errno != EINTR) {
      ThrowErrno("poll");
    }
    uint64_t count = 0;
    if (read(wake_fd_, &count, sizeof(count)) < 0 && errno != EAGAIN) ThrowErrno("eventfd");
    try {
      TakeEvents();
      if (shared) ReadDeviceEvents(*shared);
      RunTasks();
    } catch (const std::exception& e) {  // one peer's error must not affect others
      BPS_LOG(WARNING) << "RDMA connections: " << e.what();
    }
  }
  while (!links_.empty()) Drop(links_.begin()->second.get());
  forgotten_.clear();
  probes_.clear();
  waiting_.clear();
  broken_.clear();
  failing_.clear();
  listeners_.clear();
}

void Connector::TakeEvents() {
  rdma_cm_event* event = nullptr;
  while (rdma_get_cm_event(channel_.get(), &event) == 0) {
    // The data are copied: the event must be acknowledged before its id can be destroyed, and that
    // frees the data.
    char data[256] = {0};
    rdma_cm_event copy = *event;
    size_t bytes = std::min<size_t>(event->param.conn.private_data_len, sizeof(data) - 1);
    if (event->param.conn.private_data == nullptr) bytes = 0;
    if (bytes > 0) memcpy(data, event->param.conn.private_data, bytes);
    copy.param.conn.private_data = data;
    copy.param.conn.private_data_len = static_cast<uint8_t>(bytes);
    rdma_ack_cm_event(event);
    OnEvent(copy);
  }
}

int Connector::MillisecondsToWait() {
  auto next = Clock::time_point::max();
  for (const auto& link : waiting_) next = std::min(next, link->next_try);
  for (const auto& entry : failing_) next = std::min(next, entry.first);
  for (const auto& endpoint : broken_) next = std::min(next, endpoint->resume_deadline());
  for (const auto& entry : links_) {
    const Link& link = *entry.second;
    if (link.is_timed()) next = std::min(next, link.attempt_deadline);
    if (link.established && link.may_move()) next = std::min(next, ask_at_);
    next = std::min(next, link.look_at);
  }
  for (const auto& entry : probes_) next = std::min(next, entry.second.deadline);
  if (next == Clock::time_point::max()) return -1;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(next - Clock::now());
  return static_cast<int>(std::max<int64_t>(left.count(), 0)) + 1;
}

void Connector::RunTasks() {
  std::vector<std::function<void()>> tasks;
  {
    MutexLock lock(&mu_);
    tasks.swap(tasks_);
  }
  for (auto& task : tasks) task();
  const auto now = Clock::now();
  EndOutages(now);
  TryWaiting(now);
  LookHome(now);
  AskIdle(now);
  for (const auto& entry : failing_) {
    if (entry.first <= now) entry.second->Fail("it did not take what was left to be sent");
  }
  failing_.erase(std::remove_if(failing_.begin(), failing_.end(),
                                [](const auto& entry) { return entry.second->closed(); }),
                 failing_.end());
}

void Connector::TryWaiting(Clock::time_point now) {
  std::vector<LinkPtr> waiting;
  waiting.swap(waiting_);
  for (auto& link : waiting) {
    if (link->next_try <= now) {
      Try(std::move(link));
    } else {
      waiting_.push_back(std::move(link));
    }
  }
  std::vector<Link*> silent;
  for (const auto& entry : links_) {
    Link* const link = entry.second.get();
    if (link->is_timed() && link->attempt_deadline <= now) silent.push_back(link);
  }
  for (Link* link : silent) TryAgain(link, "it did not answer");
}

void Connector::EndOutages(Clock::time_point now) {
  for (const auto& endpoint : broken_) {
    if (endpoint->resume_deadline() <= now) endpoint->GiveUp(LastError(endpoint.get()), false);
  }
  broken_.erase(std::remove_if(broken_.begin(), broken_.end(),
                               [](const auto& endpoint) {
                                 return endpoint->resume_deadline() == Clock::time_point::max();
                               }),
                broken_.end());
}

void Connector::FailAll(const std::string& reason) {
  std::vector<std::shared_ptr<Endpoint>> all = broken_;
  for (const auto& entry : links_) all.push_back(entry.second->endpoint);
  for (const auto& link : waiting_) all.push_back(link->endpoint);
  for (const auto& endpoint : all) endpoint->Fail(reason);
}

Connector::Link* Connector::LinkOf(const Endpoint* endpoint) const {
  for (const auto& entry : links_) {
    if (entry.second->endpoint.get() == endpoint) return entry.second.get();
  }
  for (const auto& link : waiting_) {
    if (link->endpoint.get() == endpoint) return link.get();
  }
  return nullptr;
}

Connector::LinkPtr Connector::Take(rdma_cm_id* id) {
  auto it = links_.find(id);
  LinkPtr link = std::move(it->second);
  links_.erase(it);
  return link;
}

void Connector::Drop(Link* link) {
  if (link->established) rdma_disconnect(link->id.get());
  link->endpoint->Disconnected();
  Wake(*link->endpoint);
  Take(link->id.get());
}

void Connector::OnEvent(const rdma_cm_event& event) {
  const bool listens = std::any_of(listeners_.begin(), listeners_.end(),
                                   [&](const auto& id) { return id.get() == event.id; });
  if (event.event == RDMA_CM_EVENT_DEVICE_REMOVAL) {
    if (listens) {
      BPS_LOG(WARNING) << "an RDMA device was removed; nobody can connect to this node by it";
    }
    return FailAll("the RDMA device was removed");
  }
  if (listens) return;
  if (event.event == RDMA_CM_EVENT_CONNECT_REQUEST) return OnRequest(event);
  if (probes_.count(event.id) > 0) return OnProbeEvent(event);
  if (forgotten_.count(event.id) > 0) return EndForgotten(event.id, event.event);
  auto it = links_.find(event.id);
  if (it == links_.end()) return;
  Link* link = it->second.get();
  const std::string status = " (" + std::string(rdma_event_str(event.event)) + ", status " +
                             std::to_string(event.status) + ")";
  switch (event.event) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      return OnResolved(link, event.event);
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
      return OnResponse(link, event);
    case RDMA_CM_EVENT_ESTABLISHED:
      if (!link->active) link->endpoint->Open();
      link->established = true;
      return;
    case RDMA_CM_EVENT_REJECTED:
      // The peer broke the connection before this side knew that the connection was established.
      if (link->established) return OnDisconnected(link);
      return OnRejected(link, event);
    case RDMA_CM_EVENT_ADDR_ERROR:
      return TryAgain(link, "its address leads through no RDMA device" + status);
    case RDMA_CM_EVENT_ROUTE_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
      // The kernel reports this event also when the peer's address moves to another NIC.
      if (link->established) {
        return link->endpoint->Break("the network path to the peer changed" + status,
                                     LinkFault::kBroken);
      }
      return TryAgain(link, "it could not be reached" + status);
    case RDMA_CM_EVENT_DISCONNECTED:
      return OnDisconnected(link);
    case RDMA_CM_EVENT_ADDR_CHANGE:
      return link->endpoint->Break("the network address of the RDMA device changed" + status,
                                   LinkFault::kBroken);
    case RDMA_CM_EVENT_TIMEWAIT_EXIT:
      return;
    default:
      BPS_LOG(WARNING) << "unexpected event of an RDMA connection" << status;
  }
}

void Connector::OnDisconnected(Link* link) {
  // The endpoint continues when the device has returned all requests.
  rdma_disconnect(link->id.get());
  link->endpoint->Disconnected();
  Wake(*link->endpoint);
}

// Probes of a link's first pair of NICs. A link leaves a failed pair, probes its first pair at
// times, and returns to it.

namespace {

constexpr auto kProbeTime = std::chrono::seconds(2);
constexpr int kResolveMs = 2000;
constexpr auto kAskPause = std::chrono::seconds(1);
// The connection manager's code for a request that the listening process has rejected.
constexpr int kRejectedByListener = 28;

}  // namespace

// The connector's thread calls this and all functions below.
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
  link->look_at = Clock::time_point::max();  // the next look waits until the probe has ended
  Probe probe;
  probe.id = NewId();
  probe.endpoint = link->endpoint;
  probe.deadline = Clock::now() + kProbeTime;
  rdma_cm_id* const id = probe.id.get();
  probes_[id] = std::move(probe);
  const DialPlan::Route& home = link->dial.home();
  Address from = Resolve(home.from, 0).front();
  Address to = home.to;
  // The result is ignored: if the call fails at once, e.g. because a NIC is down, the probe times
  // out.
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
