// Optimizer steps on the server: which of them change the state, and when.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "byteps/base/protocol.h"
#include "step_job.h"

namespace byteps {
namespace core {
namespace step_tests {
namespace {

// After speculative steps, whatever the verdicts, parameters and moments have the same bits as
// after steps that were made at once.
TEST(ServerSteps, TriedOnesGiveTheSameBits) {
  for (const uint32_t workers : {1u, 2u, 3u}) {
    const std::vector<double> scales = {1, 0.25, 1, 1, 0, 0.5, 0.5, 0, 0, 1};
    Job job(workers);
    ASSERT_EQ(job.Declare(), "");
    job.Load(1);
    Verdict verdict = Verdict::kNone;
    uint64_t steps = 0;
    std::vector<double> so_far;
    for (uint32_t round = 0; round < scales.size(); ++round) {
      const Values before = MadeAtOnce(so_far.empty() ? std::vector<double>{0} : so_far, workers);
      so_far.push_back(scales[round]);
      const Values after = MadeAtOnce(so_far, workers);
      const auto tried = job.TryAll(round, verdict, Job::StepOf(steps + 1));
      EXPECT_GT(tried.sums().squares, 0);
      EXPECT_EQ(tried.sums().zeros, ZerosOf(round, workers));
      verdict = scales[round] == 1 ? Verdict::kKeep : Verdict::kDrop;
      if (scales[round] == 1) {
        EXPECT_TRUE(Holds(after, tried.values)) << round;
      }
      if (scales[round] == 0) {
        EXPECT_TRUE(Holds(before, job.State(round, verdict))) << round;
      }
      if (scales[round] != 0 && scales[round] != 1) {
        verdict = Verdict::kNone;
        for (uint32_t rank = 0; rank < workers; ++rank) {
          const auto redone =
              job.Await(job.Step(rank, round, Job::StepOf(steps + 1, scales[round])));
          EXPECT_FALSE(redone.failed) << redone.body;
          EXPECT_TRUE(Holds(after, redone.values)) << round;
        }
      }
      // A checkpoint is read after some of the steps.
      if (round % 3 == 0) {
        EXPECT_EQ(job.State(round, verdict), after) << round;
      }
      steps += scales[round] != 0;
    }
    EXPECT_EQ(job.State(static_cast<uint32_t>(scales.size()) - 1, verdict),
              MadeAtOnce(scales, workers));
  }
}

// A step without a verdict has no effect. A member that then makes the next step gets an error.
TEST(ServerSteps, ChangeNothingBeforeTheyAreKept) {
  Job job;
  ASSERT_EQ(job.Declare(), "");
  job.Load(1);
  job.TryAll(0, Verdict::kNone, Job::StepOf(1));
  const auto read = job.Await(job.Read(1, 0, 0, Verdict::kNone));
  EXPECT_TRUE(read.failed);
  EXPECT_NE(read.body.find("without committing or aborting"), std::string::npos) << read.body;
  const auto pushed = job.Await(job.Try(0, 1, Verdict::kNone, Job::StepOf(2)));
  EXPECT_NE(pushed.body.find("without committing or aborting"), std::string::npos);
  // The round has failed: the other member gets the error, too, although its verdict was applied.
  EXPECT_TRUE(job.Await(job.Try(1, 1, Verdict::kDrop, Job::StepOf(2))).failed);
  EXPECT_EQ(job.State(1), MadeAtOnce({0}, 2));
}

// Members give different verdicts on a step. The first counts; the other member gets an error.
TEST(ServerSteps, HaveOneVerdict) {
  for (const Verdict first : {Verdict::kKeep, Verdict::kDrop}) {
    Job job;
    ASSERT_EQ(job.Declare(), "");
    job.Load(1);
    job.TryAll(0, Verdict::kNone, Job::StepOf(1));
    const uint64_t waits = job.Try(0, 1, first, Job::StepOf(2));
    const Verdict second = first == Verdict::kKeep ? Verdict::kDrop : Verdict::kKeep;
    const auto refused = job.Await(job.Try(1, 1, second, Job::StepOf(2)));
    EXPECT_NE(refused.body.find("disagree on a step of 'tensor'"), std::string::npos);
    EXPECT_EQ(job.Await(waits).body, refused.body);
    EXPECT_EQ(job.State(1), MadeAtOnce({first == Verdict::kKeep ? 1.0 : 0.0}, 2));
  }
}

// One of two workers is lost before, between and after the two verdicts. The other worker's next
// step fails, and the state reflects the verdicts that were given.
TEST(ServerSteps, LoseAWorkerAtEachPhase) {
  const Values dropped = MadeAtOnce({0}, 2);
  const Values kept = MadeAtOnce({1}, 2);
  for (const char* phase : {"tried by one", "tried", "kept by one"}) {
    Job job;
    ASSERT_EQ(job.Declare(), "");
    job.Load(1);
    if (phase == std::string("tried by one")) {
      const uint64_t waits = job.Try(0, 0, Verdict::kNone, Job::StepOf(1));
      job.server().OnWorkerGone(1, "worker 1 was lost");
      EXPECT_NE(job.Await(waits).body.find("worker 1 was lost"), std::string::npos);
      EXPECT_EQ(job.State(0), dropped);
      continue;
    }
    job.TryAll(0, Verdict::kNone, Job::StepOf(1));
    if (phase == std::string("tried")) {
      job.server().OnWorkerGone(1, "worker 1 was lost");
      EXPECT_EQ(job.State(0, Verdict::kDrop), dropped);
      continue;
    }
    const uint64_t waits = job.Try(0, 1, Verdict::kKeep, Job::StepOf(2));
    job.server().OnWorkerGone(1, "worker 1 was lost");
    EXPECT_NE(job.Await(waits).body.find("worker 1 was lost"), std::string::npos);
    EXPECT_EQ(job.State(1), kept);
  }
}

// A checkpoint is loaded over a speculative step, whose verdict then has no effect.
TEST(ServerSteps, AreOvertakenByALoad) {
  Job job, other;
  for (Job* one : {&job, &other}) {
    ASSERT_EQ(one->Declare(), "");
    one->Load(1);
  }
  job.TryAll(0, Verdict::kNone, Job::StepOf(1));
  job.Load(2);
  EXPECT_TRUE(job.Await(job.Step(0, 0, Job::StepOf(1, 0.5))).failed);
  other.Load(2);
  const Values loaded = other.State(0);
  const uint64_t waits = job.Try(0, 1, Verdict::kNone, Job::StepOf(1));
  const auto tried = job.Await(job.Try(1, 1, Verdict::kKeep, Job::StepOf(1)));
  EXPECT_FALSE(tried.failed) << tried.body;
  EXPECT_EQ(job.Await(waits).values, tried.values);
  EXPECT_EQ(job.State(1, Verdict::kDrop), loaded);
}

// A checkpoint is read in ranges. Reading a range applies the verdict, as reading all does.
TEST(ServerSteps, AreReadInParts) {
  const Values kept = MadeAtOnce({1}, 2);
  Job job;
  ASSERT_EQ(job.Declare(), "");
  job.Load(1);
  job.TryAll(0, Verdict::kNone, Job::StepOf(1));
  using Parts = std::vector<std::pair<uint32_t, uint32_t>>;
  for (const auto& [begin, end] : Parts{{0, 0}, {3, 4}, {1, kElements - 1}, {0, kElements}}) {
    const auto size = static_cast<uint32_t>(sizeof(float));
    const auto part =
        job.Await(job.Read(1, 0, 0, Verdict::kKeep, begin * size, (end - begin) * size));
    EXPECT_FALSE(part.failed) << part.body;
    EXPECT_EQ(part.values, Values(kept.begin() + begin, kept.begin() + end)) << begin;
  }
  EXPECT_EQ(job.State(0, Verdict::kKeep), kept);
  for (const auto& [offset, bytes] : Parts{{4, kBytes}, {kBytes + 4, 0}, {UINT32_MAX, 4}}) {
    const auto beyond = job.Await(job.Read(1, 0, 0, Verdict::kKeep, offset, bytes));
    EXPECT_TRUE(beyond.failed);
    EXPECT_NE(beyond.body.find("does not have the declared form"), std::string::npos);
  }
}

// A member whose operation failed may have skipped a push or a STEP. It continues with the next
// round: the other members get an error, and the server drops the old round.
TEST(ServerSteps, AreGivenUpByTheNextPush) {
  constexpr uint32_t kRounds = 2000;  // more rounds than a member may be ahead
  Job job;
  ASSERT_EQ(job.Declare(), "");
  job.Load(1);
  const uint64_t norms[] = {job.Push(kPushNorm, 0, 0, Verdict::kNone, {}),
                            job.Push(kPushNorm, 1, 0, Verdict::kNone, {})};
  for (const uint64_t norm : norms) EXPECT_FALSE(job.Await(norm).failed);
  const uint64_t waits = job.Push(kPushStep, 0, 1, Verdict::kNone, Job::StepOf(1));
  UpdateStep step = Job::StepOf(1);
  step.skip = true;
  std::vector<uint64_t> last(2);
  for (uint32_t round = 2; round < kRounds; ++round) {
    for (const int rank : {1, 0}) {
      last[rank] = job.Push(kPushStep, rank, round, Verdict::kNone, step);
    }
  }
  const auto refused = job.Await(waits);
  EXPECT_TRUE(refused.failed);
  EXPECT_NE(refused.body.find("worker 1 gave up"), std::string::npos) << refused.body;
  for (const uint64_t number : last) {
    const auto answer = job.Await(number);
    EXPECT_FALSE(answer.failed) << answer.body;
  }
  EXPECT_TRUE(job.Await(job.Step(0, 0, Job::StepOf(1))).failed);
  EXPECT_EQ(job.server().OpenRounds(), 0);
  EXPECT_EQ(job.State(kRounds - 1), MadeAtOnce({0}, 2));
}

// Three workers add in a wider type. A step that fails after its sum leaves the server unchanged,
// and the next one is made.
TEST(ServerSteps, FailBeforeTheParametersAreLoaded) {
  Job job(3);
  ASSERT_EQ(job.Declare(), "");
  for (uint32_t round = 0; round < 3; ++round) {
    std::vector<uint64_t> numbers;
    for (const int rank : {2, 0, 1}) {
      numbers.push_back(job.Push(kPushStep, rank, round, Verdict::kNone, Job::StepOf(1)));
    }
    for (const uint64_t number : numbers) {
      const auto answer = job.Await(number);
      EXPECT_NE(answer.body.find("'tensor' were never loaded"), std::string::npos) << answer.body;
    }
  }
  job.Load(1);
  std::vector<uint64_t> numbers;
  for (const int rank : {2, 0, 1}) {
    numbers.push_back(job.Push(kPushStep, rank, 3, Verdict::kNone, Job::StepOf(1)));
  }
  const Values made = MadeAtOnce({0, 0, 0, 1}, 3);
  for (const uint64_t number : numbers) {
    const auto answer = job.Await(number);
    EXPECT_FALSE(answer.failed) << answer.body;
    EXPECT_TRUE(Holds(made, answer.values));
  }
}

// The step fails when the first member asks for it; the second member gets the same error.
TEST(ServerSteps, AskedForAfterAFailureFailLikewise) {
  Job job(2);
  ASSERT_EQ(job.Declare(), "");
  for (const int rank : {0, 1}) job.Push(kPushNorm, rank, 0, Verdict::kNone, Job::StepOf(1));
  for (const int rank : {0, 1}) {
    const auto answer = job.Await(job.Step(rank, 0, Job::StepOf(1)));
    EXPECT_NE(answer.body.find("'tensor' were never loaded"), std::string::npos) << answer.body;
  }
  EXPECT_EQ(job.server().OpenRounds(), 0);
}

// All members try a step, or none; and the rule has to allow it.
TEST(ServerSteps, AreTriedByAll) {
  Job job;
  ASSERT_EQ(job.Declare(), "");
  job.Load(1);
  const uint64_t waits = job.Try(0, 0, Verdict::kNone, Job::StepOf(1));
  const auto refused = job.Await(job.Push(kPushStep, 1, 0, Verdict::kNone, Job::StepOf(1)));
  EXPECT_NE(refused.body.find("to be tried"), std::string::npos) << refused.body;
  EXPECT_EQ(job.Await(waits).body, refused.body);
}

// A speculative step needs no more memory than one sum of gradients, until members decide.
TEST(ServerSteps, KeepOneGradient) {
  for (const uint32_t workers : {1u, 2u, 3u, 4u}) {
    Job job(workers);
    ASSERT_EQ(job.Declare(), "");
    job.Load(1);
    ASSERT_TRUE(job.ComesToHold(0));
    Verdict verdict = Verdict::kNone;
    for (uint32_t round = 0; round < 4; ++round) {
      job.TryAll(round, verdict, Job::StepOf(1 + round));
      EXPECT_TRUE(job.ComesToHold(1)) << workers << " workers, round " << round;
      verdict = Verdict::kKeep;
    }
    for (uint32_t rank = 0; rank < workers; ++rank) {
      EXPECT_FALSE(job.Await(job.Step(rank, 3, Job::StepOf(4))).failed);
    }
    EXPECT_TRUE(job.ComesToHold(0)) << workers;
  }
}

// The memory for gradients is counted together with the state.
TEST(ServerSteps, NeedMemoryForTheGradients) {
  Job enough(2, std::to_string(4 * kBytes));
  EXPECT_EQ(enough.Declare(), "");
  Job little(2, std::to_string(4 * kBytes - 1));
  const std::string refusal = little.Declare();
  EXPECT_NE(refusal.find("needs " + std::to_string(4 * kBytes) + " bytes"), std::string::npos);
  EXPECT_NE(refusal.find("and its gradient until a step is kept"), std::string::npos) << refusal;
}

// A removed replica that comes back has an old state, and must not load it into the servers.
TEST(ServerSteps, TakeNoStateFromARemovedReplica) {
  Job job(3);
  ASSERT_EQ(job.Declare(), "");
  job.server().SetAbsent({1});
  const Answers::Answer refused = job.LoadBy(1, 5);
  EXPECT_TRUE(refused.failed);
  EXPECT_NE(refused.body.find("its replica was removed"), std::string::npos) << refused.body;
}

}  // namespace
}  // namespace step_tests
}  // namespace core
}  // namespace byteps
