// What a scheduler or server says of itself: in the log, and to a container's health check.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/cluster/session.h"
#include "byteps/net/link/net_address.h"
#include "byteps/server/serve.h"

namespace byteps {
namespace core {
namespace {

using ps::MembershipEvent;
using ps::Plural;

// Nodes that are named as they come, and as they leave, in each generation.
constexpr int kNamed = 16;
constexpr auto kPause = std::chrono::seconds(10);
// Where no worker has come: a cluster may wait for days.
constexpr auto kLongestPause = std::chrono::minutes(10);

// "3 of 4 workers"
std::string OfAll(int n, int all, const char* noun) {
  return all < 0 ? Plural(n, noun) : std::to_string(n) + " of " + Plural(all, noun);
}

std::string Address(const std::string& host, int port) {
  return port > 0 ? ps::JoinHostPort(host, port) : host;
}

std::string TransportOf(const Config& config) {
  if (UsesRdma(config)) return "RDMA";
  if (!config.Bool("BYTEPS_TLS")) return "TCP, not encrypted";
  return config.String("BYTEPS_TLS_CERT").empty() ? "TCP with TLS"
                                                  : "TCP with TLS and certificates";
}

std::string SizeOf(const Config& config) {
  const std::string servers = Plural(static_cast<int>(config.Int("DMLC_NUM_SERVER")), "server");
  if (config.Bool("BYTEPS_KEEP")) return "as many workers as come and " + servers;
  return Plural(static_cast<int>(config.Int("DMLC_NUM_WORKER")), "worker") + " and " + servers;
}

}  // namespace

JobLog::JobLog(const Config& config, Role role, const char* version)
    : role_(role),
      version_(version),
      scheduler_(Address(config.String("DMLC_PS_ROOT_URI"),
                         static_cast<int>(config.Int("DMLC_PS_ROOT_PORT")))),
      transport_(TransportOf(config)),
      size_(SizeOf(config)),
      next_(Clock::now() + kPause),
      pause_(kPause) {}

void JobLog::SayListens(const std::string& address) {
  BPS_LOG(INFO) << "listening: " << NameOf(role_) << " of byteps " << version_ << " at " << address
                << ", " << transport_
                << (role_ == Role::kScheduler ? ", for " + size_ : ", scheduler " + scheduler_);
}

void JobLog::OnEvent(const MembershipEvent& event) {
  ps::MutexLock lock(&mu_);
  switch (event.kind) {
    case MembershipEvent::kListens:  // again, each time that it asks for a place
      if (!std::exchange(said_listens_, true)) SayListens(PlaceOf(event.node));
      return;
    case MembershipEvent::kWelcomed:
      BPS_LOG(INFO) << "admitted: the scheduler at " << scheduler_
                    << " has taken this server; waiting for the others";
      return;
    case MembershipEvent::kAdmitted:
      return SayAdmitted(event);
    case MembershipEvent::kComplete:
      return SayComplete(event);
    case MembershipEvent::kNodeLeft:
      return SayLeft(event);
    case MembershipEvent::kReplicas:  // of which the scheduler has said more
      if (role_ == Role::kServer && !event.replicas.news.empty()) {
        BPS_LOG(INFO) << event.replicas.news;
      }
      return;
    case MembershipEvent::kEnded:
      if (left_counted_ > 0) BPS_LOG(INFO) << "left: " << Plural(left_counted_, "more worker");
      BPS_LOG(INFO) << (event.suspended ? "suspended: every worker left, to come back"
                                        : "done: every worker left in order");
      break;
    case MembershipEvent::kFailed:
      break;
    default:
      return;
  }
  // Others may come now.
  said_listens_ = false;
  joined_named_ = joined_counted_ = left_named_ = left_counted_ = 0;
  next_ = Clock::now() + kPause;
  pause_ = kPause;
}

void JobLog::SayAdmitted(const MembershipEvent& event) {
  if (joined_named_ == kNamed) {
    ++joined_counted_;
    return;
  }
  ++joined_named_;
  const bool worker = event.node.role == Role::kWorker;
  const int there = worker ? event.workers : event.servers;
  const int all = worker ? event.expected_workers : event.expected_servers;
  BPS_LOG(INFO) << "joined: " << (worker ? "worker " : "server ") << there
                << (all < 0 ? "" : " of " + std::to_string(all)) << ", " << PlaceOf(event.node)
                << " (rank " << event.rank << ")"
                << (joined_named_ == kNamed ? "; the others are counted" : "");
}

void JobLog::SayComplete(const MembershipEvent& event) {
  joined_counted_ = 0;
  const std::string numbers =
      Plural(event.workers, "worker") + " and " + Plural(event.servers, "server");
  if (event.incarnation == 1) {
    BPS_LOG(INFO) << "admitted: the job is complete, " << numbers;
  } else {
    BPS_LOG(INFO) << "restarted: generation " << event.incarnation << " of the job is complete, "
                  << numbers;
  }
}

void JobLog::SayLeft(const MembershipEvent& event) {
  if (left_named_ == kNamed) {
    ++left_counted_;
    return;
  }
  ++left_named_;
  BPS_LOG(INFO) << "left: worker " << event.rank << ", " << event.node.address
                << (role_ == Role::kScheduler
                        ? "; " + OfAll(event.workers, event.expected_workers, "worker") +
                              " still there"
                        : "")
                << (left_named_ == kNamed ? "; the others are counted" : "");
}

void JobLog::OnComplete(int rank, int workers) {
  BPS_LOG(INFO) << "admitted: the job is complete; this is server " << rank << ", for "
                << (workers < 0 ? "as many workers as came" : Plural(workers, "worker"));
}

void JobLog::OnRestart() { BPS_LOG(INFO) << "restarted: joining the next generation of the job"; }

JobLog::Clock::time_point JobLog::Look(const ps::JobView& view, Clock::time_point now) {
  ps::MutexLock lock(&mu_);
  if (now < next_) return next_;
  int workers = 0;
  int left = 0;
  int servers = 0;
  for (const auto& peer : view.peers) {
    if (peer.node.role == Role::kServer) ++servers;
    if (peer.node.role == Role::kWorker) ++(peer.left ? left : workers);
  }
  if (view.phase == ps::JobView::kRunning && left_counted_ > 0) {
    BPS_LOG(INFO) << "left: " << Plural(left_counted_, "more worker") << "; "
                  << OfAll(workers, view.workers, "worker") << " still there";
    left_counted_ = 0;
  }
  if (view.phase != ps::JobView::kGathering) return next_ = now + kPause;
  const std::string more =
      joined_counted_ > 0 ? "; " + std::to_string(joined_counted_) + " more joined" : "";
  joined_counted_ = 0;
  BPS_LOG(INFO) << "waiting for "
                << (view.workers < 0
                        ? "the first worker" + (view.missing.empty() ? "" : " and " + view.missing)
                        : view.missing)
                << "; " << OfAll(servers, view.servers, "server") << " and "
                << OfAll(workers, view.workers, "worker") << " are here" << more;
  // Once a worker has come the wait has an end (BYTEPS_START_TIMEOUT_S).
  pause_ =
      workers > 0 ? Clock::duration(kPause) : std::min<Clock::duration>(pause_ * 2, kLongestPause);
  return next_ = now + pause_;
}

namespace {

constexpr int kBacklog = 16;
constexpr double kAnswerTimeoutS = 1.0;  // for who asks and does not read

sockaddr_un SocketAddress(const std::string& path) {
  sockaddr_un address;
  memset(&address, 0, sizeof(address));
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    throw UsageError("BYTEPS_HEALTH_SOCKET='" + path + "' is longer than the " +
                     std::to_string(sizeof(address.sun_path) - 1) + " bytes of a socket's path");
  }
  memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

void SetTimeout(int fd, double seconds) {
  timeval limit;
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_usec = static_cast<suseconds_t>((seconds - std::floor(seconds)) * 1e6);
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

bool Connect(int fd, const sockaddr_un& address) {
  return connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

int NewSocket() {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) throw Error(std::string("socket: ") + strerror(errno));
  return fd;
}

// Whether somebody listens at `address`; of a process that was killed only the name is left.
bool IsServed(const sockaddr_un& address) {
  const int fd = NewSocket();
  const bool served = Connect(fd, address);
  close(fd);
  return served;
}

}  // namespace

HealthServer::HealthServer(const std::string& path, std::function<std::string()> describe)
    : path_(path), describe_(std::move(describe)) {
  const sockaddr_un address = SocketAddress(path_);
  if (IsServed(address)) {
    throw UsageError("BYTEPS_HEALTH_SOCKET='" + path_ + "' is in use by another process");
  }
  unlink(path_.c_str());
  listener_ = NewSocket();
  if (bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener_, kBacklog) != 0) {
    const std::string reason = strerror(errno);
    close(listener_);
    throw UsageError("BYTEPS_HEALTH_SOCKET='" + path_ + "': " + reason);
  }
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_ < 0) {
    close(listener_);
    throw Error(std::string("eventfd: ") + strerror(errno));
  }
  thread_ = std::thread(&HealthServer::Run, this);
}

HealthServer::~HealthServer() {
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0 && errno != EAGAIN) abort();
  // Ended by the end of its thread, which was told; deadline: none.
  thread_.join();
  unlink(path_.c_str());
  close(listener_);
  close(wake_);
}

