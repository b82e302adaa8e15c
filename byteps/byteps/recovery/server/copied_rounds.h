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

// Rounds of one thread, by which states change that another server has a copy of: the backup is
// told before members are answered.
//
// A partition tells one thing at a time, and is held until the backup has it.
class CopiedRounds {
 public:
  // `backup` is null where servers have no copies.
  CopiedRounds(ServerContext* context, Rounds* rounds, SumThread* thread, RoundRecovery* recovery,
               const AbsentMembers* absent, BackupLink* backup)
      : context_(context),
        rounds_(rounds),
        thread_(thread),
        recovery_(recovery),
        absent_(absent),
        backup_(backup) {}

  bool is_on() const { return backup_ != nullptr; }

  // True: it goes on once the backup has the gradients, the step that is made or dropped as a
  // member's request says, or the loaded state.
  bool HoldsRound(Partition* partition, Round* round);
  bool HoldsStep(Partition* partition, const Message& message, const std::string& step,
                 int64_t received);
  bool HoldsLoad(Partition* partition, const Message& message, int64_t received);
  void OnOver(Partition* partition, Round* round);
  void OnFreed(Partition* partition);

  // The backup is told with this pass from now on, and knows nothing; 0: there is none.
  void SetBackup(uint64_t pass);
  // The backup has what it was told by the request of this number.
  void OnCopied(Partition* partition, uint64_t number);
  // A partition has a state, perhaps that of a server that is lost.
  void Adopt(Partition* partition);
  // Tells the backup the next state that it does not know, or that it knows them all.
  void CopyNext();

 private:
  bool HasCopy(const Partition& partition) const;
  // Tells the backup, for which the partition waits then.  If it throws, nothing has changed.
  void Tell(Partition* partition, Copying&& what, CopyRecord record, SharedBytes values);
  void TellAll(Partition* partition, Copying&& what);
  void TellFreed(const Partition& partition);
  static LastRound LastOf(Partition* partition);
  // The last update of a partition, of which its backup may have to be told; null: there is none.
  static RoundUpdate* LastUpdate(Partition* partition);
  // A partition waits for its backup no more, or again.
  void GoOn(Partition* partition);
  void GoOn(Partition* partition, const Copying& what);
  // Fails the round or the request that waited for an answer that came to an error.
  void Fail(Partition* partition, const Copying& what, const std::string& reason);
  // Its tensor was freed while it waited.
  void FreeLater(Partition* partition, const Copying& what);

  ServerContext* const context_;
  Rounds* const rounds_;
  SumThread* const thread_;
  RoundRecovery* const recovery_;
  const AbsentMembers* const absent_;
  BackupLink* const backup_;
  uint64_t pass_ = 0;               // with which the backup is told; 0: there is none
  std::vector<Partition*> states_;  // those that have a state
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_COPIED_ROUNDS_H_
