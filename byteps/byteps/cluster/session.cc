#include "byteps/cluster/session.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/cluster/ps_message.h"
#include "byteps/net/link/counters.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/node_membership.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "byteps/net/net_settings.h"
#include "ps/internal/postoffice.h"

namespace byteps {
namespace core {
namespace {

// Pause between attempts to join a job that has no room for this node yet.
constexpr auto kJoinPause = std::chrono::milliseconds(200);
// Limit in seconds for reaching the scheduler, for a probe and for a server that waits for a vacant
// rank. BYTEPS_START_TIMEOUT_S may lower it.
constexpr double kBriefSeconds = 5;

// Checks that servers can back up each other's state, if configured.
void CheckBackups(const Config& config, int servers) {
  if (!config.Bool("BYTEPS_BACKUP_STATE")) return;
  const char* const why =
      config.Bool("BYTEPS_KEEP") ? "does not go with BYTEPS_KEEP (--keep): unset one of them"
      : config.Float("BYTEPS_REPLACE_SERVERS_S") <= 0
          ? "is of use where a server that is lost is replaced: set BYTEPS_REPLACE_SERVERS_S, too"
      : servers < 2 ? "needs two servers at least: DMLC_NUM_SERVER"
                    : nullptr;
  if (why != nullptr) throw UsageError(std::string("BYTEPS_BACKUP_STATE ") + why);
}

}  // namespace

Session::Session(const Config& config, const SessionOptions& options)
    : config_(config), options_(options) {}

Session::~Session() { Stop(); }

void Session::Adopt(std::shared_ptr<ps::Van> van) {
  ps::MutexLock lock(&van_mu_);
  van_.swap(van);  // the previous van is destroyed without the lock
}

std::shared_ptr<ps::Van> Session::van() const {
  ps::MutexLock lock(&van_mu_);
  return van_;
}

template <typename Ask>
auto Session::AskNode(Ask ask) const {
  using Answer = decltype(ask(std::declval<ps::NodeMembership*>()));
  const auto van = this->van();
  ps::NodeMembership* const node = van ? van->membership()->AsNode() : nullptr;
  return node != nullptr ? ask(node) : Answer();
}

std::string Session::NameOfNode(int node_id) const {
  return AskNode([node_id](ps::NodeMembership* node) { return node->NameOf(node_id); });
}

ps::NetSettings Session::Prepare(ChannelUser* user, int probe) {
  const bool rdma = UsesRdma(config_);
  const std::string& transport = config_.String("DMLC_ENABLE_RDMA");
  if (rdma && config_.Bool("BYTEPS_TLS")) {
    throw UsageError("BYTEPS_TLS=1 encrypts TCP, and DMLC_ENABLE_RDMA=" + transport +
                     " sends everything by RDMA, which no process can encrypt: unset one of them "
                     "(docs/use/security.md says what protects RDMA)");
  }
  if (config_.Float("BYTEPS_SCHEDULER_RETURN_S") > 0) {
    if (config_.Bool("BYTEPS_KEEP")) {
      throw UsageError(
          "BYTEPS_SCHEDULER_RETURN_S does not go with BYTEPS_KEEP (--keep): unset one of them");
    }
  }
  CheckBackups(config_, options_.num_servers);
#ifndef BYTEPS_WITH_RDMA
  if (rdma) {
    throw UsageError("DMLC_ENABLE_RDMA=" + transport +
                     ": byteps was built without RDMA; build it where libibverbs-dev and "
                     "librdmacm-dev are installed");
  }
#endif
  ps::NetSettings settings = ReadSettings();
  settings.van.membership.probe = probe;
  if (probe > 0) settings.LimitStartTimeout(kBriefSeconds);
  ps::Postoffice::Handlers handlers;
  handlers.on_message = [this, user](ps::Message* msg) {
    Message message = FromPs(msg, options_.role);
    early_.Take(&message, user);
  };
  handlers.place_for = [user, role = options_.role](const ps::Meta& meta, size_t bytes) {
    return user->PlaceFor(HeadOf(meta, role), bytes);
  };
  handlers.on_van = [this](std::shared_ptr<ps::Van> van) { Adopt(std::move(van)); };
  handlers.on_event = [user](const ps::MembershipEvent& event) { user->OnEvent(event); };
  ps::Postoffice::Get()->SetHandlers(handlers);
  return settings;
}

ps::NetSettings Session::ReadSettings() const {
  ps::NetSettings settings;
  try {
    settings = ps::NetSettings::From(config_);
  } catch (const Error& e) {
    throw UsageError(e.what(), e.file(), e.line());
  }
  const bool worker = options_.role == Role::kWorker;
  settings.role = options_.role;
  settings.van.nics.gpu = options_.gpu;
  ps::MembershipSettings& membership = settings.van.membership;
  membership.is_scheduler = options_.role == Role::kScheduler;
  membership.workers = options_.num_workers;
  membership.servers = options_.num_servers;
  membership.rank = options_.rank;
  membership.replicas = worker ? Launch::From(config_).replicas : 1;
  membership.rejoin = options_.rejoin;
  membership.make_roster_policy = options_.make_roster_policy;
  return settings;
}

void Session::Start(ChannelUser* user) {
  const bool server = options_.role == Role::kServer;
  const int known_rank = options_.role == Role::kWorker ? options_.rank : 0;
  ps::SetLogIdentity(NameOf(options_.role), server ? -1 : known_rank);
  try {
    Join(user, Prepare(user, 0));
  } catch (const ps::JobFailed& e) {
    ps::Postoffice::Get()->SetHandlers({});
    throw JobFailedError(e.what(), e.file(), e.line());
  } catch (...) {
    ps::Postoffice::Get()->SetHandlers({});
    throw;
  }
  started_ = true;
  AskNode(
      [user](ps::NodeMembership* node) { node->SetReporter([user] { return user->Report(); }); });
  ps::SetLogIdentity(NameOf(options_.role), options_.role == Role::kScheduler ? 0 : rank());
}

std::string Session::Probe(ChannelUser* user, int count) {
  const ps::NetSettings settings = Prepare(user, count);
  const struct Handlers {
    ~Handlers() { ps::Postoffice::Get()->SetHandlers({}); }
  } handlers;
  try {
    ps::Postoffice::Get()->Start(settings, 0);
    ps::Postoffice::Get()->Finalize(0, false);  // the scheduler asks no other node
    return "";
  } catch (const ps::WouldBeAdmitted& e) {
    return e.what();
  } catch (const ps::NoAnswer& e) {
    throw NoSchedulerError(e.what(), e.file(), e.line());
  }
}

void Session::Join(ChannelUser* user, ps::NetSettings settings) {
  const double limit_s = config_.Float("BYTEPS_START_TIMEOUT_S");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
  const bool may_wait =
      options_.role == Role::kServer && config_.Float("BYTEPS_REPLACE_SERVERS_S") > 0;
  const std::chrono::duration<double> away(config_.Float("BYTEPS_SCHEDULER_RETURN_S"));
  auto answered = std::chrono::steady_clock::now();
  while (true) {
    early_.Drop();
    try {
      ps::Postoffice::Get()->Start(settings, 0);
      return early_.Release(user);
    } catch (const ps::ComeAgain& e) {
      answered = std::chrono::steady_clock::now();
      if (may_wait && !std::exchange(waits_, true)) {
        settings.LimitStartTimeout(kBriefSeconds);
        BPS_LOG(INFO) << "waiting for the place of a server that is lost: " << e.what();
      }
      if (!waits_ && std::chrono::steady_clock::now() >= deadline) {
        char limit[64];
        snprintf(limit, sizeof(limit), "%.1f s (BYTEPS_START_TIMEOUT_S=%g)", limit_s, limit_s);
        throw Error(std::string(e.what()) + "; this was so for " + limit);
      }
      BPS_LOG(DEBUG) << e.what() << "; trying again";
    } catch (const ps::JobFailed&) {
      throw;
    } catch (const ps::NoAnswer& e) {
      if (!waits_) throw;
      if (std::chrono::steady_clock::now() - answered >= away) {
        throw NotNeededError("no server was lost: " + std::string(e.what()));
      }
      BPS_LOG(DEBUG) << e.what() << "; it may return";
    } catch (const Error& e) {
      if (!waits_) throw;
      throw NotNeededError("no server was lost: " + std::string(e.what()));
    }
    // The pause is ended by the next attempt; deadline: kJoinPause.
    std::this_thread::sleep_for(kJoinPause);
  }
}

void Session::Leave(const ps::Farewell& farewell) {
  AskNode([&farewell](ps::NodeMembership* node) { node->Leave(farewell); });
}

void Session::Stop() {
  if (!started_) return;
  started_ = false;
  ps::Postoffice::Get()->Finalize(0, false);
  for (const auto& e : ps::ReadEndpointCounters()) {
    BPS_LOG(DEBUG) << "RDMA endpoint to " << e.peer << ", " << e.plane << " " << e.index
                   << ": sent " << e.messages_sent << " messages, " << e.bytes_sent
                   << " bytes; received " << e.messages_received << " messages, "
                   << e.bytes_received << " bytes";
  }
  ps::Postoffice::Get()->SetHandlers({});
}

void Session::StopByOrder(const std::string& how) {
  if (const auto van = this->van()) van->membership()->StopByOrder(how);
}

bool Session::HasWorkers() const {
  const auto van = this->van();
  return van && van->membership()->HasWorkers();
}

bool Session::AllArrived() const {
  const auto van = this->van();
  return !van || van->AllArrived();
}

ps::JobView Session::View() { return van()->membership()->AsScheduler()->View(); }

void Session::Send(const Message& message) {
  const auto van = this->van();
  if (!van) return;
  ps::Message msg = ToPs(message);
  van->Send(msg);
}

void Session::ReceiveReady() {
  if (const auto van = this->van()) van->ReceiveReady();
}

void Session::Abandon(const void* begin, size_t bytes) {
  if (const auto van = this->van()) van->Abandon(begin, bytes);
}

bool Session::RegistersMemory() const { return UsesRdma(config_); }

bool Session::is_late() const {
  return AskNode([](ps::NodeMembership* node) { return node->is_late(); });
}

bool Session::lacks_scheduler() const {
  return AskNode([](ps::NodeMembership* node) { return node->lacks_scheduler(); });
}

void Session::SayReady() {
  AskNode([](ps::NodeMembership* node) { node->SayOfReplica(ps::membership::Ready()); });
}

void Session::AskToAdmit(int replica, int ready_epoch) {
  AskNode([=](ps::NodeMembership* node) {
    node->SayOfReplica(ps::membership::Admit{replica, ready_epoch});
  });
}

void Session::SayAwaited(int rank, const std::string& name, uint32_t round) {
  AskNode([&](ps::NodeMembership* node) {
    node->SayOfReplica(ps::membership::Awaited{rank, static_cast<int>(round), name});
  });
}

void Session::SayLate(int rank, const std::string& why) {
  AskNode(
      [&](ps::NodeMembership* node) { node->SayOfReplica(ps::membership::Late{rank, 0, why}); });
}

double Session::link_gbps() const {
  return AskNode([](ps::NodeMembership* node) { return node->link_mbps(); }) / 1e3;
}

ps::Node Session::node() const {
  const auto van = this->van();
  return van ? van->node() : ps::Node();
}

int Session::num_nics() const { return std::max<int>(1, node().nics.size()); }
std::string Session::host() const { return node().hostname; }
int Session::rank() const { return ps::Postoffice::IDtoRank(node().id); }
int Session::port() const { return node().port; }

std::string Session::HostOfServer(int rank) {
  const int id = ps::Postoffice::ServerRankToID(rank);
  return AskNode([id](ps::NodeMembership* node) { return node->HostOf(id); });
}

std::string Session::NameOfServer(int rank) {
  return NameOfNode(ps::Postoffice::ServerRankToID(rank));
}

std::string Session::NameOfWorker(int rank) {
  return NameOfNode(ps::Postoffice::WorkerRankToID(rank));
}

int WorkerId(int rank) { return ps::Postoffice::WorkerRankToID(rank); }
int ServerId(int rank) { return ps::Postoffice::ServerRankToID(rank); }
int RankOf(int node_id) { return ps::Postoffice::IDtoRank(node_id); }
bool IsWorker(int node_id) { return node_id % 2 == WorkerId(0) % 2; }

ps::Message ToPs(const Message& message) {
  ps::Message msg;
  msg.meta.app_id = 0;
  msg.meta.customer_id = 0;
  msg.meta.timestamp = 0;
  msg.meta.head = message.op;
  // Only these three messages carry no values. A transport with two planes sends all others on the
  // data plane.
  msg.meta.simple_app = message.op == kDeclare || message.op == kRelease || message.op == kConfirm;
  msg.meta.request = msg.meta.push = message.is_request;
  const bool to_server = message.is_request || message.between_servers;
  msg.meta.recver = to_server ? ServerId(message.peer) : WorkerId(message.peer);
  msg.meta.key = message.key;
  msg.meta.addr = message.number;
  msg.meta.option = message.failed ? 1 : 0;
  msg.meta.body = message.body;
  msg.meta.val_len = static_cast<int>(message.values.size());
  if (!message.values.empty()) {
    ps::SArray<char> values;
    values.reset(message.values.data(), message.values.size(),
                 [owner = message.values.owner()](char*) {});
    msg.AddData(values);
  }
  if (message.place != nullptr) {
    msg.answer.reset(message.place, message.place_bytes, [](char*) {});
  }
  return msg;
}

MessageHead HeadOf(const ps::Meta& meta, Role here) {
  MessageHead head;
  head.op = meta.head;
  head.is_request = meta.request;
  head.failed = meta.option != 0;
  head.between_servers = here == Role::kServer && !IsWorker(meta.sender);
  head.peer = RankOf(meta.sender);
  head.key = meta.key;
  head.number = meta.addr;
  return head;
}

Message FromPs(ps::Message* msg, Role here) {
  Message message;
  static_cast<MessageHead&>(message) = HeadOf(msg->meta, here);
  message.body = std::move(msg->meta.body);
  if (msg->data.size() == 1) {
    ps::SArray<char>& values = msg->data[0];
    message.SetValues({std::move(values.ptr()), values.size()});
    if (message.values.empty()) message.sent_bytes = static_cast<uint32_t>(msg->meta.data_size);
  } else if (!msg->data.empty()) {
    message.sent_bytes = Message::kInPieces;
  }
  return message;
}

}  // namespace core
}  // namespace byteps
