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
#include "byteps/server/request_form.h"
#include "byteps/server/rounds.h"
#include "byteps/server/sum_thread.h"

namespace byteps {
namespace core {

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

SumServer::SumServer(const Config& config, Channel* channel,
                     std::unique_ptr<ServerLossPolicy> losses)
    : context_(config, channel), losses_(std::move(losses)), state_memory_(config) {
  losses_->Attach(this, &context_);
  const auto text = [this](const Message& message, const std::bad_alloc& error) {
    return NoMemoryFor(message, error);
  };
  const long threads = config.Int("BYTEPS_SERVER_ENGINE_THREAD");
  for (long i = 0; i < threads; ++i) {
    threads_.push_back(std::make_unique<SumThread>(
        &context_, i, text, [this](const Partition& partition) { OnFreed(partition); },
        losses_.get()));
  }
}

SumServer::~SumServer() {
  threads_.clear();
  if (!context_.tracer || rank_ < 0) return;
  for (const auto& [key, partition] : partitions_) {
    if (!partition) continue;
    for (const Round& round : partition->rounds) context_.TraceRound(*partition, round, false);
  }
  context_.tracer->End();
}

std::vector<Metric> SumServer::Metrics() {
  ServerGauges gauges;
  gauges.open_rounds = OpenRounds();
  gauges.has_copy = losses_->has_copy() ? 1 : 0;
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
  if (context_.tracer) context_.tracer->Begin(Role::kServer, rank);
  losses_->OnJoined();
}

bool SumServer::Expects(const MessageHead& head, size_t bytes) {
  if (head.between_servers) return losses_->ExpectsOfServer(head);
  const uint64_t index = IndexOf(head.key);
  ps::ReaderLock lock(&mu_);
  const auto it = tensors_.find(head.key - index);
  if (!head.is_request || it == tensors_.end() || !it->second) return false;
  const Declaration& declaration = it->second->declaration;
  if (index >= declaration.NumPartitions()) return false;
  return bytes == ValueBytes(head.op, declaration, index).value_or(0);
}

void SumServer::OnMessage(Message* message) {
  if (message->between_servers) return losses_->OnServerMessage(message);
  if (!message->is_request) return;
  // Another exception is rethrown: the transport then closes the connection.
  std::exception_ptr other;
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
      if (!losses_->Serve(message)) context_.RefuseUnknown(*message);
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
        state_memory_.Promise(declaration, context_.channel->rank(), losses_->copies_state());
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
    // Members that have already pushed wait for a sum that cannot complete, so their rounds fail.
    for (auto& thread : threads_) thread->FailAll(tensor, tensor->refusal);
  }
  tensor->SetHold(rank, true);
  return tensor->refusal;
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
    const auto known_partition = partitions_.find(key);
    if (known_partition != partitions_.end()) partition = known_partition->second;
  }
  if (!error.empty()) return context_.Refuse(*message, error);
  if (losses_->Holds(*tensor, message)) return;
  if (partition == nullptr) {
    ps::WriterLock lock(&mu_);
    // The tensor may have been freed since the request's declaration was looked up.
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
    }
    partition = std::move(made);
    losses_->OnMade(partition);
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

// ------------------------------------------------------------------ releases

void SumServer::OnRelease(const Message& message) {
  const int rank = message.peer;
  WireReader in(message.body);
  const uint32_t count = in.GetCount(sizeof(uint64_t));
  auto releasing = std::make_shared<Releasing>();
  *releasing = {rank, message.number, message.key, 1};
  Owed owed{releasing};
  {
    ps::WriterLock lock(&mu_);
    for (uint32_t i = 0; i < count; ++i) {
      const auto it = tensors_.find(in.Get<uint64_t>());
      if (it == tensors_.end() || it->second->declaration.MemberIndex(rank) < 0) continue;
      const TensorPtr tensor = it->second;
      ++releasing->left;
      tensor->releasing.push_back(releasing);
      tensor->SetHold(rank, false);
      tensor->released_by = rank;
      if (tensor->holders > 0) {
        for (auto& thread : threads_) thread->Release(tensor, rank);
      }
      FreeIfUnused(tensor, &owed);
    }
  }
  AnswerReleases(owed);
}

void SumServer::FreeIfUnused(const TensorPtr& tensor, Owed* owed) {
  if (tensor->holders > 0 || !losses_->MayFree(*tensor)) return;
  const Declaration& declaration = tensor->declaration;
  PS_PROBE(kTensorFreed);
  std::vector<std::vector<std::shared_ptr<Partition>>> of_threads(threads_.size());
  const uint64_t key = declaration.Key();
  for (uint64_t i = 0; i < declaration.NumPartitions(); ++i) {
    const auto it = partitions_.find(key + i);
    if (it != partitions_.end()) of_threads[it->second->thread].push_back(it->second);
  }
  for (size_t i = 0; i < threads_.size(); ++i) {
    if (!of_threads[i].empty()) threads_[i]->Free(std::move(of_threads[i]));
  }
  if (declaration.rule) {
    state_memory_.Return(declaration, context_.channel->rank(), losses_->copies_state());
  }
  owed->insert(owed->end(), tensor->releasing.begin(), tensor->releasing.end());
  tensor->releasing.clear();
  tensors_.erase(key);
}

void SumServer::OnFreed(const Partition& partition) {
  ps::WriterLock lock(&mu_);
  const auto it = partitions_.find(partition.key);
  if (it != partitions_.end() && it->second.get() == &partition) partitions_.erase(it);
}

void SumServer::AnswerReleases(const Owed& owed) {
  Owed due;
  {
    ps::WriterLock lock(&mu_);
    for (const auto& releasing : owed) {
      if (--releasing->left == 0) due.push_back(releasing);
    }
  }
  for (const auto& releasing : due) {
    context_.Answer(Caller{releasing->rank, releasing->request, kRelease}, releasing->key, "");
  }
}

void SumServer::OnWorkerGone(int rank, const std::string& reason) {
  losses_->OnWorkerGone(rank);
  for (auto& thread : threads_) thread->OnWorkerGone(rank, reason);
  DropHolds({rank}, false);
}

void SumServer::DropHolds(const std::set<int>& ranks, bool may_return) {
  Owed owed;
  {
    ps::WriterLock lock(&mu_);
    std::vector<TensorPtr> unused;
    for (const auto& [key, tensor] : tensors_) {
      for (const int rank : ranks) tensor->SetHold(rank, false);
      // A tensor that no member has released is kept for absent workers that may return.
      const bool is_over = !may_return || tensor->released_by >= 0;
      if (tensor->holders == 0 && is_over) unused.push_back(tensor);
    }
    for (const TensorPtr& tensor : unused) FreeIfUnused(tensor, &owed);
  }
  AnswerReleases(owed);
}

// ------------------------------------------------------------------ for the loss policy

std::shared_ptr<const DeclaredTensor> SumServer::FindTensor(uint64_t key) {
  ps::ReaderLock lock(&mu_);
  const auto it = tensors_.find(key);
  return it == tensors_.end() ? nullptr : it->second;
}

std::shared_ptr<Partition> SumServer::FindPartition(uint64_t key) {
  ps::ReaderLock lock(&mu_);
  const auto it = partitions_.find(key);
  return it == partitions_.end() ? nullptr : it->second;
}

void SumServer::MakePartition(uint64_t key) {
  ps::WriterLock lock(&mu_);
  const auto it = tensors_.find(key - IndexOf(key));
  if (it != tensors_.end()) FindOrMake(it->second, key);
}

bool SumServer::KeepsState() {
  ps::ReaderLock lock(&mu_);
  return std::any_of(tensors_.begin(), tensors_.end(),
                     [](const auto& entry) { return entry.second->declaration.rule != nullptr; });
}

bool SumServer::SetFirstRound(uint64_t key, uint32_t round) {
  ps::WriterLock lock(&mu_);
  const auto it = tensors_.find(key);
  if (it == tensors_.end() || round <= it->second->first_round) return false;
  it->second->first_round = round;
  return true;
}

}  // namespace core
}  // namespace byteps
