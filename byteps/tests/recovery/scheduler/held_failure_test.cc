// HeldFailure: names the node that ended first if several fail.
#include <gtest/gtest.h>

#include "tests/recovery/scheduler/recovery_test.h"

namespace ps {
namespace {

using HeldFailureTest = RecoveryTest;

TEST_F(HeldFailureTest, WhoEndedBeforeAWorkerFailedIsNamed) {
  Gather();
  links_.SetBroken({worker_});
  Say(other_, Control::LEAVE, Failed("RuntimeError: Connection reset by peer"));
  EXPECT_EQ(failure(), "");
  EXPECT_EQ(links_.SentTo(other_, Control::JOB_FAILED)[0].meta.body,
            "worker 1 (10.0.0.2) failed: RuntimeError: Connection reset by peer");
  membership_->OnDisconnect(other_);  // this node has reported why
  EXPECT_EQ(failure(), "");
  membership_->OnDisconnect(worker_);
  EXPECT_EQ(failure(),
            "worker 0 (10.0.0.2) was lost: its connection closed; then worker 1 (10.0.0.2) failed: "
            "RuntimeError: Connection reset by peer");
}

TEST_F(HeldFailureTest, AWorkerWhoseLinkWasBrokenSaysItself) {
  Gather();
  links_.SetBroken({worker_});
  Say(other_, Control::LEAVE, Failed("RuntimeError: Connection reset by peer"));
  Say(worker_, Control::LEAVE, Failed("told to end by SIGTERM"));
  EXPECT_EQ(failure(),
            "worker 0 (10.0.0.2) failed: told to end by SIGTERM; then worker 1 (10.0.0.2) failed: "
            "RuntimeError: Connection reset by peer");
}

TEST_F(HeldFailureTest, AFailureIsNamedWhenALinkThatBrokeIsThereAgain) {
  Gather();
  links_.SetBroken({worker_});
  Say(other_, Control::LEAVE, Failed("exit status 3"));
  EXPECT_EQ(failure(), "");
  links_.SetBroken({});
  links_.Await(server_, Control::JOB_FAILED, 1);
  EXPECT_EQ(links_.SentTo(server_, Control::JOB_FAILED)[0].meta.body,
            "worker 1 (10.0.0.2) failed: exit status 3");
}

}  // namespace
}  // namespace ps
