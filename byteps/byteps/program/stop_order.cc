#include "byteps/program/stop_order.h"

#include <algorithm>
#include <utility>

#include "byteps/base/log.h"
#include "byteps/net/link/net_address.h"

namespace byteps {
namespace core {
namespace {

constexpr auto kLook = std::chrono::milliseconds(10);
// Limit for reductions in flight after the wait for workers. With this limit a process ends within
// 30 s by default, before Kubernetes, Slurm and torchrun kill it.
constexpr auto kDrainLimit = std::chrono::seconds(2);
// Time for the last answers to arrive.
constexpr auto kArrivalLimit = std::chrono::seconds(1);

}  // namespace

StopOrder::StopOrder(Process* process, std::string signal, double limit_s)
    : process_(process), signal_(std::move(signal)), limit_s_(limit_s) {}

bool StopOrder::Ends(Duration deadline) {
  return process_->IsOver() || process_->IsHurried() || process_->Now() >= deadline;
}

template <typename Condition>
bool StopOrder::WaitUntil(Duration deadline, Condition condition) {
  while (!condition()) {
    if (Ends(deadline)) return false;
    process_->Sleep(kLook);
  }
  return true;
}

std::string StopOrder::Await() {
  const auto limit = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(limit_s_));
  const std::string limit_text = ps::Limit(limit_s_, "BYTEPS_STOP_TIMEOUT_S");
  const bool waits = process_->HasWorkers() && !process_->IsOver();
  BPS_LOG(WARNING) << "told to end by " << signal_
                   << (waits ? "; serves the workers until they have left, for at most " +
                                   limit_text + "; a second signal ends it at once"
                             : "; no worker is in the job");
  const bool all_left = WaitUntil(process_->Now() + limit, [&] { return !process_->HasWorkers(); });
  const bool is_late = !all_left && !process_->IsOver() && !process_->IsHurried() && limit_s_ > 0;
  const bool drained = WaitUntil(process_->Now() + std::min<Duration>(limit, kDrainLimit),
                                 [&] { return !process_->HasOpenSums(); });
  if (drained) {
    // All answers must arrive first: a worker that learned of the end before its sum arrived would
    // fail.
    WaitUntil(process_->Now() + kArrivalLimit, [&] { return process_->AllArrived(); });
  }
  if (process_->IsOver()) return "";
  return "stopped by " + signal_ +
         (drained ? "" : " before the reductions in flight were complete") +
         (is_late ? "; its workers had not left within " + limit_text : "");
}

}  // namespace core
}  // namespace byteps
