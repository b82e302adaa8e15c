// Tests of the end of a stopped scheduler or server, on a simulated clock.
#include "byteps/program/stop_order.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace byteps {
namespace core {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Simulated process: events by seconds since the signal.
class PlayedProcess : public StopOrder::Process {
 public:
  static constexpr double kNever = 1e6;

  double workers_leave = kNever;
  double job_fails = kNever;
  double hurried = kNever;
  double sums_close = 0;
  double answers_arrive = 0;
  bool ends_with_workers = true;  // true for a server, which learns of the job's end

  bool IsOver() override { return At(job_fails) || (ends_with_workers && At(workers_leave)); }
  bool HasWorkers() override { return !At(workers_leave); }
  bool HasOpenSums() override { return !At(sums_close); }
  bool AllArrived() override { return At(answers_arrive); }
  bool IsHurried() override { return At(hurried); }
  StopOrder::Duration Now() override { return now_; }
  void Sleep(StopOrder::Duration duration) override { now_ += duration; }

  double seconds_gone() const { return std::chrono::duration<double>(now_).count(); }

 private:
  bool At(double s) const { return seconds_gone() >= s; }

  StopOrder::Duration now_{};
};

std::string Await(PlayedProcess* process, double limit_s = 25) {
  return StopOrder(process, "SIGTERM", limit_s).Await();
}

TEST(StopOrderTest, WorkersThatLeaveEndTheJobInOrder) {
  PlayedProcess process;
  process.workers_leave = 20;
  EXPECT_EQ(Await(&process), "");
  EXPECT_NEAR(process.seconds_gone(), 20, 0.1);
}

TEST(StopOrderTest, AJobThatFailsMeanwhileIsNotWaitedFor) {
  PlayedProcess process;
  process.job_fails = 3;
  EXPECT_EQ(Await(&process), "");
  EXPECT_NEAR(process.seconds_gone(), 3, 0.1);
}

TEST(StopOrderTest, WithoutWorkersItEndsAtOnce) {
  PlayedProcess process;
  process.workers_leave = 0;
  process.ends_with_workers = false;  // a scheduler whose job has not begun
  EXPECT_EQ(Await(&process), "stopped by SIGTERM");
  EXPECT_LT(process.seconds_gone(), 0.1);
}

TEST(StopOrderTest, WorkersThatStayAreNamedWithTheLimit) {
  PlayedProcess process;
  EXPECT_EQ(
      Await(&process),
      "stopped by SIGTERM; its workers had not left within 25.0 s (BYTEPS_STOP_TIMEOUT_S=25)");
  EXPECT_NEAR(process.seconds_gone(), 25, 0.1);
}

TEST(StopOrderTest, ItEndsBeforeAManagerWouldKillIt) {
  PlayedProcess process;
  process.sums_close = process.answers_arrive = PlayedProcess::kNever;
  EXPECT_EQ(Await(&process),
            "stopped by SIGTERM before the reductions in flight were complete; its workers had not "
            "left within 25.0 s (BYTEPS_STOP_TIMEOUT_S=25)");
  EXPECT_LT(process.seconds_gone(), 28);
}

TEST(StopOrderTest, ASumInFlightIsFinishedAndReceived) {
  PlayedProcess process;
  process.sums_close = 1.5;
  process.answers_arrive = 2.2;
  EXPECT_EQ(Await(&process, 1),
            "stopped by SIGTERM; its workers had not left within 1.0 s (BYTEPS_STOP_TIMEOUT_S=1)");
  EXPECT_NEAR(process.seconds_gone(), 2.2, 0.1);
}

TEST(StopOrderTest, ASecondSignalEndsEveryWait) {
  PlayedProcess process;
  process.hurried = 2;
  process.sums_close = process.answers_arrive = PlayedProcess::kNever;
  EXPECT_EQ(Await(&process), "stopped by SIGTERM before the reductions in flight were complete");
  EXPECT_NEAR(process.seconds_gone(), 2, 0.1);
}

TEST(StopOrderTest, WithoutALimitNobodyIsWaitedFor) {
  PlayedProcess process;
  EXPECT_EQ(Await(&process, 0), "stopped by SIGTERM");
  EXPECT_LT(process.seconds_gone(), 0.1);
}

}  // namespace
}  // namespace core
}  // namespace byteps
