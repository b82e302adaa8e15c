// Tests of the parts of membership: messages, the roster, and the heartbeat thread.
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/membership/event.h"
#include "byteps/net/membership/heartbeat_thread.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/refusal.h"
#include "byteps/net/membership/replica_view.h"
#include "byteps/net/membership/roster.h"
#include "byteps/net/membership/roster_policy.h"
#include "byteps/net/membership/words.h"
#include "tests/net/membership/membership_test.h"

namespace ps {
namespace {

using membership::Claim;
using membership::MemberWord;
using membership::Refusal;

Node NodeOf(Node::Role role, int rank) {
  Node node;
  node.role = role;
  node.aux_id = role == Node::WORKER ? rank : -1;
  node.id = IdOf(role, rank);
  node.hostname = "10.0.0.2";
  node.port = 0;
  return node;
}

// Encodes the word, and returns the decoded result.
template <typename T>
std::optional<T> Sent(const T& word) {
  return membership::Parse<T>(membership::Pack(word));
}

TEST(MembershipProtocol, EachWordIsReadAsItWasMade) {
  const membership::Turns turns{{0, 2}, {17, 3}};
  const auto beginning = Sent(membership::Beginning{25'000, true, turns});
  EXPECT_EQ(beginning->link_mbps, 25'000);
  EXPECT_TRUE(beginning->late);
  EXPECT_EQ(beginning->turns, turns);
  const MemberWord words[] = {membership::Acknowledged{17},
                              membership::Ready(),
                              membership::Admit{2, 17},
                              membership::Awaited{2, 17, "outer/0/fragment1"},
                              membership::Late{2, 17, std::string("it had not pushed 'a\0b'", 24)},
                              membership::ServerLost{2, 3, "it was lost"},
                              membership::ServerReplaced{2, 4, 3},
                              membership::LeftKnown{2}};
  for (const MemberWord& word : words) {
    const std::string bytes = membership::Pack(word);
    const auto read = membership::Parse<MemberWord>(bytes);
    ASSERT_TRUE(read) << word.index();
    EXPECT_EQ(read->index(), word.index());
    EXPECT_EQ(membership::Pack(*read), bytes);
    EXPECT_FALSE(membership::Parse<MemberWord>(bytes.substr(0, bytes.size() - 1)));
    EXPECT_FALSE(membership::Parse<MemberWord>(bytes + '\0'));
  }
  EXPECT_EQ(std::get<membership::Late>(*Sent(words[4])).why.size(), 24u);
  EXPECT_FALSE(membership::Parse<MemberWord>("\xff")) << "there is no such word";
}

TEST(MembershipProtocol, WhatCannotBeIsNotRead) {
  EXPECT_FALSE(Sent(membership::Beginning{-5, true, {}}));
  EXPECT_FALSE(Sent(membership::Beginning{5, true, {{-3, 1}}}));
  for (const MemberWord& word : std::initializer_list<MemberWord>{
           membership::Late{-1, 0, ""}, membership::LeftKnown{1 << 30},
           membership::ServerLost{0, 2, "it has its place"}, membership::ServerReplaced{0, 3, 1},
           membership::Awaited{0, -1, ""}}) {
    EXPECT_FALSE(Sent(word)) << word.index();
  }
}

TEST(MembershipProtocol, AFarewellIsAFailureOrNot) {
  const auto failure = [](const membership::Leave& leave, bool errors_count) {
    return membership::DepartureOf(*Sent(leave), errors_count).failure;
  };
  EXPECT_EQ(failure(Farewell{false, "exit status 3", ""}, false), "failed: exit status 3");
  EXPECT_EQ(failure(Farewell{true, "", "it timed out"}, false), "");
  EXPECT_EQ(failure(Farewell{true, "", "it timed out"}, true), "failed: it timed out");
  EXPECT_EQ(failure(membership::Stopped{"stopped by SIGTERM"}, false), "was stopped by SIGTERM");
  EXPECT_TRUE(membership::DepartureOf(Farewell{true, "", "an error"}, false).suspend);
  EXPECT_FALSE(membership::DepartureOf(Farewell(), true).suspend);
}

TEST(MembershipRoster, ItNamesThoseThatAreMissing) {
  Roster roster(JobSize{20, 2});
  EXPECT_FALSE(roster.IsComplete());
  roster.Put(NodeOf(Node::WORKER, 1));
  roster.Put(NodeOf(Node::SERVER, 0));
  EXPECT_EQ(
      roster.Missing(),
      "worker 0, worker 2, worker 3, worker 4, worker 5, worker 6, worker 7, worker 8, "
      "worker 9, worker 10, worker 11, worker 12, worker 13, worker 14, worker 15, worker 16, "
      "3 more workers, 1 server");
  EXPECT_EQ(roster.FirstFreeRank(Node::WORKER), 0);
  EXPECT_EQ(roster.FirstFreeRank(Node::SERVER), 1);
  roster.Expect({1, 1});
  EXPECT_TRUE(roster.IsComplete());
  roster.Expect({1, -1});
  EXPECT_FALSE(roster.IsComplete()) << "nobody knows yet how many";
}

TEST(MembershipRoster, AJobEndsWithItsLastWorker) {
  Roster roster(JobSize{2, 1});
  roster.Put(NodeOf(Node::SERVER, 0));
  roster.Put(NodeOf(Node::WORKER, 0))->left = true;
  EXPECT_FALSE(roster.AllWorkersLeft()) << "one has not come";
  Member* const last = roster.Put(NodeOf(Node::WORKER, 1));
  EXPECT_FALSE(roster.AllWorkersLeft());
  EXPECT_EQ(roster.PresentIds(), (std::vector<int>{IdOf(Node::SERVER, 0), IdOf(Node::WORKER, 1)}));
  last->left = last->left_to_suspend = true;
  EXPECT_TRUE(roster.AllWorkersLeft());
  EXPECT_TRUE(roster.IsBeingSuspended());
}

TEST(MembershipProtocol, ReplicasAreToldAsTheyAre) {
  const ReplicaView view{6, 12, "101", "010", {0, 11, 7}, {-1, -1, 0}, "replica 1 was removed"};
  const auto told = Sent(view);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->AbsentRanks(), (std::set<int>{2, 3}));
  EXPECT_EQ(told->donors, view.donors);
  EXPECT_EQ(told->news, view.news);
  EXPECT_TRUE(Sent(ReplicaView())) << "there are none";
  const ReplicaView wrong[] = {
      {6, 1, "1", "0", {0}, {-1}, ""},          {5, 1, "11", "00", {0, 0}, {-1, -1}, ""},
      {6, 1, "12", "00", {0, 0}, {-1, -1}, ""}, {6, 1, "11", "000", {0, 0}, {-1, -1}, ""},
      {6, 1, "11", "00", {0}, {-1}, ""},        {6, 1, "11", "00", {0, -1}, {-1, -1}, ""},
      {6, 1, "11", "00", {0, 0}, {-1, 2}, ""},  {6, 1, "11", "00", {0, 0}, {-1}, ""},
      {6, -1, "11", "00", {0, 0}, {-1, -1}, ""}};
  for (const ReplicaView& other : wrong) EXPECT_FALSE(Sent(other)) << &other - wrong;
}

TEST(MembershipAdmission, WhatMayBeTrueOfTheLastGenerationMayComeAgain) {
  RosterPolicy policy(nullptr, nullptr);
  Roster roster(JobSize{2, 1});
  roster.Put(NodeOf(Node::WORKER, 0));
  Claim claim;
  claim.protocol = membership::kProtocol;
  for (const bool keep : {false, true}) {
    MembershipSettings settings;
    settings.keep = keep;
    Node node = NodeOf(Node::WORKER, 0);
    Refusal refusal = Assign(roster, &policy, settings, claim, &node);
    EXPECT_EQ(refusal.reason,
              "the job has a worker 0 (10.0.0.2) already; does another job use this scheduler?");
    EXPECT_EQ(refusal.later, keep);
    claim.servers = 3;
    refusal = Assign(roster, &policy, settings, claim, &node);
    EXPECT_EQ(refusal.reason,
              "it was started for 3 servers, the scheduler for 1 server (DMLC_NUM_SERVER)");
    EXPECT_FALSE(refusal.later) << "a scheduler's servers stay as many";
    claim.servers = -1;
  }
  Node any = NodeOf(Node::WORKER, -1);
  EXPECT_FALSE(Assign(roster, &policy, MembershipSettings(), claim, &any));
  EXPECT_EQ(any.aux_id, 1);
  EXPECT_EQ(any.id, IdOf(Node::WORKER, 1));
  EXPECT_EQ(roster.members().size(), 1u) << "it is only asked";
}

TEST(MembershipAdmission, SeveralAreAskedForAtOnce) {
  RosterPolicy policy(nullptr, nullptr);
  Roster roster(JobSize{4, 2});
  roster.Put(NodeOf(Node::WORKER, 2));
  Claim claim;
  claim.protocol = membership::kProtocol;
  claim.probe = 2;
  EXPECT_FALSE(AssignAll(roster, &policy, MembershipSettings(), claim, NodeOf(Node::SERVER, 0)));
  EXPECT_FALSE(AssignAll(roster, &policy, MembershipSettings(), claim, NodeOf(Node::WORKER, 0)));
  EXPECT_EQ(AssignAll(roster, &policy, MembershipSettings(), claim, NodeOf(Node::WORKER, 1)).reason,
            "the job has a worker 2 (10.0.0.2) already; does another job use this scheduler?");
  claim.probe = 3;
  EXPECT_EQ(AssignAll(roster, &policy, MembershipSettings(), claim, NodeOf(Node::SERVER, 0)).reason,
            "the job has room for 2 more servers, and this machine has 3");
}

class Beats : public testing::Test {
 protected:
  using Clock = AwakeClock;

  ~Beats() override { thread_.Stop(); }

  void Watch(std::optional<Clock::time_point> due) {
    {
      MutexLock lock(&mu_);
      due_ = due;
    }
    thread_.Wake();
  }
  void AwaitBeats(int count) {
    MutexLock lock(&mu_);
    cond_.Wait(&mu_, [&]() PS_REQUIRES(mu_) { return beats_ >= count; });
  }
  void AwaitDues(int count) {
    MutexLock lock(&mu_);
    cond_.Wait(&mu_, [&]() PS_REQUIRES(mu_) { return dues_ >= count; });
  }
  int beats() {
    MutexLock lock(&mu_);
    return beats_;
  }

  static constexpr double kHeartbeatS = 0.01;
  Mutex mu_;
  CondVar cond_;
  std::optional<Clock::time_point> due_ PS_GUARDED_BY(mu_);
  int beats_ PS_GUARDED_BY(mu_) = 0;
  int dues_ PS_GUARDED_BY(mu_) = 0;
  HeartbeatThread thread_{kHeartbeatS,
                          {[this] {
                             MutexLock lock(&mu_);
                             return due_;
                           },
                           [this](Clock::time_point) {
                             MutexLock lock(&mu_);
                             ++dues_;
                             due_ = Clock::time_point::max();
                             cond_.NotifyAll();
                           },
                           [this](Clock::time_point) {
                             MutexLock lock(&mu_);
                             ++beats_;
                             cond_.NotifyAll();
                           }}};
};

TEST_F(Beats, ComeOnlyWhileTheJobIsWatched) {
  thread_.Start();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(beats(), 0);
  Watch(Clock::time_point::max());
  AwaitBeats(3);
}

TEST_F(Beats, WhatIsDueIsDoneOnce) {
  thread_.Start();
  Watch(Clock::now());
  AwaitDues(1);
  AwaitBeats(beats() + 3);
  Watch(Clock::now() + std::chrono::milliseconds(5));
  AwaitDues(2);
  MutexLock lock(&mu_);
  EXPECT_EQ(dues_, 2);
}

TEST_F(Beats, StopNeedsNoStart) { thread_.Stop(); }

// ----- registrations

TEST(MembershipProtocol, ARegistrationIsReadAsItWasMade) {
  membership::Registration registration;
  registration.claim = {membership::kProtocol, 7, -1, 25'000, 2, 1, true};
  membership::Account& account = registration.account;
  account.job = 0xffff'ffff'ffff'0001;
  account.scheduler_number = 3;
  account.is_late = true;
  account.left = {0, 12};
  account.turns = {{0, 2}, {3, 1}};
  account.replicas = {4, 7, "10", "01", {0, 5}, {-1, -1}, ""};
  const std::string text = membership::PackRegistration(registration);
  const membership::Registration read = membership::ParseRegistration(text);
  EXPECT_EQ(membership::PackRegistration(read), text);
  EXPECT_EQ(read.claim.workers, 7);
  EXPECT_TRUE(read.claim.backups);
  EXPECT_EQ(read.account.job, account.job);
  EXPECT_TRUE(read.account.is_late);
  EXPECT_EQ(read.account.left, account.left);
  EXPECT_EQ(read.account.turns, account.turns);
  EXPECT_EQ(read.account.replicas.present, "10");
}

TEST(MembershipProtocol, AnotherVersionIsToldByItsNumberAlone) {
  EXPECT_EQ(membership::ParseRegistration("protocol=17 workers=2 servers=1").claim.protocol, 17);
  EXPECT_EQ(membership::ParseRegistration("").claim.protocol, -1);
  membership::Registration wrong;
  wrong.claim.protocol = membership::kProtocol;
  wrong.claim.link_mbps = -1;
  EXPECT_EQ(membership::ParseRegistration(PackRegistration(wrong)).claim.protocol, -1);
  wrong.claim.link_mbps = 0;
  EXPECT_EQ(membership::ParseRegistration(PackRegistration(wrong)).claim.protocol,
            membership::kProtocol);
  wrong.account.scheduler_number = 1;  // without a job
  EXPECT_EQ(membership::ParseRegistration(PackRegistration(wrong)).claim.protocol, -1);
}

}  // namespace
}  // namespace ps
