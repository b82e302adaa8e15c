// What the channel's threads do: declarations, and the checks of requests before an engine thread
// has them.
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/declaration_list.h"
#include "byteps/base/log.h"
#include "byteps/base/steady_time.h"
#include "byteps/base/text.h"
#include "byteps/server/sum_server.h"

namespace byteps {
namespace core {
namespace {

// Whether a request has a header, which asks for a part of `size` bytes.
bool AsksForAPart(const Message& message, uint64_t size) {
  PushHeader header;
  if (!PushHeader::Unpack(message.body, &header) || header.oldest > header.round) return false;
  return header.pull_offset <= size && header.pull_bytes <= size - header.pull_offset;
}

}  // namespace

bool Server::Expects(const MessageHead& head, size_t bytes) {
  const uint64_t index = head.key & (kMaxPartitions - 1);
  ps::ReaderLock lock(&mu_);
  const auto it = tensors_.find(head.key - index);
  if (!head.is_request || it == tensors_.end() || !it->second) return false;
  const Declaration& declaration = it->second->declaration;
  if (index >= declaration.NumPartitions()) return false;
  return bytes == ValueBytes(head.op, declaration, index).value_or(0);
}

void Server::OnMessage(Message* message) {
  if (!message->is_request) return;
  try {
    Dispatch(message);
  } catch (const std::bad_alloc& e) {
    Refuse(*message, NoMemoryFor(*message, e));
  }
}

void Server::Dispatch(Message* message) {
  switch (message->op) {
    case kDeclare:
      return OnDeclare(*message);
    case kPushPull:
    case kPushStep:
    case kPushNorm:
    case kPushTry:
    case kStep:
    case kLoadState:
    case kReadState:
      return OnRequest(message);
    default: {
      Refuse(*message, "the server does not know operation " + std::to_string(message->op) +
                       ": install the same byteps on every node");
    }
  }
}

void Server::OnDeclare(const Message& message) {
  const int rank = message.peer;
  std::vector<Declaration> declarations;
  std::string error;
  if (!UnpackDeclarations(message.body, &declarations, &error)) {
    return Refuse(message, "the declaration of worker " + std::to_string(rank) + " " + error);
  }
  for (const auto& declaration : declarations) {
    const std::string refusal = Declare(rank, declaration);
    if (error.empty()) error = refusal;
  }
  if (!error.empty()) return Refuse(message, error);
  Answer(Caller{rank, message.number, message.op}, message.key, "", nullptr);
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
    auto made = std::make_unique<Tensor>();
    made->declaration = declaration;
    made->declared_by = rank;
    tensor = std::move(made);
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
      Queue(engine.get(), std::move(task));
    }
  }
  return tensor->refusal;
}

void Server::Refuse(const Message& request, const std::string& error) {
  counters_.refused_requests.Add();
  const Caller caller{request.peer, request.number, request.op};
  Answer(caller, request.key, error, nullptr);
}

std::string Server::Refusal(const Message& message, const Tensor* tensor, uint64_t index) const {
  const std::string worker = "worker " + std::to_string(message.peer);
  const bool pull = message.op == kReadState;
  if (tensor == nullptr || index >= tensor->declaration.NumPartitions()) {
    return worker + (pull ? " pulled" : " pushed") + " key " + Hex(message.key) +
           ", which nobody declared";
  }
  if (!tensor->refusal.empty()) return tensor->refusal;
  const Declaration& declaration = tensor->declaration;
  if (declaration.MemberIndex(message.peer) < 0) {
    return worker + " is no member of the group of '" + declaration.name + "'";
  }
  if (!HasForm(message, declaration, index)) {
    return std::string(pull ? "a pull" : "a push") + " of '" + declaration.name + "' from " +
           worker + " does not have the declared form";
  }
  return "";
}

std::optional<uint64_t> Server::ValueBytes(int op, const Declaration& declaration, uint64_t index) {
  const uint64_t size = declaration.PartitionSize(index);
  switch (op) {
    case kPushPull:
      if (!declaration.rule) return size;
      return std::nullopt;
    case kPushStep:
    case kPushNorm:
    case kPushTry:
      if (declaration.rule) return size;
      return std::nullopt;
    case kLoadState:
      if (declaration.rule) return size / SizeOf(declaration.dtype) * sizeof(float);
      return std::nullopt;
    case kStep:
    case kReadState:
      if (declaration.rule) return 0;
      return std::nullopt;
    default:
      return std::nullopt;
  }
}

