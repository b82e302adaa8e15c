#include "byteps/server/rounds.h"

#include <algorithm>
#include <map>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/process.h"
#include "byteps/server/round_errors.h"
#include "byteps/server/server_loss_policy.h"
#include "byteps/server/updates.h"

namespace byteps {
namespace core {
namespace {

constexpr size_t kFailuresKept = 16;  // failures kept per partition
// Error of a round that has its sum, but no memory to answer with it.
constexpr char kNoMemoryToAnswer[] =
    "the server is out of memory: it has the sum, and could not send it";

}  // namespace

Rounds::Rounds(ServerContext* context, int track, Freed freed, SumThread* thread,
               ServerLossPolicy* losses)
    : context_(context),
      track_(track),
      freed_(std::move(freed)),
      losses_(losses->MakeOfRounds(context, this, thread)) {}

void Rounds::Push(Partition* partition, Message* message, int64_t received) {
  const Declaration& declaration = partition->declaration();
  Caller caller = CallerOf(*message, received);
  if (message->op == kPushNorm) caller.bytes = sizeof(GradientSums);
  if (losses_->Answers(partition, *message, received)) return;
  Round* const round = Admit(partition, *message);
  if (round == nullptr) return;
  if (message->values.empty()) throw OutOfMemory(message->sent_bytes);  // the values were dropped
  const int member = declaration.MemberIndex(caller.rank);
  Add(partition, round, member, std::move(message->values));
  caller.added = round->last_added = SteadyNs();
  if (round->first_taken == 0) round->first_taken = caller.taken;
  context_->counters.adding_ns.Add(caller.added - caller.taken);
  context_->TraceAddition(*partition, *round, caller, track_);
  round->callers.push_back(caller);
  const bool is_last = round->accumulator.added() == declaration.group.size();
  losses_->OnAdded(partition, round, *message);
  if (is_last) {
    context_->lateness.Add(caller.rank, caller.received - round->first_taken);
    EndSummed(partition, round);
  }
  DropDone(partition);
}

void Rounds::EndSummed(Partition* partition, Round* round) {
  if (!round->update) return Finish(partition, round);
  if (!losses_->Holds(partition, round)) Update(partition, round);
}

void Rounds::Update(Partition* partition, Round* round) {
  Accumulator& gradients = round->accumulator;
  const std::string error = round->update->Complete(&gradients.sum(), gradients.TakeSpare());
  if (error.empty()) {
    Finish(partition, round);
  } else {
    Fail(partition, round, error);
  }
}

Round* Rounds::Admit(Partition* partition, const Message& message) {
  const Declaration& declaration = partition->declaration();
  const int rank = message.peer;
  const int member = declaration.MemberIndex(rank);
  const PushHeader header = HeaderOf(message);
  std::string error;
  if (losses_->Refuses(*partition, message) || RefuseReleased(*partition, message)) return nullptr;
  if (partition->state && header.round > 0) {
    error = SettleStep(this, partition, message, header.round - 1);
  }
  // GiveUpBefore is called twice. This call ends open rounds, so that none of them puts this push
  // out of reach; a later call ends earlier rounds that FindOrBegin has begun.
  GiveUpBefore(partition, rank, header.oldest);
  DropDone(partition);
  Round* round = FindOrBegin(partition, header);
  if (round == nullptr || round->pushed[member]) {
    context_->Refuse(message, OutOfReach(*partition, rank, header.round));
    return nullptr;
  }
  GiveUpBefore(partition, rank, header.oldest);
  round->pushed[member] = true;
  round->forgets_lost |= (header.flags & PushHeader::kForgetLost) != 0;
  losses_->OnPush(partition, round);
  if (round->done) {
    PS_PROBE(kPushAfterFailure);
    error = round->failure;  // the round failed before this push
  } else {
    if (round->update && error.empty()) {
      error = round->update->Agree(rank, message.op, StepOf(message));
    }
    if (!error.empty()) Fail(partition, round, error);
  }
  if (!error.empty()) {
    round->told[member] = true;
    context_->Refuse(message, error);
    round = nullptr;
  }
  DropDone(partition);  // the returned round is open, so DropDone keeps it
  return round;
}

void Rounds::List(Partition* partition) {
  if (!partition->is_listed) partitions_.push_back(partition);
  partition->is_listed = true;
}

Round* Rounds::FindOrBegin(Partition* partition, const PushHeader& header) {
  // The difference is unsigned, so a round that is finished counts as far ahead, too.
  const uint32_t ahead = header.round - partition->first_round;
  if (ahead >= MostRoundsKept(partition->declaration())) return nullptr;
  List(partition);
  if (ahead > 0 && partition->rounds.size() <= ahead) PS_PROBE(kRoundsOpen);
  while (partition->rounds.size() <= ahead) {
    const auto number = partition->first_round + static_cast<uint32_t>(partition->rounds.size());
    partition->rounds.push_back(Begin(partition, number, header.timeout_ms));
    try {
      open_.emplace(DeadlineOf(*partition, partition->rounds.back()), partition);
    } catch (const std::bad_alloc&) {
      partition->rounds.pop_back();
      throw;
    }
    ++context_->open_rounds;
  }
  Round* const round = &partition->rounds[ahead];
  BPS_INVARIANT("rounds are numbered without a gap", round->number == header.round,
                "round " + std::to_string(round->number) + " where " +
                    std::to_string(header.round) + " belongs");
  return round;
}

Round Rounds::Begin(Partition* partition, uint32_t number, uint32_t timeout_ms) const {
  const Declaration& declaration = partition->declaration();
  Round round;
  round.number = number;
  round.pushed.resize(declaration.group.size());
  round.told.resize(declaration.group.size());
  round.started = Clock::now();
  round.timeout_s = timeout_ms / 1000.0;
  round.deadline = round.started + std::chrono::milliseconds(timeout_ms);
  if (partition->state) {
    round.update = std::make_unique<RoundUpdate>(&declaration, number, partition->state.get(),
                                                 &context_->counters);
  }
  losses_->OnBegin(*partition, &round);
  return round;
}

void Rounds::Add(Partition* partition, Round* round, size_t member, SharedBytes values) {
  const Declaration& declaration = partition->declaration();
  if (declaration.feedback) {
    const uint64_t blocks = declaration.PartitionSize(partition->index) / SizeOf(declaration.dtype);
    if (std::exchange(round->forgets_lost, false)) partition->lost.clear();
    partition->lost.resize(blocks * kBlockValues);
  }
  Chance chance;
  const AdditionRule rule = RuleOf(partition, round, &chance);
  round->accumulator.Take(declaration, rule, member, std::move(values), &scratch_);
}

AdditionRule Rounds::RuleOf(Partition* partition, Round* round, Chance* chance) const {
  const Declaration& declaration = partition->declaration();
  AdditionRule rule;
  rule.in_order = context_->deterministic || declaration.in_order;
  rule.wide_float32 = context_->wide_float32;
  rule.keeps_memory = round->update && round->update->keeps_memory();
  if (declaration.feedback) rule.lost = partition->lost.data();
  if (declaration.stochastic) {
    chance->seed = ChanceSeed(declaration.name, round->number, -1);
    chance->block = partition->index * (declaration.partition_bytes / SizeOf(declaration.dtype));
    rule.chance = chance;
  }
  return rule;
}

void Rounds::Finish(Partition* partition, Round* round) {
  context_->counters.sums.Add();
  context_->counters.round_wait_seconds.Observe(round->last_added - round->first_taken);
  round->done = true;
  Deliver(partition, round);
  Close(*partition, *round);
}

void Rounds::Deliver(Partition* partition, Round* round) {
  context_->TraceRound(*partition, *round, true);
  const AnswerNotes notes = losses_->Describe(round);
  round->AnswerCallers([&](const Caller& caller) {
    context_->counters.answered_partitions.Add();
    context_->counters.answered_bytes.Add(caller.bytes);
    const int member = partition->declaration().MemberIndex(caller.rank);
    CheckUntold(*partition, *round, member);
    switch (caller.op) {
      case kPushNorm:
        context_->Answer(caller, partition->key, "", &round->update->sums());
        break;
      case kPushTry: {
        const SharedBytes& sums = round->update->sums();
        context_->Answer(caller, partition->key, "", &round->update->parameters(),
                         std::string(sums.data(), sums.size()) + notes.lacks);
        break;
      }
      default:
        context_->Answer(caller, partition->key, "", &round->accumulator.sum(), notes.Of(caller));
        round->told[member] = true;
    }
  });
  if (round->update) round->update->ForgetParameters();
  // An update's answer is kept, because a member may ask for it again at another server.
  if (round->all_told() && !round->update) round->accumulator.Clear(&scratch_);
}

void Rounds::EndShort(Partition* partition, Round* round) {
  Chance chance;
  const AdditionRule rule = RuleOf(partition, round, &chance);
  round->accumulator.Close(partition->declaration(), rule, &scratch_);
  round->last_added = SteadyNs();
  EndSummed(partition, round);
}

void Rounds::EndWith(Partition* partition, Round* round, SharedBytes sum) {
  round->accumulator.Put(std::move(sum), &scratch_);
  round->done = true;
  round->last_added = SteadyNs();
  Deliver(partition, round);
  Close(*partition, *round);
}

void Rounds::CheckUntold(const Partition& partition, const Round& round, int member) {
  BPS_INVARIANT_NOTED("a round is answered once to each member", !round.told[member],
                      "round " + std::to_string(round.number) + " of '" +
                          partition.declaration().name + "', member " + std::to_string(member));
}

void Rounds::Close(const Partition& partition, const Round& round) {
  const size_t closed = open_.erase(DeadlineOf(partition, round));
  BPS_INVARIANT_NOTED("a round is closed once", closed == 1,
                      "round " + std::to_string(round.number) + " of '" +
                          partition.declaration().name + "' was not open");
  context_->open_rounds -= closed;
}

Rounds::Clock::time_point Rounds::FirstDeadline() const {
  return open_.empty() ? Clock::time_point::max() : std::get<0>(open_.begin()->first);
}

void Rounds::Postpone(Partition* partition, Round* round, Clock::time_point deadline) {
  auto entry = open_.extract(DeadlineOf(*partition, *round));  // allocates nothing
  round->deadline = deadline;
  entry.key() = DeadlineOf(*partition, *round);
  open_.insert(std::move(entry));
}

// ------------------------------------------------------------------ failures

void Rounds::Fail(Partition* partition, Round* round, const std::string& reason) {
  // This line may throw for lack of memory. The caller then calls this function again.
  round->failure = reason;
  context_->TraceRound(*partition, *round, false);
  round->AnswerCallers([&](const Caller& caller) {
    const int member = partition->declaration().MemberIndex(caller.rank);
    CheckUntold(*partition, *round, member);
    context_->Answer(caller, partition->key, reason);
    round->told[member] = true;
  });
  context_->counters.failed_sums.Add();
  round->accumulator.Clear(&scratch_);
  round->done = true;
  Close(*partition, *round);
}

void Rounds::FailUnanswered(Partition* partition, Round* round, const std::string& reason) {
  const bool is_open = open_.count(DeadlineOf(*partition, *round)) > 0;
  if (is_open && (!round->done || !round->callers.empty())) return Fail(partition, round, reason);
  if (is_open) Close(*partition, *round);
  round->AnswerCallers(
      [&](const Caller& caller) { context_->Answer(caller, partition->key, reason); });
}

void Rounds::GiveUpBefore(Partition* partition, int rank, uint32_t number) {
  if (number <= partition->first_round) return;
  const int member = partition->declaration().MemberIndex(rank);
  const size_t ahead = number - partition->first_round;
  for (size_t i = 0; i < std::min(ahead, partition->rounds.size()); ++i) {
    Round* const round = &partition->rounds[i];
    if (round->done && open_.count(DeadlineOf(*partition, *round)) > 0) {
      FailUnanswered(partition, round, kNoMemoryToAnswer);
    }
    if (round->told[member]) continue;
    if (!round->done) {
      PS_PROBE(kRoundGivenUp);
      Fail(partition, round,
           "worker " + std::to_string(rank) + " gave up round " + std::to_string(round->number) +
               " of '" + partition->declaration().name +
               "', in which something of it failed, and went on");
    }
    round->pushed[member] = round->told[member] = true;
  }
}

std::vector<Partition*> Rounds::WithOpenRounds() const {
  // Only partitions with open rounds are collected, because thousands of workers may leave at once.
  std::map<uint64_t, Partition*> waiting;
  for (const auto& [deadline, partition] : open_) waiting[partition->key] = partition;
  std::vector<Partition*> partitions;
  for (const auto& [key, partition] : waiting) partitions.push_back(partition);
  return partitions;
}

// ------------------------------------------------------------------ releases

bool Rounds::RefuseReleased(const Partition& partition, const Message& message) {
  const int rank = partition.tensor->released_by;
  if (rank < 0) return false;
  PS_PROBE(kPushAfterRelease);
  context_->Refuse(message, "worker " + std::to_string(rank) + " has released '" +
                                partition.declaration().name + "', which worker " +
                                std::to_string(message.peer) +
                                " pushed: all members release it after the same sums");
  return true;
}

void Rounds::Release(const DeclaredTensor* tensor, int rank) {
  for (Partition* partition : partitions_) {
    if (partition->tensor.get() != tensor) continue;
    if (partition->is_held) {
      partition->released_by.push_back(rank);  // LetGo handles this release
    } else {
      Release(partition, rank);
    }
  }
}

void Rounds::LetGo(Partition* partition) {
  while (!partition->is_held && !partition->released_by.empty()) {
    Release(partition, partition->released_by.back());
    partition->released_by.pop_back();
  }
}

void Rounds::Release(Partition* partition, int rank) {
  const int member = partition->declaration().MemberIndex(rank);
  for (Round& round : partition->rounds) {
    if (round.told[member]) continue;
    if (!round.done) {
      PS_PROBE(kRoundOfReleased);
      Fail(partition, &round,
           "worker " + std::to_string(rank) + " has released '" + partition->declaration().name +
               "', of which it had not ended round " + std::to_string(round.number));
    }
    round.pushed[member] = round.told[member] = true;
  }
  DropDone(partition);
}

void Rounds::Free(const std::vector<std::shared_ptr<Partition>>& partitions) {
  for (const auto& partition : partitions) {
    partition->is_freed = true;
    if (partition->is_held) {
      PS_PROBE(kFreedLater);
      continue;  // the thread that holds the partition frees it
    }
    EndFreed(partition.get());
  }
  std::erase_if(partitions_, [](const Partition* p) { return p->is_freed && !p->is_held; });
  for (const auto& partition : partitions) {
    if (!partition->is_held) freed_(*partition);
  }
}

void Rounds::EndFreed(Partition* partition) {
  const std::string reason = "all members have released '" + partition->declaration().name + "'";
  for (Round& round : partition->rounds) {
    if (!round.done) Fail(partition, &round, reason);
    round.accumulator.Clear(&scratch_);
  }
  partition->rounds.clear();
  partition->lost = {};
  losses_->OnFreed(partition);
  partition->state.reset();
}

void Rounds::FailAll(const DeclaredTensor* tensor, const std::string& reason) {
  for (Partition* partition : partitions_) {
    if (partition->tensor.get() != tensor) continue;
    for (auto& round : partition->rounds) {
      if (!round.done) Fail(partition, &round, reason);
    }
    DropDone(partition);
  }
}

void Rounds::FailLate(Clock::time_point as_of, Clock::time_point grace_until,
                      Clock::duration stood_still) {
  while (!open_.empty()) {
    const auto& [deadline, key, number] = open_.begin()->first;
    if (as_of < deadline) return;
    Partition* const partition = open_.begin()->second;
    Round* const round = partition->Find(number);
    if (round->done) {
      FailUnanswered(partition, round, kNoMemoryToAnswer);
      DropDone(partition);
      continue;
    }
    if (losses_->Waits(partition, round, as_of)) continue;
    PS_PROBE(kRoundLate);
    Fail(partition, round, TimedOut(*partition, *round, as_of, grace_until, stood_still));
    DropDone(partition);
  }
}

void Rounds::FailPartition(Partition* partition, const Message& message, const std::string& error) {
  const Declaration& declaration = partition->declaration();
  BPS_LOG(ERROR) << "serving partition " << partition->index << " of '" << declaration.name
                 << "' failed: " << error;
  for (Round& round : partition->rounds) FailUnanswered(partition, &round, error);
  // The lines above have answered the caller, unless no round has its push yet.
  Round* const round = partition->Find(HeaderOf(message).round);
  const int member = declaration.MemberIndex(message.peer);
  if (round == nullptr) {
    context_->Refuse(message, error);
  } else if (!round->told[member]) {
    round->pushed[member] = round->told[member] = true;
    context_->Refuse(message, error);
  }
  DropDone(partition);
}

void Rounds::FailRoundOf(Partition* partition, const Message& message, const std::string& reason) {
  const int op = message.op;
  const bool is_push = op != kLoadState && op != kReadState && op != kStep;
  Round* const round = partition->Find(HeaderOf(message).round);
  if (!is_push || round == nullptr) return context_->Refuse(message, reason);
  // If the round is done, some members may have their answers, and must not get a second one.
  const int member = partition->declaration().MemberIndex(message.peer);
  const bool waits = std::any_of(
      round->callers.begin(), round->callers.end(),
      [&](const Caller& c) { return c.rank == message.peer && c.request == message.number; });
  if (!round->done && !waits && !round->told[member]) {
    context_->Refuse(message, reason);
    round->told[member] = true;
  }
  FailUnanswered(partition, round, reason);
  DropDone(partition);
}

void Rounds::DropDone(Partition* partition) {
  // A round is kept until every member has its sum. Of a failed round only the error is kept.
  while (!partition->rounds.empty()) {
    Round& round = partition->rounds.front();
    if (!round.done || (round.failure.empty() && !round.all_told())) return;
    if (!round.failure.empty() && !round.all_told()) {
      partition->failures[round.number] = std::move(round.failure);
      if (partition->failures.size() > kFailuresKept) {
        partition->failures.erase(partition->failures.begin());
      }
    } else {
      losses_->OnOver(partition, &round);
    }
    round.accumulator.Clear(&scratch_);
    partition->rounds.pop_front();
    ++partition->first_round;
  }
}

}  // namespace core
}  // namespace byteps
