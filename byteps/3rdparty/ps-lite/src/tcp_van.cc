#include "./tcp_van.h"

#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "./meta_check.h"
#include "./net_address.h"
#include "dmlc/logging.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

// First bytes of every message, so that a stranger or another build is told
// apart from a peer before anything of its message is believed.
struct WireHeader {
  uint32_t magic;
  uint32_t version;
  int32_t sender;
  uint32_t reserved;
};
constexpr uint32_t kMagic = 0x5350424d;  // "MBPS", little endian
constexpr uint32_t kVersion = 1;

// Messages taken from one socket before the others have their turn.
constexpr int kBurst = 64;
// How long closing waits for queued messages (a goodbye, a failure) to leave.
constexpr int kLingerMs = 1000;

void ReleaseArray(void* /*data*/, void* hint) { delete static_cast<SArray<char>*>(hint); }

std::string ZmqError() { return zmq_strerror(zmq_errno()); }

void SetOption(void* socket, int option, int value) {
  CHECK_EQ(zmq_setsockopt(socket, option, &value, sizeof(value)), 0) << ZmqError();
}

}  // namespace

TcpVan::~TcpVan() {
  if (context_ != nullptr) zmq_ctx_term(context_);
  if (wake_fd_ >= 0) close(wake_fd_);
}

void TcpVan::Start(int customer_id, bool standalone) {
  standalone_ = standalone;
  if (context_ == nullptr) {
    context_ = zmq_ctx_new();
    CHECK(context_ != nullptr) << "zmq_ctx_new: " << ZmqError();
    zmq_ctx_set(context_, ZMQ_MAX_SOCKETS, GetEnv("BYTEPS_ZMQ_MAX_SOCKET", 1024));
    zmq_ctx_set(context_, ZMQ_IO_THREADS, GetEnv("BYTEPS_ZMQ_NTHREADS", 2));
    wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    CHECK_GE(wake_fd_, 0) << "eventfd: " << strerror(errno);
    stop_requested_ = false;
    std::lock_guard<std::mutex> lock(outbox_mu_);
    stopped_ = false;
  }
  if (!standalone) Van::Start(customer_id, false);
}

void TcpVan::Stop() {
  Van::Stop();  // ends and joins the receiving thread, so the sockets are ours
  for (auto& link : links_) CloseLink(&link.second);
  links_.clear();
  routes_.clear();
  inbox_.clear();
  if (router_ != nullptr) {
    zmq_close(router_);
    router_ = nullptr;
  }
  zmq_ctx_term(context_);
  context_ = nullptr;
  close(wake_fd_);
  wake_fd_ = -1;
}

void* TcpVan::NewSocket(int type) {
  void* socket = zmq_socket(context_, type);
  if (socket == nullptr) {
    throw dmlc::Error("cannot open a socket: " + ZmqError() +
                      "; raise BYTEPS_ZMQ_MAX_SOCKET or the limit of open files (ulimit -n)");
  }
  // Flow is controlled by the engine's credits, never by dropping or blocking.
  SetOption(socket, ZMQ_SNDHWM, 0);
  SetOption(socket, ZMQ_RCVHWM, 0);
  SetOption(socket, ZMQ_LINGER, kLingerMs);
  SetOption(socket, ZMQ_IPV6, 1);
  SetOption(socket, ZMQ_RECONNECT_IVL, 50);
  SetOption(socket, ZMQ_RECONNECT_IVL_MAX, 1000);
  return socket;
}

int TcpVan::Bind(const Node& node, int /*max_retry*/) {
  router_ = NewSocket(ZMQ_ROUTER);
  SetOption(router_, ZMQ_ROUTER_MANDATORY, 1);
  const bool scheduler = node.role == Node::SCHEDULER;
  const bool every_address = scheduler && GetEnv("DMLC_USE_KUBERNETES", 0) > 0;
  const std::string host = every_address ? "0.0.0.0" : NumericAddress(node.hostname);
  const int port = scheduler ? node.port : 0;
  std::string address = "tcp://" + JoinHostPort(host, port);
  if (port == 0) address.replace(address.size() - 1, 1, "*");
  if (zmq_bind(router_, address.c_str()) != 0) {
    const std::string reason = ZmqError();
    zmq_close(router_);
    router_ = nullptr;
    throw dmlc::Error(std::string(scheduler ? "the scheduler" : "this node") +
                      " cannot listen on " + JoinHostPort(host, port) + ": " + reason +
                      (scheduler ? " (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)"
                                 : " (DMLC_NODE_HOST, DMLC_INTERFACE)"));
  }
  char endpoint[256];
  size_t length = sizeof(endpoint);
  CHECK_EQ(zmq_getsockopt(router_, ZMQ_LAST_ENDPOINT, endpoint, &length), 0) << ZmqError();
  const char* colon = strrchr(endpoint, ':');
  CHECK(colon != nullptr) << endpoint;
  return atoi(colon + 1);
}

