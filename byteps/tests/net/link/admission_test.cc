// Who may connect to a node, and for whom a peer speaks.
#include "byteps/net/link/admission.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "byteps/base/error.h"
#include "byteps/net/link/who_connects.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

constexpr uint64_t kJob = (0x1234 << 16) + 2;  // its second incarnation
constexpr uint64_t kMe = 77;
constexpr uint64_t kOther = 88;

constexpr char kRole[] =
    "its role must not connect to this node: workers connect to servers and the scheduler, servers "
    "to the scheduler, and to a server only where the scheduler has said so to both "
    "(BYTEPS_BACKUP_STATE)";

Applicant Worker(int rank) {
  Applicant worker;
  worker.who = {kOther, Node::WORKER, rank};
  worker.job = kJob;
  worker.node_id = Postoffice::WorkerRankToID(rank);
  return worker;
}

std::string AtServer(const Applicant& applicant, uint64_t job = kJob) {
  return ReasonToRefuse(applicant, Node::SERVER, kMe, job);
}

std::string AtScheduler(const Applicant& applicant) {
  return ReasonToRefuse(applicant, Node::SCHEDULER, kMe, kJob);
}

TEST(Admission, AServerTakesTheWorkersOfItsJob) {
  EXPECT_EQ(AtServer(Worker(0)), "");
  Applicant second = Worker(3);
  second.plane = 1;
  second.index = kMaxLinks - 1;
  second.receiver = kMe;
  EXPECT_EQ(AtServer(second), "");
  EXPECT_EQ(AtServer(Worker(0), 0), "this node is in no job yet");
}

TEST(Admission, AnotherJobOrIncarnationIsNamed) {
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
  node.resumes = true;  // it has heard the number, or there was no link
  EXPECT_NE(AtScheduler(node), "");
  node.job = kJob;
  EXPECT_EQ(AtScheduler(node), "");
  node.plane = 1;
  EXPECT_EQ(AtScheduler(node), "the scheduler has no data plane");
}

TEST(Admission, WhoCannotBeIsRefused) {
  Applicant worker = Worker(0);
  worker.receiver = kOther;
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
  return ReasonToRefuse(applicant, Node::SERVER, kMe, kJob, is_expected);
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
  server.receiver = kOther;
  EXPECT_EQ(AtNeighbor(server, true), "the process that is meant is not here any more");
  server.receiver = kMe;
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
  const PeerIdentity who{kOther, Node::WORKER, 3};
  EXPECT_NO_THROW(CheckControl(Join(kOther, Node::WORKER, 3), Node::kEmpty, who, true));
  EXPECT_THROW(CheckControl(Join(kMe, Node::WORKER, 3), 9, who, true), Error);
  EXPECT_THROW(CheckControl(Join(kOther, Node::SERVER, 3), 9, who, true), Error);
  EXPECT_THROW(CheckControl(Join(kOther, Node::WORKER, 4), 9, who, true), Error);
  Control two = Join(kOther, Node::WORKER, 3);
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
  job.SetIncarnation(3);
  EXPECT_NE(job.Hear(kJob, false), "");
  EXPECT_EQ(job.Hear(kJob + 1, false), "");
}

}  // namespace
}  // namespace ps
