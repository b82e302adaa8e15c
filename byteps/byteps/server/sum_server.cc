#include "byteps/server/sum_server.h"

#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/out_of_memory.h"
#include "byteps/base/probe.h"
#include "byteps/base/thread_name.h"
#include "byteps/cluster/messages.h"
#include "byteps/cluster/node_ids.h"
#include "byteps/observe/status_record.h"
#include "byteps/server/reducer.h"

namespace byteps {
namespace core {
namespace {

// To wake an engine thread takes longer than to add as many bytes.
constexpr size_t kServedHere = 64 << 10;
constexpr auto kNever = std::chrono::steady_clock::time_point::max();

// Of a request that HasForm().
PushHeader HeaderOf(const ps::Message& msg) {
  PushHeader header;
  std::string rest;
  PushHeader::Unpack(msg.meta.body, &header, &rest);
  return header;
}

}  // namespace

Server::Server(const Config& config, Channel* channel)
    : channel_(channel),
      deterministic_(config.Bool("BYTEPS_DETERMINISTIC")),
      wide_float32_(config.Bool("BYTEPS_SERVER_WIDE_FLOAT32")),
      state_memory_(config) {
  tracer_ = Tracer::Make(config);
  const long threads = config.Int("BYTEPS_SERVER_ENGINE_THREAD");
  for (long i = 0; i < threads; ++i) engines_.push_back(std::make_unique<Engine>());
  for (size_t i = 0; i < engines_.size(); ++i) {
    Engine* e = engines_[i].get();
    if (tracer_) e->track = tracer_->AddThread("engine thread");
    e->thread = std::thread([this, e, i] {
      NameThisThread("engine", i);
      Run(e);
    });
  }
}

Server::~Server() {
  for (auto& engine : engines_) engine->queue.Close();
  for (auto& engine : engines_) engine->thread.join();
  if (!tracer_ || rank_ < 0) return;
  for (const auto& entry : partitions_) {
    if (!entry.second) continue;
    for (const Round& round : entry.second->rounds) TraceRound(*entry.second, round, false);
  }
  tracer_->Write(Role::kServer, rank_);
}

std::vector<Metric> Server::Metrics() {
  ServerGauges gauges;
  gauges.open_rounds = OpenRounds();
  {
    ps::ReaderLock lock(&mu_);
    gauges.state_bytes = state_memory_.promised();
  }
  for (auto& engine : engines_) {
    gauges.engine_queues.push_back(engine->queue.Size());
  }
  return Tell(counters_, gauges);
}

std::string Server::Report() {
  StatusRecord record;
  DescribeProcess(&record);
  record.role = Role::kServer;
  record.sent_bytes = counters_.answered_bytes.Get();
  record.received_bytes = counters_.received_bytes.Get();
  record.finished = counters_.sums.Get();
  record.failed = counters_.failed_sums.Get();
  record.running = OpenRounds();
  record.tensors = counters_.declared_tensors.Get();
  {
    ps::ReaderLock lock(&mu_);
    record.keys = partitions_.size();
  }
  for (auto& engine : engines_) record.queued += engine->queue.Size();
  record.busy_ns = counters_.adding_ns.Get();
  lateness_.Take(&record.sums_since, &record.late);
  return record.Pack();
}

void Server::Answer(const Caller& caller, uint64_t key, const std::string& error,
                    const ps::SArray<char>* values, const ps::SArray<char>* sums) {
  ps::Message msg = MakeAnswer(caller.op, WorkerId(caller.rank), key, caller.request, error);
  if (values != nullptr && caller.bytes > 0) {
    AddValues(&msg, values->segment(caller.offset, caller.offset + caller.bytes));
  }
  if (sums != nullptr) msg.meta.body.assign(sums->data(), sums->size());
  channel_->Send(&msg);
}

void Server::Queue(Engine* engine, Task task) {
  ++engine->waiting;
  if (task.received == 0) task.received = SteadyNs();
  try {
    engine->queue.Push(std::move(task));
  } catch (const std::bad_alloc&) {
    --engine->waiting;
    throw;
  }
}

void Server::Run(Engine* engine) {
  Task task;
  while (true) {
    Clock::time_point look;
    {
      ps::MutexLock lock(&engine->mu);
      // What is queued may be what a round waits for.
      if (engine->queue.Size() == 0) FailLateRounds(engine, Clock::now());
      engine->looks_at = look = NextLook(*engine);
    }
    bool timed_out = false;
    const bool got = look == kNever ? engine->queue.Pop(&task)
                                    : engine->queue.PopFor(&task, look - Clock::now(), &timed_out);
    if (!got) {
      if (!timed_out) return;
      continue;
    }
    {
      ps::MutexLock lock(&engine->mu);
      // There may be no moment without work.
      FailLateRounds(engine, Clock::time_point(std::chrono::nanoseconds(task.received)));
      Do(engine, &task);
    }
    --engine->waiting;
    task = Task();
  }
}

bool Server::ServeHere(Engine* engine, Task* task) {
  const Partition& partition = *task->partition;
  if (partition.tensor->declaration.PartitionSize(partition.index) > kServedHere) return false;
  if (engine->waiting > 0 || !engine->mu.TryLock()) {
    PS_PROBE(kQueuedWhileServing);
    return false;
  }
  PS_PROBE(kServedHere);
  Do(engine, task);
  const bool early =
      !engine->open.empty() && std::get<0>(engine->open.begin()->first) < engine->looks_at;
  if (early) engine->looks_at = std::get<0>(engine->open.begin()->first);
  engine->mu.Unlock();
  if (early) {
    PS_PROBE(kLooksSooner);
    Task look;
    look.kind = Task::kLook;
    Queue(engine, std::move(look));
  }
  return true;
}

void Server::Do(Engine* engine, Task* task) noexcept {
  try {
    Handle(engine, task);
  } catch (const std::bad_alloc& e) {
    OnOutOfMemory(engine, *task, e);
  } catch (const std::exception& e) {
    ServingFailed(engine, *task, e.what());
  }
}

void Server::Handle(Engine* engine, Task* task) {
  switch (task->kind) {
    case Task::kRequest:
      return Serve(engine, task);
    case Task::kGone:
      engine->gone[task->rank] = task->reason;
      return FailRoundsWithout(engine, task->rank, task->reason);
    case Task::kRefuse:
      for (Partition* partition : engine->partitions) {
        if (partition->tensor != task->tensor) continue;
        for (auto& round : partition->rounds) {
          if (!round.done) FailRound(engine, partition, &round, task->reason);
        }
        DropDoneRounds(partition);
      }
      return;
    case Task::kLook:
      return;
  }
}

void Server::Serve(Engine* engine, Task* task) {
  switch (task->msg.meta.head) {
    case kPull:
      return Pull(task->partition, task->msg, task->received);
    case kStep:
      return Step(task->partition, task->msg, task->received);
    case kLoadState:
    case kReadState:
      return MoveState(task->partition, task->msg, task->received);
    default:
      return Push(engine, task->partition, &task->msg, task->received);
  }
}

Server::Caller Server::CallerOf(const ps::Message& msg, int64_t received) {
  const PushHeader header = HeaderOf(msg);
  const int64_t now = SteadyNs();
  return {RankOf(msg.meta.sender), msg.meta.addr, msg.meta.head, header.pull_offset,
          header.pull_bytes,       received,      now,           now};
}

void Server::Push(Engine* engine, Partition* partition, ps::Message* msg, int64_t received) {
  const Declaration& declaration = partition->tensor->declaration;
  Caller caller = CallerOf(*msg, received);
  if (msg->meta.head == kPushNorm) caller.bytes = sizeof(GradientSums);
  Round* const round = Admit(engine, partition, *msg, caller.rank);
  if (round == nullptr) return;
  if (msg->data[0].empty()) throw OutOfMemory(ValueBytes(*msg));  // they were dropped
  AddInTurn(engine, declaration, round, declaration.MemberIndex(caller.rank),
            std::move(msg->data[0]));
  caller.added = round->last_added = SteadyNs();
  if (round->first_taken == 0) round->first_taken = caller.taken;
  counters_.adding_ns.Add(caller.added - caller.taken);
  if (tracer_ && tracer_->Wants(round->number)) {
    tracer_->AddSlice(Traced(*partition, *round, caller), engine->track, "add", caller.taken,
                      TraceArrow::kPasses);
  }
  if (msg->meta.head == kPush) {
    Answer(caller, msg->meta.key, "", nullptr);
  } else {
    round->callers.push_back(caller);
  }
  if (round->added < declaration.group.size()) return;
  lateness_.Add(caller.rank, caller.received - round->first_taken);
  const std::string error = declaration.rule ? CompleteUpdate(partition, round) : "";
  if (error.empty()) {
    Finish(engine, partition, round);
  } else {
    FailRound(engine, partition, round, error);
  }
  DropDoneRounds(partition);
}

Server::Round* Server::Admit(Engine* engine, Partition* partition, const ps::Message& msg,
                             int rank) {
  const Declaration& declaration = partition->tensor->declaration;
  const int member = declaration.MemberIndex(rank);
  const PushHeader header = HeaderOf(msg);
  std::string error;
  if (declaration.rule && header.round > 0) error = Settle(partition, msg, header.round - 1);
  // Those that are there, so that none of them puts this one out of reach; then those before it
  // that were not there.
  GiveUpBefore(engine, partition, rank, header.oldest);
  DropDoneRounds(partition);
  Round* round = FindRound(engine, partition, header);
  if (round == nullptr || round->pushed[member]) {
    Refuse(msg, OutOfReach(*partition, rank, header.round));
    return nullptr;
  }
  GiveUpBefore(engine, partition, rank, header.oldest);
  round->pushed[member] = true;
  FailWithoutThoseGone(engine, partition, round);
  if (round->done) {
    PS_PROBE(kPushAfterFailure);
    error = round->failure;  // it failed before this push came
  } else {
    if (declaration.rule && error.empty()) error = AgreeOnPush(declaration, msg, round);
    if (!error.empty()) FailRound(engine, partition, round, error);
  }
  if (!error.empty()) {
    round->told[member] = true;
    Refuse(msg, error);
    round = nullptr;
  }
  DropDoneRounds(partition);  // not one that is returned: it is open
  return round;
}

void Server::AddInTurn(Engine* engine, const Declaration& declaration, Round* round, int member,
                       ps::SArray<char> values) {
  if (!deterministic_ && !(declaration.rule && declaration.rule->in_order)) {
    return Accumulate(engine, declaration, round, std::move(values));
  }
  round->waiting.resize(declaration.group.size());
  round->waiting[member] = std::move(values);
  while (round->added < declaration.group.size() && round->pushed[round->added]) {
    auto& next = round->waiting[round->added];
    Accumulate(engine, declaration, round, std::move(next));
    next = ps::SArray<char>();
  }
}

Server::Round* Server::FindPushed(Partition* partition, const ps::Message& msg,
                                  const Caller& caller) {
  const Declaration& declaration = partition->tensor->declaration;
  const int member = declaration.MemberIndex(caller.rank);
  const PushHeader header = HeaderOf(msg);
  const uint32_t ahead = header.round - partition->first_round;
  Round* round = ahead < partition->rounds.size() ? &partition->rounds[ahead] : nullptr;
  const auto failed = partition->failures.find(header.round);
  if (round == nullptr && failed != partition->failures.end()) {
    PS_PROBE(kPullAfterFailure);
    Refuse(msg, failed->second);
    return nullptr;
  }
  if (round == nullptr || !round->pushed[member] || round->told[member]) {
    Refuse(msg, "worker " + std::to_string(caller.rank) + " pulled round " +
                    std::to_string(header.round) + " of '" + declaration.name +
                    "' without having pushed it, or twice");
    return nullptr;
  }
  if (round->failure.empty()) return round;
  PS_PROBE(kPullAfterFailure);
  round->told[member] = true;
  Refuse(msg, round->failure);
  DropDoneRounds(partition);
  return nullptr;
}

void Server::Pull(Partition* partition, const ps::Message& msg, int64_t received) {
  const Caller caller = CallerOf(msg, received);
  Round* round = FindPushed(partition, msg, caller);
  if (round == nullptr) return;
  round->callers.push_back(caller);
  if (round->done) {
    Deliver(partition, round);
  } else {
    PS_PROBE(kPullBeforeSum);
  }
  DropDoneRounds(partition);
}

void Server::Accumulate(Engine* engine, const Declaration& declaration, Round* round,
                        ps::SArray<char> values) {
  const DType t = declaration.dtype;
  const size_t n = values.size() / SizeOf(t);
  const size_t members = declaration.group.size();
  const size_t added = ++round->added;
  const bool last = added == members;
  BPS_INVARIANT("a member's push is added once", added <= members,
                std::to_string(added) + " pushes of " + std::to_string(members) + " members of '" +
                    declaration.name + "'");
  const int divisor = declaration.average && last ? static_cast<int>(members) : 1;
  if (added == 1) {
    round->sum = std::move(values);
  } else if (members == 2 || !AddsWide(t)) {
    Add(t, round->sum.data(), values.data(), divisor, n);
    if (last && round->step_op == kPushTry) round->spare = std::move(values);
  } else if (added == 2) {
    round->wide = engine->scratch.Take(n * SizeOf(AccumulatorOf(t)));
    WideBegin(t, round->wide.data(), round->sum.data(), values.data(), n);
    round->sum = ps::SArray<char>();
  } else if (!last) {
    WideAdd(t, round->wide.data(), values.data(), n);
    if (added + 1 == members && round->step_op == kPushTry) round->spare = std::move(values);
  } else {
    WideEnd(t, values.data(), round->wide.data(), divisor, n);
    round->sum = std::move(values);
    engine->scratch.Return(std::move(round->wide));
  }
}

bool Server::AddsWide(DType t) const {
  return IsHalf(t) || (t == DType::kFloat32 && wide_float32_);
}

void Server::Finish(Engine* engine, Partition* partition, Round* round) {
  counters_.sums.Add();
  counters_.round_wait_seconds.Observe(round->last_added - round->first_taken);
  round->done = true;
  Deliver(partition, round);
  Close(engine, *partition, *round);
}

void Server::Deliver(Partition* partition, Round* round) {
  const Declaration& declaration = partition->tensor->declaration;
  for (const Caller& caller : round->callers) {
    counters_.answered_partitions.Add();
    counters_.answered_bytes.Add(caller.bytes);
    const int member = declaration.MemberIndex(caller.rank);
    CheckUntold(*partition, *round, member);
    switch (caller.op) {
      case kPushNorm:
        Answer(caller, partition->key, "", &round->sums);
        break;
      case kPushTry:
        Answer(caller, partition->key, "", &round->parameters, &round->sums);
        break;
      default:
        Answer(caller, partition->key, "", &round->sum);
        round->told[member] = true;
    }
  }
  TraceRound(*partition, *round, true);
  round->callers.clear();
  round->parameters = ps::SArray<char>();
  if (round->all_told()) round->sum = ps::SArray<char>();
}

TracedPartition Server::Traced(const Partition& partition, const Round& round,
                               const Caller& caller) {
  const Declaration& d = partition.tensor->declaration;
  return {d.name,       partition.key, partition.index,
          round.number, caller.rank,   d.PartitionSize(partition.index)};
}

void Server::TraceRound(const Partition& partition, const Round& round, bool answered) {
  if (!tracer_ || !tracer_->Wants(round.number)) return;
  const int64_t now = SteadyNs();
  for (const Caller& caller : round.callers) {
    tracer_->AddRow(Traced(partition, round, caller), caller.received,
                    {{"receive queue", caller.taken},
                     {"add", caller.added},
                     {"other workers", answered ? round.last_added : 0},
                     {"answer", now}});
  }
}

}  // namespace core
}  // namespace byteps
