#ifndef BYTEPS_RECOVERY_SERVER_COPIED_ROUNDS_H_
#define BYTEPS_RECOVERY_SERVER_COPIED_ROUNDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "byteps/base/shared_bytes.h"
#include "byteps/cluster/channel.h"
#include "byteps/recovery/server/absent_members.h"
#include "byteps/recovery/server/backup_link.h"
#include "byteps/recovery/server/copy_record.h"
#include "byteps/recovery/server/notes.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"
#include "byteps/server/rounds.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

class RoundRecovery;

// Rounds of one thread that change states of which another server has a copy. The backup gets each
// change before members are answered.
//
// A partition sends one change at a time, and is held until the backup has acknowledged it.
class CopiedRounds {
 public:
  // `backup` is null if servers have no copies.
  CopiedRounds(ServerContext* context, Rounds* rounds, SumThread* thread, RoundRecovery* recovery,
               const AbsentMembers* absent, BackupLink* backup)
      : context_(context),
        rounds_(rounds),
        thread_(thread),
        recovery_(recovery),
        absent_(absent),
        backup_(backup) {}

  bool is_on() const { return backup_ != nullptr; }

  // These functions hold a round until the backup has the gradients, a step until the backup has
  // the decision, or a load until the backup has the loaded state. They return false if there is no
  // need to wait.
  bool HoldsRound(Partition* partition, Round* round);
  bool HoldsStep(Partition* partition, const Message& message, const std::string& step,
                 int64_t received);
  bool HoldsLoad(Partition* partition, const Message& message, int64_t received);
  void OnOver(Partition* partition, Round* round);
  void OnFreed(Partition* partition);

  // Starts copying to a backup that has nothing yet. `token`: its token; 0: there is no backup.
  void SetBackup(uint64_t token);
  // Handles the backup's acknowledgement of request `number`.
  void OnCopied(Partition* partition, uint64_t number);
  // Takes over a partition that was given state, possibly the state of a lost server.
  void Adopt(Partition* partition);
  // Sends the backup the next state that it lacks. If it has all states, tells it so.
  void CopyNext();

 private:
  bool HasCopy(const Partition& partition) const;
  // Sends a record to the backup, and holds the partition. If this throws, nothing has changed.
  void Tell(Partition* partition, Copying&& what, CopyRecord record, SharedBytes values);
  void TellAll(Partition* partition, Copying&& what);
  void TellFreed(const Partition& partition);
  static LastRound LastOf(Partition* partition);
  // Returns the last update of a partition whose outcome the backup may not know; null if there is
  // none.
  static RoundUpdate* LastUpdate(Partition* partition);
  // Ends the hold of a partition, and does the work that has waited. The partition may then be held
  // again.
  void GoOn(Partition* partition);
  void GoOn(Partition* partition, const Copying& what);
  // Fails the round or request that has waited, after an error.
  void Fail(Partition* partition, const Copying& what, const std::string& reason);
  // Handles a tensor that was freed while the partition was held.
  void FreeLater(Partition* partition, const Copying& what);

  ServerContext* const context_;
  Rounds* const rounds_;
  SumThread* const thread_;
  RoundRecovery* const recovery_;
  const AbsentMembers* const absent_;
  BackupLink* const backup_;
  uint64_t token_ = 0;              // token of the backup; 0: there is none
  std::vector<Partition*> states_;  // partitions with a state
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_COPIED_ROUNDS_H_
