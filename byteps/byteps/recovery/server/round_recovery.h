#ifndef BYTEPS_RECOVERY_SERVER_ROUND_RECOVERY_H_
#define BYTEPS_RECOVERY_SERVER_ROUND_RECOVERY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "byteps/cluster/vacancies.h"
#include "byteps/recovery/server/absent_members.h"
#include "byteps/recovery/server/backup_link.h"
#include "byteps/recovery/server/confirmations.h"
#include "byteps/recovery/server/copied_rounds.h"
#include "byteps/recovery/server/given_sums.h"
#include "byteps/recovery/server/late_replicas.h"
#include "byteps/recovery/server/resumed_rounds.h"
#include "byteps/server/round_loss_policy.h"

namespace byteps {
namespace core {

// Continues the rounds of one thread after losses: without removed replicas, and with data of a
// lost server that members or a backup have.
class RoundRecovery : public RoundLossPolicy {
 public:
  // `backup` is null if servers have no copies.
  RoundRecovery(ServerContext* context, Rounds* rounds, SumThread* thread,
                Confirmations* confirmations, const Vacancies* vacancies, BackupLink* backup);

  bool Refuses(const Partition& partition, const Message& message) override;
  bool Answers(Partition* partition, const Message& push, int64_t received) override;
  void OnBegin(const Partition& partition, Round* round) override;
  void OnAdded(Partition* partition, Round* round, const Message& push) override;
  bool Holds(Partition* partition, Round* round) override;
  AnswerNotes Describe(Round* round) override;
  void OnOver(Partition* partition, Round* round) override;
  bool Waits(Partition* partition, Round* round, Round::Clock::time_point as_of) override;
  bool HoldsStep(Partition* partition, const Message& message, const std::string& step,
                 int64_t received) override;
  bool HoldsLoad(Partition* partition, const Message& message, int64_t received) override;
  bool copies_state() const override { return copied_.is_on(); }
  void Serve(Partition* partition, Message* message) override;
  void OnFreed(Partition* partition) override;

  // Makes exactly the workers of these ranks absent.
  void SetAbsent(const std::set<int>& ranks);
  // See ResumedRounds::GoOnFrom.
  void GoOnFrom(std::shared_ptr<const DeclaredTensor> tensor, uint32_t first_round);
  // See CopiedRounds.
  void SetBackup(uint64_t token);
  void OnCopied(std::shared_ptr<Partition> partition, uint64_t number);
  void Adopt(std::shared_ptr<Partition> partition);
  // Runs `task` in the thread, after all queued tasks.
  void Call(std::function<void()> task);

  // Ends rounds of a partition that wait only for absent members.
  void EndWithoutAbsent(Partition* partition);

 private:
  // Ends the round if possible. Call when all expected pushes have come.
  void EndIfAll(Partition* partition, Round* round);

  Confirmations* const confirmations_;
  AbsentMembers absent_;
  LateReplicas late_;
  ResumedRounds resumed_;
  GivenSums given_;
  CopiedRounds copied_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_ROUND_RECOVERY_H_
