// Tests of admission, of failed greetings, of the table of links, and of the choice of a message's
// link.
#include "byteps/net/link/peer_table.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/link_rate.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

constexpr uint64_t kJob = (0x1234 << 16) + 2;  // job in its second generation
constexpr uint64_t kMyToken = 77;
constexpr uint64_t kOtherToken = 88;

constexpr char kRole[] =
    "its role must not connect to this node: workers connect to servers and the scheduler, servers "
    "to the scheduler, and to a server only where the scheduler has said so to both "
    "(BYTEPS_BACKUP_STATE)";

Applicant Worker(int rank) {
  Applicant worker;
  worker.who = {kOtherToken, Node::WORKER, rank};
  worker.job = kJob;
  worker.node_id = Postoffice::WorkerRankToID(rank);
  return worker;
}

std::string AtServer(const Applicant& applicant, uint64_t job = kJob) {
  return ReasonToRefuse(applicant, Node::SERVER, kMyToken, job);
}

std::string AtScheduler(const Applicant& applicant) {
  return ReasonToRefuse(applicant, Node::SCHEDULER, kMyToken, kJob);
}

TEST(Admission, AServerTakesTheWorkersOfItsJob) {
  EXPECT_EQ(AtServer(Worker(0)), "");
  Applicant second = Worker(3);
  second.plane = 1;
  second.index = kMaxLinks - 1;
  second.receiver = kMyToken;
  EXPECT_EQ(AtServer(second), "");
  EXPECT_EQ(AtServer(Worker(0), 0), "this node is in no job yet");
}

TEST(Admission, AnotherJobOrGenerationIsNamed) {
  Applicant worker = Worker(0);
  worker.job = 0x9999 << 16;
  EXPECT_EQ(AtServer(worker), "it belongs to another job");
  worker.job = kJob + 1;
  EXPECT_EQ(AtServer(worker), "it is of generation 3 of the job, and this node of generation 2");
  worker.job = 0;
  EXPECT_EQ(AtServer(worker), "it belongs to another job");
}

TEST(Admission, OnlyTheSchedulerTakesThoseThatKnowNoJob) {
  Applicant node = Worker(0);
  node.job = 0;
  node.node_id = Node::kEmpty;
  EXPECT_EQ(AtScheduler(node), "");
  node.who.role = Node::SERVER;
  EXPECT_EQ(AtScheduler(node), "");
  node.resumes = true;  // it knows the job's number, unless it had no link
  EXPECT_NE(AtScheduler(node), "");
  node.job = kJob;
  EXPECT_EQ(AtScheduler(node), "");
  node.plane = 1;
  EXPECT_EQ(AtScheduler(node), "the scheduler has no data plane");
}

TEST(Admission, WhoCannotBeIsRefused) {
  Applicant worker = Worker(0);
  worker.receiver = kOtherToken;
  EXPECT_EQ(AtServer(worker), "the process that is meant is not here any more");
  worker = Worker(0);
  worker.who.role = Node::SERVER;
  EXPECT_EQ(AtServer(worker), kRole);
  worker = Worker(0);
  worker.node_id = 8;
  EXPECT_EQ(AtServer(worker), "it is no worker");
  worker.node_id = Node::kEmpty;
  EXPECT_EQ(AtServer(worker), "it is no worker");
  worker = Worker(0);
  worker.who.rank = 1;
  EXPECT_EQ(AtServer(worker), "its rank is not that of its node id");
  for (int what = 0; what < 3; ++what) {
    worker = Worker(0);
    if (what == 0) worker.who.token = 0;
    if (what == 1) worker.index = kMaxLinks;
    if (what == 2) worker.who.role = Node::SCHEDULER + 1;
    EXPECT_EQ(AtServer(worker), "its hello does not parse");
  }
}

std::string AtNeighbor(const Applicant& applicant, bool is_expected) {
  return ReasonToRefuse(applicant, Node::SERVER, kMyToken, kJob, is_expected);
}

