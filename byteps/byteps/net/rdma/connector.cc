#include "byteps/net/rdma/connector.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "byteps/base/error.h"
#include "byteps/base/log.h"

namespace ps {
namespace rdma {
namespace {

constexpr int kBacklog = 1024;
void DontBlock(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) Throw("fcntl", errno);
}

}  // namespace

Transport::~Transport() {
  // First: what it still has to do may hold endpoints, which go before their pollers.
  if (registrar) registrar->Stop();
}

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
  if (thread_.joinable()) thread_.join();
  close(wake_fd_);
}

std::shared_ptr<Transport> Connector::transport() {
  MutexLock lock(&mu_);
  return transport_;
}

std::shared_ptr<Transport> Connector::TransportFor(rdma_cm_id* id) {
  if (id->verbs == nullptr) throw Error("no RDMA device has this address");
  auto known = transport();
  if (known) {
    if (known->device->context() == id->verbs) return known;
    throw Error(std::string("the path leads through ") + ibv_get_device_name(id->verbs->device) +
                ", this process uses " + known->device->name() +
                " (BYTEPS_RDMA_DEVICE, DMLC_NODE_HOST)");
  }
  auto made = std::make_shared<Transport>();
  made->device = std::make_shared<Device>(id->verbs, id->port_num == 0 ? 1 : id->port_num);
  const Device& device = *made->device;
  if (!settings_.device.empty() && settings_.device != device.name()) {
    throw Error("the address " + host_ + " is that of " + device.name() +
                ", not of BYTEPS_RDMA_DEVICE=" + settings_.device);
  }
  if (settings_.port != 0 && settings_.port != device.port()) {
    throw Error("the address " + host_ + " is that of port " + std::to_string(device.port()) +
                " of " + device.name() +
                ", not of BYTEPS_RDMA_PORT=" + std::to_string(settings_.port));
  }
  settings_.Check(device);
  made->registrar = std::make_shared<Registrar>();
  made->pool = std::make_shared<Pool>(made->device, made->registrar, settings_.pool_bytes);
  for (const Plane plane : {Plane::kControl, Plane::kData}) {
    made->pollers[static_cast<int>(plane)] =
        std::make_unique<Poller>(device, plane, settings_.busy_poll);
  }
  MutexLock lock(&mu_);
  transport_ = made;
  return made;
}

Owned<rdma_cm_id> Connector::BindTo(const std::string& host, int port) {
  rdma_cm_id* id = nullptr;
  if (rdma_create_id(channel_.get(), &id, nullptr, RDMA_PS_TCP) != 0) {
    Throw("cannot make a connection", errno);
  }
  Owned<rdma_cm_id> bound(id);
  SocketAddress address = SocketAddress::Of(host.empty() ? "0.0.0.0" : host, port);
  if (rdma_bind_addr(id, address.get()) != 0) {
    const int error = errno;
    if (error == ENODEV || error == EADDRNOTAVAIL) {
      throw Error("no RDMA device has this address (errno " + std::to_string(error) +
                  "); `rdma link` shows which there are");
    }
    Throw("bind", error);
  }
  host_ = host;
  if (!host.empty()) {
    TransportFor(id);
    ReadDeviceEvents();
  }
  return bound;
}

void Connector::UseDeviceOf(const std::string& host) { BindTo(host, 0); }

int Connector::Listen(const std::string& host, int port) {
  listener_ = BindTo(host, port);
  rdma_cm_id* const id = listener_.get();
  if (settings_.traffic_class >= 0) {
    auto tos = static_cast<uint8_t>(settings_.traffic_class);
    if (rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof(tos)) != 0) {
      Throw("BYTEPS_RDMA_TRAFFIC_CLASS cannot be set", errno);
    }
  }
  if (rdma_listen(id, kBacklog) != 0) Throw("listen", errno);
  return ntohs(rdma_get_src_port(id));
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
    Wake(*endpoint);  // it may be finished
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

void Connector::Reconnect(std::shared_ptr<Endpoint> endpoint) {
  Post([this, endpoint] { ReconnectHere(endpoint); });
}

void Connector::Wake(const Endpoint& endpoint) {
  auto shared = transport();
  if (shared) shared->pollers[static_cast<int>(endpoint.plane())]->Wake();
}

