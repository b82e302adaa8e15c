#include "byteps/recovery/server/given_sums.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/wire.h"
#include "byteps/recovery/server/notes.h"
#include "byteps/recovery/server/resumed_rounds.h"

namespace byteps {
namespace core {

namespace {

// Returns the members whose values are missing in a given sum.
std::vector<bool> LackedBy(const Message& message, size_t members) {
  PushHeader header;
  std::string packed;
  PushHeader::Unpack(message.body, &header, &packed);
  std::vector<bool> lacks;
  for (const size_t member : UnpackMembers(packed, members)) {
    lacks.resize(members);
    lacks[member] = true;
  }
  return lacks;
}

}  // namespace

Round* GivenSums::Take(Partition* partition, Message* message) {
  const int rank = message->peer;
  const int member = partition->declaration().MemberIndex(rank);
  if (absent_->Has(rank)) return nullptr;
  // Dropped values mean that this server lacks memory, not that the member had only a part.
  const bool lacks_memory = message->values.empty() && message->sent_bytes > 0;
  if (lacks_memory) throw OutOfMemory(message->sent_bytes);
  Round* const round = rounds_->FindOrBegin(partition, HeaderOf(*message));
  if (round == nullptr) return nullptr;  // the round is over for all members
  round->told[member] = true;
  // The member has finished this round, even if the round is not done here.
  const bool is_over = round->pushed[member] || round->done;
  round->pushed[member] = true;
  if (is_over) return nullptr;
  if (message->values.empty()) {
    ++NotesOf(round)->parts_had;
    return round;
  }
  round->callers.empty() ? PS_PROBE(kGivenFirst) : PS_PROBE(kGivenOpen);
  const size_t members = partition->declaration().group.size();
  ResumedRounds::Resume(round, members, LackedBy(*message, members));
  NotesOf(round)->receipt = confirmations_->Begin();
  rounds_->EndWith(partition, round, std::move(message->values));
  return nullptr;
}

void GivenSums::Acknowledge(Partition* partition, const Message& message) {
  const uint32_t number = HeaderOf(message).round;
  const Round* const round = partition->Find(number);
  const RoundNotes* const notes = round == nullptr ? nullptr : FindNotes(*round);
  WireWriter out;
  out.Put(number);
  out.Put<uint64_t>(notes == nullptr ? 0 : notes->receipt.serial());
  context_->Answer(Caller{message.peer, message.number, message.op}, partition->key, "", nullptr,
                   out.Take());
}

void GivenSums::Describe(Round* round, AnswerNotes* answer) {
  const auto keeps = [](const Caller& caller) { return caller.keeps; };
  if (!std::any_of(round->callers.begin(), round->callers.end(), keeps)) return;
  RoundNotes* const notes = NotesOf(round);
  if (notes->receipt.serial() == 0) notes->receipt = confirmations_->Begin();
  const uint64_t serial = notes->receipt.serial();
  const KeptAnswer head = {notes->is_resumed ? 0 : notes->ended, serial,
                           confirmations_->FirstOpen()};
  answer->to_keep = head.Pack() + answer->lacks;
  for (const Caller& caller : round->callers) {
    if (caller.keeps) confirmations_->Answered(caller.rank, caller.request, serial);
  }
}

}  // namespace core
}  // namespace byteps
