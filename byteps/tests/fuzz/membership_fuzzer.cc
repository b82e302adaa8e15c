// Fuzzers with malformed peers: of a scheduler and its members, and of a server and its neighbors.
// Tests.cmake makes a program of each function `Fuzz_NAME`, which libFuzzer calls.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "byteps/cluster/channel.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/membership_links.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/words.h"
#include "byteps/recovery/scheduler/make_roster_recovery.h"
#include "byteps/recovery/server/backup_link.h"
#include "byteps/recovery/server/copies.h"
#include "byteps/recovery/server/copy_record.h"
#include "byteps/server/optimizer/partition_state.h"
#include "byteps/server/optimizer/round_update.h"
#include "ps/base.h"
#include "tests/support/kit.h"

namespace {

// Links that only record the peers they should connect, and send nothing.
class NoLinks : public ps::MembershipLinks {
 public:
  explicit NoLinks(ps::Node::Role role) {
    scheduler_.role = ps::Node::SCHEDULER;
    scheduler_.id = ps::kScheduler;
    scheduler_.hostname = "10.0.0.1";
    scheduler_.port = 9000;
    self_ = scheduler_;
    self_.role = role;
    if (role != ps::Node::SCHEDULER) self_.id = ps::Node::kEmpty;
  }
  ps::Node self() const override { return self_; }
  const ps::Node& scheduler() const override { return scheduler_; }
  void SetSelf(const ps::Node& node) override { self_ = node; }
  void Connect(const ps::Node& node) override { DEMAND(node.id != ps::Node::kEmpty); }
  void Disconnect(int) override {}
  void SetGeneration(int) override {}
  uint64_t job() const override { return 1; }
  void SetJob(uint64_t) override {}
  void Send(ps::Message* message) override {
    // The message must be readable.
    ps::Meta meta;
    const std::string bytes = ps::EncodeMeta(message->meta);
    DEMAND(ps::DecodeMeta(bytes.data(), bytes.size(), &meta));
  }

