// Copies of another server's state, and rounds of a state that another server has a copy of.
#include <bit>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"
#include "byteps/base/wire.h"
#include "byteps/server/backup_link.h"
#include "byteps/server/rounds.h"

namespace byteps {
namespace core {

std::string CopyRecord::Pack() const {
  WireWriter out;
  out.Put(pass);
  out.Put(static_cast<uint8_t>(what));
  out.PutText(settled);
  out.Put(round);
  out.Put(rank);
  out.PutText(lacks);
  if (what == kState) {
    out.PutText(declaration);
    out.Put(slots);
    out.Put<uint8_t>(is_all ? 1 : 0);
    out.PutText(last);
  } else if (what == kRound) {
    out.Put(op);
    out.PutText(step);
  }
  return out.Take();
}

bool CopyRecord::Unpack(const std::string& text, CopyRecord* record) {
  WireReader in(text);
  record->pass = in.Get<uint64_t>();
  const auto what = in.Get<uint8_t>();
  if (what > kFreed) return false;
  record->what = static_cast<What>(what);
  record->settled = in.GetText();
  record->round = in.Get<uint32_t>();
  record->rank = in.Get<uint32_t>();
  record->lacks = in.GetText();
  if (what == kState) {
    record->declaration = in.GetText();
    record->slots = in.Get<uint32_t>();
    record->is_all = in.Get<uint8_t>() != 0;
    record->last = in.GetText();
  } else if (what == kRound) {
    record->op = in.Get<uint8_t>();
    record->step = in.GetText();
  }
  return in.ok() && in.at_end();
}

namespace {

constexpr char kNotOfForm[] = "a record of a copy does not have the declared form";

uint64_t IndexOf(uint64_t key) { return key & (kMaxPartitions - 1); }

size_t SlotBytes(const PartitionState& state) { return state.size() * sizeof(float); }

// Of the summed gradients of a round.
size_t GradientBytes(const Declaration& declaration, const PartitionState& state, uint64_t index) {
  return IsBlock(declaration.dtype) ? SlotBytes(state) : declaration.PartitionSize(index);
}

// Empty: none.
std::vector<bool> MembersIn(const std::string& packed, const Declaration& declaration) {
  if (packed.empty()) return {};
  std::vector<bool> members(declaration.group.size());
  for (const size_t member : UnpackMembers(packed, members.size())) members[member] = true;
  return members;
}

// Of what a round's sum has become.
size_t SumBytes(const StateCopy& copy, const RoundUpdate& update) {
  return update.has_answer() ? copy.state->answer_bytes()
                             : GradientBytes(*copy.declaration, *copy.state, copy.index);
}

}  // namespace

CopyRecord RecordOfAll(const Declaration& declaration, const PartitionState& state,
                       const LastRound& last, SharedBytes* values) {
  CopyRecord record;
  record.what = CopyRecord::kState;
  record.is_all = true;
  record.declaration = PackDeclarations({declaration});
  // Moments that were never anything else are 0, and whether they were is a part of the state.
  record.slots = state.has_moments() ? (1U << declaration.NumSlots()) - 1 : 1;
  if (IsBlock(declaration.dtype)) record.slots |= 1U << declaration.rule->NumSlots();
  const size_t bytes = std::popcount(record.slots) * SlotBytes(state);
  *values = SharedBytes::New(bytes + last.sum.size());
  char* at = values->data();
  for (uint32_t slot = 0; slot < declaration.NumSlots(); ++slot) {
    if ((record.slots >> slot & 1) == 0) continue;
    state.Read(slot, 0, SlotBytes(state), at);
    at += SlotBytes(state);
  }
  if (last.update != nullptr) {
    record.round = last.number;
    record.last = last.update->Pack();
    record.lacks = PackMembers(last.excused);
    memcpy(at, last.sum.data(), last.sum.size());
  }
  return record;
}

uint64_t Copies::generation() {
  ps::MutexLock lock(&mu_);
  return generation_;
}

std::shared_ptr<StateCopy> Copies::Find(uint64_t key) {
  ps::MutexLock lock(&mu_);
  const auto it = copies_.find(key);
  return it == copies_.end() ? nullptr : it->second;
}

std::shared_ptr<StateCopy> Copies::FindOrMake(uint64_t key, const CopyRecord& record,
                                              uint64_t generation, std::string* error) {
  std::vector<Declaration> declarations;
  if (!UnpackDeclarations(record.declaration, &declarations, error)) return nullptr;
  const bool fits = declarations.size() == 1 && declarations[0].rule != nullptr &&
                    declarations[0].Key() == key - IndexOf(key) &&
                    IndexOf(key) < declarations[0].NumPartitions();
  if (!fits || record.slots >> declarations[0].NumSlots() != 0) {
    *error = kNotOfForm;
    return nullptr;
  }
  std::shared_ptr<StateCopy> copy = Find(key);
  if (copy && *copy->declaration == declarations[0]) return copy;
  copy = std::make_shared<StateCopy>();
  copy->declaration = std::make_shared<const Declaration>(std::move(declarations[0]));
  copy->index = IndexOf(key);
  copy->state = std::make_unique<PartitionState>(copy->declaration.get(), copy->index);
  ps::MutexLock lock(&mu_);
  if (generation == generation_) copies_[key] = copy;
  return copy;
}

std::string Copies::Apply(uint64_t key, const CopyRecord& record, SharedBytes values,
                          uint64_t generation) {
  std::string error;
  if (record.what == CopyRecord::kFreed) {
    Take(key);
    return "";
  }
  const auto copy =
      record.what == CopyRecord::kState ? FindOrMake(key, record, generation, &error) : Find(key);
  if (copy == nullptr) return error.empty() ? "a record came of what there is no copy of" : error;
  error = Settle(copy.get(), record);
  if (!error.empty()) return error;
  switch (record.what) {
    case CopyRecord::kState:
      return Load(copy.get(), record, values);
    case CopyRecord::kRound:
      return Add(copy.get(), record, std::move(values));
    default:
      return "";
  }
}

std::string Copies::Settle(StateCopy* copy, const CopyRecord& record) {
  if (record.settled.empty() || !copy->last) return "";
  UpdateStep step;
  const size_t groups = copy->declaration->rule->groups.size();
  if (!UpdateStep::Unpack(record.settled, &step) || step.rates.size() != groups) return kNotOfForm;
  if (copy->last->update->has_answer()) return "";  // its gradients are gone
  std::string failure;
  const std::string error = copy->last->update->Decide(static_cast<int>(record.rank),
                                                       record.settled, &copy->last->sum, &failure);
  return error.empty() ? failure : error;
}

std::string Copies::Load(StateCopy* copy, const CopyRecord& record, const SharedBytes& values) {
  const size_t slot_bytes = SlotBytes(*copy->state);
  const size_t state_bytes = std::popcount(record.slots) * slot_bytes;
  std::optional<UpdatedRound> last;
  if (record.is_all && !record.last.empty()) {
    last.emplace();
    last->number = record.round;
    last->update = std::make_unique<RoundUpdate>(copy->declaration.get(), record.round,
                                                 copy->state.get(), &uncounted_);
    if (!last->update->Unpack(record.last)) return kNotOfForm;
    last->excused = MembersIn(record.lacks, *copy->declaration);
  }
  const size_t sum_bytes = last ? SumBytes(*copy, *last->update) : 0;
  if (values.size() != state_bytes + sum_bytes) return kNotOfForm;
  // Members may still lack the answer of the last round: it stays.
  if (!record.is_all && copy->last) copy->last->update->Overtake(&copy->last->sum);
  size_t at = 0;
  for (uint32_t slot = 0; slot < copy->declaration->NumSlots(); ++slot) {
    if ((record.slots >> slot & 1) == 0) continue;
    const std::string error = copy->state->Load(slot, values.data() + at);
    if (!error.empty()) return error;
    at += slot_bytes;
  }
  if (!record.is_all) return "";
  if (last) {  // memory of its own, without that of the state
    last->sum = SharedBytes::New(sum_bytes);
    memcpy(last->sum.data(), values.data() + at, sum_bytes);
  }
  copy->last = std::move(last);
  return "";
}

std::string Copies::Add(StateCopy* copy, const CopyRecord& record, SharedBytes values) {
  const Declaration& declaration = *copy->declaration;
  if (values.size() != GradientBytes(declaration, *copy->state, copy->index)) return kNotOfForm;
  UpdateStep step;
  const bool has_step = record.op == kPushStep || record.op == kPushTry;
  if (has_step ? !UpdateStep::Unpack(record.step, &step) ||
                     step.rates.size() != declaration.rule->groups.size()
               : record.op != kPushNorm || !record.step.empty()) {
    return kNotOfForm;
  }
  copy->last.emplace();
  copy->last->number = record.round;
  copy->last->sum = std::move(values);
  copy->last->excused = MembersIn(record.lacks, declaration);
  copy->last->update =
      std::make_unique<RoundUpdate>(&declaration, record.round, copy->state.get(), &uncounted_);
  copy->last->update->Agree(static_cast<int>(record.rank), record.op, record.step);
  return copy->last->update->CompleteCopy(&copy->last->sum);
}

std::vector<uint64_t> Copies::Keys() {
  std::vector<uint64_t> keys;
  ps::MutexLock lock(&mu_);
  for (const auto& entry : copies_) keys.push_back(entry.first);
  return keys;
}

CopyRecord Copies::RecordOf(uint64_t key, SharedBytes* values) {
  const auto copy = Find(key);
  if (copy == nullptr) throw std::runtime_error("there is no copy of a part of it");
  LastRound last;
  if (copy->last) {
    const UpdatedRound& kept = *copy->last;
    last = {kept.number, kept.update.get(), kept.sum, kept.excused};
  }
  return RecordOfAll(*copy->declaration, *copy->state, last, values);
}

std::shared_ptr<StateCopy> Copies::Take(uint64_t key) {
  ps::MutexLock lock(&mu_);
  const auto it = copies_.find(key);
  if (it == copies_.end()) return nullptr;
  std::shared_ptr<StateCopy> copy = std::move(it->second);
  copies_.erase(it);
  return copy;
}

void Copies::Clear() {
  std::map<uint64_t, std::shared_ptr<StateCopy>> gone;  // without the lock
  ps::MutexLock lock(&mu_);
  ++generation_;
  gone.swap(copies_);
}

// Rounds of a copied state: what the backup is told before members are answered.
//
// A partition tells one thing at a time, and serves no request until the backup has it.

// ------------------------------------------------------------------ what a backup is told

bool Rounds::HasCopy(const Partition& partition) const {
  return pass_ != 0 && partition.pass == pass_;
}

LastRound Rounds::LastOf(Partition* partition) {
  for (auto it = partition->rounds.rbegin(); it != partition->rounds.rend(); ++it) {
    const bool has_update = it->done && it->failure.empty() && it->update->pushed_by() != 0;
    if (has_update) return {it->number, it->update.get(), it->accumulator.sum(), it->excused};
  }
  if (!partition->ended) return {};
  const UpdatedRound& ended = *partition->ended;
  return {ended.number, ended.update.get(), ended.sum, ended.excused};
}

RoundUpdate* Rounds::LastUpdate(Partition* partition) {
  for (auto it = partition->rounds.rbegin(); it != partition->rounds.rend(); ++it) {
    if (it->done && it->update->pushed_by() != 0) return it->update.get();
  }
  return partition->ended ? partition->ended->update.get() : nullptr;
}

void Rounds::Tell(Partition* partition, Copying&& what, CopyRecord record, SharedBytes values) {
  record.pass = pass_;
  // A decision and a whole state say themselves what was settled.
  RoundUpdate* const last = record.settled.empty() ? LastUpdate(partition) : nullptr;
  if (last != nullptr && !record.is_all) record.settled = last->Settled();
  what.number = context_->backup->Tell(partition->key, record, std::move(values));
  partition->copying = std::move(what);
  if (last != nullptr) last->NoteTold();
}

void Rounds::TellAll(Partition* partition, Copying&& what) {
  PS_PROBE(kStateCopied);
  SharedBytes values;
  CopyRecord record =
      RecordOfAll(partition->declaration(), *partition->state, LastOf(partition), &values);
  Tell(partition, std::move(what), std::move(record), std::move(values));
  partition->pass = pass_;
}

void Rounds::TellFreed(const Partition& partition) {
  CopyRecord record;
  record.pass = pass_;
  record.what = CopyRecord::kFreed;
  context_->backup->Tell(partition.key, record, {});
}

bool Rounds::CopyRound(Partition* partition, Round* round) {
  if (!HasCopy(*partition)) return false;
  PS_PROBE(kRoundCopied);
  const RoundUpdate& update = *round->update;
  CopyRecord record;
  record.what = CopyRecord::kRound;
  record.round = round->number;
  record.op = static_cast<uint8_t>(update.op());
  record.step = update.step();
  record.rank = static_cast<uint32_t>(update.asked_by());
  record.lacks = PackMembers(round->excused);
  Copying what;
  what.round = round->number;
  Tell(partition, std::move(what), std::move(record), round->accumulator.sum());
  return true;
}

bool Rounds::CopyStep(Partition* partition, const Message& message, int64_t received) {
  if (!HasCopy(*partition)) return false;
  PS_PROBE(kStepCopied);
  TellDecision(partition, Copying::kStep, message, StepOf(message), received);
  return true;
}

bool Rounds::CopyVerdict(Partition* partition, const Message& message, const UpdateStep& step,
                         int64_t received) {
  if (!HasCopy(*partition)) return false;
  PS_PROBE(kVerdictCopied);
  TellDecision(partition, Copying::kVerdict, message, step.Pack(), received);
  return true;
}

void Rounds::TellDecision(Partition* partition, Copying::Kind kind, const Message& message,
                          std::string step, int64_t received) {
  CopyRecord record;
  record.settled = std::move(step);
  record.round = HeaderOf(message).round;
  record.rank = static_cast<uint32_t>(message.peer);
  Copying what;
  what.kind = kind;
  what.request = message;
  what.received = received;
  Tell(partition, std::move(what), std::move(record), {});
}

bool Rounds::CopyLoad(Partition* partition, const Message& message, int64_t received) {
  if (context_->backup == nullptr) return false;
  Adopt(partition);
  if (pass_ == 0) {
    context_->backup->HasState();
    return false;
  }
  PS_PROBE(kLoadCopied);
  Copying what;
  what.kind = Copying::kLoad;
  what.request = message;
  what.request.values = SharedBytes();
  what.received = received;
  if (!HasCopy(*partition)) {
    TellAll(partition, std::move(what));
    return true;
  }
  CopyRecord record;
  record.what = CopyRecord::kState;
  record.declaration = PackDeclarations({partition->declaration()});
  const std::string slot = StepOf(message);
  record.slots = 1U << WireReader(slot).Get<uint32_t>();
  Tell(partition, std::move(what), std::move(record), message.values);
  return true;
}

void Rounds::Adopt(Partition* partition) {
  if (context_->backup == nullptr || partition->has_state) return;
  if (!partition->is_listed) partitions_.push_back(partition);
  partition->is_listed = true;
  states_.push_back(partition);
  partition->has_state = true;
  for (const int rank : absent_) {
    if (partition->declaration().MemberIndex(rank) < 0) continue;
    for (Round& round : partition->rounds) Excuse(partition, &round, rank);
  }
  DropDone(partition);
}

std::vector<Partition*> Rounds::SetBackup(uint64_t pass) {
  pass_ = pass;
  std::vector<Partition*> waiting;
  for (Partition* partition : states_) {
    if (partition->copying && !HasCopy(*partition)) waiting.push_back(partition);
  }
  return waiting;
}

void Rounds::CopyNext() {
  if (pass_ == 0) return;
  for (Partition* partition : states_) {
    if (HasCopy(*partition) || partition->copying || partition->is_freed) continue;
    Copying what;
    what.kind = Copying::kAll;
    return TellAll(partition, std::move(what));
  }
  context_->backup->OnToldAll(pass_);
}

// ------------------------------------------------------------------ that it has it

void Rounds::GoOn(Partition* partition, const Copying& what) {
  if (partition->is_freed) return FreeLater(partition, what);
  switch (what.kind) {
    case Copying::kRound: {
      Round* const round = partition->Find(what.round);
      if (round != nullptr && !round->done) Update(partition, round);
      break;
    }
    case Copying::kStep:
      ServeStep(context_, this, partition, what.request, what.received, true);
      break;
    case Copying::kVerdict:
      MoveState(context_, this, partition, what.request, what.received, true);
      break;
    case Copying::kLoad:
      context_->backup->HasState();
      context_->Answer(CallerOf(what.request, what.received), partition->key, "");
      break;
    case Copying::kAll:
      CopyNext();
  }
  EndCopying(partition);
}

void Rounds::EndCopying(Partition* partition) {
  // Unless it waits again.
  while (!partition->copying && !partition->released_by.empty()) {
    Release(partition, partition->released_by.back());
    partition->released_by.pop_back();
  }
  EndWithoutAbsent(partition);
}

void Rounds::FailCopied(Partition* partition, const Copying& what, const std::string& reason) {
  if (what.kind == Copying::kRound) {
    if (Round* const round = partition->Find(what.round)) FailUnanswered(partition, round, reason);
  } else if (what.kind != Copying::kAll) {
    context_->Refuse(what.request, reason);
  }
  EndCopying(partition);
}

void Rounds::FreeLater(Partition* partition, const Copying& what) {
  const auto stays = partition->shared_from_this();
  // Its backup may have made a step that is not made here: both have nothing of it any more.
  Free({stays});
  const bool has_request = what.kind != Copying::kRound && what.kind != Copying::kAll;
  if (has_request)
    context_->Refuse(what.request,
                     "'" + partition->declaration().name + "' was released by all members");
  if (what.kind == Copying::kLoad) context_->backup->HasState();
  if (what.kind == Copying::kAll) CopyNext();
}

bool Rounds::AnswerAgain(Partition* partition, const Message& message, int64_t received) {
  Round* const round = partition->Find(HeaderOf(message).round);
  const int member = partition->declaration().MemberIndex(message.peer);
  if (round == nullptr || !round->is_restored || round->told[member]) return false;
  if (absent_.count(message.peer) > 0) return false;
  PS_PROBE(kAnsweredAgain);
  if (!round->update->IsLike(message.op, StepOf(message))) {
    context_->Refuse(message, "worker " + std::to_string(message.peer) +
                                  " asks for another step of '" + partition->declaration().name +
                                  "' than the others did before a server was lost");
    return true;
  }
  Caller caller = CallerOf(message, received);
  if (message.op == kPushNorm) caller.bytes = sizeof(GradientSums);
  round->callers.push_back(caller);
  Deliver(partition, round);
  DropDone(partition);
  return true;
}

}  // namespace core
}  // namespace byteps