void Connector::ReconnectHere(const std::shared_ptr<Endpoint>& endpoint) {
  if (std::find(broken_.begin(), broken_.end(), endpoint) == broken_.end()) {
    broken_.push_back(endpoint);
  }
  if (!endpoint->NeedsConnection()) return;  // there is another one already
  if (!endpoint->active()) return Forget(endpoint.get());
  for (const auto& entry : links_) {
    if (entry.second->endpoint != endpoint || !entry.second->established) continue;
    LinkPtr link = Take(entry.first);
    link->last_id = std::move(link->id);
    link->established = false;
    link->resumes = true;
    link->redial.Begin();
    link->challenge.clear();
    link->next_try = Clock::now();
    ++link->attempt;
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
  for (const auto& entry : links_) {
    if (entry.second->endpoint.get() == endpoint) return entry.second->redial.last_error();
  }
  for (const auto& link : waiting_) {
    if (link->endpoint.get() == endpoint) return link->redial.last_error();
  }
  return "";
}

rdma_conn_param Connector::Parameters(const std::string& data, uint32_t queue_pair) {
  rdma_conn_param parameters;
  memset(&parameters, 0, sizeof(parameters));
  parameters.private_data = data.data();
  parameters.private_data_len = static_cast<uint8_t>(data.size());
  parameters.qp_num = queue_pair;
  parameters.responder_resources = 1;
  parameters.initiator_depth = 1;
  parameters.retry_count = 7;
  parameters.rnr_retry_count = 7;
  return parameters;
}

// --------------------------------------------------------------- the thread

void Connector::Loop() {
  while (!stop_) {
    auto shared = transport();
    pollfd items[3] = {{channel_->fd, POLLIN, 0}, {wake_fd_, POLLIN, 0}, {-1, POLLIN, 0}};
    if (shared) items[2].fd = shared->device->context()->async_fd;
    if (poll(items, 3, MillisecondsToWait()) < 0 && errno != EINTR) ThrowErrno("poll");
    uint64_t count = 0;
    if (read(wake_fd_, &count, sizeof(count)) < 0 && errno != EAGAIN) ThrowErrno("eventfd");
    try {
      TakeEvents();
      if (shared) ReadDeviceEvents();
      RunTasks();
    } catch (const std::exception& e) {  // what one peer causes, others need not suffer from
      BPS_LOG(WARNING) << "RDMA connections: " << e.what();
    }
  }
  while (!links_.empty()) Drop(links_.begin()->second.get());
  forgotten_.clear();
  waiting_.clear();
  broken_.clear();
  failing_.clear();
  listener_.reset();
}

void Connector::TakeEvents() {
  rdma_cm_event* event = nullptr;
  while (rdma_get_cm_event(channel_.get(), &event) == 0) {
    // A copy: while an event is not acknowledged, its id cannot be destroyed.
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
    if (link.resumes && !link.established) next = std::min(next, link.attempt_deadline);
  }
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
    const bool tries = link->resumes && !link->established;
    if (tries && link->attempt_deadline <= now) silent.push_back(link);
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

void Connector::ReadDeviceEvents() {
  ibv_context* context = transport()->device->context();
  DontBlock(context->async_fd);
  ibv_async_event event;
  while (ibv_get_async_event(context, &event) == 0) {
    const std::string what = ibv_event_type_str(event.event_type);
    const bool fatal = event.event_type == IBV_EVENT_DEVICE_FATAL;
    const bool of_queue_pair = event.event_type == IBV_EVENT_QP_FATAL ||
                               event.event_type == IBV_EVENT_QP_REQ_ERR ||
                               event.event_type == IBV_EVENT_QP_ACCESS_ERR;
    std::shared_ptr<Endpoint> broken;
    for (const auto& entry : links_) {
      if (of_queue_pair && event.element.qp->qp_context == entry.second->endpoint.get()) {
        broken = entry.second->endpoint;
      }
    }
    ibv_ack_async_event(&event);
    const bool usual = of_queue_pair || event.event_type == IBV_EVENT_COMM_EST ||
                       event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED;
    if (!usual) BPS_LOG(WARNING) << "RDMA device " << transport()->device->name() << ": " << what;
    const std::string reason = "the RDMA device reported: " + what;
    if (fatal) FailAll(reason);
    if (broken) broken->Break(reason, LinkFault::kBroken);
  }
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
  if (event.event == RDMA_CM_EVENT_DEVICE_REMOVAL) {
    if (event.id == listener_.get()) {
      BPS_LOG(WARNING) << "the RDMA device was removed; nobody can connect to this node any more";
    }
    return FailAll("the RDMA device was removed");  // there is but one in use
  }
  if (event.id == listener_.get()) return;
  if (event.event == RDMA_CM_EVENT_CONNECT_REQUEST) return OnRequest(event);
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
      // The peer broke it before it knew that it was whole.
      if (link->established) return OnDisconnected(link);
      return OnRejected(link, event);
    case RDMA_CM_EVENT_ADDR_ERROR:
      return TryAgain(link, "its address leads through no RDMA device" + status);
    case RDMA_CM_EVENT_ROUTE_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
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
  // What becomes of it is known when the device has given everything back.
  rdma_disconnect(link->id.get());
  link->endpoint->Disconnected();
  Wake(*link->endpoint);
}

}  // namespace rdma
}  // namespace ps
