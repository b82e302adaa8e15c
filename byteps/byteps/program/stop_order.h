// StopOrder: the end of a scheduler or server that has got a signal to stop.
#ifndef BYTEPS_PROGRAM_STOP_ORDER_H_
#define BYTEPS_PROGRAM_STOP_ORDER_H_

#include <chrono>
#include <string>

namespace byteps {
namespace core {

// Makes a process that was told to stop wait for the job's workers. A cluster manager stops all
// processes at once, but workers that save a checkpoint still need scheduler and servers.
class StopOrder {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // State and clock of the process.
  class Process {
   public:
    virtual ~Process() = default;
    // Returns whether the job has ended or failed.
    virtual bool IsOver() = 0;
    // Returns whether the job has begun and has workers.
    virtual bool HasWorkers() = 0;
    // Returns whether some workers, but not all, have pushed a sum.
    virtual bool HasOpenSums() = 0;
    // Returns whether peers have received everything that was sent.
    virtual bool AllArrived() = 0;
    // Returns whether there was another signal.
    virtual bool IsHurried() = 0;
    // Time on a steady clock.
    virtual Duration Now() = 0;
    virtual void Sleep(Duration duration) = 0;
  };

  // `signal`: a name, e.g. "SIGTERM". `limit_s`: BYTEPS_STOP_TIMEOUT_S. `process` must outlive
  // this.
  StopOrder(Process* process, std::string signal, double limit_s);

  // Waits, then returns, so that the process can end. If the job is not over, returns the reason to
  // tell its peers, such as "stopped by SIGTERM"; otherwise "".
  std::string Await();

 private:
  // Returns whether to stop waiting, because the job is over or no time is left.
  bool Ends(Duration deadline);
  template <typename Condition>
  bool WaitUntil(Duration deadline, Condition condition);

  Process* const process_;
  const std::string signal_;
  const double limit_s_;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_PROGRAM_STOP_ORDER_H_