void TcpVan::Connect(const Node& node) {
  CHECK_NE(node.id, Node::kEmpty);
  const bool self =
      node.id == my_node_.id || (node.role == my_node_.role && node.role == Node::SCHEDULER);
  const bool peers = node.role == my_node_.role && !standalone_;
  const bool server_to_worker = my_node_.role == Node::SERVER && node.role == Node::WORKER;
  if (self || peers || server_to_worker) return;

  auto known = links_.find(node.id);
  if (known != links_.end()) {
    CloseLink(&known->second);
    links_.erase(known);
  }
  Link link;
  link.socket = NewSocket(ZMQ_DEALER);
  const std::string inproc = "inproc://monitor-" + std::to_string(monitors_made_++);
  CHECK_EQ(zmq_socket_monitor(link.socket, inproc.c_str(), ZMQ_EVENT_DISCONNECTED), 0)
      << ZmqError();
  link.monitor = zmq_socket(context_, ZMQ_PAIR);
  CHECK(link.monitor != nullptr) << ZmqError();
  SetOption(link.monitor, ZMQ_LINGER, 0);
  CHECK_EQ(zmq_connect(link.monitor, inproc.c_str()), 0) << ZmqError();
  const std::string address = "tcp://" + JoinHostPort(node.hostname, node.port);
  if (zmq_connect(link.socket, address.c_str()) != 0) {
    const std::string reason = ZmqError();
    CloseLink(&link);
    throw dmlc::Error("cannot connect to " + address + ": " + reason);
  }
  links_[node.id] = link;
}

void TcpVan::CloseLink(Link* link) {
  zmq_socket_monitor(link->socket, nullptr, 0);
  zmq_close(link->monitor);
  zmq_close(link->socket);
  link->monitor = link->socket = nullptr;
}

int TcpVan::SendMsg(Message& msg) {
  int bytes = GetPackMetaLen(msg.meta);
  for (const auto& part : msg.data) bytes += static_cast<int>(part.size());
  {
    std::lock_guard<std::mutex> lock(outbox_mu_);
    if (stopped_) return -1;
    outbox_.push_back(msg);
    // What ends the receiving thread must find everything before it sent.
    if (msg.meta.control.cmd == Control::TERMINATE) stopped_ = true;
  }
  const uint64_t one = 1;
  const ssize_t written = write(wake_fd_, &one, sizeof(one));
  // EAGAIN means the counter is full: the thread has been woken already.
  CHECK(written == sizeof(one) || errno == EAGAIN) << strerror(errno);
  return bytes;
}

int TcpVan::RecvMsg(Message* msg) {
  while (true) {
    FlushOutbox();
    if (stop_requested_) {
      *msg = Message();
      msg->meta.control.cmd = Control::TERMINATE;
      return 0;
    }
    if (!inbox_.empty()) {
      *msg = std::move(inbox_.front().first);
      // Only now: a message read before may have given this node its id.
      msg->meta.recver = my_node_.id;
      const int bytes = inbox_.front().second;
      inbox_.pop_front();
      return bytes;
    }
    WaitForTraffic();
  }
}

void TcpVan::FlushOutbox() {
  std::vector<Message> batch;
  {
    std::lock_guard<std::mutex> lock(outbox_mu_);
    batch.swap(outbox_);
  }
  for (auto& msg : batch) Transmit(&msg);
}

void TcpVan::Transmit(Message* msg) {
  if (msg->meta.control.cmd == Control::TERMINATE) {
    stop_requested_ = true;
    return;
  }
  const int peer = msg->meta.recver;
  if (peer == my_node_.id) {
    msg->meta.sender = my_node_.id;
    inbox_.emplace_back(std::move(*msg), 0);
    return;
  }
  const WireHeader header{kMagic, kVersion, my_node_.id, 0};
  int meta_size = GetPackMetaLen(msg->meta);
  SArray<char> head(sizeof(header) + meta_size + 1);
  memcpy(head.data(), &header, sizeof(header));
  char* meta = head.data() + sizeof(header);
  PackMeta(msg->meta, &meta, &meta_size);
  head.resize(sizeof(header) + meta_size);

  void* socket = nullptr;
  auto link = links_.find(peer);
  if (link != links_.end()) {
    socket = link->second.socket;
  } else {
    auto route = routes_.find(peer);
    if (route == routes_.end()) {
      LOG(WARNING) << "no connection to node " << peer << "; dropped " << msg->DebugString();
      return;
    }
    socket = router_;
    if (!SendFrame(socket, route->second, true, peer)) return;
  }
  if (!SendFrame(socket, head, !msg->data.empty(), peer)) return;
  for (size_t i = 0; i < msg->data.size(); ++i) {
    if (!SendFrame(socket, msg->data[i], i + 1 < msg->data.size(), peer)) return;
  }
}

bool TcpVan::SendFrame(void* socket, const SArray<char>& frame, bool more, int peer) {
  zmq_msg_t out;
  auto* owner = new SArray<char>(frame);
  CHECK_EQ(zmq_msg_init_data(&out, owner->data(), owner->size(), ReleaseArray, owner), 0)
      << ZmqError();
  const int flags = ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0);
  while (zmq_msg_send(&out, socket, flags) < 0) {
    if (zmq_errno() == EINTR) continue;
    // EHOSTUNREACH: the peer closed its connection.  Whoever watches the peers
    // says so to those who wait for it; this message can reach nobody.
    PS_VLOG(1) << "message to node " << peer << " dropped: " << ZmqError();
    zmq_msg_close(&out);
    return false;
  }
  return true;
}