TEST(Admission, AServerTakesTheServerThatTheSchedulerHasNamed) {
  Applicant server = Worker(0);
  server.who.role = Node::SERVER;
  server.node_id = Postoffice::ServerRankToID(0);
  EXPECT_EQ(AtNeighbor(server, true), "");
  EXPECT_EQ(AtNeighbor(server, false), kRole);
  server.who.rank = 1;
  EXPECT_EQ(AtNeighbor(server, true), "its rank is not that of its node id");
  server.who.rank = -1;
  EXPECT_EQ(AtNeighbor(server, true), "its rank is not that of its node id");
  server.who.rank = 0;
  server.node_id = Postoffice::WorkerRankToID(0);
  EXPECT_EQ(AtNeighbor(server, true), "it is no server");
  server.node_id = Node::kEmpty;
  EXPECT_EQ(AtNeighbor(server, true), "it is no server");
  server.node_id = Postoffice::ServerRankToID(0);
  server.receiver = kOtherToken;
  EXPECT_EQ(AtNeighbor(server, true), "the process that is meant is not here any more");
  server.receiver = kMyToken;
  server.job = kJob - 1;
  EXPECT_EQ(AtNeighbor(server, true),
            "it is of generation 1 of the job, and this node of generation 2");
}

TEST(WhoConnects, NeighborsInTheRingOfServersHaveOneLink) {
  const auto links = [](int servers) {
    std::vector<std::pair<int, int>> made;
    for (int one = 0; one < servers; ++one) {
      for (int other = 0; other < servers; ++other) {
        if (AreNeighbors(one, other, servers) && DialsNeighbor(one, other))
          made.emplace_back(one, other);
      }
    }
    return made;
  };
  using Links = std::vector<std::pair<int, int>>;
  EXPECT_EQ(links(1), Links());
  EXPECT_EQ(links(2), (Links{{0, 1}}));
  EXPECT_EQ(links(3), (Links{{0, 1}, {0, 2}, {1, 2}}));
  EXPECT_EQ(links(4), (Links{{0, 1}, {0, 3}, {1, 2}, {2, 3}}));
}

Control Join(uint64_t token, Node::Role role, int rank) {
  Control control;
  control.cmd = Control::ADD_NODE;
  control.node.emplace_back();
  control.node[0].role = role;
  control.node[0].aux_id = rank;
  SetToken(token, &control.node[0]);
  return control;
}

TEST(Admission, NobodyJoinsForAnotherProcess) {
  const PeerIdentity who{kOtherToken, Node::WORKER, 3};
  EXPECT_NO_THROW(CheckControl(Join(kOtherToken, Node::WORKER, 3), Node::kEmpty, who, true));
  EXPECT_THROW(CheckControl(Join(kMyToken, Node::WORKER, 3), 9, who, true), Error);
  EXPECT_THROW(CheckControl(Join(kOtherToken, Node::SERVER, 3), 9, who, true), Error);
  EXPECT_THROW(CheckControl(Join(kOtherToken, Node::WORKER, 4), 9, who, true), Error);
  Control two = Join(kOtherToken, Node::WORKER, 3);
  two.node.push_back(two.node[0]);
  EXPECT_THROW(CheckControl(two, 9, who, true), Error);
  EXPECT_NO_THROW(CheckControl(two, 9, who, false)) << "the scheduler tells of all nodes";
}

TEST(Admission, WhoIsNoMemberMayAskToJoinAndNoMore) {
  Control heartbeat;
  heartbeat.cmd = Control::HEARTBEAT;
  EXPECT_THROW(CheckControl(heartbeat, Node::kEmpty, {}, true), Error);
  EXPECT_NO_THROW(CheckControl(heartbeat, 9, {}, true));
  EXPECT_THROW(CheckMember(Node::kEmpty), Error);
  EXPECT_NO_THROW(CheckMember(9));
}

