// The devices of a connector, and the threads that handle what completes on them.
#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/rdma/van.h"

namespace ps {
namespace rdma {

// The connector's part that finds devices, listens by them, and hears what happens to them.

namespace {

constexpr int kBacklog = 1024;

std::string NamesOf(const Devices& devices) {
  std::string names;
  for (const auto& device : devices) names += (names.empty() ? "" : ", ") + device->name();
  return names;
}

}  // namespace

void DontBlock(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) Throw("fcntl", errno);
}

bool IsActive(const rdma_cm_id& id) {
  ibv_port_attr attributes;
  memset(&attributes, 0, sizeof(attributes));
  if (id.verbs == nullptr || ibv_query_port(id.verbs, id.port_num, &attributes) != 0) return true;
  return attributes.state >= IBV_PORT_ACTIVE;
}

Transport::Transport(Devices used, const Settings& settings)
    : devices(std::move(used)),
      registrar(std::make_shared<Registrar>()),
      pool(std::make_shared<Pool>(devices, registrar, settings.pool_bytes)) {
  pollers.push_back(std::make_unique<Poller>(devices, Plane::kControl, settings.busy_poll));
  for (size_t i = 0; i < devices.size(); ++i) {
    pollers.push_back(std::make_unique<Poller>(devices, Plane::kData, settings.busy_poll));
  }
}

Transport::~Transport() {
  // First: what it still has to do may hold endpoints, which go before their pollers.
  registrar->Stop();
}

std::shared_ptr<Device> Transport::DeviceOf(const ibv_context* context) const {
  const auto it = std::find_if(devices.begin(), devices.end(), [context](const auto& device) {
    return device->context() == context;
  });
  return it == devices.end() ? nullptr : *it;
}

Poller* Transport::PollerOf(Plane plane, const Device& device) const {
  if (plane == Plane::kControl) return pollers[0].get();
  const auto it = std::find_if(devices.begin(), devices.end(),
                               [&](const auto& one) { return one.get() == &device; });
  return pollers[1 + static_cast<size_t>(it - devices.begin())].get();
}

void Transport::RunNearDevices(const std::vector<HostNic>& nics, const NumaNodes& nodes) {
  for (size_t i = 0; i < devices.size(); ++i) {
    const auto nic = std::find_if(nics.begin(), nics.end(), [&](const HostNic& one) {
      return one.rdma == devices[i]->name();
    });
    if (nic == nics.end()) continue;
    const ThreadPlace place = PlaceThreads({*nic}, nodes, AllowedCores(), 1).front();
    if (place.numa < 0) continue;
    const bool runs = pollers[1 + i]->RunOn(place.cores);
    BPS_LOG(DEBUG) << "the thread of " << devices[i]->name() << (runs ? " runs" : " cannot run")
                   << " on NUMA node " << place.numa;
  }
}

std::shared_ptr<Transport> Connector::transport() {
  MutexLock lock(&mu_);
  return transport_;
}

void Connector::Prepare(const std::shared_ptr<Endpoint>& endpoint, rdma_cm_id* id, bool may_move) {
  if (id->verbs == nullptr) throw Error("no RDMA device has this address");
  if (!transport()) {
    Devices devices;
    AddDevice(id, "", &devices);
    UseDevices(std::move(devices));
  }
  const auto shared = transport();
  Endpoint::Path path;
  path.device = shared->DeviceOf(id->verbs);
  if (!path.device) {
    throw Error(std::string("the path leads through ") + ibv_get_device_name(id->verbs->device) +
                ", this process uses " + NamesOf(shared->devices) +
                " (BYTEPS_NICS, BYTEPS_RDMA_DEVICE, DMLC_NODE_HOST)");
  }
  Poller* poller = endpoint->poller();
  if (poller == nullptr) poller = shared->PollerOf(endpoint->plane(), *path.device);
  path.channel = poller->channel(*path.device);
  path.id = id;
  path.may_move = may_move;
  endpoint->Prepare({shared->pool, shared->registrar, shared->devices, poller}, path);
}

void Connector::AddDevice(rdma_cm_id* id, const std::string& host, Devices* devices) const {
  if (id->verbs == nullptr) throw Error("no RDMA device has this address");
  // Several addresses may be of one device.
  for (const auto& known : *devices) {
    if (known->context() == id->verbs) return;
  }
  const auto made = std::make_shared<Device>(id->verbs, id->port_num == 0 ? 1 : id->port_num);
  if (!settings_.device.empty() && settings_.device != made->name()) {
    throw Error("the address " + host + " is that of " + made->name() +
                ", not of BYTEPS_RDMA_DEVICE=" + settings_.device);
  }
  if (settings_.port != 0 && settings_.port != made->port()) {
    throw Error("the address " + host + " is that of port " + std::to_string(made->port()) +
                " of " + made->name() +
                ", not of BYTEPS_RDMA_PORT=" + std::to_string(settings_.port));
  }
  settings_.Check(*made);
  devices->push_back(made);
}

void Connector::UseDevices(Devices devices) {
  for (const auto& device : devices) DontBlock(device->context()->async_fd);
  auto made = std::make_shared<Transport>(std::move(devices), settings_);
  made->RunNearDevices(ListNics(), ReadNumaNodes());
  MutexLock lock(&mu_);
  transport_ = std::move(made);
}

Owned<rdma_cm_id> Connector::NewId() const {
  rdma_cm_id* id = nullptr;
  if (rdma_create_id(channel_.get(), &id, nullptr, RDMA_PS_TCP) != 0) {
    Throw("cannot make a connection", errno);
  }
  Owned<rdma_cm_id> made(id);
  if (settings_.traffic_class >= 0) {
    auto tos = static_cast<uint8_t>(settings_.traffic_class);
    if (rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof(tos)) != 0) {
      Throw("BYTEPS_RDMA_TRAFFIC_CLASS cannot be set", errno);
    }
  }
  return made;
}

