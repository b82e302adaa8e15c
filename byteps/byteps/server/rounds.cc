#include "byteps/server/rounds.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/process.h"
#include "byteps/base/wire.h"

namespace byteps {
namespace core {
namespace {

// Rounds that are kept of a tensor.  A worker holds back what would be more than MostRoundsOpen
// ahead of the oldest round that has not ended there.  The oldest one here may be older by as many:
// where a server was lost, one member may have had the answers that another one lacks.
uint32_t MostRoundsKept(const Declaration& declaration) { return 2 * declaration.MostRoundsOpen(); }

// Why a push of this number comes to no round, where it does not.
std::string OutOfReach(const Partition& partition, int rank, uint32_t number) {
  const Declaration& declaration = partition.declaration();
  if (const auto failed = partition.failures.find(number); failed != partition.failures.end()) {
    return failed->second;
  }
  const std::string what = "worker " + std::to_string(rank) + " pushed round " +
                           std::to_string(number) + " of '" + declaration.name + "'";
  if (number < partition.first_round) return what + ", which is over";
  const uint32_t limit = MostRoundsKept(declaration);
  if (number - partition.first_round < limit) return what + " twice";
  return what + " while round " + std::to_string(partition.first_round) +
         " is open: of this tensor of " + std::to_string(declaration.bytes) + " bytes at most " +
         std::to_string(limit) + " rounds are kept; install the same byteps on every node";
}

SharedBytes BytesOf(const std::string& text) {
  if (text.empty()) return {};
  SharedBytes bytes = SharedBytes::New(text.size());
  memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

}  // namespace

void Rounds::Push(Partition* partition, Message* message, int64_t received) {
  const Declaration& declaration = partition->declaration();
  Caller caller = CallerOf(*message, received);
  if (message->op == kPushNorm) caller.bytes = sizeof(GradientSums);
  if (caller.keeps) context_->confirmations.Confirm(caller.rank, HeaderOf(*message).confirmed);
  if (AnswerFromGiven(partition, *message, received)) return;
  if (AnswerAgain(partition, *message, received)) return;
  Round* const round = Admit(partition, *message);
  if (round == nullptr) return;
  if (message->values.empty()) throw OutOfMemory(message->sent_bytes);  // they were dropped
  const int member = declaration.MemberIndex(caller.rank);
  Add(partition, round, member, std::move(message->values));
  caller.added = round->last_added = SteadyNs();
  if (round->first_taken == 0) round->first_taken = caller.taken;
  context_->counters.adding_ns.Add(caller.added - caller.taken);
  context_->TraceAddition(*partition, *round, caller, track_);
  round->callers.push_back(caller);
  partition->came.resize(declaration.group.size());
  partition->came[member] = true;
  if (!round->excused.empty() || round->parts_had > 0) {
    EndIfAll(partition, round);
    return DropDone(partition);
  }
  if (round->accumulator.added() < declaration.group.size()) {
    return BeginGrace(partition, round);
  }
  context_->lateness.Add(caller.rank, caller.received - round->first_taken);
  EndSummed(partition, round);
  DropDone(partition);
}

void Rounds::EndSummed(Partition* partition, Round* round) {
  if (!round->update) return Finish(partition, round);
  if (!CopyRound(partition, round)) Update(partition, round);
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
  if (RefuseAbsent(partition, message, "pushed round " + std::to_string(header.round)) ||
      RefuseReleased(*partition, message)) {
    return nullptr;
  }
  if (partition->state && header.round > 0) {
    error = SettleStep(this, partition, message, header.round - 1);
  }
  // Those that are there, so that none of them puts this one out of reach; then those before it
  // that were not there.
  GiveUpBefore(partition, rank, header.oldest);
  DropDone(partition);
  Round* round = FindOrBegin(partition, header);
  if (round == nullptr || round->pushed[member]) {
    context_->Refuse(message, OutOfReach(*partition, rank, header.round));
    return nullptr;
  }
  GiveUpBefore(partition, rank, header.oldest);
  round->pushed[member] = true;
  round->ended = std::min(round->ended, header.oldest);
  round->forgets_lost |= (header.flags & PushHeader::kForgetLost) != 0;
  FailWithoutThoseGone(partition, round);
  if (round->done) {
    PS_PROBE(kPushAfterFailure);
    error = round->failure;  // it failed before this push came
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
  DropDone(partition);  // not one that is returned: it is open
  return round;
}

Round* Rounds::FindOrBegin(Partition* partition, const PushHeader& header) {
  // Unsigned, so that a round before the first open one is far ahead as well.
  const uint32_t ahead = header.round - partition->first_round;
  if (ahead >= MostRoundsKept(partition->declaration())) return nullptr;
  if (!partition->is_listed) partitions_.push_back(partition);
  partition->is_listed = true;
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
  for (const int rank : absent_) {
    const int member = declaration.MemberIndex(rank);
    if (member >= 0) round.Excuse(member);
  }
  if (partition->state) {
    round.update = std::make_unique<RoundUpdate>(&declaration, number, partition->state.get(),
                                                 &context_->counters);
  }
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

Round* Rounds::FindPushed(Partition* partition, const Message& message) {
  const int rank = message.peer;
  const int member = partition->declaration().MemberIndex(rank);
  const uint32_t number = HeaderOf(message).round;
  Round* const round = partition->Find(number);
  const auto failed = partition->failures.find(number);
  if (round == nullptr && failed != partition->failures.end()) {
    PS_PROBE(kStepAfterFailure);
    context_->Refuse(message, failed->second);
    return nullptr;
  }
  const std::string lacks = partition->state->NotLoaded();
  if (!lacks.empty()) {
    context_->Refuse(message, lacks);
    return nullptr;
  }
  if (round == nullptr || !round->pushed[member] || round->told[member]) {
    context_->Refuse(message, "worker " + std::to_string(rank) + " asks for a step of round " +
                                  std::to_string(number) + " of '" + partition->declaration().name +
                                  "' without having pushed it, or twice");
    return nullptr;
  }
  if (round->failure.empty()) return round;
  PS_PROBE(kStepAfterFailure);
  round->told[member] = true;
  context_->Refuse(message, round->failure);
  DropDone(partition);
  return nullptr;
}

void Rounds::Deliver(Partition* partition, Round* round) {
  context_->TraceRound(*partition, *round, true);
  // Only in an answer that lacks some, or is kept.
  std::string about = PackMembers(round->excused);
  const SharedBytes missing = BytesOf(about);
  SharedBytes tried;  // what goes with the parameters of a step that is tried
  if (!missing.empty() && round->update && !round->update->sums().empty()) {
    const SharedBytes& sums = round->update->sums();
    tried = BytesOf(std::string(sums.data(), sums.size()) + about);
  }
  SharedBytes kept;
  if (std::any_of(round->callers.begin(), round->callers.end(), [](auto& c) { return c.keeps; })) {
    if (round->receipt.serial() == 0) round->receipt = context_->confirmations.Begin();
    const KeptAnswer answer = {round->is_given ? 0 : round->ended, round->receipt.serial(),
                               context_->confirmations.FirstOpen()};
    kept = BytesOf(answer.Pack() + about);
  }
  round->AnswerCallers([&](const Caller& caller) {
    context_->counters.answered_partitions.Add();
    context_->counters.answered_bytes.Add(caller.bytes);
    const int member = partition->declaration().MemberIndex(caller.rank);
    CheckUntold(*partition, *round, member);
    if (caller.keeps) {
      context_->confirmations.Answered(caller.rank, caller.request, round->receipt.serial());
    }
    switch (caller.op) {
      case kPushNorm:
        context_->Answer(caller, partition->key, "", &round->update->sums());
        break;
      case kPushTry:
        context_->Answer(caller, partition->key, "", &round->update->parameters(),
                         tried.empty() ? &round->update->sums() : &tried);
        break;
      default:
        context_->Answer(caller, partition->key, "", &round->accumulator.sum(),
                         caller.keeps ? &kept : (missing.empty() ? nullptr : &missing));
        round->told[member] = true;
    }
  });
  if (round->update && !round->is_restored) round->update->ForgetParameters();
  // What became of an update may be asked for again, at another server.
  if (round->all_told() && !round->update) round->accumulator.Clear(&scratch_);
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
  auto entry = open_.extract(DeadlineOf(*partition, *round));  // takes no memory
  round->deadline = deadline;
  entry.key() = DeadlineOf(*partition, *round);
  open_.insert(std::move(entry));
}

}  // namespace core
}  // namespace byteps