TEST(JobNumber, TheSchedulersFirstWordIsBelieved) {
  JobNumber job;
  EXPECT_EQ(job.Hear(0, true), "it is in no job");
  EXPECT_EQ(job.Hear(kJob, false), "it belongs to another job");
  EXPECT_EQ(job.Hear(kJob, true), "");
  EXPECT_EQ(job.get(), kJob);
  EXPECT_EQ(job.Hear(0x9999 << 16, true), "it belongs to another job");
  job.SetGeneration(3);
  EXPECT_NE(job.Hear(kJob, false), "");
  EXPECT_EQ(job.Hear(kJob + 1, false), "");
}

// ----- the meaning of a failed greeting

using Failure = GreetingFailure;

TEST(GreetingRule, OnALinkThatBrokeDamageCostsAnAttempt) {
  EXPECT_TRUE(IsOneMoreAttempt(Failure::kMaybeDamaged, true));
  EXPECT_FALSE(IsOneMoreAttempt(Failure::kMaybeDamaged, false)) << "settings differ";
}

TEST(GreetingRule, WhatTheOtherEndHasDecidedIsFinal) {
  EXPECT_FALSE(IsOneMoreAttempt(Failure::kDecided, true));
  EXPECT_FALSE(IsOneMoreAttempt(Failure::kDecided, false));
}

TEST(GreetingRule, WhatWillPassIsWaitedFor) {
  EXPECT_TRUE(IsOneMoreAttempt(Failure::kWillPass, true));
  EXPECT_TRUE(IsOneMoreAttempt(Failure::kWillPass, false));
}

}  // namespace

// ----- the table of links

struct FakeLink : std::enable_shared_from_this<FakeLink> {
  explicit FakeLink(int peer = Node::kEmpty) : peer_id(peer) {}

  LinkLoad load() const { return state; }
  bool closed() const { return state.is_closed; }
  int peer() const { return peer_id; }
  void set_peer(int id) { peer_id = id; }

  PeerIdentity identity;
  LinkLoad state{true, false, 0};
  int peer_id;
};
using FakeLinkPtr = std::shared_ptr<FakeLink>;