 private:
  ps::Node self_;
  ps::Node scheduler_;
};

ps::Node AnyNode(FuzzedDataProvider* data) {
  ps::Node node;
  node.role = static_cast<ps::Node::Role>(data->ConsumeIntegralInRange<int>(0, 2));
  const bool likely = data->ConsumeIntegralInRange<int>(0, 7) > 0;
  node.id = likely ? data->ConsumeIntegralInRange<int>(0, 15) : data->ConsumeIntegral<int32_t>();
  node.aux_id =
      likely ? data->ConsumeIntegralInRange<int>(-1, 3) : data->ConsumeIntegral<int32_t>();
  node.port = data->ConsumeIntegralInRange<int>(0, 65535);
  node.hostname = "10.0.0." + std::to_string(data->ConsumeIntegralInRange<int>(0, 9));
  return node;
}

ps::ReplicaView AnyView(FuzzedDataProvider* data) {
  ps::ReplicaView view;
  view.workers = 2;
  view.epoch = data->ConsumeIntegralInRange<int>(0, 3);
  view.present = data->ConsumeBool() ? "10" : "11";
  view.waiting = "01";
  view.ready_epochs = {0, 3};
  view.donors = {-1, data->ConsumeIntegralInRange<int>(-1, 1)};
  return view;
}

ps::membership::MemberWord AnyWord(FuzzedDataProvider* data) {
  const int rank = data->ConsumeIntegralInRange<int>(0, 3);
  const int number = data->ConsumeIntegralInRange<int>(0, 3);
  switch (data->ConsumeIntegralInRange<int>(0, 8)) {
    case 0:
      return AnyView(data);
    case 1:
      return ps::membership::Acknowledged{number};
    case 2:
      return ps::membership::Ready();
    case 3:
      return ps::membership::Admit{rank, number};
    case 4:
      return ps::membership::Awaited{rank, number, "why"};
    case 5:
      return ps::membership::Late{rank, number, "why"};
    case 6:
      return ps::membership::ServerLost{rank, number, "why"};
    case 7:
      return ps::membership::ServerReplaced{rank, number, 2};
    default:
      return ps::membership::LeftKnown{rank};
  }
}

ps::Message AnyMessage(FuzzedDataProvider* data) {
  ps::Message message;
  const ps::Control::Command likely[] = {
      ps::Control::ADD_NODE,   ps::Control::WELCOME,   ps::Control::REFUSED,
      ps::Control::JOB_FAILED, ps::Control::HEARTBEAT, ps::Control::LEAVE,
      ps::Control::NODE_LEFT,  ps::Control::JOB_END,   ps::Control::MEMBERS};
  message.meta.control.cmd = data->PickValueInArray(likely);
  if (data->ConsumeIntegralInRange<int>(0, 15) == 0) {
    message.meta.control.cmd =
        static_cast<ps::Control::Command>(data->ConsumeIntegralInRange<int>(0, 15));
  }
  const int nodes = data->ConsumeIntegralInRange<int>(0, 3);
  for (int i = 0; i < (nodes == 3 ? 3 : nodes > 0); ++i) {
    message.meta.control.node.push_back(AnyNode(data));
  }
  switch (data->ConsumeIntegralInRange<int>(0, 3)) {
    case 0:
      message.meta.body = data->ConsumeRandomLengthString(40);
      break;
    case 1:
      if (data->ConsumeBool()) {
        message.meta.body = ps::membership::Pack(AnyWord(data));
        break;
      }
      message.meta.body = data->ConsumeBool()
                              ? ps::membership::Pack(ps::membership::End{data->ConsumeBool()})
                              : ps::membership::Pack(ps::membership::Leave(
                                    ps::Farewell{data->ConsumeBool(), "", ""}));
      break;
    default: {
      ps::membership::Registration registration;
      const auto number = [data](int from, int to) {
        return data->ConsumeIntegralInRange<int>(from, to);
      };
      registration.claim = {
          ps::membership::kProtocol,  number(-1, 3), number(-1, 2),      number(-1, 400'000),
          std::max(number(-9, 3), 0), number(0, 3),  data->ConsumeBool()};
      if (number(0, 3) == 0) {
        ps::membership::Account& account = registration.account;
        account.job = number(0, 2);
        account.scheduler_number = number(0, 3);
        account.is_late = data->ConsumeBool();
        account.left.insert(number(0, 3));
        account.turns[number(0, 3)] = number(0, 3);
        if (data->ConsumeBool()) account.replicas = AnyView(data);
      }
      message.meta.body = ps::membership::PackRegistration(registration);
    }
  }
  return message;
}

}  // namespace

// A scheduler with arbitrary applicants and messages of members; a node with arbitrary messages of
// its scheduler. Both can always be stopped, and report at most one end.
extern "C" int Fuzz_membership(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  const bool is_scheduler = data.ConsumeBool();
  NoLinks links(is_scheduler ? ps::Node::SCHEDULER : ps::Node::WORKER);
  ps::MembershipSettings settings;
  settings.is_scheduler = is_scheduler;
  settings.workers = data.ConsumeIntegralInRange<int>(-1, 2);
  settings.servers = data.ConsumeIntegralInRange<int>(-1, 2);
  settings.rank = 0;
  settings.replace_servers_s = data.ConsumeBool() ? 60 : 0;
  settings.scheduler_return_s = data.ConsumeBool() ? 60 : 0;
  settings.make_roster_policy = ps::MakeRosterRecovery;
  std::atomic<int> failures{0};
  const auto membership =
      ps::Membership::Make(&links, settings, [&](const ps::MembershipEvent& event) {
        if (event.kind == ps::MembershipEvent::kFailed) ++failures;
      });
  if (is_scheduler) membership->Join();
  while (data.remaining_bytes() > 0) {
    const int who = data.ConsumeIntegralInRange<int>(0, 15);
    const int sender = who == 15 ? ps::Node::kEmpty : who;
    const int what = data.ConsumeIntegralInRange<int>(0, 15);
    if (what == 0) {
      membership->OnDisconnect(sender);
    } else if (what == 1) {
      membership->OnLinkLost(sender, "it broke", data.ConsumeBool());
    } else {
      ps::Message message;
      const std::string sent = ps::EncodeMeta(AnyMessage(&data).meta);
      // Vans drop messages that do not parse.
      if (!ps::DecodeMeta(sent.data(), sent.size(), &message.meta)) continue;
      message.meta.sender = sender;
      // An exception of the handler ends the connection, as in a van.
      try {
        membership->Handle(message);
      } catch (const ps::Error&) {
      }
    }
    (void)membership->NameOf(sender);
  }
  membership->Stop();
  DEMAND(failures <= 1);
  return 0;
}

namespace byteps {
namespace core {

namespace {

constexpr int kServers = 3;
constexpr int kPrimary = 0;
constexpr int kSelf = 1;
constexpr int kBackup = 2;
constexpr int kTensors = 3;
constexpr size_t kThreads = 2;
constexpr uint32_t kMember = 1;

// AdamW in two partitions; momentum; gradients of eight bits, with speculative steps.
Declaration TheDeclaration(int which) {
  Declaration d;
  d.name = std::string(1, 'a' + which);
  d.dtype = which == 2 ? DType::kInt8x128 : DType::kFloat32;
  d.partition_bytes = which == 2 ? SizeOf(d.dtype) : 16;
  d.bytes = which == 0 ? 24 : d.partition_bytes;
  d.group = {0, 1};
  auto rule = std::make_shared<UpdateRule>();
  rule->algorithm = which == 0 ? UpdateRule::kAdamW : UpdateRule::kSgd;
  rule->groups.push_back(which == 0 ? UpdateRule::Group{0.9, 0.99, 1e-8, false}
                                    : UpdateRule::Group{which == 1 ? 0.9 : 0.0, 0, 0, which == 1});
  rule->segments = {{ValuesIn(d.dtype, d.bytes), 0}};
  rule->speculative = which > 0;
  d.rule = rule;
  return d;
}

SharedBytes Zeros(size_t bytes) {
  SharedBytes values = SharedBytes::New(bytes);
  memset(values.data(), 0, bytes);
  return values;
}

// Runs tasks on demand: those of one key in order, of several keys in any order.
class Neighbors : public ServerChannel, public BackupUser {
 public:
  void Send(const Message& message) override {
    DEMAND(message.between_servers);
    DEMAND(message.peer == kPrimary || message.peer == kBackup);
    if (!message.is_request) {
      DEMAND(!message.failed || !message.body.empty());
      int* const open = &asked_[{message.peer, message.op, message.key, message.number}];
      DEMAND(*open > 0);
      --*open;
    } else if (message.op == kFetched) {
      IsWhole(message);
    }
    sent_.push_back(message);
  }
  int rank() const override { return kSelf; }
  void InThreadOf(uint64_t key, std::function<void()> task) override {
    tasks_[key].push_back(std::move(task));
  }
  void OnCopied(uint64_t, uint64_t) override {}
  void OnBackup(uint64_t token) override { backup_token_ = token; }
  void OnFetched() override {}

