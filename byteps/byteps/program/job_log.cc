// Log lines of a scheduler or server about its job.
#include "byteps/program/job_log.h"

#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <utility>

#include "byteps/base/dtype.h"
#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/cluster/session.h"
#include "byteps/net/link/net_address.h"

namespace byteps {
namespace core {
namespace {

using ps::MembershipEvent;
using ps::Plural;

// Limit of nodes per generation that the log names as they come, and as they leave.
constexpr int kNamed = 16;
constexpr auto kPause = std::chrono::seconds(10);
// Longest pause between lines before the first worker comes: a cluster may wait for days.
constexpr auto kLongestPause = std::chrono::minutes(10);

// Returns text such as "3 of 4 workers".
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
    case MembershipEvent::kListens:  // the event repeats with each attempt to get a rank
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
    case MembershipEvent::kReplicas:  // the scheduler has logged more
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
  // The next generation begins with fresh counts.
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
  if (event.generation == 1) {
    BPS_LOG(INFO) << "admitted: the job is complete, " << numbers;
  } else {
    BPS_LOG(INFO) << "restarted: generation " << event.generation << " of the job is complete, "
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
  // Once the first worker has come, the other workers have BYTEPS_START_TIMEOUT_S to come.
  pause_ =
      workers > 0 ? Clock::duration(kPause) : std::min<Clock::duration>(pause_ * 2, kLongestPause);
  return next_ = now + pause_;
}

}  // namespace core
}  // namespace byteps
