// Copies of another server's optimizer state.
#include "byteps/recovery/server/copies.h"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/recovery/server/copy_record.h"

namespace byteps {
namespace core {

namespace {

constexpr char kNotOfForm[] = "a record of a copy does not have the declared form";

uint64_t IndexOf(uint64_t key) { return key & (kMaxPartitions - 1); }

size_t SlotBytes(const PartitionState& state) { return state.size() * sizeof(float); }

// Returns the size in bytes of a round's summed gradients.
size_t GradientBytes(const Declaration& declaration, const PartitionState& state, uint64_t index) {
  return IsBlock(declaration.dtype) ? SlotBytes(state) : declaration.PartitionSize(index);
}

// Unpacks a bit per member. Returns an empty vector if there are none.
std::vector<bool> MembersIn(const std::string& packed, const Declaration& declaration) {
  if (packed.empty()) return {};
  std::vector<bool> members(declaration.group.size());
  for (const size_t member : UnpackMembers(packed, members.size())) members[member] = true;
  return members;
}

// Returns the size in bytes of a round's sum: of its answer, or of its gradients.
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
  // Moments that were never set are 0. The state includes whether they were set.
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

uint64_t Copies::resets() {
  ps::MutexLock lock(&mu_);
  return resets_;
}

std::shared_ptr<StateCopy> Copies::Find(uint64_t key) {
  ps::MutexLock lock(&mu_);
  const auto it = copies_.find(key);
  return it == copies_.end() ? nullptr : it->second;
}

std::shared_ptr<StateCopy> Copies::FindOrMake(uint64_t key, const CopyRecord& record,
                                              uint64_t resets, std::string* error) {
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
  if (resets == resets_) copies_[key] = copy;
  return copy;
}

std::string Copies::Apply(uint64_t key, const CopyRecord& record, SharedBytes values,
                          uint64_t resets) {
  std::string error;
  if (record.what == CopyRecord::kFreed) {
    Take(key);
    return "";
  }
  const auto copy =
      record.what == CopyRecord::kState ? FindOrMake(key, record, resets, &error) : Find(key);
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
  if (copy->last->update->has_answer()) return "";  // the round's gradients are gone
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
  // The last round is kept, because some members may not have its answer yet.
  if (!record.is_all && copy->last) copy->last->update->Overtake(&copy->last->sum);
  size_t at = 0;
  for (uint32_t slot = 0; slot < copy->declaration->NumSlots(); ++slot) {
    if ((record.slots >> slot & 1) == 0) continue;
    const std::string error = copy->state->Load(slot, values.data() + at);
    if (!error.empty()) return error;
    at += slot_bytes;
  }
  if (!record.is_all) return "";
  if (last) {  // the round is copied, so that the memory of the state can be freed
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
    const UpdatedRound& round = *copy->last;
    last = {round.number, round.update.get(), round.sum, round.excused};
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
  std::map<uint64_t, std::shared_ptr<StateCopy>> gone;  // destroyed after the lock is released
  ps::MutexLock lock(&mu_);
  ++resets_;
  gone.swap(copies_);
}

}  // namespace core
}  // namespace byteps