bool Server::HasForm(const Message& message, const Declaration& declaration, uint64_t index) {
  const std::optional<uint64_t> values = ValueBytes(message.op, declaration, index);
  if (!values || message.sent_bytes != *values) return false;
  if (declaration.rule) return HasFormOfUpdate(message, declaration, index);
  return AsksForAPart(message, declaration.PartitionSize(index));
}

void Server::OnRequest(Message* message) {
  const uint64_t index = message->key & (kMaxPartitions - 1);
  Task task;
  const Tensor* tensor = nullptr;
  std::string error;
  {
    ps::ReaderLock lock(&mu_);
    const auto it = tensors_.find(message->key - index);
    if (it != tensors_.end()) tensor = it->second.get();
    error = Refusal(*message, tensor, index);
    const auto partition = partitions_.find(message->key);
    if (partition != partitions_.end()) task.partition = partition->second.get();
  }
  if (!error.empty()) return Refuse(*message, error);
  if (task.partition == nullptr) {
    ps::WriterLock lock(&mu_);
    task.partition = FindOrMake(*tensor, message->key);
  }
  task.message = std::move(*message);
  task.received = SteadyNs();
  if (task.message.sent_bytes > 0) {
    counters_.received_partitions.Add();
    counters_.received_bytes.Add(task.message.sent_bytes);
  }
  Engine* const engine = engines_[task.partition->engine].get();
  if (!ServeHere(engine, &task)) Queue(engine, std::move(task));
}

void Server::ServingFailed(Engine* engine, const Task& task, const std::string& error) {
  if (task.kind != Task::kRequest) {
    // Rounds that it was about end at their deadline.
    BPS_LOG(ERROR) << "server " << channel_->rank() << ": " << error;
    return;
  }
  Partition* const partition = task.partition;
  const Message& message = task.message;
  BPS_LOG(ERROR) << "serving partition " << partition->index << " of '"
                 << partition->tensor->declaration.name << "' failed: " << error;
  for (Round& round : partition->rounds) {
    // One that has its sum may have been told to some of its members.
    std::erase_if(round.callers, [&](const Caller& caller) {
      return round.told[partition->tensor->declaration.MemberIndex(caller.rank)];
    });
    const bool is_open = engine->open.count(DeadlineOf(*partition, round)) > 0;
    if (is_open || !round.callers.empty()) FailRound(engine, partition, &round, error);
  }
  // Whoever waited in its round was answered by that, unless the request never got so far.
  PushHeader header;
  std::string detail;
  PushHeader::Unpack(message.body, &header, &detail);
  const uint32_t ahead = header.round - partition->first_round;
  if (ahead < partition->rounds.size()) {
    Round& round = partition->rounds[ahead];
    const int rank = message.peer;
    const int member = partition->tensor->declaration.MemberIndex(rank);
    if (!round.told[member]) {
      round.pushed[member] = round.told[member] = true;
      Refuse(message, error);
    }
  } else {
    Refuse(message, error);
  }
  DropDoneRounds(partition);
}

Server::Partition* Server::FindOrMake(const Tensor& tensor, uint64_t key) {
  auto& partition = partitions_[key];
  if (!partition) {
    auto made = std::make_unique<Partition>();
    made->tensor = &tensor;
    made->key = key;
    made->index = key & (kMaxPartitions - 1);
    made->engine = next_engine_++ % engines_.size();
    if (tensor.declaration.rule) {
      made->state = std::make_unique<PartitionState>(&tensor.declaration, made->index);
    }
    partition = std::move(made);
  }
  return partition.get();
}

void Server::OnWorkerGone(int rank, const std::string& reason) {
  for (auto& engine : engines_) {
    Task task;
    task.kind = Task::kGone;
    task.rank = rank;
    task.reason = reason;
    Queue(engine.get(), std::move(task));
  }
}

}  // namespace core
}  // namespace byteps