  void WillBeAsked(const Message& message) {
    ++asked_[{message.peer, message.op, message.key, message.number}];
  }
  bool RunOne(FuzzedDataProvider* data) {
    if (tasks_.empty()) return false;
    auto it = tasks_.begin();
    std::advance(it, data->ConsumeIntegralInRange<size_t>(0, tasks_.size() - 1));
    const auto task = std::move(it->second.front());
    it->second.pop_front();
    if (it->second.empty()) tasks_.erase(it);
    task();
    return true;
  }
  // The last token that this server gave to its primary, or got from its backup.
  uint64_t token_of(int peer) const { return peer == kPrimary ? given_token_ : backup_token_; }
  // The server's own instance, which it sends when it meets another.
  uint64_t instance() const { return instance_; }
  void Look() {
    for (const Message& message : sent_) {
      if (message.op != kMeet) continue;
      WireReader in(message.body);
      instance_ = in.Get<uint64_t>();
      const auto token = in.Get<uint64_t>();
      if (message.peer == kPrimary) given_token_ = token;
    }
    sent_.clear();
  }

 private:
  // Demands that a server without state accepts the record, and would send the same.
  static void IsWhole(const Message& message) {
    CopyRecord record;
    DEMAND(CopyRecord::Unpack(message.body, &record));
    Copies copies;
    DEMAND(copies.Apply(message.key, record, message.values, copies.resets()).empty());
    SharedBytes values;
    CopyRecord again = copies.RecordOf(message.key, &values);
    again.token = record.token;
    DEMAND(again.Pack() == record.Pack());
    DEMAND(values.size() == message.values.size());
    DEMAND(values.empty() || memcmp(values.data(), message.values.data(), values.size()) == 0);
  }

