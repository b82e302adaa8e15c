#ifndef BYTEPS_RECOVERY_SERVER_NOTES_H_
#define BYTEPS_RECOVERY_SERVER_NOTES_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/recovery/server/confirmations.h"
#include "byteps/recovery/server/copies.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"

namespace byteps {
namespace core {

// A recovery's notes on a round.
struct RoundNotes : LossNotes {
  // By member index: it will not push this round, since its replica was removed before it did.
  // Empty: nobody is excused.
  std::vector<bool> excused;
  // The sum is that of a server that was lost; or so many members had their part of it, and cannot
  // give the whole.
  bool is_resumed = false;
  size_t parts_had = 0;
  // Of a sum that members keep.  Rounds before `ended` have ended at all members that have pushed.
  Confirmations::Hold receipt;
  uint32_t ended = UINT32_MAX;
  // Progress of the wait for members that have not pushed (LateReplicas).
  enum class Waits { kFirst, kQuorum, kAwaited, kSeveral, kLate } waits = Waits::kFirst;
  Round::Clock::time_point quorum_since;
  Round::Clock::time_point excused_until;  // they could wait for a server until then
};

// Work that goes on once the backup has what it was told (backup_link.h).
struct Copying {
  enum Kind { kRound, kStep, kVerdict, kLoad, kAll } kind = kRound;
  uint64_t number = 0;   // of the request to the backup
  uint32_t round = 0;    // kRound
  Message request;       // kStep, kVerdict and kLoad: of a member
  int64_t received = 0;  // when that came
};

// A recovery's notes on a partition.
struct PartitionNotes : LossNotes {
  // By member index: it has pushed a round of this since its replica came.  Empty: nobody has.
  std::vector<bool> came;
  // Of a state of which another server has a copy.  What waits for the backup; the pass with which
  // the backup knows the state; the last round that was complete and that nobody here needs.
  std::optional<Copying> copying;
  uint64_t pass = 0;
  std::optional<UpdatedRound> ended;
  std::shared_ptr<const Declaration> restored_declaration;  // of a state that was a copy
  bool has_state = false;                                   // is among those that have one
};

inline RoundNotes* NotesOf(Round* round) {
  if (!round->notes) round->notes = std::make_unique<RoundNotes>();
  return static_cast<RoundNotes*>(round->notes.get());
}

// Null: there is nothing to remember.
inline const RoundNotes* FindNotes(const Round& round) {
  return static_cast<const RoundNotes*>(round.notes.get());
}

inline PartitionNotes* NotesOf(Partition* partition) {
  if (!partition->notes) partition->notes = std::make_unique<PartitionNotes>();
  return static_cast<PartitionNotes*>(partition->notes.get());
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_NOTES_H_