void TcpVan::WaitForTraffic() {
  std::vector<zmq_pollitem_t> items;
  items.push_back({nullptr, wake_fd_, ZMQ_POLLIN, 0});
  items.push_back({router_, 0, ZMQ_POLLIN, 0});
  std::vector<std::pair<int, Link>> links(links_.begin(), links_.end());
  for (const auto& link : links) {
    items.push_back({link.second.socket, 0, ZMQ_POLLIN, 0});
    items.push_back({link.second.monitor, 0, ZMQ_POLLIN, 0});
  }
  if (zmq_poll(items.data(), static_cast<int>(items.size()), -1) < 0) {
    CHECK_EQ(zmq_errno(), EINTR) << ZmqError();
    return;
  }
  if (items[0].revents) {
    uint64_t count;
    if (read(wake_fd_, &count, sizeof(count)) < 0) CHECK_EQ(errno, EAGAIN) << strerror(errno);
  }
  if (items[1].revents) Drain(router_, true);
  for (size_t i = 0; i < links.size(); ++i) {
    // Messages before the news that the connection closed: they came first.
    if (items[2 + 2 * i].revents) Drain(links[i].second.socket, false);
    if (items[3 + 2 * i].revents) ReadMonitor(links[i].first, links[i].second.monitor);
  }
}

void TcpVan::Drain(void* socket, bool is_router) {
  for (int n = 0; n < kBurst; ++n) {
    std::vector<SArray<char>> frames(1);
    bool more = false;
    if (!ReceiveFrame(socket, &frames[0], &more)) return;
    while (more) {
      frames.emplace_back();
      CHECK(ReceiveFrame(socket, &frames.back(), &more)) << "a message ended early";
    }
    ParseMessage(&frames, is_router);
  }
}

bool TcpVan::ReceiveFrame(void* socket, SArray<char>* frame, bool* more) {
  auto* in = new zmq_msg_t;
  zmq_msg_init(in);
  while (zmq_msg_recv(in, socket, ZMQ_DONTWAIT) < 0) {
    if (zmq_errno() == EINTR) continue;
    CHECK_EQ(zmq_errno(), EAGAIN) << ZmqError();
    zmq_msg_close(in);
    delete in;
    return false;
  }
  *more = zmq_msg_more(in) != 0;
  frame->reset(static_cast<char*>(zmq_msg_data(in)), zmq_msg_size(in), [in](char*) {
    zmq_msg_close(in);
    delete in;
  });
  return true;
}

void TcpVan::ParseMessage(std::vector<SArray<char>>* frames, bool is_router) {
  const size_t first = is_router ? 1 : 0;
  WireHeader header{};
  const bool has_head = frames->size() > first && (*frames)[first].size() >= sizeof(header);
  if (has_head) memcpy(&header, (*frames)[first].data(), sizeof(header));
  if (!has_head || header.magic != kMagic) {
    LOG(WARNING) << "dropped a message that is not of this protocol";
    return;
  }
  if (header.version != kVersion) {
    LOG(WARNING) << "dropped a message of wire version " << header.version << " from node "
                 << header.sender << "; this build speaks version " << kVersion
                 << ": install the same byteps on every node";
    return;
  }
  const SArray<char>& head = (*frames)[first];
  const char* meta = head.data() + sizeof(header);
  const size_t meta_size = head.size() - sizeof(header);
  if (!MetaIsWhole(meta, meta_size)) {
    LOG(WARNING) << "dropped a message from node " << header.sender << " whose meta of "
                 << meta_size << " bytes does not parse";
    return;
  }
  Message msg;
  UnpackMeta(meta, static_cast<int>(meta_size), &msg.meta);
  msg.meta.sender = header.sender;
  int bytes = static_cast<int>(head.size());
  for (size_t i = first + 1; i < frames->size(); ++i) {
    bytes += static_cast<int>((*frames)[i].size());
    msg.data.push_back(std::move((*frames)[i]));
  }
  if (is_router && header.sender != Node::kEmpty) {
    auto& route = routes_[header.sender];
    const auto& identity = (*frames)[0];
    if (route.size() != identity.size() ||
        memcmp(route.data(), identity.data(), identity.size()) != 0) {
      SArray<char> copy;
      copy.CopyFrom(identity.data(), identity.size());
      route = copy;
    }
  }
  inbox_.emplace_back(std::move(msg), bytes);
}

void TcpVan::ReadMonitor(int node_id, void* monitor) {
  SArray<char> event;
  SArray<char> address;
  bool more = false;
  bool closed = false;
  while (ReceiveFrame(monitor, &event, &more)) {
    while (more) ReceiveFrame(monitor, &address, &more);
    uint16_t what = 0;
    if (event.size() >= sizeof(what)) memcpy(&what, event.data(), sizeof(what));
    closed = closed || what == ZMQ_EVENT_DISCONNECTED;
  }
  if (closed) OnDisconnect(node_id);
}

}  // namespace ps