  std::map<uint64_t, std::deque<std::function<void()>>> tasks_;
  std::map<std::tuple<int, int, uint64_t, uint64_t>, int> asked_;
  std::vector<Message> sent_;
  uint64_t given_token_ = 0, backup_token_ = 0, instance_ = 0;
};

std::string GoodStep(FuzzedDataProvider* data, const Declaration& d) {
  UpdateStep step;
  step.number = data->ConsumeIntegralInRange<uint64_t>(1, 3);
  step.skip = data->ConsumeIntegralInRange<int>(0, 7) == 0;
  step.rates.assign(d.rule->groups.size(), {0.5, 0});
  return step.Pack();
}

std::string AnyStep(FuzzedDataProvider* data, const Declaration& d) {
  if (data->ConsumeIntegralInRange<int>(0, 15) == 0) return data->ConsumeRandomLengthString(40);
  return GoodStep(data, d);
}

// Returns the last round of a partition's state, packed as a server packs it. Stores the round's
// gradients in `sum`.
std::string AnyLast(FuzzedDataProvider* data, const Declaration& d, uint64_t index, uint32_t round,
                    SharedBytes* sum) {
  ServerCounters counters;
  PartitionState state(&d, index);
  state.Load(0, Zeros(state.size() * sizeof(float)).data());
  RoundUpdate update(&d, round, &state, &counters);
  const int op = d.rule->speculative && data->ConsumeBool() ? kPushTry : kPushNorm;
  update.Agree(kMember, op, op == kPushTry ? GoodStep(data, d) : "");
  update.CompleteCopy(sum);
  std::string failure;
  if (data->ConsumeBool()) update.Decide(kMember, GoodStep(data, d), sum, &failure);
  return update.Pack();
}

// A record about a partition, from one server to another; often valid.
Message AnyRecord(FuzzedDataProvider* data, int op, int peer, uint64_t token) {
  const Declaration d = TheDeclaration(data->ConsumeIntegralInRange<int>(0, kTensors - 1));
  const uint64_t index = data->ConsumeIntegralInRange<uint64_t>(0, d.NumPartitions());
  const size_t values = index < d.NumPartitions() ? ValuesIn(d.dtype, d.PartitionSize(index)) : 1;
  CopyRecord record;
  record.token = token;
  record.what = static_cast<CopyRecord::What>(data->ConsumeIntegralInRange<int>(0, 4));
  if (data->ConsumeBool()) record.settled = AnyStep(data, d);
  record.round = data->ConsumeIntegralInRange<uint32_t>(1, 3);
  record.rank = kMember;
  size_t bytes = 0;
  SharedBytes sum;
  if (record.what == CopyRecord::kState) {
    record.declaration = PackDeclarations({d});
    record.slots = data->ConsumeIntegralInRange<uint32_t>(0, (2U << d.NumSlots()) - 1);
    record.is_all = data->ConsumeBool();
    bytes = static_cast<size_t>(__builtin_popcount(record.slots)) * values * sizeof(float);
    if (record.is_all && data->ConsumeBool() && index < d.NumPartitions()) {
      sum = Zeros(d.dtype == DType::kFloat32 ? d.PartitionSize(index) : values * sizeof(float));
      record.last = AnyLast(data, d, index, record.round, &sum);
    }
    if (data->ConsumeIntegralInRange<int>(0, 15) == 0) {
      record.last = data->ConsumeRandomLengthString(64);
    }
  } else if (record.what == CopyRecord::kRound) {
    record.op = data->ConsumeBool() ? kPushStep : data->ConsumeBool() ? kPushTry : kPushNorm;
    if (record.op != kPushNorm) record.step = AnyStep(data, d);
    bytes = values * sizeof(float);
  }
  std::string body = record.Pack();
  if (data->ConsumeIntegralInRange<int>(0, 15) == 0) body = data->ConsumeRandomLengthString(100);
  const uint64_t number = op == kFetched && data->ConsumeIntegralInRange<int>(0, 7) > 0
                              ? token
                              : token << 32 | data->ConsumeIntegralInRange<uint32_t>(0, 9);
  Message message = MakeRequest(op, peer, d.Key() + index, number, std::move(body));
  if (data->ConsumeIntegralInRange<int>(0, 15) == 0) {
    message.SetValues(Zeros(data->ConsumeIntegralInRange<size_t>(0, 600)));
  } else if (bytes + sum.size() > 0) {
    const SharedBytes all = Zeros(bytes + sum.size());
    if (!sum.empty()) memcpy(all.data() + bytes, sum.data(), sum.size());
    message.SetValues(all);
  }
  return message;
}

Message AnyMeeting(FuzzedDataProvider* data, int peer, uint64_t instance) {
  WireWriter out;
  out.Put(data->ConsumeIntegralInRange<uint64_t>(1, 4));
  out.Put(data->ConsumeIntegralInRange<uint64_t>(0, 5));
  out.Put(data->ConsumeIntegralInRange<int>(0, 7) > 0 ? instance : 0);
  out.Put(data->ConsumeIntegral<uint8_t>());
  return MakeRequest(kMeet, peer, 0, 0, out.Take());
}

Message AnyMessage(FuzzedDataProvider* data, const Neighbors& neighbors) {
  const int peer = data->ConsumeBool() ? kPrimary : kBackup;
  // Mostly the current token.
  const uint64_t token = data->ConsumeIntegralInRange<int>(0, 7) > 0
                             ? neighbors.token_of(peer)
                             : data->ConsumeIntegralInRange<uint64_t>(0, 5);
  switch (data->ConsumeIntegralInRange<int>(0, 9)) {
    case 0:
      return AnyMeeting(data, peer, neighbors.instance());
    case 1:
      return MakeRequest(kFetch, peer, 0, token, "");
    case 2: {
      const int ops[] = {kFetch, kFetched, kCopy};
      const int op = ops[data->ConsumeIntegralInRange<int>(0, 2)];
      const uint64_t number =
          op == kCopy ? token << 32 | data->ConsumeIntegralInRange<uint32_t>(0, 9) : token;
      return MakeAnswer(op, peer, 0, number, data->ConsumeRandomLengthString(8));
    }
    case 3:
      return MakeRequest(data->ConsumeIntegral<int>(), peer, 0, token,
                         data->ConsumeRandomLengthString(16));
    default:
      return AnyRecord(data, data->ConsumeIntegralInRange<int>(0, 3) > 0 ? kCopy : kFetched, peer,
                       token);
  }
}

// Takes over every state that has arrived, as a server does.
void TakeAll(BackupLink* link) {
  for (const uint64_t key : link->fetched()->Keys()) {
    const std::shared_ptr<StateCopy> copy = link->fetched()->Take(key);
    DEMAND(copy != nullptr && copy->state != nullptr);
    if (copy->last) copy->last->update->Restore(copy->last->sum);
  }
}

}  // namespace

// A server of three with malformed neighbors. These meet it as several processes, and send states
// and rounds that do not fit their declarations. They fetch before they have met, answer without
// requests, and are lost and replaced. The server answers each request at most once. Every copy
// that it sends is complete: another server restores the same copy from it.
extern "C" int Fuzz_backup(const uint8_t* bytes, size_t size) {
  setenv("BYTEPS_LOG_LEVEL", "FATAL", 1);
  FuzzedDataProvider data(bytes, size);
  Neighbors neighbors;
  BackupLink link(true, kServers, kThreads, &neighbors, &neighbors);
  link.Start();
  neighbors.Look();
  for (int i = 0; data.remaining_bytes() > 0 && i < 300; ++i) {
    switch (data.ConsumeIntegralInRange<int>(0, 11)) {
      case 0:
        link.OnServerLost(data.ConsumeBool() ? kPrimary : kBackup);
        break;
      case 1:
        link.OnServerReplaced(data.ConsumeBool() ? kPrimary : kBackup);
        break;
      case 2:
        data.ConsumeBool() ? link.HasState() : link.OnToldAll(neighbors.token_of(kBackup));
        break;
      case 3:
        if (link.fetch_error().empty() && !link.Fetches()) TakeAll(&link);
        break;
      case 4:
      case 5:
      case 6:
        neighbors.RunOne(&data);
        break;
      default: {
        Message message = AnyMessage(&data, neighbors);
        message.between_servers = true;
        if (message.is_request) neighbors.WillBeAsked(message);
        link.Expects(message);
        link.OnMessage(&message);
      }
    }
    neighbors.Look();
  }
  while (neighbors.RunOne(&data)) neighbors.Look();
  return 0;
}

}  // namespace core
}  // namespace byteps
