#ifndef BYTEPS_RECOVERY_SERVER_SERVER_RECOVERY_H_
#define BYTEPS_RECOVERY_SERVER_SERVER_RECOVERY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/cluster/channel.h"
#include "byteps/cluster/vacancies.h"
#include "byteps/recovery/server/backup_link.h"
#include "byteps/recovery/server/confirmations.h"
#include "byteps/recovery/server/round_recovery.h"
#include "byteps/server/server_loss_policy.h"

namespace byteps {
namespace core {

// Continues after losses: with the members that are left, or as the successor of a lost server, if
// workers ask for that (docs/design/losses.md).
class ServerRecovery : public ServerLossPolicy, private BackupUser {
 public:
  // `channel`: channel of the server.
  ServerRecovery(const Config& config, Channel* channel);

  std::unique_ptr<RoundLossPolicy> MakeOfRounds(ServerContext* context, Rounds* rounds,
                                                SumThread* thread) override;
  void OnJoined() override { backup_.Start(); }
  bool ExpectsOfServer(const MessageHead& head) override { return backup_.Expects(head); }
  void OnServerMessage(Message* message) override { backup_.OnMessage(message); }
  bool Serve(Message* message) override;
  bool Holds(const DeclaredTensor& tensor, Message* message) override;
  void OnMade(const std::shared_ptr<Partition>& partition) override;
  bool MayFree(const DeclaredTensor& tensor) override;
  bool copies_state() const override { return backup_.is_on(); }
  bool has_copy() override { return backup_.IsCopied(); }
  void OnWorkerGone(int rank) override;
  void OnServerLost(int rank) override;
  void OnServerReplaced(int rank) override;
  void SetAbsent(const std::set<int>& ranks) override;

 private:
  // Handles the confirmation of received answers by a worker that has nothing to push.
  void OnConfirm(const Message& message);
  // Handles the report of a worker to the successor of a lost server: the rounds with which the
  // worker continues.
  void OnResume(const Message& message);
  void Resume(const Message& message);
  // Returns why this successor cannot continue with an updated tensor, or "".
  std::string WhyNoState(const Declaration& declaration);
  // BackupUser.
  void InThreadOf(uint64_t key, std::function<void()> task) override;
  void OnCopied(uint64_t key, uint64_t number) override;
  void OnBackup(uint64_t token) override;
  void OnFetched() override;

  Channel* const channel_;
  Vacancies vacancies_;
  Confirmations confirmations_;
  BackupLink backup_;
  std::vector<RoundRecovery*> rounds_;  // by thread; never changes
  ps::Mutex mu_;
  // Ranks of workers that have resumed on this successor, or need not. `is_successor_`: whether
  // this server replaces a lost server.
  std::set<int> settled_ PS_GUARDED_BY(mu_);
  bool is_successor_ PS_GUARDED_BY(mu_) = false;
  std::set<int> absent_ PS_GUARDED_BY(mu_);
  // Requests about updated tensors. They wait until this server has met its backup, or has the
  // state of the lost server.
  std::vector<Message> awaiting_state_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_SERVER_RECOVERY_H_
