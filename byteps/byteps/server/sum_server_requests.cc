// What the channel's threads do: declarations, and the checks of requests before an engine thread
// has them.
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/declaration_list.h"
#include "byteps/base/log.h"
#include "byteps/base/steady_time.h"
#include "byteps/base/text.h"
#include "byteps/cluster/node_ids.h"
#include "byteps/server/sum_server.h"

namespace byteps {
namespace core {
namespace {

// Whether a request has a header, which asks for a part of `size` bytes.
bool AsksForAPart(const ps::Message& msg, uint64_t size) {
  PushHeader header;
  if (!PushHeader::Unpack(msg.meta.body, &header) || header.oldest > header.round) return false;
  return header.pull_offset <= size && header.pull_bytes <= size - header.pull_offset;
}

}  // namespace

bool Server::Expects(const ps::Meta& meta, size_t bytes) {
  const uint64_t index = meta.key & (kMaxPartitions - 1);
  ps::ReaderLock lock(&mu_);
  const auto it = tensors_.find(meta.key - index);
  if (!meta.request || it == tensors_.end() || !it->second) return false;
  const Declaration& declaration = it->second->declaration;
  if (index >= declaration.NumPartitions()) return false;
  return bytes == ValueBytes(meta.head, declaration, index).value_or(0);
}

void Server::OnMessage(ps::Message* msg) {
  if (!msg->meta.request) return;
  try {
    Dispatch(msg);
  } catch (const std::bad_alloc& e) {
    Refuse(*msg, NoMemoryFor(*msg, e));
  }
}

void Server::Dispatch(ps::Message* msg) {
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
  const int rank = RankOf(msg.meta.sender);
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

void Server::Refuse(const ps::Message& request, const std::string& error) {
  counters_.refused_requests.Add();
  const Caller caller{RankOf(request.meta.sender), request.meta.addr, request.meta.head};
  Answer(caller, request.meta.key, error, nullptr);
}

std::string Server::Refusal(const ps::Message& msg, const Tensor* tensor, uint64_t index) const {
  const std::string worker = "worker " + std::to_string(RankOf(msg.meta.sender));
  const bool pull = msg.meta.head == kPull || msg.meta.head == kReadState;
  if (tensor == nullptr || index >= tensor->declaration.NumPartitions()) {
    return worker + (pull ? " pulled" : " pushed") + " key " + Hex(msg.meta.key) +
           ", which nobody declared";
  }
  if (!tensor->refusal.empty()) return tensor->refusal;
  const Declaration& declaration = tensor->declaration;
  if (declaration.MemberIndex(RankOf(msg.meta.sender)) < 0) {
    return worker + " is no member of the group of '" + declaration.name + "'";
  }
  if (!HasForm(msg, declaration, index)) {
    return std::string(pull ? "a pull" : "a push") + " of '" + declaration.name + "' from " +
           worker + " does not have the declared form";
  }
  return "";
}

uint64_t Server::ValueBytes(const ps::Message& msg) {
  uint64_t bytes = 0;
  for (const auto& value : msg.data) bytes += value.size();
  return bytes > 0 ? bytes : static_cast<uint32_t>(msg.meta.data_size);
}

std::optional<uint64_t> Server::ValueBytes(int op, const Declaration& declaration, uint64_t index) {
  const uint64_t size = declaration.PartitionSize(index);
  switch (op) {
    case kPushPull:
    case kPush:
      if (!declaration.rule && declaration.fused == (op == kPushPull)) return size;
      return std::nullopt;
    case kPull:
      if (!declaration.rule && !declaration.fused) return 0;
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

bool Server::HasForm(const ps::Message& msg, const Declaration& declaration, uint64_t index) {
  const std::optional<uint64_t> values = ValueBytes(msg.meta.head, declaration, index);
  if (!values || ValueBytes(msg) != *values || msg.data.size() != (*values > 0 ? 1 : 0)) {
    return false;
  }
  if (declaration.rule) return HasFormOfUpdate(msg, declaration, index);
  return AsksForAPart(msg, declaration.PartitionSize(index));
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
    counters_.received_bytes.Add(ValueBytes(task.msg));
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
  const ps::Message& msg = task.msg;
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
  PushHeader::Unpack(msg.meta.body, &header, &detail);
  const uint32_t ahead = header.round - partition->first_round;
  if (ahead < partition->rounds.size()) {
    Round& round = partition->rounds[ahead];
    const int rank = RankOf(msg.meta.sender);
    const int member = partition->tensor->declaration.MemberIndex(rank);
    if (!round.told[member]) {
      round.pushed[member] = round.told[member] = true;
      Refuse(msg, error);
    }
  } else {
    Refuse(msg, error);
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