Owned<rdma_cm_id> Connector::BindTo(const std::string& host, int port, Devices* devices) {
  Owned<rdma_cm_id> bound = NewId();
  Address address = Resolve(host.empty() ? "0.0.0.0" : host, port).front();
  if (rdma_bind_addr(bound.get(), address.get()) != 0) {
    const int error = errno;
    if (error == ENODEV || error == EADDRNOTAVAIL) {
      throw Error("no RDMA device has this address (errno " + std::to_string(error) +
                  "); `rdma link` shows which there are");
    }
    Throw("bind", error);
  }
  if (!host.empty()) AddDevice(bound.get(), host, devices);
  return bound;
}

std::vector<Owned<rdma_cm_id>> Connector::BindToAll(const std::vector<std::string>& hosts,
                                                    int port) {
  Devices devices;
  std::vector<Owned<rdma_cm_id>> ids;
  for (const std::string& host : hosts) {
    try {
      ids.push_back(BindTo(host, port, &devices));
      port = ntohs(rdma_get_src_port(ids.front().get()));
    } catch (const Error& e) {
      if (ids.empty()) throw;
      // A port that is not active, or another process's port: connections take other pairs of NICs.
      BPS_LOG(WARNING) << "the NIC at " << host << " is not used: " << e.what();
    }
  }
  if (!devices.empty()) UseDevices(std::move(devices));
  return ids;
}

void Connector::UseDevicesOf(const std::vector<std::string>& hosts) { BindToAll(hosts, 0); }

int Connector::Listen(const std::vector<std::string>& hosts, int port) {
  listeners_ = BindToAll(hosts, port);
  for (const auto& listener : listeners_) {
    if (rdma_listen(listener.get(), kBacklog) != 0) Throw("listen", errno);
  }
  return ntohs(rdma_get_src_port(listeners_.front().get()));
}

void Connector::ReadDeviceEvents(const Transport& shared) {
  for (const auto& device : shared.devices) {
    ibv_async_event event;
    while (ibv_get_async_event(device->context(), &event) == 0) OnDeviceEvent(*device, event);
  }
}

void Connector::OnDeviceEvent(const Device& device, ibv_async_event event) {
  const std::string what = ibv_event_type_str(event.event_type);
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
  if (!usual) BPS_LOG(WARNING) << "RDMA device " << device.name() << ": " << what;
  const std::string reason = "the RDMA device reported: " + what;
  if (event.event_type == IBV_EVENT_DEVICE_FATAL) FailAll(reason);
  if (event.event_type == IBV_EVENT_PORT_ERR) LeaveNic(device.context(), event.element.port_num);
  if (broken) broken->Break(reason, LinkFault::kBroken);
}

namespace {

// Batches of one endpoint before the others have their turn.
constexpr int kBatches = 8;
// How much later than it could be a message of an endpoint that has nothing else to send is known
// to have arrived.
constexpr std::chrono::milliseconds kPause{1};

ibv_comp_channel* MakeChannel(const Device& device) {
  Owned<ibv_comp_channel> channel(ibv_create_comp_channel(device.context()));
  if (!channel) Throw("cannot make a completion channel", errno);
  const int flags = fcntl(channel->fd, F_GETFL);
  if (flags < 0 || fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    Throw("cannot set up a completion channel", errno);
  }
  return channel.release();
}

}  // namespace

Poller::Channel::Channel(const Device& device)
    : device(&device), channel(MakeChannel(device)), in_child(channel->fd) {}

