// Devices that a connector uses, and their pollers.
#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/rdma/connector.h"
#include "byteps/net/rdma/poller.h"
#include "byteps/net/rdma/transport.h"
#include "byteps/net/rdma/van.h"
#include "byteps/net/rdma/verbs.h"

namespace ps {
namespace rdma {

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
  // A device may have several addresses.
  for (const auto& known : *devices) {
    if (known->context() == id->verbs) return;
  }
  const auto made = std::make_shared<Device>(id->verbs, id->port_num == 0 ? 1 : id->port_num);
  const RdmaChoice& choice = settings_.choice;
  if (!choice.device.empty() && choice.device != made->name()) {
    throw Error("the address " + host + " is that of " + made->name() +
                ", not of BYTEPS_RDMA_DEVICE=" + choice.device);
  }
  if (choice.port != 0 && choice.port != made->port()) {
    throw Error("the address " + host + " is that of port " + std::to_string(made->port()) +
                " of " + made->name() + ", not of port " + std::to_string(choice.port) +
                " (BYTEPS_RDMA_DEVICE)");
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
      // The port may be inactive or in use. Connections then use other pairs of NICs.
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

}  // namespace rdma
}  // namespace ps
