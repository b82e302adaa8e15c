// Whose fault the scheduler says it is; and until when workers need it.
#include <gtest/gtest.h>

#include "tests/net/membership/membership_test.h"

namespace ps {
namespace {

TEST_F(SchedulerMembershipTest, WhoEndedBeforeAWorkerFailedIsNamed) {
  Gather();
  links_.SetBroken({worker_});
  Say(other_, Control::LEAVE, "failed: RuntimeError: Connection reset by peer");
  EXPECT_EQ(failure(), "");
  EXPECT_EQ(links_.SentTo(other_, Control::JOB_FAILED)[0].meta.body,
            "worker 1 (10.0.0.2) failed: RuntimeError: Connection reset by peer");
  membership_->OnDisconnect(other_);  // it has said why
  EXPECT_EQ(failure(), "");
  membership_->OnDisconnect(worker_);
  EXPECT_EQ(failure(),
            "worker 0 (10.0.0.2) was lost: its connection closed; then worker 1 (10.0.0.2) failed: "
            "RuntimeError: Connection reset by peer");
}

TEST_F(SchedulerMembershipTest, AWorkerWhoseLinkWasBrokenSaysItself) {
  Gather();
  links_.SetBroken({worker_});
  Say(other_, Control::LEAVE, "failed: RuntimeError: Connection reset by peer");
  Say(worker_, Control::LEAVE, "failed: told to end by SIGTERM");
  EXPECT_EQ(failure(),
            "worker 0 (10.0.0.2) failed: told to end by SIGTERM; then worker 1 (10.0.0.2) failed: "
            "RuntimeError: Connection reset by peer");
}

TEST_F(SchedulerMembershipTest, AFailureIsNamedWhenALinkThatBrokeIsThereAgain) {
  Gather();
  links_.SetBroken({worker_});
  Say(other_, Control::LEAVE, "failed: exit status 3");
  EXPECT_EQ(failure(), "");
  links_.SetBroken({});
  links_.Await(server_, Control::JOB_FAILED, 1);
  EXPECT_EQ(links_.SentTo(server_, Control::JOB_FAILED)[0].meta.body,
            "worker 1 (10.0.0.2) failed: exit status 3");
}

TEST_F(SchedulerMembershipTest, AServerAtALoopbackAddressServesItsMachineAlone) {
  MembershipSettings settings;
  settings.workers = 1;
  settings.servers = 1;
  Start(settings);
  Register(Node::SERVER, -1, -1, 1, "127.0.0.1");
  Register(Node::WORKER, 0, 1, 1, "192.0.2.77");
  EXPECT_EQ(failure(),
            "server 0 (127.0.0.1:9001) listens at a loopback address, which worker 0 (192.0.2.77) "
            "cannot reach: the scheduler's name stands for it on that server's machine; set "
            "DMLC_NODE_HOST there to an address of the machine");
  EXPECT_EQ(links_.CountTo(worker_, Control::JOB_FAILED), 1);
}

TEST_F(SchedulerMembershipTest, AJobOfOneMachineMayUseLoopback) {
  MembershipSettings settings;
  settings.workers = 1;
  settings.servers = 1;
  Start(settings);
  Register(Node::SERVER, -1, -1, 1, "127.0.0.1");
  Register(Node::WORKER, 0, 1, 1, "127.0.0.1");
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerMembershipTest, HasWorkersOnceAJobHasBegunUntilTheyHaveLeft) {
  MembershipSettings settings;
  settings.workers = 2;
  settings.servers = 1;
  Start(settings);
  Register(Node::WORKER, 0, 2, 1);
  EXPECT_FALSE(membership_->HasWorkers()) << "they have nothing to save";
  Register(Node::SERVER, -1, -1, 1);
  Register(Node::WORKER, 1, 2, 1);
  EXPECT_TRUE(membership_->HasWorkers());
  Say(worker_, Control::LEAVE, "finish");
  EXPECT_TRUE(membership_->HasWorkers());
  Say(other_, Control::LEAVE, "finish");
  EXPECT_FALSE(membership_->HasWorkers());
}

}  // namespace
}  // namespace ps
