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

// Makes a ServerReplacement if BYTEPS_REPLACE_SERVERS_S is set, otherwise the policy that ends the
// job.
std::unique_ptr<LossPolicy> MakeLossPolicy(const Config& config, int num_servers);

// Continues the job with the successor of a lost server (docs/design/losses.md):
//
//   lost      sends nothing more to the lost server
//   replaced declares all tensors to the successor, and tells it the rounds with which this worker
//             continues; gives it the kept sums; then repeats the unanswered pushes
class ServerReplacement : public LossPolicy {
 public:
  // `has_backups`: whether another server has a copy of each server's optimizer state.
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
  // Confirms answers to servers with no open requests, as long as some of their sums are kept.
  void OnTick() override;
  uint64_t kept_bytes() override { return kept_.bytes(); }

 private:
  // State of a server rank. All messages that bring a successor up to date carry its turn, which is
  // a number of the successor. So answers of a successor that was lost meanwhile are dropped.
  struct Place {
    bool is_vacant = false;  // whether the server is lost and not replaced, so that nothing is sent
    uint64_t turn = 0;       // turn of a successor that is brought up to date; 0: there is none
    uint64_t came_in_turn = 0;  // turn of the present server; 0: the first
    std::deque<KeptSum> to_give;
    size_t given_in_flight = 0;
  };

  // Returns the server that is brought up to date in this turn; -1 if it was lost since.
  int ServerOf(uint64_t turn) const PS_REQUIRES_SHARED(mu_);
  void KeepSum(Message* answer, const Request& request);
  // Tells a successor the rounds with which this worker continues.
  void SendResume(int server, uint64_t turn);
  void OnResumed(const Message& answer);
  // Sends a successor more kept sums, as many as may be in flight. After the last one, calls GoOn.
  void GiveNext(int server, uint64_t turn);
  void Give(int server, uint64_t turn, const KeptSum& sum);
  void OnGiven(const Message& answer);
  void OnConfirmed(const Message& answer);
  void GoOn(int server, uint64_t turn);
  void PushAgain(Request request);

  const bool has_backups_;
  // Held for reading from the time before a request is recorded until it is sent, and while an
  // answer is taken and its sum kept. So a holder of the write lock sees each partition either as a
  // request or as a kept sum, never as both.
  ps::SharedMutex mu_;
  std::vector<Place> places_ PS_GUARDED_BY(mu_);  // by server
  uint64_t last_turn_ PS_GUARDED_BY(mu_) = 0;
  KeptSums kept_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_WORKER_SERVER_REPLACEMENT_H_
