#ifndef BYTEPS_RECOVERY_WORKER_SERVER_REPLACEMENT_H_
#define BYTEPS_RECOVERY_WORKER_SERVER_REPLACEMENT_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/engine/loss_policy.h"
#include "byteps/engine/requests.h"
#include "byteps/recovery/worker/kept_sums.h"

namespace byteps {
namespace core {

// The policy of a worker by its settings: ServerReplacement with BYTEPS_REPLACE_SERVERS_S, or else
// the one that ends the job.
std::unique_ptr<LossPolicy> MakeLossPolicy(const Config& config, int num_servers);

// Goes on with the server that takes the place of a lost one (docs/design/losses.md):
//
//   lost      nothing is sent to it any more
//   replaced  the new one is told of all tensors, and where this worker goes on in each of them;
//             it is given the sums that were kept; then what the old one had not answered is
//             pushed again
class ServerReplacement : public LossPolicy {
 public:
  // `has_backups`: another server has a copy of each server's optimizer state.
  ServerReplacement(bool has_backups, int num_servers);

  bool keeps_sums() const override { return true; }
  void Complete(PushHeader* header, int server) override;
  std::string Send(int server, const std::function<std::string(bool)>& send) override;
  bool TakeRequest(Message* answer, Request* request) override;
  bool IsVacant(int server) override;
  void OnReleased(int server, const Tensor& tensor) override;
  void OnServerLost(int server, const std::string& reason) override;
  void OnServerReplaced(int server) override;
  bool OnAnswer(const Message& message) override;
  // Tells servers that have no requests of this worker's what it has, as long as it keeps any of
  // their sums.
  void OnTick() override;
  uint64_t kept_bytes() override { return kept_.bytes(); }

 private:
  // A server's place. A successor is told in one turn where this worker goes on: all messages of
  // that turn have its number, so that answers of one that was lost meanwhile are dropped.
  struct Place {
    bool is_vacant = false;     // what is sent there would be lost
    uint64_t turn = 0;          // 0: no successor is being told
    uint64_t came_in_turn = 0;  // 0: the first server of this place
    std::deque<KeptSum> to_give;
    size_t given_in_flight = 0;
  };

  // The server that is told in this turn; -1: it is lost by now.
  int ServerOf(uint64_t turn) const PS_REQUIRES_SHARED(mu_);
  void KeepSum(Message* answer, const Request& request);
  // Tells a successor in which rounds this worker goes on.
  void SendResume(int server, uint64_t turn);
  void OnResumed(const Message& answer);
  // Gives a successor as many of the sums that wait as may be in flight; after the last, goes on.
  void GiveNext(int server, uint64_t turn);
  void Give(int server, uint64_t turn, const KeptSum& sum);
  void OnGiven(const Message& answer);
  void OnConfirmed(const Message& answer);
  void GoOn(int server, uint64_t turn);
  void PushAgain(Request request);

  const bool has_backups_;
  // Held to read from before a request is remembered until it is sent, and while an answer is taken
  // and its sum kept. The thread that holds it to write sees each partition in one place.
  ps::SharedMutex mu_;
  std::vector<Place> places_ PS_GUARDED_BY(mu_);  // by server
  uint64_t last_turn_ PS_GUARDED_BY(mu_) = 0;
  KeptSums kept_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_WORKER_SERVER_REPLACEMENT_H_
