// Optimizer steps on the server: which of them change the state, and when; also without members of
// removed replicas.
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

// After speculative steps, whatever their outcome, parameters and moments have the same bits as
// after steps made at once.
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
      // Read a checkpoint after some steps.
      if (round % 3 == 0) {
        EXPECT_EQ(job.State(round, verdict), after) << round;
      }
      steps += scales[round] != 0;
    }
    EXPECT_EQ(job.State(static_cast<uint32_t>(scales.size()) - 1, verdict),
              MadeAtOnce(scales, workers));
  }
}

// A step without a verdict has no effect. A member that goes on without a verdict gets an error.
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
  // The round failed: the other member gets the error, too, and its verdict has had effect.
  EXPECT_TRUE(job.Await(job.Try(1, 1, Verdict::kDrop, Job::StepOf(2))).failed);
  EXPECT_EQ(job.State(1), MadeAtOnce({0}, 2));
}

// Members give different verdicts on a step: the first counts, the other gets an error.
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

// A worker is lost before, between and after the verdicts of the two. The other worker's next step
// fails, and the state reflects the verdicts.
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

// A member whose operation failed may have skipped a push or a STEP. It goes on with the next
// round: others get an error, and the old round is dropped.
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

// A speculative step keeps what was promised: one sum of gradients, until the members decide.
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

// ----- without members of removed replicas

constexpr int kRemoved = 1;

// The input of a step: the gradients of these ranks of three, summed and scaled as if all had
// pushed.
Values SumOf(uint32_t round, const std::vector<uint32_t>& ranks) {
  Values sum(kElements);
  for (size_t i = 0; i < kElements; ++i) {
    double value = 0;
    for (const uint32_t rank : ranks) value += Job::GradientOf(i, rank, round);
    sum[i] = static_cast<float>(value * 3 / static_cast<double>(ranks.size()));
  }
  return sum;
}

struct Made {
  std::vector<uint32_t> ranks;
  double scale = 1;  // 0: skipped
};

// The state after these steps.
Values Expected(const std::vector<Made>& steps) {
  Job job(1);
  EXPECT_EQ(job.Declare(), "");
  job.Load(1);
  uint64_t made = 0;
  for (uint32_t round = 0; round < steps.size(); ++round) {
    const double scale = steps[round].scale;
    UpdateStep step = Job::StepOf(made + 1, scale == 0 ? 1 : scale);
    step.skip = scale == 0;
    const uint64_t number =
        job.Push(kPushStep, 0, round, Verdict::kNone, step, SumOf(round, steps[round].ranks));
    EXPECT_FALSE(job.Await(number).failed);
    made += !step.skip;
  }
  return job.State(static_cast<uint32_t>(steps.size()) - 1);
}

const std::vector<uint32_t> kAll = {0, 1, 2}, kOthers = {0, 2};

class AbsentSteps : public testing::Test {
 protected:
  AbsentSteps() {
    EXPECT_EQ(job_.Declare(), "");
    job_.Load(1);
  }

  void Remove() { job_.server().SetAbsent({kRemoved}); }
  Answers::Answer Expect(uint64_t number, const std::vector<size_t>& missing, size_t skip = 0) {
    const Answers::Answer answer = job_.Await(number);
    EXPECT_FALSE(answer.failed) << answer.body;
    if (answer.body.size() >= skip) {
      EXPECT_EQ(UnpackMembers(answer.body.substr(skip), 3), missing);
    }
    return answer;
  }
  Answers::Answer ExpectTried(uint64_t number, const std::vector<size_t>& missing) {
    return Expect(number, missing, sizeof(GradientSums));
  }
  void Says(uint64_t number) {
    const Answers::Answer answer = job_.Await(number);
    EXPECT_FALSE(answer.failed) << answer.body;
  }

  Job job_{3};
};

TEST_F(AbsentSteps, AStepIsMadeOfThePushesThatHaveCome) {
  const UpdateStep step = Job::StepOf(1);
  const uint64_t first = job_.Push(kPushStep, 0, 0, Verdict::kNone, step);
  const uint64_t second = job_.Push(kPushStep, 2, 0, Verdict::kNone, step);
  Remove();
  const Values after = Expected({{kOthers}});
  for (const uint64_t number : {first, second}) {
    EXPECT_TRUE(Holds(after, Expect(number, {kRemoved}).values));
  }
  EXPECT_EQ(job_.State(0), after);
  // The same for steps that begin without it.
  const UpdateStep next = Job::StepOf(2);
  job_.Push(kPushStep, 0, 1, Verdict::kNone, next);
  Expect(job_.Push(kPushStep, 2, 1, Verdict::kNone, next), {kRemoved});
  EXPECT_EQ(job_.State(1), Expected({{kOthers}, {kOthers}}));
}

TEST_F(AbsentSteps, WhatItHasPushedCounts) {
  const UpdateStep step = Job::StepOf(1);
  job_.Push(kPushStep, kRemoved, 0, Verdict::kNone, step);
  job_.Push(kPushStep, 0, 0, Verdict::kNone, step);
  Remove();
  Expect(job_.Push(kPushStep, 2, 0, Verdict::kNone, step), {});
  EXPECT_EQ(job_.State(0), Expected({{kAll}}));
}

