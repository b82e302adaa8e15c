// What a server does that finds no memory: it names what it wanted it for, and goes on.
#include <algorithm>
#include <string>

#include "byteps/base/log.h"
#include "byteps/base/out_of_memory.h"
#include "byteps/server/sum_server.h"

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
    default:
      return "a push";
  }
}

}  // namespace

std::string Server::NoMemoryFor(const Message& message, const std::bad_alloc& error) {
  const uint64_t index = message.key & (kMaxPartitions - 1);
  const auto* const known = dynamic_cast<const OutOfMemory*>(&error);
  std::string text = "server " + std::to_string(channel_->rank()) +
                     " is out of memory: it wanted " +
                     (known == nullptr ? "some" : std::to_string(known->bytes())) + " bytes for " +
                     NameOfOp(message.op);
  ps::ReaderLock lock(&mu_);
  const auto it = tensors_.find(message.key - index);
  if (it != tensors_.end() && it->second) text += " of '" + it->second->declaration.name + "'";
  return text + " from worker " + std::to_string(message.peer) + ", partition " +
         std::to_string(index) +
         "; take more servers, or servers with more memory (python -m byteps.sizing says how much)";
}

void Server::OnOutOfMemory(Engine* engine, const Task& task, const std::bad_alloc& error) {
  if (task.kind != Task::kRequest) {
    // Rounds that it was about end at their deadline.
    BPS_LOG(ERROR) << "server " << channel_->rank() << " is out of memory";
    return;
  }
  const std::string reason = NoMemoryFor(task.message, error);
  BPS_LOG(ERROR) << reason;
  const Message& message = task.message;
  Partition* const partition = task.partition;
  PushHeader header;
  std::string rest;
  PushHeader::Unpack(message.body, &header, &rest);
  const uint32_t ahead = header.round - partition->first_round;
  const bool is_push = message.op != kLoadState && message.op != kReadState && message.op != kStep;
  if (!is_push || ahead >= partition->rounds.size()) return Refuse(message, reason);
  Round* const round = &partition->rounds[ahead];
  // It was being answered: to those who had their answers no other one may come.
  if (round->done) return;
  const int rank = message.peer;
  const bool waits =
      std::any_of(round->callers.begin(), round->callers.end(),
                  [&](const Caller& c) { return c.rank == rank && c.request == message.number; });
  FailRound(engine, partition, round, reason);
  round->told[partition->tensor->declaration.MemberIndex(rank)] = true;
  if (!waits) Refuse(message, reason);
  DropDoneRounds(partition);
}

}  // namespace core
}  // namespace byteps
