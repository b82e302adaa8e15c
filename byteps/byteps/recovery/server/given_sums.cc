#include <cstring>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/process.h"
#include "byteps/base/wire.h"
#include "byteps/server/rounds.h"

namespace byteps {
namespace core {

// Rounds that began at a server that is lost.  This one has its place: members push again what they
// were not answered, and give the sums that they have.
//
// Each member speaks of a round once: it gives its sum, or pushes it.  So none ends by pushes alone
// while a member that is there has its sum.

namespace {

std::string MembersOf(const Message& message) {
  PushHeader header;
  std::string members;
  PushHeader::Unpack(message.body, &header, &members);
  return members;
}

}  // namespace

void Rounds::Resume(const DeclaredTensor* tensor, uint32_t first_round) {
  for (Partition* partition : partitions_) {
    if (partition->tensor.get() != tensor) continue;
    while (partition->first_round < first_round) {
      if (!partition->rounds.empty()) {
        Round* const round = &partition->rounds.front();
        if (!round->done) Fail(partition, round, "all members have ended it");
        round->accumulator.Clear(&scratch_);
        partition->rounds.pop_front();
      }
      ++partition->first_round;
      if (partition->rounds.empty()) partition->first_round = first_round;
    }
  }
}

void Rounds::Give(Partition* partition, Message* message) {
  TakeGiven(partition, message);
  const uint32_t number = HeaderOf(*message).round;
  const Round* const round = partition->Find(number);
  WireWriter out;
  out.Put(number);
  out.Put<uint64_t>(round == nullptr ? 0 : round->receipt.serial());
  const std::string body = out.Take();
  SharedBytes note = SharedBytes::New(body.size());
  memcpy(note.data(), body.data(), body.size());
  // Only now does it push what is to come behind that.
  context_->Answer(Caller{message->peer, message->number, message->op}, partition->key, "", nullptr,
                   &note);
}

void Rounds::TakeGiven(Partition* partition, Message* message) {
  const int rank = message->peer;
  const int member = partition->declaration().MemberIndex(rank);
  if (absent_.count(rank) > 0) return;
  // Values of a gift that were dropped are no part that a member had.
  const bool lacks_memory = message->values.empty() && message->sent_bytes > 0;
  if (lacks_memory) throw OutOfMemory(message->sent_bytes);
  Round* const round = FindOrBegin(partition, HeaderOf(*message));
  // All have ended one that is over; and this member has ended it, whatever became of it here.
  if (round == nullptr || round->pushed[member]) {
    if (round != nullptr) round->told[member] = true;
    return DropDone(partition);
  }
  round->pushed[member] = round->told[member] = true;
  if (round->done) return DropDone(partition);
  if (message->values.empty()) {
    ++round->parts_had;
    if (round->has_all()) EndIfAll(partition, round);
    return DropDone(partition);
  }
  round->callers.empty() ? PS_PROBE(kGivenFirst) : PS_PROBE(kGivenOpen);
  round->accumulator.Put(std::move(message->values), &scratch_);
  round->is_given = true;
  round->receipt = context_->confirmations.Begin();
  const size_t members = partition->declaration().group.size();
  round->pushed.assign(members, true);
  round->excused.clear();
  for (const size_t lacked : UnpackMembers(MembersOf(*message), members)) {
    round->excused.resize(members);
    round->excused[lacked] = true;
    round->told[lacked] = true;
  }
  round->done = true;
  round->last_added = SteadyNs();
  Deliver(partition, round);
  Close(*partition, *round);
  DropDone(partition);
}

bool Rounds::AnswerFromGiven(Partition* partition, const Message& message, int64_t received) {
  Round* const round = partition->Find(HeaderOf(message).round);
  const int member = partition->declaration().MemberIndex(message.peer);
  if (round == nullptr || !round->is_given || round->told[member]) return false;
  if (absent_.count(message.peer) > 0) return false;
  PS_PROBE(kPushOfGiven);
  round->callers.push_back(CallerOf(message, received));
  Deliver(partition, round);
  DropDone(partition);
  return true;
}

}  // namespace core
}  // namespace byteps