TEST_F(AbsentSteps, AStepThatWaitsForTheNormDoesNotWaitForIt) {
  // In the first round the worker dies before its push; in the second, after the norm is known.
  const uint64_t first = job_.Push(kPushNorm, 0, 0, Verdict::kNone, {});
  const uint64_t second = job_.Push(kPushNorm, 2, 0, Verdict::kNone, {});
  Remove();
  Says(first);
  Says(second);
  Expect(job_.Step(2, 0, Job::StepOf(1, 0.5)), {kRemoved});
  Expect(job_.Step(0, 0, Job::StepOf(1, 0.5)), {kRemoved});
  EXPECT_EQ(job_.State(0), Expected({{kOthers, 0.5}}));
  job_.server().SetAbsent({});
  std::vector<uint64_t> numbers;
  for (const int rank : {0, 1, 2}) {
    numbers.push_back(job_.Push(kPushNorm, rank, 1, Verdict::kNone, {}));
  }
  for (const uint64_t number : numbers) Says(number);
  Remove();
  Expect(job_.Step(0, 1, Job::StepOf(2, 0.25)), {});
  Expect(job_.Step(2, 1, Job::StepOf(2, 0.25)), {});
  EXPECT_EQ(job_.State(1), Expected({{kOthers, 0.5}, {kAll, 0.25}}));
}

TEST_F(AbsentSteps, AStepThatIsTriedIsThatOfTheOthers) {
  const UpdateStep step = Job::StepOf(1);
  const uint64_t first = job_.Try(0, 0, Verdict::kNone, step);
  const uint64_t second = job_.Try(2, 0, Verdict::kNone, step);
  Remove();
  const Values after = Expected({{kOthers}});
  const Answers::Answer tried = ExpectTried(first, {kRemoved});
  EXPECT_TRUE(Holds(after, tried.values));
  double squares = 0;
  for (const float value : SumOf(0, kOthers)) squares += double{value} * value;
  EXPECT_DOUBLE_EQ(tried.sums().squares, squares);
  EXPECT_EQ(ExpectTried(second, {kRemoved}).body, tried.body);
  // The step is kept, and the next one clipped.
  const uint64_t third = job_.Try(0, 1, Verdict::kKeep, Job::StepOf(2));
  ExpectTried(job_.Try(2, 1, Verdict::kKeep, Job::StepOf(2)), {kRemoved});
  ExpectTried(third, {kRemoved});
  Expect(job_.Step(0, 1, Job::StepOf(2, 0.5)), {kRemoved});
  Expect(job_.Step(2, 1, Job::StepOf(2, 0.5)), {kRemoved});
  EXPECT_EQ(job_.State(1), Expected({{kOthers}, {kOthers, 0.5}}));
}

TEST_F(AbsentSteps, NobodyWaitsForWhatItWouldSayOfAStep) {
  for (const Verdict verdict : {Verdict::kKeep, Verdict::kDrop}) {
    Job job(3);
    ASSERT_EQ(job.Declare(), "");
    job.Load(1);
    job.TryAll(0, Verdict::kNone, Job::StepOf(1));
    job.server().SetAbsent({kRemoved});
    const bool kept = verdict == Verdict::kKeep;
    const UpdateStep step = Job::StepOf(kept ? 2 : 1);
    job.Try(0, 1, verdict, step);
    EXPECT_FALSE(job.Await(job.Try(2, 1, verdict, step)).failed);
    const Made first{kAll, kept ? 1.0 : 0.0};
    EXPECT_EQ(job.State(1, Verdict::kKeep), Expected({first, {kOthers}}));
  }
}

TEST_F(AbsentSteps, WhatItHasSaidOfAStepHoldsAsWhatTheOthersSay) {
  job_.TryAll(0, Verdict::kNone, Job::StepOf(1));
  job_.Try(kRemoved, 1, Verdict::kKeep, Job::StepOf(2));
  Remove();
  job_.Try(0, 1, Verdict::kKeep, Job::StepOf(2));
  ExpectTried(job_.Try(2, 1, Verdict::kKeep, Job::StepOf(2)), {});
  EXPECT_EQ(job_.State(1, Verdict::kKeep), Expected({{kAll}, {kAll}}));
}

TEST_F(AbsentSteps, OneThatComesBackReadsWhatTheOthersHave) {
  job_.Try(0, 0, Verdict::kNone, Job::StepOf(1));
  job_.Try(2, 0, Verdict::kNone, Job::StepOf(1));
  Remove();
  // It has the state of its last life, and must not load that.
  const Answers::Answer refused = job_.LoadBy(kRemoved, 5);
  EXPECT_TRUE(refused.failed);
  EXPECT_NE(refused.body.find("its replica was removed"), std::string::npos) << refused.body;
  job_.server().SetAbsent({});
  Says(job_.Read(2, 0, 0, Verdict::kKeep, 0, 0));  // sends its verdict, and reads nothing
  const Values after = Expected({{kOthers}});
  EXPECT_TRUE(Holds(after, job_.Await(job_.Read(kRemoved, 0, 0, Verdict::kNone)).values));
  // All take part in the next step; the one that came back has no verdict on the last.
  job_.Try(kRemoved, 1, Verdict::kNone, Job::StepOf(2));
  job_.Try(0, 1, Verdict::kKeep, Job::StepOf(2));
  ExpectTried(job_.Try(2, 1, Verdict::kKeep, Job::StepOf(2)), {});
  EXPECT_EQ(job_.State(1, Verdict::kKeep), Expected({{kOthers}, {kAll}}));
}

TEST_F(AbsentSteps, ARoundThatNobodyElseIsInFails) {
  const uint64_t first = job_.Push(kPushStep, 0, 0, Verdict::kNone, Job::StepOf(1));
  job_.server().SetAbsent({0, 1, 2});
  job_.server().SetAbsent({0, 1});
  EXPECT_FALSE(job_.Await(job_.Push(kPushStep, 2, 1, Verdict::kNone, Job::StepOf(1))).failed);
  (void)first;
}

}  // namespace
}  // namespace step_tests
}  // namespace core
}  // namespace byteps
