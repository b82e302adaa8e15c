// Steps of an optimizer on the server without the members of replicas that were removed.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "byteps/base/declaration_list.h"
#include "byteps/base/protocol.h"
#include "tests/server/optimizer/step_job.h"

namespace byteps {
namespace core {
namespace step_tests {
namespace {

constexpr int kRemoved = 1;

// What a step is made of: the sum of the gradients of these ranks of three, scaled as if all had
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

// The state after steps of these lists.
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
  // And those that begin without it.
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
  // In the first round it dies before its push; in the second one, once the norm is told.
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
  // It is kept, and the next one is clipped.
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
  // It has what its last life had, and may not load that.
  const Answers::Answer refused = job_.LoadBy(kRemoved, 5);
  EXPECT_TRUE(refused.failed);
  EXPECT_NE(refused.body.find("its replica was removed"), std::string::npos) << refused.body;
  job_.server().SetAbsent({});
  Says(job_.Read(2, 0, 0, Verdict::kKeep, 0, 0));  // says what becomes of the step, and no more
  const Values after = Expected({{kOthers}});
  EXPECT_TRUE(Holds(after, job_.Await(job_.Read(kRemoved, 0, 0, Verdict::kNone)).values));
  // All are in the next step, and the one that came back has nothing to say of the last.
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

TEST(AbsentStepsOfCopies, AreRefused) {
  Answers answers;
  Server server(ConfigWith({{"BYTEPS_SERVER_ENGINE_THREAD", "1"},
                            {"BYTEPS_BACKUP_STATE", "1"},
                            {"BYTEPS_REPLACE_SERVERS_S", "10"},
                            {"DMLC_NUM_SERVER", "2"}}),
                &answers);
  Declaration declaration;
  declaration.name = "tensor";
  declaration.bytes = declaration.partition_bytes = kBytes;
  declaration.group = {0, 1};
  declaration.patience.replica_ranks = 1;
  auto rule = std::make_shared<UpdateRule>();
  rule->groups = {{0.9, 0.95, 1e-8, false}};
  rule->segments = {{kElements, 0}};
  declaration.rule = rule;
  Message declare = MakeRequest(kDeclare, 0, declaration.Key(), 1, PackDeclarations({declaration}));
  declare.peer = 0;
  server.OnMessage(&declare);
  const Answers::Answer answer = answers.Await(1);
  EXPECT_TRUE(answer.failed);
  EXPECT_NE(answer.body.find("BYTEPS_BACKUP_STATE"), std::string::npos) << answer.body;
}

}  // namespace
}  // namespace step_tests
}  // namespace core
}  // namespace byteps
