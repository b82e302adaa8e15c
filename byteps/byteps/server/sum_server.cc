#include "byteps/server/sum_server.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "byteps/base/declaration_list.h"
#include "byteps/base/log.h"
#include "byteps/base/thread_name.h"
#include "byteps/observe/status_record.h"
#include "byteps/server/reducer.h"
#include "ps/internal/postoffice.h"

namespace byteps {
namespace core {
namespace {

// A worker that is further ahead than this has lost count.
constexpr uint32_t kMaxRoundsAhead = 4096;

std::string Hex(uint64_t x) {
  char text[32];
  snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

// Of a request that HasForm().
PushHeader HeaderOf(const ps::Message& msg) {
  PushHeader header;
  std::string rest;
  PushHeader::Unpack(msg.meta.body, &header, &rest);
  return header;
}

// Whether a request has a header, which asks for a part of `size` bytes.
bool AsksForAPart(const ps::Message& msg, uint64_t size) {
  PushHeader header;
  if (!PushHeader::Unpack(msg.meta.body, &header)) return false;
  return header.pull_offset <= size && header.pull_bytes <= size - header.pull_offset;
}

bool All(const std::vector<bool>& flags) {
  return std::find(flags.begin(), flags.end(), false) == flags.end();
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

uint64_t Server::OpenRounds() const {
  uint64_t open = 0;
  for (const auto& engine : engines_) open += engine->open_rounds;
  return open;
}

// ---------------------------------------------------- the channel's threads

void Server::OnMessage(ps::Message* msg) {
  if (!msg->meta.request) return;
  switch (msg->meta.head) {
    case kDeclare:
      return OnDeclare(*msg);
    case kPushPull:
    case kPush:
    case kPull:
    case kPushStep:
    case kPushNorm:
    case kPushTry:
    case kStep:
    case kLoadState:
    case kReadState:
      return OnRequest(msg);
    default: {
      Refuse(*msg, "the server does not know operation " + std::to_string(msg->meta.head) +
                       ": install the same byteps on every node");
    }
  }
}

void Server::OnDeclare(const ps::Message& msg) {
  const int rank = ps::Postoffice::IDtoRank(msg.meta.sender);
  std::vector<Declaration> declarations;
  std::string error;
  if (!UnpackDeclarations(msg.meta.body, &declarations, &error)) {
    return Refuse(msg, "the declaration of worker " + std::to_string(rank) + " " + error);
  }
  for (const auto& declaration : declarations) {
    const std::string refusal = Declare(rank, declaration);
    if (error.empty()) error = refusal;
  }
  if (!error.empty()) return Refuse(msg, error);
  Answer(Caller{rank, msg.meta.addr, msg.meta.head}, msg.meta.key, "", nullptr);
}

std::string Server::Declare(int rank, const Declaration& declaration) {
  if (declaration.MemberIndex(rank) < 0) {
    return "worker " + std::to_string(rank) + " is no member of the group of '" + declaration.name +
           "': " + declaration.Describe();
  }
  const uint64_t key = declaration.Key();
  ps::WriterLock lock(&mu_);
  if (declaration.rule && tensors_.count(key) == 0) {
    const std::string refusal = state_memory_.Promise(declaration, channel_->rank());
    if (!refusal.empty()) return refusal;
  }
  auto& tensor = tensors_[key];
  if (!tensor) {
    tensor = std::make_unique<Tensor>();
    tensor->declaration = declaration;
    tensor->declared_by = rank;
    counters_.declared_tensors.Add();
  } else if (!(tensor->declaration == declaration) && tensor->refusal.empty()) {
    tensor->refusal = "workers disagree on a tensor: worker " +
                      std::to_string(tensor->declared_by) + " declared '" +
                      tensor->declaration.name + "' (" + tensor->declaration.Describe() +
                      "), worker " + std::to_string(rank) + " declared '" + declaration.name +
                      "' (" + declaration.Describe() + "), both with key " + Hex(key);
    BPS_LOG(WARNING) << tensor->refusal;
    // Those who pushed already are waiting for a sum that cannot come.
    for (auto& engine : engines_) {
      Task task;
      task.kind = Task::kRefuse;
      task.tensor = tensor.get();
      task.reason = tensor->refusal;
      engine->queue.Push(std::move(task));
    }
  }
  return tensor->refusal;
}

void Server::Refuse(const ps::Message& request, const std::string& error) {
  counters_.refused_requests.Add();
  const Caller caller{ps::Postoffice::IDtoRank(request.meta.sender), request.meta.addr,
                      request.meta.head};
  Answer(caller, request.meta.key, error, nullptr);
}

std::string Server::Refusal(const ps::Message& msg, const Tensor* tensor, uint64_t index) const {
  const std::string worker = "worker " + std::to_string(ps::Postoffice::IDtoRank(msg.meta.sender));
  const bool pull = msg.meta.head == kPull || msg.meta.head == kReadState;
  if (tensor == nullptr || index >= tensor->declaration.NumPartitions()) {
    return worker + (pull ? " pulled" : " pushed") + " key " + Hex(msg.meta.key) +
           ", which nobody declared";
  }
  if (!tensor->refusal.empty()) return tensor->refusal;
  const Declaration& declaration = tensor->declaration;
  if (declaration.MemberIndex(ps::Postoffice::IDtoRank(msg.meta.sender)) < 0) {
    return worker + " is no member of the group of '" + declaration.name + "'";
  }
  if (!HasForm(msg, declaration, index)) {
    return std::string(pull ? "a pull" : "a push") + " of '" + declaration.name + "' from " +
           worker + " does not have the declared form";
  }
  return "";
}

bool Server::HasForm(const ps::Message& msg, const Declaration& declaration, uint64_t index) {
  if (declaration.rule) return HasFormOfUpdate(msg, declaration, index);
  const int op = msg.meta.head;
  if (op != kPushPull && op != kPush && op != kPull) return false;
  const uint64_t size = declaration.PartitionSize(index);
  const bool values =
      op == kPull ? msg.data.empty() : msg.data.size() == 1 && msg.data[0].size() == size;
  return values && AsksForAPart(msg, size) && declaration.fused == (op == kPushPull);
}

void Server::OnRequest(ps::Message* msg) {
  const uint64_t index = msg->meta.key & (kMaxPartitions - 1);
  Task task;
  const Tensor* tensor = nullptr;
  std::string error;
  {
    ps::ReaderLock lock(&mu_);
    const auto it = tensors_.find(msg->meta.key - index);
    if (it != tensors_.end()) tensor = it->second.get();
    error = Refusal(*msg, tensor, index);
    const auto partition = partitions_.find(msg->meta.key);
    if (partition != partitions_.end()) task.partition = partition->second.get();
  }
  if (!error.empty()) return Refuse(*msg, error);
  if (task.partition == nullptr) {
    ps::WriterLock lock(&mu_);
    task.partition = FindOrMake(*tensor, msg->meta.key);
  }
  task.msg = std::move(*msg);
  task.received = SteadyNs();
  if (!task.msg.data.empty()) {
    counters_.received_partitions.Add();
    counters_.received_bytes.Add(task.msg.data[0].size());
  }
  engines_[task.partition->engine]->queue.Push(std::move(task));
}

Server::Partition* Server::FindOrMake(const Tensor& tensor, uint64_t key) {
  auto& partition = partitions_[key];
  if (!partition) {
    partition = std::make_unique<Partition>();
    partition->tensor = &tensor;
    partition->key = key;
    partition->index = key & (kMaxPartitions - 1);
    partition->engine = next_engine_++ % engines_.size();
    if (tensor.declaration.rule) {
      partition->state = std::make_unique<PartitionState>(&tensor.declaration, partition->index);
    }
  }
  return partition.get();
}

void Server::OnWorkerGone(int rank, const std::string& reason) {
  for (auto& engine : engines_) {
    Task task;
    task.kind = Task::kGone;
    task.rank = rank;
    task.reason = reason;
    engine->queue.Push(std::move(task));
  }
}

void Server::Answer(const Caller& caller, uint64_t key, const std::string& error,
                    const ps::SArray<char>* values, const ps::SArray<char>* sums) {
  ps::Message msg = MakeAnswer(caller.op, ps::Postoffice::WorkerRankToID(caller.rank), key,
                               caller.request, error);
  if (values != nullptr && caller.bytes > 0) {
    AddValues(&msg, values->segment(caller.offset, caller.offset + caller.bytes));
  }
  if (sums != nullptr) msg.meta.body.assign(sums->data(), sums->size());
  channel_->Send(&msg);
}

// ---------------------------------------------------------- engine threads

void Server::Run(Engine* engine) {
  Task task;
  while (true) {
    bool timed_out = false;
    // By the clock: there may be no moment without work.
    FailLateRounds(engine);
    // Nothing can be late while no round is open: sleep until there is work.
    const bool got =
        engine->open.empty()
            ? engine->queue.Pop(&task)
            : engine->queue.PopFor(&task, std::get<0>(engine->open.begin()->first) - Clock::now(),
                                   &timed_out);
    if (!got) {
      if (!timed_out) return;
      continue;
    }
    switch (task.kind) {
      case Task::kRequest:
        Serve(engine, &task);
        break;
      case Task::kGone:
        engine->gone[task.rank] = task.reason;
        FailRoundsWithout(engine, task.rank, task.reason);
        break;
      case Task::kRefuse:
        for (Partition* partition : engine->partitions) {
          if (partition->tensor != task.tensor) continue;
          for (auto& round : partition->rounds) {
            if (!round.done) FailRound(engine, partition, &round, task.reason);
          }
          DropDoneRounds(partition);
        }
        break;
    }
    task = Task();
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
  return {ps::Postoffice::IDtoRank(msg.meta.sender),
          msg.meta.addr,
          msg.meta.head,
          header.pull_offset,
          header.pull_bytes,
          received,
          now,
          now};
}

Server::Round* Server::FindRound(Engine* engine, Partition* partition, const PushHeader& header) {
  // Unsigned, so that a round before the first open one is far ahead as well.
  const uint32_t ahead = header.round - partition->first_round;
  if (ahead >= kMaxRoundsAhead) return nullptr;
  if (partition->first_round == 0 && partition->rounds.empty())
    engine->partitions.push_back(partition);
  const size_t members = partition->tensor->declaration.group.size();
  while (partition->rounds.size() <= ahead) {
    Round round;
    round.number = partition->first_round + static_cast<uint32_t>(partition->rounds.size());
    round.pushed.resize(members);
    round.told.resize(members);
    round.started = Clock::now();
    round.timeout_s = header.timeout_ms / 1000.0;
    round.deadline = round.started + std::chrono::milliseconds(header.timeout_ms);
    engine->open.emplace(DeadlineOf(*partition, round), partition);
    ++engine->open_rounds;
    partition->rounds.push_back(std::move(round));
  }
  return &partition->rounds[ahead];
}

void Server::Push(Engine* engine, Partition* partition, ps::Message* msg, int64_t received) {
  const Declaration& declaration = partition->tensor->declaration;
  Caller caller = CallerOf(*msg, received);
  if (msg->meta.head == kPushNorm) caller.bytes = sizeof(GradientSums);
  const int member = declaration.MemberIndex(caller.rank);
  const PushHeader header = HeaderOf(*msg);
  std::string error;
  if (declaration.rule && header.round > 0) error = Settle(partition, *msg, header.round - 1);
  Round* round = FindRound(engine, partition, header);
  if (round == nullptr || round->pushed[member]) {
    return Refuse(*msg, "worker " + std::to_string(caller.rank) + " pushed round " +
                            std::to_string(header.round) + " of '" + declaration.name +
                            "' while round " + std::to_string(partition->first_round) + " is open");
  }
  if (declaration.rule) GiveUpBefore(engine, partition, caller.rank, header.round);
  round->pushed[member] = true;
  for (const auto& gone : engine->gone) {
    const int lost = declaration.MemberIndex(gone.first);
    if (round->done || lost < 0 || round->pushed[lost]) continue;
    FailRound(engine, partition, round,
              gone.second + " while the push_pull of '" + declaration.name + "' waited for it");
  }
  if (round->done) {  // it failed before this push came
    round->told[member] = true;
    Refuse(*msg, round->failure);
    return DropDoneRounds(partition);
  }
  if (declaration.rule && error.empty()) error = AgreeOnPush(declaration, *msg, round);
  if (!error.empty()) {
    FailRound(engine, partition, round, error);
    round->told[member] = true;
    Refuse(*msg, error);
    return DropDoneRounds(partition);
  }
  if (deterministic_ || (declaration.rule && declaration.rule->in_order)) {
    round->waiting.resize(declaration.group.size());
    round->waiting[member] = std::move(msg->data[0]);
    while (round->added < declaration.group.size() && round->pushed[round->added]) {
      auto& next = round->waiting[round->added];
      Accumulate(engine, declaration, round, std::move(next));
      next = ps::SArray<char>();
    }
  } else {
    Accumulate(engine, declaration, round, std::move(msg->data[0]));
  }
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
  if (round->added == declaration.group.size()) {
    lateness_.Add(caller.rank, caller.received - round->first_taken);
    if (declaration.rule) error = CompleteUpdate(partition, round);
    if (error.empty()) {
      Finish(engine, partition, round);
    } else {
      FailRound(engine, partition, round, error);
    }
    DropDoneRounds(partition);
  }
}

Server::Round* Server::FindPushed(Partition* partition, const ps::Message& msg,
                                  const Caller& caller) {
  const Declaration& declaration = partition->tensor->declaration;
  const int member = declaration.MemberIndex(caller.rank);
  const PushHeader header = HeaderOf(msg);
  const uint32_t ahead = header.round - partition->first_round;
  Round* round = ahead < partition->rounds.size() ? &partition->rounds[ahead] : nullptr;
  if (round == nullptr || !round->pushed[member] || round->told[member]) {
    Refuse(msg, "worker " + std::to_string(caller.rank) + " pulled round " +
                    std::to_string(header.round) + " of '" + declaration.name +
                    "' without having pushed it, or twice");
    return nullptr;
  }
  if (round->failure.empty()) return round;
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
  if (round->done) Deliver(partition, round);
  DropDoneRounds(partition);
}

void Server::Accumulate(Engine* engine, const Declaration& declaration, Round* round,
                        ps::SArray<char> values) {
  const DType t = declaration.dtype;
  const size_t n = values.size() / SizeOf(t);
  const size_t members = declaration.group.size();
  const size_t added = ++round->added;
  const bool last = added == members;
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

Server::Deadline Server::DeadlineOf(const Partition& partition, const Round& round) {
  return {round.deadline, partition.key, round.number};
}

void Server::Close(Engine* engine, const Partition& partition, const Round& round) {
  engine->open.erase(DeadlineOf(partition, round));
  --engine->open_rounds;
}

void Server::Deliver(Partition* partition, Round* round) {
  const Declaration& declaration = partition->tensor->declaration;
  for (const Caller& caller : round->callers) {
    counters_.answered_partitions.Add();
    counters_.answered_bytes.Add(caller.bytes);
    const int member = declaration.MemberIndex(caller.rank);
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
  if (All(round->told)) round->sum = ps::SArray<char>();
}

void Server::FailRound(Engine* engine, Partition* partition, Round* round,
                       const std::string& reason) {
  const Declaration& declaration = partition->tensor->declaration;
  counters_.failed_sums.Add();
  TraceRound(*partition, *round, false);
  for (const Caller& caller : round->callers) {
    Answer(caller, partition->key, reason, nullptr);
    round->told[declaration.MemberIndex(caller.rank)] = true;
  }
  round->failure = reason;
  round->callers.clear();
  round->waiting.clear();
  engine->scratch.Return(std::move(round->wide));
  round->sum = round->spare = ps::SArray<char>();
  round->done = true;
  Close(engine, *partition, *round);
}

void Server::DropDoneRounds(Partition* partition) {
  // A round stays until every member has its sum, or has heard that there is none.
  while (!partition->rounds.empty()) {
    const Round& round = partition->rounds.front();
    if (!round.done || !All(round.told)) return;
    partition->rounds.pop_front();
    ++partition->first_round;
  }
}

void Server::FailRoundsWithout(Engine* engine, int rank, const std::string& reason) {
  for (Partition* partition : engine->partitions) {
    const Declaration& declaration = partition->tensor->declaration;
    const int member = declaration.MemberIndex(rank);
    if (member < 0) continue;
    for (auto& round : partition->rounds) {
      if (round.done || round.pushed[member]) continue;
      FailRound(engine, partition, &round,
                reason + " while the push_pull of '" + declaration.name + "' waited for it");
    }
    DropDoneRounds(partition);
  }
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

std::string Server::MissingRanks(const Partition& partition, const Round& round) const {
  const auto& group = partition.tensor->declaration.group;
  std::string missing;
  for (size_t i = 0; i < group.size(); ++i) {
    if (round.pushed[i]) continue;
    missing += (missing.empty() ? "worker " : ", worker ") + std::to_string(group[i]);
  }
  return missing;
}

void Server::FailLateRounds(Engine* engine) {
  if (engine->open.empty()) return;
  const auto now = Clock::now();
  while (!engine->open.empty()) {
    const auto& [deadline, key, number] = engine->open.begin()->first;
    if (now < deadline) return;
    Partition* const partition = engine->open.begin()->second;
    const Declaration& declaration = partition->tensor->declaration;
    Round* const round = &partition->rounds[number - partition->first_round];
    char limit[96];
    snprintf(limit, sizeof(limit), "%.1f s (BYTEPS_OP_TIMEOUT_S=%g)",
             std::chrono::duration<double>(now - round->started).count(), round->timeout_s);
    FailRound(engine, partition, round,
              "push_pull of '" + declaration.name + "' timed out: partition " +
                  std::to_string(partition->index) + ", key " + Hex(partition->key) + ", " +
                  std::to_string(declaration.PartitionSize(partition->index)) +
                  " bytes, still lacks the push of " + MissingRanks(*partition, *round) +
                  " after " + limit);
    DropDoneRounds(partition);
  }
}

}  // namespace core
}  // namespace byteps
