#include "byteps/recovery/server/server_recovery.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"
#include "byteps/base/wire.h"
#include "byteps/recovery/server/notes.h"
#include "byteps/recovery/server/resumed_rounds.h"
#include "byteps/server/sum_server.h"

namespace byteps {
namespace core {

ServerRecovery::ServerRecovery(const Config& config, Channel* channel)
    : channel_(channel),
      vacancies_(channel),
      backup_(config.Bool("BYTEPS_BACKUP_STATE"), static_cast<int>(config.Int("DMLC_NUM_SERVER")),
              config.Int("BYTEPS_SERVER_ENGINE_THREAD"), channel, this) {}

std::unique_ptr<RoundLossPolicy> ServerRecovery::MakeOfRounds(ServerContext* context,
                                                              Rounds* rounds, SumThread* thread) {
  auto made = std::make_unique<RoundRecovery>(context, rounds, thread, &confirmations_, &vacancies_,
                                              backup_.is_on() ? &backup_ : nullptr);
  rounds_.push_back(made.get());
  return made;
}

bool ServerRecovery::Serve(Message* message) {
  if (message->op == kResume) return OnResume(*message), true;
  if (message->op == kConfirm) return OnConfirm(*message), true;
  return false;
}

void ServerRecovery::OnConfirm(const Message& message) {
  WireReader in(message.body);
  confirmations_.Confirm(message.peer, in.Get<uint64_t>());
  WireWriter out;
  out.Put(confirmations_.FirstOpen());
  context_->Answer(Caller{message.peer, message.number, message.op}, message.key, "", nullptr,
                   out.Take());
}

// ------------------------------------------------------------------ successor of a lost server

void ServerRecovery::OnResume(const Message& message) {
  if (server_->KeepsState()) {
    {
      ps::MutexLock lock(&mu_);
      if (backup_.Fetches()) {
        awaiting_state_.push_back(message);
        return;
      }
    }
    const std::string error = backup_.fetch_error();
    if (!error.empty()) return context_->Refuse(message, error);
  }
  for (const uint64_t key : backup_.fetched()->Keys()) server_->MakePartition(key);
  Resume(message);
}

void ServerRecovery::Resume(const Message& message) {
  std::string error;
  WireReader in(message.body);
  constexpr size_t kEach = sizeof(uint64_t) + sizeof(uint32_t);
  const uint32_t count = in.GetCount(kEach);
  for (uint32_t i = 0; i < count; ++i) {
    const auto key = in.Get<uint64_t>();
    const auto round = in.Get<uint32_t>();
    const auto tensor = server_->FindTensor(key);
    if (tensor == nullptr || round == 0) continue;
    if (tensor->declaration.rule) {
      // Members may be in different rounds of the tensor. The copy of the state says which round is
      // next.
      if (error.empty()) error = WhyNoState(tensor->declaration);
    } else if (server_->SetFirstRound(key, round)) {
      for (RoundRecovery* rounds : rounds_) rounds->GoOnFrom(tensor, round);
    }
  }
  if (!error.empty()) return context_->Refuse(message, error);
  if (!in.ok() || !in.at_end()) {
    return context_->Refuse(message, "worker " + std::to_string(message.peer) +
                                         " does not say in which rounds it goes on");
  }
  context_->Answer(Caller{message.peer, message.number, message.op}, message.key, "");
  {
    ps::MutexLock lock(&mu_);
    is_successor_ = true;
    settled_.insert(message.peer);
  }
  server_->DropHolds({}, false);
}

std::string ServerRecovery::WhyNoState(const Declaration& declaration) {
  for (uint64_t i = 0; i < declaration.NumPartitions(); ++i) {
    const int server = ServerOf(declaration.hash, declaration.Key(), declaration.placement, i,
                                backup_.num_servers());
    if (server != channel_->rank() || server_->FindPartition(declaration.Key() + i)) continue;
    return "the state of '" + declaration.name +
           "' is lost with two servers, one of which had the copy of the other one's: load the "
           "last checkpoint";
  }
  return "";
}

bool ServerRecovery::Holds(const DeclaredTensor& tensor, Message* message) {
  if (!tensor.declaration.rule || !backup_.Fetches()) return false;
  ps::MutexLock lock(&mu_);
  if (!backup_.Fetches()) return false;
  awaiting_state_.push_back(std::move(*message));
  return true;
}

void ServerRecovery::OnMade(const std::shared_ptr<Partition>& partition) {
  if (!partition->state) return;
  auto copy = backup_.fetched()->Take(partition->key);
  // The copy may belong to another tensor with the same key. Then no member needs the copy.
  if (!copy || !(*copy->declaration == partition->declaration())) return;
  partition->state = std::move(copy->state);
  PartitionNotes* const notes = NotesOf(partition.get());
  notes->restored_declaration = copy->declaration;
  notes->token = backup_.fetched_token();
  if (copy->last) ResumedRounds::Restore(partition.get(), std::move(*copy->last));
  rounds_[partition->thread]->Adopt(partition);
}

bool ServerRecovery::MayFree(const DeclaredTensor& tensor) {
  ps::MutexLock lock(&mu_);
  const auto is_settled = [this](uint32_t rank) PS_REQUIRES(mu_) {
    return settled_.count(static_cast<int>(rank)) > 0;
  };
  const auto& group = tensor.declaration.group;
  // A member that has not resumed yet may need sums that other members give.
  if (!is_successor_ || std::all_of(group.begin(), group.end(), is_settled)) return true;
  PS_PROBE(kFreedHeld);
  return false;
}

// ------------------------------------------------------------------ callbacks of the backup link

void ServerRecovery::InThreadOf(uint64_t key, std::function<void()> task) {
  rounds_[HashBytes(&key, sizeof(key), 1) % rounds_.size()]->Call(std::move(task));
}

void ServerRecovery::OnCopied(uint64_t key, uint64_t number) {
  const auto partition = server_->FindPartition(key);
  if (partition) rounds_[partition->thread]->OnCopied(partition, number);
}

void ServerRecovery::OnBackup(uint64_t token) {
  for (RoundRecovery* rounds : rounds_) rounds->SetBackup(token);
}

void ServerRecovery::OnFetched() {
  std::vector<Message> waiting;
  {
    ps::MutexLock lock(&mu_);
    waiting.swap(awaiting_state_);
  }
  for (Message& message : waiting) server_->OnMessage(&message);
}

// ------------------------------------------------------------------ events

void ServerRecovery::OnWorkerGone(int rank) {
  confirmations_.SetGone(rank);
  ps::MutexLock lock(&mu_);
  settled_.insert(rank);
}

void ServerRecovery::OnServerLost(int rank) {
  vacancies_.Lost(rank);
  backup_.OnServerLost(rank);
}

void ServerRecovery::OnServerReplaced(int rank) {
  vacancies_.Replaced(rank);
  backup_.OnServerReplaced(rank);
}

void ServerRecovery::SetAbsent(const std::set<int>& ranks) {
  confirmations_.SetAbsent(ranks);
  for (RoundRecovery* rounds : rounds_) rounds->SetAbsent(ranks);
  std::set<int> lost;
  {
    ps::MutexLock lock(&mu_);
    std::set_difference(ranks.begin(), ranks.end(), absent_.begin(), absent_.end(),
                        std::inserter(lost, lost.end()));
    absent_ = ranks;
    settled_.insert(lost.begin(), lost.end());
  }
  server_->DropHolds(lost, true);
}

}  // namespace core
}  // namespace byteps
