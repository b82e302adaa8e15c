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

// Notes of a recovery on a round.
struct RoundNotes : LossNotes {
  // Members that will not push this round, because their replicas were removed; by index. Empty if
  // all members will push.
  std::vector<bool> excused;
  // Whether a lost server had completed this round, and this server, its successor, got the round's
  // sum from a member or a backup.
  bool is_resumed = false;
  // Number of members to which the lost server sent only a part of this round's sum, as they had
  // asked. They have ended the round, but cannot give the whole sum to this server.
  size_t parts_had = 0;
  // Used if members keep sums. `receipt`: hold on this round's serial. `ended`: a round; every
  // member that has pushed this round has ended all rounds before that one.
  Confirmations::Hold receipt;
  uint32_t ended = UINT32_MAX;
  // Stage of the wait for late members (LateReplicas).
  enum class Waits { kFirst, kQuorum, kAwaited, kSeveral, kLate } waits = Waits::kFirst;
  Round::Clock::time_point quorum_since;
  Round::Clock::time_point excused_until;  // members may have been waiting for a server until then
};

// Work that waits until the backup has acknowledged a record (backup_link.h).
struct Copying {
  enum Kind { kRound, kStep, kVerdict, kLoad, kAll } kind = kRound;
  uint64_t number = 0;   // number of the request to the backup
  uint32_t round = 0;    // kRound
  Message request;       // kStep, kVerdict, kLoad: the member's request
  int64_t received = 0;  // time at which the request arrived
};

// Notes of a recovery on a partition.
struct PartitionNotes : LossNotes {
  // Members that have pushed a round since their replica joined; by index. Empty if none has.
  std::vector<bool> came;
  // Set if a backup copies the state. `copying`: work that waits for the backup's acknowledgement.
  // `token`: token under which the backup has the state. The last complete round stays here when
  // this server has dropped it from the partition's rounds.
  std::optional<Copying> copying;
  uint64_t token = 0;
  std::optional<UpdatedRound> ended;
  // Owns the declaration of a state that was a copy.
  std::shared_ptr<const Declaration> restored_declaration;
  bool has_state = false;  // whether the partition is in CopiedRounds::states_
};

inline RoundNotes* NotesOf(Round* round) {
  if (!round->notes) round->notes = std::make_unique<RoundNotes>();
  return static_cast<RoundNotes*>(round->notes.get());
}

// Returns null if the round has no notes.
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