void HealthServer::Run() {
  while (true) {
    pollfd items[2] = {{listener_, POLLIN, 0}, {wake_, POLLIN, 0}};
    // Ended by a question or the destructor; deadline: none, an idle thread's.
    if (poll(items, 2, -1) < 0) continue;
    if (items[1].revents != 0) return;
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    SetTimeout(fd, kAnswerTimeoutS);
    const std::string line = describe_() + "\n";
    // The client may be gone: not worth a word, nor SIGPIPE.
    (void)!send(fd, line.data(), line.size(), MSG_NOSIGNAL);
    close(fd);
  }
}

std::string AskHealth(const std::string& path, double timeout_s) {
  const sockaddr_un address = SocketAddress(path);
  const int fd = NewSocket();
  SetTimeout(fd, timeout_s);
  if (!Connect(fd, address)) {
    const std::string reason = strerror(errno);
    close(fd);
    throw Error("nobody answers at " + path + ": " + reason);
  }
  std::string answer;
  char buffer[256];
  ssize_t count;
  while ((count = recv(fd, buffer, sizeof(buffer), 0)) > 0) answer.append(buffer, count);
  const int error = errno;
  close(fd);
  if (count < 0) {
    const bool late = error == EAGAIN || error == EWOULDBLOCK;
    throw Error("no answer from " + path +
                (late ? " in time" : ": " + std::string(strerror(error))));
  }
  if (answer.empty() || answer.back() != '\n') throw Error("half an answer from " + path);
  answer.pop_back();
  return answer;
}

}  // namespace core
}  // namespace byteps