namespace {

using Table = PeerTable<FakeLink>;
using Links = std::vector<FakeLinkPtr>;
using Again = Table::Again;

constexpr int kWorker = 9;  // node ids of workers
constexpr int kOther = 11;

FakeLinkPtr LinkWith(bool is_open, size_t queued_bytes) {
  auto link = std::make_shared<FakeLink>();
  link->state = {is_open, false, queued_bytes};
  return link;
}

TEST(BestOf, TheOneOnWhichTheFewestBytesWait) {
  const auto few = LinkWith(true, 5), many = LinkWith(true, 6);
  EXPECT_EQ(BestOf<FakeLink>({few, many}), few);
  EXPECT_EQ(BestOf<FakeLink>({many, nullptr, few}), few);
  EXPECT_EQ(BestOf<FakeLink>({many}), many);
  EXPECT_EQ(BestOf<FakeLink>({nullptr}), nullptr);
  EXPECT_EQ(BestOf<FakeLink>({}), nullptr);
}

// Over TCP this was always so. Over RDMA, messages used to wait on a link that was being resumed.
TEST(BestOf, OneThatIsBrokenOnlyWhereAllAre) {
  const auto broken = LinkWith(false, 0), other = LinkWith(false, 1), open = LinkWith(true, 1000);
  EXPECT_EQ(BestOf<FakeLink>({broken, open}), open);
  EXPECT_EQ(BestOf<FakeLink>({open, broken}), open);
  EXPECT_EQ(BestOf<FakeLink>({other, broken}), broken);
}

// If links were chosen by queued bytes alone, the slow NIC would finish long after the fast NIC.
TEST(LinkRate, IsMeasuredWhileMuchIsInFlight) {
  constexpr size_t kPart = 128 << 10;
  LinkRate rate;
  int64_t now = 0;
  const auto send = [&](int parts, int64_t each_ns) {
    rate.Update(parts * kPart, 0, now);
    for (int left = parts; left-- > 0;) {
      now += each_ns;
      rate.Update(left * kPart, kPart, now);
    }
  };
  send(3, 1000);
  EXPECT_EQ(rate.bytes_per_ns(), 0);
  now += 1'000'000;  // nothing is in flight
  send(1, 1000);
  EXPECT_DOUBLE_EQ(rate.bytes_per_ns(), kPart / 1000.0);
  // A small message is acknowledged late, so it does not change the rate.
  rate.Update(100, 0, now);
  rate.Update(0, 100, now += 20'000'000);
  send(4, 2000);
  EXPECT_DOUBLE_EQ(rate.bytes_per_ns(), kPart / 1000.0 * 0.875);
  for (int i = 0; i < 40; ++i) send(4, 2000);
  EXPECT_NEAR(rate.bytes_per_ns(), kPart / 2000.0, 0.01);
}

TEST(BestOf, OfNicsThatDifferInRateTheOneThatIsDoneFirst) {
  const auto fast = LinkWith(true, 3000), slow = LinkWith(true, 1000);
  slow->state.nics = 1;
  EXPECT_EQ(BestOf<FakeLink>({fast, slow}), slow);  // no rate is known
  fast->state.bytes_per_ns = 4.0;
  EXPECT_EQ(BestOf<FakeLink>({fast, slow}), slow);
  slow->state.bytes_per_ns = 1.0;
  EXPECT_EQ(BestOf<FakeLink>({fast, slow}), fast);
  EXPECT_EQ(BestOf<FakeLink>({slow, fast}), fast);
  fast->state.in_flight_bytes = 1500;
  EXPECT_EQ(BestOf<FakeLink>({slow, fast}), slow);
  slow->state.bytes_per_ns = 2.5;  // equal within the precision of a measurement
  fast->state.in_flight_bytes = 0;
  EXPECT_EQ(BestOf<FakeLink>({fast, slow}), slow);
}

TEST(BestOf, NeverOneThatIsClosed) {
  const auto closed = LinkWith(false, 0), broken = LinkWith(false, 7);
  closed->state.is_closed = true;
  EXPECT_EQ(BestOf<FakeLink>({closed, broken}), broken);
  EXPECT_EQ(BestOf<FakeLink>({closed, closed}), nullptr);
}

Applicant Process(uint64_t token, int node_id = Node::kEmpty, int index = 0, int plane = 0) {
  Applicant applicant;
  applicant.who = {token, Node::WORKER, 0};
  applicant.node_id = node_id;
  applicant.plane = plane;
  applicant.index = index;
  return applicant;
}

class PeerTableTest : public testing::Test {
 protected:
  // Admits at the scheduler, or, with a node id, at a server.
  Table::Admitted Admit(const Applicant& applicant, Again again = Again::kTakesTheLink) {
    const bool scheduler = applicant.node_id == Node::kEmpty;
    return table_.Admit(applicant, scheduler, again,
                        [](int id) { return std::make_shared<FakeLink>(id); });
  }
  std::string Refusal(const Applicant& applicant, Again again = Again::kTakesTheLink) {
    return Admit(applicant, again).refusal;
  }

