#include "byteps/server/sum_server.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/protocol.h"
#include "byteps/base/wire.h"
#include "byteps/observe/status_record.h"
#include "byteps/server/rounds.h"
#include "byteps/server/sum_thread.h"

namespace byteps {
namespace core {

std::optional<uint64_t> ValueBytes(int op, const Declaration& declaration, uint64_t index) {
  const uint64_t size = declaration.PartitionSize(index);
  if (op == kPushPull || op == kGiveSum) {
    return declaration.rule ? std::nullopt : std::optional(size);
  }
  if (!declaration.rule && !MovesFeedback(op, declaration)) return std::nullopt;
  switch (op) {
    case kPushStep:
    case kPushNorm:
    case kPushTry:
      return size;
    case kLoadState:
      return declaration.PartitionValues(index) * sizeof(float);
    case kStep:
    case kReadState:
      return 0;
    default:
      return std::nullopt;
  }
}

namespace {

constexpr uint32_t kKnownFlags = PushHeader::kForgetLost | PushHeader::kKeepsSums;

bool HasFormOfGift(const Message& message, const Declaration& declaration, uint64_t index) {
  const uint64_t bytes = message.sent_bytes;
  if (declaration.rule || (bytes != 0 && bytes != declaration.PartitionSize(index))) return false;
  PushHeader header;
  std::string members;
  return PushHeader::Unpack(message.body, &header, &members) &&
         members.size() <= (declaration.group.size() + 7) / 8;
}

}  // namespace

bool HasForm(const Message& message, const Declaration& declaration, uint64_t index) {
  if (message.op == kGiveSum) return HasFormOfGift(message, declaration, index);
  if (message.sent_bytes != ValueBytes(message.op, declaration, index)) return false;
  if (declaration.rule) return HasFormOfUpdate(message, declaration, index);
  PushHeader header;
  if (!PushHeader::Unpack(message.body, &header) || header.oldest > header.round) return false;
  if ((header.flags & ~kKnownFlags) != 0) return false;
  uint64_t size = declaration.PartitionSize(index);
  if (MovesFeedback(message.op, declaration)) {
    size = declaration.PartitionValues(index) * sizeof(float);
    if (header.pull_offset % sizeof(float) != 0 || header.pull_bytes % sizeof(float) != 0) {
      return false;
    }
  }
  return header.pull_offset <= size && header.pull_bytes <= size - header.pull_offset;
}

namespace {

std::string NameOfOp(int op) {
  switch (op) {
    case kDeclare:
      return "the declaration";
    case kStep:
      return "a step";
    case kLoadState:
      return "state that is loaded";
    case kReadState:
      return "state that is read";
    case kGiveSum:
      return "a sum that is given";
    default:
      return "a push";
  }
}

uint64_t IndexOf(uint64_t key) { return key & (kMaxPartitions - 1); }

}  // namespace

SumServer::SumServer(const Config& config, Channel* channel)
    : context_(config, channel),
      backup_(config.Bool("BYTEPS_BACKUP_STATE"), static_cast<int>(config.Int("DMLC_NUM_SERVER")),
              config.Int("BYTEPS_SERVER_ENGINE_THREAD"), channel, this),
      state_memory_(config) {
  if (backup_.is_on()) context_.backup = &backup_;
  const auto text = [this](const Message& message, const std::bad_alloc& error) {
    return NoMemoryFor(message, error);
  };
  const long threads = config.Int("BYTEPS_SERVER_ENGINE_THREAD");
  for (long i = 0; i < threads; ++i) {
    threads_.push_back(std::make_unique<SumThread>(
        &context_, i, text, [this](const Partition& partition) { OnFreed(partition); }));
  }
}

SumServer::~SumServer() {
  threads_.clear();
  if (!context_.tracer || rank_ < 0) return;
  for (const auto& [key, partition] : partitions_) {
    if (!partition) continue;
    for (const Round& round : partition->rounds) context_.TraceRound(*partition, round, false);
  }
  context_.tracer->Write(Role::kServer, rank_);
}

std::vector<Metric> SumServer::Metrics() {
  ServerGauges gauges;
  gauges.open_rounds = OpenRounds();
  gauges.has_copy = backup_.IsCopied() ? 1 : 0;
  {
    ps::ReaderLock lock(&mu_);
    gauges.state_bytes = state_memory_.promised();
  }
  for (auto& thread : threads_) gauges.engine_queues.push_back(thread->queued());
  return Tell(context_.counters, gauges);
}

std::string SumServer::Report() {
  const ServerCounters& counters = context_.counters;
  StatusRecord record;
  DescribeProcess(&record);
  record.role = Role::kServer;
  record.sent_bytes = counters.answered_bytes.Get();
  record.received_bytes = counters.received_bytes.Get();
  record.finished = counters.sums.Get();
  record.failed = counters.failed_sums.Get();
  record.running = OpenRounds();
  {
    ps::ReaderLock lock(&mu_);
    record.tensors = tensors_.size();
    record.keys = partitions_.size();
  }
  for (auto& thread : threads_) record.queued += thread->queued();
  record.busy_ns = counters.adding_ns.Get();
  context_.lateness.Take(&record.sums_since, &record.late);
  return record.Pack();
}

void SumServer::SetRank(int rank) {
  rank_ = rank;
  backup_.Start();
}

bool SumServer::Expects(const MessageHead& head, size_t bytes) {
  if (head.between_servers) return backup_.Expects(head);
  const uint64_t index = IndexOf(head.key);
  ps::ReaderLock lock(&mu_);
  const auto it = tensors_.find(head.key - index);
  if (!head.is_request || it == tensors_.end() || !it->second) return false;
  const Declaration& declaration = it->second->declaration;
  if (index >= declaration.NumPartitions()) return false;
  return bytes == ValueBytes(head.op, declaration, index).value_or(0);
}

void SumServer::OnMessage(Message* message) {
  if (message->between_servers) return backup_.OnMessage(message);
  if (!message->is_request) return;
  std::exception_ptr other;  // the transport closes the connection for it
  const auto work = [&] {
    try {
      Dispatch(message);
    } catch (const std::bad_alloc&) {
      throw;
    } catch (...) {
      other = std::current_exception();
    }
  };
  reserve_.Survive(work, [&](const std::exception& e) {
    context_.Refuse(*message, NoMemoryFor(*message, dynamic_cast<const std::bad_alloc&>(e)));
  });
  if (other) std::rethrow_exception(other);
}

void SumServer::Dispatch(Message* message) {
  switch (message->op) {
    case kDeclare:
      return OnDeclare(*message);
    case kRelease:
      return OnRelease(*message);
    case kConfirm:
      return OnConfirm(*message);
    case kResume:
      return OnResume(*message);
    case kPushPull:
    case kPushStep:
    case kPushNorm:
    case kPushTry:
    case kStep:
    case kLoadState:
    case kReadState:
    case kGiveSum:
      return OnRequest(message);
    default:
      context_.Refuse(*message, "the server does not know operation " +
                                    std::to_string(message->op) +
                                    ": install the same byteps on every node");
  }
}

void SumServer::OnDeclare(const Message& message) {
  const int rank = message.peer;
  std::vector<Declaration> declarations;
  std::string error;
  if (!UnpackDeclarations(message.body, &declarations, &error, &groups_)) {
    return context_.Refuse(message,
                           "the declaration of worker " + std::to_string(rank) + " " + error);
  }
  for (const auto& declaration : declarations) {
    const std::string refusal = Declare(rank, declaration);
    if (error.empty()) error = refusal;
  }
  if (!error.empty()) return context_.Refuse(message, error);
  context_.Answer(Caller{rank, message.number, message.op}, message.key, "");
}

std::string SumServer::Declare(int rank, const Declaration& declaration) {
  if (declaration.MemberIndex(rank) < 0) {
    return "worker " + std::to_string(rank) + " is no member of the group of '" + declaration.name +
           "': " + declaration.Describe();
  }
  const uint64_t key = declaration.Key();
  ps::WriterLock lock(&mu_);
  if (declaration.rule && tensors_.count(key) == 0) {
    const std::string refusal =
        state_memory_.Promise(declaration, context_.channel->rank(), backup_.is_on());
    if (!refusal.empty()) return refusal;
  }
  auto& tensor = tensors_[key];
  if (!tensor) {
    auto made = std::make_shared<DeclaredTensor>();
    made->declaration = declaration;
    made->declared_by = rank;
    tensor = std::move(made);
    context_.counters.declared_tensors.Add();
  } else if (!(tensor->declaration == declaration) && tensor->refusal.empty()) {
    tensor->refusal = "workers disagree on a tensor: worker " +
                      std::to_string(tensor->declared_by) + " declared '" +
                      tensor->declaration.name + "' (" + tensor->declaration.Describe() +
                      "), worker " + std::to_string(rank) + " declared '" + declaration.name +
                      "' (" + declaration.Describe() + "), both with key " + Hex(key);
    BPS_LOG(WARNING) << tensor->refusal;
    // Those who pushed already are waiting for a sum that cannot come.
    for (auto& thread : threads_) thread->FailAll(tensor, tensor->refusal);
  }
  tensor->SetHold(rank, true);
  return tensor->refusal;
}

void SumServer::OnResume(const Message& message) {
  std::string error;
  {
    ps::WriterLock lock(&mu_);
    if (KeepsState()) {
      if (backup_.Fetches()) {
        awaiting_state_.push_back(message);
        return;
      }
      error = backup_.fetch_error();
    }
  }
  if (!error.empty()) return context_.Refuse(message, error);
  AdoptStates();
  Resume(message);
}

void SumServer::Resume(const Message& message) {
  std::string error;
  WireReader in(message.body);
  constexpr size_t kEach = sizeof(uint64_t) + sizeof(uint32_t);
  const uint32_t count = in.GetCount(kEach);
  for (uint32_t i = 0; i < count; ++i) {
    const auto key = in.Get<uint64_t>();
    const auto round = in.Get<uint32_t>();
    ps::WriterLock lock(&mu_);
    const auto it = tensors_.find(key);
    if (it == tensors_.end() || round <= it->second->first_round) continue;
    if (it->second->declaration.rule) {
      // Members may be in different rounds of it, and the copy of the state says in which.
      if (error.empty()) error = WhyNoState(it->second->declaration);
      continue;
    }
    it->second->first_round = round;
    for (auto& thread : threads_) thread->Resume(it->second, round);
  }
  if (!error.empty()) return context_.Refuse(message, error);
  if (!in.ok() || !in.at_end()) {
    return context_.Refuse(message, "worker " + std::to_string(message.peer) +
                                        " does not say in which rounds it goes on");
  }
  context_.Answer(Caller{message.peer, message.number, message.op}, message.key, "");
  Settle(message.peer);
}

bool SumServer::KeepsState() {
  return std::any_of(tensors_.begin(), tensors_.end(),
                     [](const auto& entry) { return entry.second->declaration.rule != nullptr; });
}

std::string SumServer::WhyNoState(const Declaration& declaration) const {
  const int servers = backup_.num_servers();
  for (uint64_t i = 0; i < declaration.NumPartitions(); ++i) {
    const uint64_t key = declaration.Key() + i;
    const int server =
        ServerOf(declaration.hash, declaration.Key(), declaration.placement, i, servers);
    if (server != context_.channel->rank() || partitions_.count(key) > 0) continue;
    return "the state of '" + declaration.name +
           "' is lost with two servers, one of which had the copy of the other one's: load the "
           "last checkpoint";
  }
  return "";
}

void SumServer::AdoptStates() {
  ps::WriterLock lock(&mu_);
  for (const uint64_t key : backup_.fetched()->Keys()) {
    const auto it = tensors_.find(key - IndexOf(key));
    if (it == tensors_.end()) continue;
    FindOrMake(it->second, key);
  }
}

void SumServer::AdoptState(const std::shared_ptr<Partition>& partition,
                           std::shared_ptr<StateCopy> copy) {
  const DeclaredTensor& tensor = *partition->tensor;
  partition->state = std::move(copy->state);
  partition->restored_declaration = copy->declaration;
  partition->pass = backup_.fetched_pass();
  if (copy->last) {
    Round round;
    const size_t members = tensor.declaration.group.size();
    round.number = partition->first_round = copy->last->number;
    round.pushed.resize(members, true);
    round.told.resize(members);
    round.excused = std::move(copy->last->excused);
    for (size_t i = 0; i < round.excused.size(); ++i) {
      if (!round.excused[i]) continue;
      round.pushed[i] = false;
      round.told[i] = true;
    }
    round.update = std::move(copy->last->update);
    const std::string error = round.update->Restore(copy->last->sum);
    if (!error.empty()) BPS_LOG(ERROR) << "'" << tensor.declaration.name << "': " << error;
    round.accumulator.sum() = std::move(copy->last->sum);
    round.is_restored = round.done = true;
    partition->rounds.push_back(std::move(round));
  }
  threads_[partition->thread]->Adopt(partition);
}

// ------------------------------------------------------------------ of the backup link

void SumServer::InThreadOf(uint64_t key, std::function<void()> task) {
  threads_[HashBytes(&key, sizeof(key), 1) % threads_.size()]->Call(std::move(task));
}

void SumServer::OnCopied(uint64_t key, uint64_t number) {
  ps::ReaderLock lock(&mu_);
  const auto it = partitions_.find(key);
  if (it == partitions_.end()) return;
  threads_[it->second->thread]->OnCopied(it->second, number);
}

void SumServer::OnBackup(uint64_t pass) {
  for (auto& thread : threads_) thread->SetBackup(pass);
}

void SumServer::OnFetched() {
  std::vector<Message> waiting;
  {
    ps::WriterLock lock(&mu_);
    waiting.swap(awaiting_state_);
  }
  for (Message& message : waiting) OnMessage(&message);
}

void SumServer::OnRequest(Message* message) {
  const uint64_t key = message->key;
  const uint64_t index = IndexOf(key);
  TensorPtr tensor;
  std::shared_ptr<Partition> partition;
  std::string error;
  {
    ps::ReaderLock lock(&mu_);
    const auto it = tensors_.find(key - index);
    if (it != tensors_.end()) tensor = it->second;
    error = Refusal(*message, tensor.get(), index);
    const auto found = partitions_.find(key);
    if (found != partitions_.end()) partition = found->second;
  }
  if (!error.empty()) return context_.Refuse(*message, error);
  if (tensor->declaration.rule && backup_.Fetches()) {
    ps::WriterLock lock(&mu_);
    if (backup_.Fetches()) {
      awaiting_state_.push_back(std::move(*message));
      return;
    }
  }
  if (partition == nullptr) {
    ps::WriterLock lock(&mu_);
    // It may have been freed meanwhile.
    if (tensors_.count(key - index) > 0) partition = FindOrMake(tensor, key);
  }
  if (partition == nullptr) return context_.Refuse(*message, Refusal(*message, nullptr, index));
  if (message->sent_bytes > 0) {
    context_.counters.received_partitions.Add();
    context_.counters.received_bytes.Add(message->sent_bytes);
  }
  SumThread* const thread = threads_[partition->thread].get();
  thread->Serve(std::move(partition), std::move(*message));
}

std::string SumServer::Refusal(const Message& message, const DeclaredTensor* tensor,
                               uint64_t index) {
  const std::string worker = "worker " + std::to_string(message.peer);
  const bool reads = message.op == kReadState;
  if (tensor == nullptr || index >= tensor->declaration.NumPartitions()) {
    return worker + (reads ? " read" : " pushed") + " key " + Hex(message.key) +
           ", which nobody declared, or all members have released";
  }
  if (!tensor->refusal.empty()) return tensor->refusal;
  const Declaration& declaration = tensor->declaration;
  if (declaration.MemberIndex(message.peer) < 0) {
    return worker + " is no member of the group of '" + declaration.name + "'";
  }
  if (!HasForm(message, declaration, index)) {
    return std::string(reads ? "a request for state" : "a push") + " of '" + declaration.name +
           "' from " + worker + " does not have the declared form";
  }
  return "";
}

std::shared_ptr<Partition> SumServer::FindOrMake(const TensorPtr& tensor, uint64_t key) {
  auto& partition = partitions_[key];
  if (!partition || partition->tensor != tensor) {
    auto made = std::make_shared<Partition>();
    made->tensor = tensor;
    made->key = key;
    made->index = IndexOf(key);
    made->thread = next_thread_++ % threads_.size();
    made->first_round = tensor->first_round;
    if (tensor->declaration.rule) {
      made->state = std::make_unique<PartitionState>(&tensor->declaration, made->index);
      auto copy = backup_.fetched()->Take(key);
      // What another tensor had is of no use, and no member knows it.
      if (copy && *copy->declaration == tensor->declaration) AdoptState(made, std::move(copy));
    }
    partition = std::move(made);
  }
  return partition;
}

std::string SumServer::NoMemoryFor(const Message& message, const std::bad_alloc& error) {
  const uint64_t index = IndexOf(message.key);
  const auto* const known = dynamic_cast<const OutOfMemory*>(&error);
  std::string text = "server " + std::to_string(context_.channel->rank()) +
                     " is out of memory: it wanted " +
                     (known == nullptr ? "some" : std::to_string(known->bytes())) + " bytes for " +
                     NameOfOp(message.op);
  ps::ReaderLock lock(&mu_);
  const auto it = tensors_.find(message.key - index);
  if (it != tensors_.end() && it->second) text += " of '" + it->second->declaration.name + "'";
  return text + " from worker " + std::to_string(message.peer) + ", partition " +
         std::to_string(index) + "; " + DescribeFreeMemory() +
         "; take more servers, or servers with more memory (python -m byteps.sizing says how much)";
}

}  // namespace core
}  // namespace byteps