Poller::Poller(const Devices& devices, Plane plane, bool spin) : spin_(spin) {
  for (const auto& device : devices) channels_.emplace_back(*device);
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) Throw("eventfd", errno);
  sources_.push_back({wake_fd_, POLLIN, 0});
  for (const Channel& one : channels_) sources_.push_back({one.channel->fd, POLLIN, 0});
  thread_ = std::thread(&Poller::Run, this);
  const char* name = plane == Plane::kData ? "bps-rdma-data" : "bps-rdma-ctl";
  pthread_setname_np(thread_.native_handle(), name);
}

Poller::~Poller() {
  stop_ = true;
  Wake();
  // Ended by the end of its thread, which was told; deadline: none.
  thread_.join();
  endpoints_.clear();  // before the channel of their queues
  close(wake_fd_);
}

bool Poller::RunOn(const std::set<int>& cores) { return ps::RunOn(&thread_, cores); }

ibv_comp_channel* Poller::channel(const Device& device) {
  for (const Channel& one : channels_) {
    if (one.device == &device) return one.channel.get();
  }
  throw Error("no completion channel of " + device.name());
}

void Poller::Add(std::shared_ptr<Endpoint> endpoint) {
  {
    MutexLock lock(&mu_);
    Endpoint* key = endpoint.get();
    endpoints_[key] = std::move(endpoint);
  }
  Wake();  // an event may have come before, for an endpoint that was not known
}

size_t Poller::size() {
  MutexLock lock(&mu_);
  return endpoints_.size();
}

void Poller::Wake() {
  const uint64_t one = 1;
  const ssize_t written = write(wake_fd_, &one, sizeof(one));
  // EAGAIN means the counter is full: the thread has been woken already.
  if (written != sizeof(one) && errno != EAGAIN) ThrowErrno("eventfd");
}

void Poller::Run() {
  std::set<Endpoint*> ready;
  while (!stop_) {
    if (ready.empty() && !spin_) Sleep();
    TakeEvents(&ready);
    for (auto it = ready.begin(); it != ready.end();) {
      // By name: it may be gone since the event was told.
      const auto endpoint = Find(*it);
      bool more = false;
      try {
        more = endpoint && Serve(endpoint);
      } catch (const std::exception& e) {  // it alone suffers
        endpoint->Fail(e.what());
      }
      it = more ? std::next(it) : ready.erase(it);
    }
    if (!watched_.empty() && Endpoint::Clock::now() >= ask_at_) AskWatched();
  }
}

void Poller::Sleep() {
  const int limit = watched_.empty() ? -1 : static_cast<int>(kPause.count());
  // Ended by a completion or Wake; deadline: kPause where something is watched, else none.
  if (poll(sources_.data(), sources_.size(), limit) < 0 && errno != EINTR) ThrowErrno("poll");
}

void Poller::AskWatched() {
  for (Endpoint* watched : std::exchange(watched_, {})) {
    if (const auto endpoint = Find(watched)) endpoint->AskWhatArrived();
  }
}

void Poller::TakeEvents(std::set<Endpoint*>* ready) {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  for (const Channel& one : channels_) {
    while (ibv_get_cq_event(one.channel.get(), &queue, &context) == 0) {
      ibv_ack_cq_events(queue, 1);
      ready->insert(static_cast<Endpoint*>(context));
    }
  }
  uint64_t count = 0;
  const bool woken = read(wake_fd_, &count, sizeof(count)) > 0;
  if (!woken && !spin_) return;
  MutexLock lock(&mu_);
  for (const auto& entry : endpoints_) ready->insert(entry.first);
}

std::shared_ptr<Endpoint> Poller::Find(Endpoint* endpoint) {
  MutexLock lock(&mu_);
  auto it = endpoints_.find(endpoint);
  return it == endpoints_.end() ? nullptr : it->second;
}

bool Poller::Serve(const std::shared_ptr<Endpoint>& endpoint) {
  // Armed first: a completion between the last look and sleep makes an event.
  if (!spin_) {
    if (int error = endpoint->Arm()) {
      endpoint->Fail(std::string("its completion queue cannot be armed: ") + strerror(error));
    }
  }
  bool more = true;
  for (int batch = 0; batch < kBatches && more; ++batch) more = endpoint->Poll();
  if (!more && endpoint->Watch()) {
    if (watched_.empty()) ask_at_ = Endpoint::Clock::now() + kPause;
    watched_.insert(endpoint.get());
  }
  if (more || !endpoint->finished()) return more;
  MutexLock lock(&mu_);
  endpoints_.erase(endpoint.get());
  return false;
}

}  // namespace rdma
}  // namespace ps