  Table table_;
};

TEST_F(PeerTableTest, AServerThatWillComeIsSentToBefore) {
  constexpr int kServer = 8;
  EXPECT_FALSE(table_.Expects(1, kServer));
  const auto link = std::make_shared<FakeLink>(kServer);
  table_.Expect({1, Node::SERVER, 0}, kServer, link);
  EXPECT_EQ(table_.Choose(kServer, 0), link);
  EXPECT_TRUE(table_.Expects(1, kServer));
  EXPECT_FALSE(table_.Expects(2, kServer)) << "another process";
  EXPECT_FALSE(table_.Expects(1, kServer + 2));
  Applicant server = Process(1, kServer);
  server.who.role = Node::SERVER;
  EXPECT_EQ(Admit(server).link, link);
  server.index = 1;
  EXPECT_NE(Admit(server).link, link);
  EXPECT_EQ(table_.Of(kServer).size(), 2u);
  Applicant other = Process(2, kServer);
  EXPECT_EQ(Refusal(other), "another process is connected under its node id");
  EXPECT_EQ(table_.Forget(kServer).size(), 2u);
  EXPECT_FALSE(table_.Expects(1, kServer));
}

TEST_F(PeerTableTest, WhoComesToTheSchedulerHasNoNameUntilItIsNamed) {
  const auto link = Admit(Process(1)).link;
  ASSERT_TRUE(link);
  EXPECT_EQ(link->identity.token, 1u);
  EXPECT_EQ(table_.Choose(kWorker, 0), nullptr);
  EXPECT_TRUE(table_.Name(1, kWorker).is_there);
  EXPECT_EQ(link->peer(), kWorker);
  EXPECT_EQ(table_.Choose(kWorker, 0), link);
  EXPECT_EQ(Admit(Process(1, Node::kEmpty, 1)).link->peer(), kWorker) << "over another link";
  EXPECT_FALSE(table_.Name(2, kOther).is_there) << "it came, and has gone already";
}

TEST_F(PeerTableTest, AnotherNameReplacesTheLast) {
  const auto link = Admit(Process(1)).link;
  table_.Name(1, kWorker);
  table_.Name(1, kOther);
  EXPECT_EQ(link->peer(), kOther);
  EXPECT_EQ(table_.Choose(kWorker, 0), nullptr);
  EXPECT_EQ(table_.All(), Links({link}));
}

TEST_F(PeerTableTest, AProcessThatTakesTheNameOfAnotherDisplacesIt) {
  const auto before = Admit(Process(1)).link;
  table_.Name(1, kWorker);
  const auto after = Admit(Process(2)).link;
  EXPECT_EQ(table_.Name(2, kWorker).displaced, Links({before}));
  EXPECT_EQ(table_.Choose(kWorker, 0), after);
  EXPECT_EQ(table_.All().size(), 2u) << "both are closed where the van stops";
  // No node is lost in this case.
  const auto loss = table_.LetGo(before.get());
  EXPECT_TRUE(loss.peer);
  EXPECT_TRUE(table_.IsReplaced(loss.id, loss.peer));
  EXPECT_EQ(table_.Choose(kWorker, 0), after);
}

TEST_F(PeerTableTest, AServerKnowsAWorkerByItsOwnWord) {
  const auto first = Admit(Process(1, kWorker)).link;
  const auto second = Admit(Process(1, kWorker, 1)).link;
  EXPECT_EQ(table_.Of(kWorker), Links({first, second}));
  EXPECT_EQ(Refusal(Process(2, kWorker)), "another process is connected under its node id");
  EXPECT_EQ(Refusal(Process(1, kOther)), "another process is connected under its node id");
  // Once all links of the first process are gone, another process may connect.
  table_.LetGo(first.get());
  EXPECT_NE(Refusal(Process(2, kWorker)), "");
  table_.LetGo(second.get());
  EXPECT_EQ(Refusal(Process(2, kWorker)), "");
}

TEST_F(PeerTableTest, ALinkIsResumedByTheProcessThatHadIt) {
  Applicant again = Process(1, kWorker);
  again.resumes = true;
  EXPECT_EQ(Refusal(again), "this node has given the connection up");
  const auto link = Admit(Process(1, kWorker)).link;
  for (const Again policy : {Again::kTakesTheLink, Again::kMakesAnother}) {
    EXPECT_EQ(Admit(again, policy).link, link);
  }
  again.who.rank = 5;
  EXPECT_EQ(Refusal(again), "it was another role or rank before");
  again.who.rank = 0;
  link->state.is_closed = true;
  EXPECT_EQ(Refusal(again), "this node has closed the connection");
}

TEST_F(PeerTableTest, WhoAsksOnceMoreGetsTheLinkOrAnother) {
  const auto link = Admit(Process(1, kWorker)).link;
  EXPECT_EQ(Admit(Process(1, kWorker)).link, link);
  const auto admitted = Admit(Process(1, kWorker), Again::kMakesAnother);
  EXPECT_NE(admitted.link, link);
  EXPECT_EQ(admitted.replaced, link);
  EXPECT_EQ(table_.All(), Links({admitted.link}));
  EXPECT_FALSE(table_.LetGo(link.get()).peer) << "nobody's loss";
}

// The kernel may hold bytes of an idle link that are not sent yet.
TEST_F(PeerTableTest, OfIdleLinksThatOverTheIdlerNicIsChosen) {
  const auto first = Admit(Process(1, kWorker)).link;
  const auto second = Admit(Process(1, kWorker, 1)).link;
  first->state.in_flight_bytes = 1000;
  EXPECT_EQ(table_.Choose(kWorker, 0), first) << "both go over one NIC";
  second->state.nics = 1;
  EXPECT_EQ(table_.Choose(kWorker, 0), second);
  second->state.in_flight_bytes = 2000;
  EXPECT_EQ(table_.Choose(kWorker, 0), first);
  first->state.queued_bytes = 1;
  EXPECT_EQ(table_.Choose(kWorker, 0), second) << "nothing waits for it";
}

TEST_F(PeerTableTest, AMessageTakesALinkOfItsPlane) {
  const auto control = Admit(Process(1, kWorker)).link;
  EXPECT_EQ(table_.Choose(kWorker, 1), control) << "where there is no other";
  const auto data = Admit(Process(1, kWorker, 0, 1)).link;
  EXPECT_EQ(table_.Choose(kWorker, 0), control);
  EXPECT_EQ(table_.Choose(kWorker, 1), data);
  // A message does not use the links of another plane: the peer is lost.
  table_.LetGo(data.get());
  EXPECT_EQ(table_.Choose(kWorker, 1), nullptr);
}

TEST_F(PeerTableTest, ALossIsThatOfANode) {
  const auto unnamed = Admit(Process(1)).link;
  EXPECT_FALSE(table_.LetGo(unnamed.get()).peer) << "it was no more than a link";
  EXPECT_TRUE(table_.All().empty());
  auto peer = std::make_shared<Table::Peer>();
  peer->id = 8;
  peer->links[0] = {std::make_shared<FakeLink>(8), std::make_shared<FakeLink>(8)};
  const auto links = Table::LinksOf(*peer);
  table_.Add(peer);
  for (const auto& link : links) {
    const auto loss = table_.LetGo(link.get());
    EXPECT_EQ(loss.peer, peer);
    EXPECT_EQ(loss.id, 8);
    EXPECT_EQ(loss.link, link);
    EXPECT_FALSE(table_.IsReplaced(8, peer));
  }
  EXPECT_FALSE(table_.LetGo(links[0].get()).peer) << "once";
  EXPECT_TRUE(table_.Of(8).empty());
  EXPECT_FALSE(table_.IsReplaced(8, nullptr));
}

TEST_F(PeerTableTest, WhileItStopsNobodyComesAndNobodyIsLost) {
  const auto link = Admit(Process(1, kWorker)).link;
  table_.Stop();
  EXPECT_EQ(Refusal(Process(2, kOther)), "this node is leaving the job");
  EXPECT_FALSE(table_.LetGo(link.get()).peer);
  EXPECT_EQ(table_.All(), Links({link}));
  table_.Clear();
  table_.Open();
  EXPECT_TRUE(table_.All().empty());
  EXPECT_EQ(Refusal(Process(2, kOther)), "");
}

}  // namespace
}  // namespace ps
