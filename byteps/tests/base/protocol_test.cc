// Tests of texts and bytes: the protocol of workers and servers, a launcher's variables, and the
// log.
#include "byteps/base/protocol.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/protocol.h"
#include "byteps/net/link/admission.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

std::vector<Declaration> SomeDeclarations() {
  std::vector<Declaration> all;
  for (int i = 0; i < 7; ++i) {
    Declaration d;
    d.name = std::string(i, 'x') + "\0\xff" + std::to_string(i);
    d.dtype = static_cast<DType>(i);
    d.average = i % 2 == 0;
    d.in_order = i % 3 == 1;
    d.hash = KeyHash::kDjb2;
    d.patience = {2, 1, 1500};
    d.bytes = 800 * (i + 1);
    d.partition_bytes = 4096;
    d.placement = 0x1122334455667788 + i;
    d.group = i % 3 == 0 ? std::vector<uint32_t>{0, 1, 70000} : std::vector<uint32_t>{5, 6};
    if (i == 0) {  // 200 elements of fp32
      UpdateRule rule;
      rule.groups = {{0.9, 0.95, 1e-8, false}, {0.8, 0.9, 1e-6, false}};
      rule.segments = {{3, 1}, {199, 0, false}, {200, 1}};
      rule.counts_zeros = true;
      d.rule = std::make_shared<UpdateRule>(rule);
    }
    all.push_back(d);
  }
  return all;
}

TEST(DeclarationList, ComesBackAsItWas) {
  const auto all = SomeDeclarations();
  std::vector<Declaration> back;
  std::string error;
  ASSERT_TRUE(UnpackDeclarations(PackDeclarations(all), &back, &error)) << error;
  ASSERT_EQ(back.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(back[i] == all[i]) << i;
}

TEST(DeclarationList, IsLittleEndianAndHasEachGroupOnce) {
  auto all = SomeDeclarations();
  const std::string text = PackDeclarations(all);
  EXPECT_EQ(text[0], kDeclarationVersion);                                       // version
  EXPECT_EQ(text[1], 1);                                                         // djb2
  EXPECT_EQ(text.substr(2, 12), std::string("\2\0\0\0\1\0\0\0\xdc\5\0\0", 12));  // patience
  EXPECT_EQ(text.substr(14, 4), std::string("\2\0\0\0", 4));                     // groups
  EXPECT_EQ(text.substr(18, 4), std::string("\3\0\0\0", 4));        // members of the first
  EXPECT_EQ(text.substr(30, 4), std::string("\x70\x11\x01\0", 4));  // 70000
}

TEST(DeclarationList, EveryTruncationAndAdditionIsRefused) {
  const std::string text = PackDeclarations(SomeDeclarations());
  std::vector<Declaration> back;
  std::string error;
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_FALSE(UnpackDeclarations(text.substr(0, size), &back, &error)) << size;
    EXPECT_EQ(error, "does not parse");
  }
  EXPECT_FALSE(UnpackDeclarations(text + "x", &back, &error));
}

// Groups are shared between the lists of many ranks, and between the tensors of a list.
TEST(DeclarationList, EqualGroupsAreSharedAndGoWithTheLast) {
  const std::string text = PackDeclarations(SomeDeclarations());
  RankGroups groups;
  std::vector<Declaration> first, second;
  std::string error;
  ASSERT_TRUE(UnpackDeclarations(text, &first, &error, &groups)) << error;
  ASSERT_TRUE(UnpackDeclarations(text, &second, &error, &groups)) << error;
  EXPECT_TRUE(first[0].group.IsSharedWith(second[3].group));
  EXPECT_TRUE(first[1].group.IsSharedWith(second[2].group));
  EXPECT_FALSE(first[0].group.IsSharedWith(first[1].group));
  const std::weak_ptr<const RankGroup::Ranks> kept = first[0].group.shared();
  first.clear();
  second.clear();
  EXPECT_TRUE(kept.expired());
}

TEST(DeclarationList, AQuorumNeedsReplicas) {
  auto all = SomeDeclarations();
  for (auto& d : all) d.patience = {0, 1, 1500};
  std::vector<Declaration> back;
  std::string error;
  EXPECT_FALSE(UnpackDeclarations(PackDeclarations(all), &back, &error));
}

TEST(DeclarationList, AnotherVersionIsNamed) {
  std::string text = PackDeclarations(SomeDeclarations());
  text[0] = kDeclarationVersion + 1;
  std::vector<Declaration> back;
  std::string error;
  EXPECT_FALSE(UnpackDeclarations(text, &back, &error));
  const std::string wanted = "version " + std::to_string(kDeclarationVersion + 1);
  EXPECT_NE(error.find(wanted), std::string::npos) << error;
}

TEST(DeclarationList, AnyBytesAreTakenOrRefused) {
  const std::string good = PackDeclarations(SomeDeclarations());
  std::mt19937 random(7);
  std::vector<Declaration> back;
  std::string error;
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = good;
    for (int flips = 1 + random() % 4; flips > 0; --flips) {
      text[random() % text.size()] = static_cast<char>(random());
    }
    if (!UnpackDeclarations(text, &back, &error)) {
      ++refused;
      continue;
    }
    for (const auto& d : back) {
      EXPECT_LE(d.NumPartitions(), kMaxPartitions);
      EXPECT_TRUE(std::is_sorted(d.group.begin(), d.group.end()));
      EXPECT_FALSE(d.group.empty());
    }
  }
  EXPECT_GT(refused, 1000);
}

// Returns whether the rule is the same after packing and unpacking, for a tensor of 10 elements.
bool IsRule(const UpdateRule& rule) {
  UpdateRule back;
  return UpdateRule::Unpack(rule.Pack(), 10, &back) && back == rule;
}

TEST(UpdateRule, HasEachElementInOneGroup) {
  UpdateRule rule;
  rule.groups = {{0.9, 0.95, 1e-8, false}};
  rule.segments = {{4, 0}, {10, 0}};
  EXPECT_TRUE(IsRule(rule));
  EXPECT_EQ(rule.NumSlots(), 3u);
  for (const auto& segments : std::vector<std::vector<UpdateRule::Segment>>{
           {}, {{4, 0}}, {{4, 0}, {11, 0}}, {{4, 0}, {4, 0}, {10, 0}}, {{4, 1}, {10, 0}}}) {
    UpdateRule bad = rule;
    bad.segments = segments;
    EXPECT_FALSE(IsRule(bad));
  }
  rule.groups[0].beta2 = 1;  // its bias correction is 0
  EXPECT_FALSE(IsRule(rule));
  rule.algorithm = UpdateRule::kSgd;
  EXPECT_TRUE(IsRule(rule));
  EXPECT_EQ(rule.NumSlots(), 2u);
}

TEST(UpdateRule, EveryTruncationOfAStepIsRefused) {
  UpdateStep step, back;
  step.number = 7;
  step.skip = true;
  step.grad_scale = 0.25;
  step.rates = {{0.1, 0.01}, {0.2, 0}};
  const std::string text = step.Pack();
  ASSERT_TRUE(UpdateStep::Unpack(text, &back));
  EXPECT_EQ(back.Pack(), text);
  EXPECT_EQ(back.Describe(),
            "step 7, skipped, with learning rates 0.1, 0.2, weight decays 0.01, 0, gradients times "
            "0.25");
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_FALSE(UpdateStep::Unpack(text.substr(0, size), &back)) << size;
  }
  EXPECT_FALSE(UpdateStep::Unpack(text + "x", &back));
}

PushHeader SomeHeader() {
  PushHeader header;
  header.round = 0x01020304;
  header.timeout_ms = 600'000;
  header.pull_offset = 0xfffffffe;
  header.pull_bytes = 7;
  header.oldest = 0x01000003;
  header.flags = PushHeader::kForgetLost;
  header.confirmed = 0x8000000000000005;
  return header;
}

TEST(PushHeader, IsSevenLittleEndianNumbers) {
  const std::string wire(
      "\4\3\2\1\xc0\x27\x09\0\xfe\xff\xff\xff\7\0\0\0\3\0\0\1\1\0\0\0\5\0\0\0\0\0\0\x80", 32);
  EXPECT_EQ(SomeHeader().Pack(), wire);
  PushHeader back;
  ASSERT_TRUE(PushHeader::Unpack(wire, &back));
  EXPECT_EQ(back.round, 0x01020304u);
  EXPECT_EQ(back.timeout_ms, 600'000u);
  EXPECT_EQ(back.pull_offset, 0xfffffffeu);
  EXPECT_EQ(back.pull_bytes, 7u);
  EXPECT_EQ(back.oldest, 0x01000003u);
  EXPECT_EQ(back.flags, PushHeader::kForgetLost);
}

TEST(PushHeader, SomethingMayFollow) {
  const std::string wire = SomeHeader().Pack();
  PushHeader back;
  std::string rest;
  ASSERT_TRUE(PushHeader::Unpack(wire + "after", &back, &rest));
  EXPECT_EQ(rest, "after");
  EXPECT_EQ(back.Pack(), wire);
  EXPECT_FALSE(PushHeader::Unpack(wire.substr(1), &back, &rest));
}

TEST(PushHeader, AnyOtherLengthIsRefused) {
  const std::string wire = SomeHeader().Pack();
  PushHeader back;
  for (size_t size = 0; size < wire.size(); ++size) {
    EXPECT_FALSE(PushHeader::Unpack(wire.substr(0, size), &back)) << size;
  }
  EXPECT_FALSE(PushHeader::Unpack(wire + "x", &back));
}

// A long message that claims a node for almost every byte.
TEST(Meta, ACountTakesNoMemoryBeforeItsNodesAreRead) {
  constexpr size_t kBytes = 3 << 20;
  const std::string empty = ps::EncodeMeta(ps::Meta());
  for (const uint32_t nodes : {1u << 20, uint32_t{kBytes / 15}}) {
    std::string bytes = empty + std::string(kBytes, '\xff');
    for (int i = 0; i < 4; ++i) bytes[empty.size() - 4 + i] = static_cast<char>(nodes >> 8 * i);
    ps::Meta meta;
    EXPECT_FALSE(ps::DecodeMeta(bytes.data(), bytes.size(), &meta));
    EXPECT_LE(meta.control.node.capacity(), 64u) << nodes;
  }
}

TEST(Meta, TheNodesOfALargeJobComeBack) {
  ps::Meta meta;
  meta.control.cmd = ps::Control::ADD_NODE;
  for (int i = 0; i < 5000; ++i) {
    ps::Node node;
    node.role = i % 2 == 0 ? ps::Node::SERVER : ps::Node::WORKER;
    node.id = 8 + i;
    node.aux_id = i / 2;
    node.port = 1000 + i;
    node.hostname = "host-" + std::to_string(i);
    meta.control.node.push_back(node);
  }
  const std::string bytes = ps::EncodeMeta(meta);
  ps::Meta back;
  ASSERT_TRUE(ps::DecodeMeta(bytes.data(), bytes.size(), &back));
  EXPECT_EQ(back.control.node.size(), 5000u);
  EXPECT_EQ(ps::EncodeMeta(back), bytes);
}

// ----- a launcher's variables for a worker and its replica

Launch From(const Settings& settings) { return Launch::From(ConfigWith(settings)); }

std::string ErrorOf(const Settings& settings) {
  try {
    From(settings);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

TEST(Launch, IsTheLaunchersOrOurs) {
  EXPECT_EQ(From({}).size, 1);
  const Launch launch = From({{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"DMLC_NUM_WORKER", "3"}});
  EXPECT_EQ(launch.rank, 2);
  EXPECT_EQ(launch.size, 3);
  EXPECT_EQ(launch.replicas, 1);
  EXPECT_EQ(ErrorOf({{"WORLD_SIZE", "3"}, {"DMLC_NUM_WORKER", "4"}}),
            "WORLD_SIZE=3 and DMLC_NUM_WORKER=4 disagree: workers are the job's ranks, not its "
            "hosts; unset DMLC_NUM_WORKER");
}

TEST(Launch, OurPlaceOnTheHostComesBeforeTheLaunchers) {
  Settings settings = {{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
  EXPECT_EQ(From(settings).local_rank, 1);
  EXPECT_EQ(From(settings).local_size, 2);
  settings.insert({{"BYTEPS_LOCAL_RANK", "3"}, {"BYTEPS_LOCAL_SIZE", "4"}});
  EXPECT_EQ(From(settings).local_rank, 3);
  EXPECT_EQ(From(settings).local_size, 4);
}

TEST(Launch, RanksOfReplicasFollowEachOther) {
  for (const Settings& all : {Settings(), Settings{{"DMLC_NUM_WORKER", "8"}}}) {
    Settings settings = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"BYTEPS_REPLICA", "3/4"}};
    settings.insert(all.begin(), all.end());
    const Launch launch = From(settings);
    EXPECT_EQ(launch.replica, 3);
    EXPECT_EQ(launch.replicas, 4);
    EXPECT_EQ(launch.rank, 7);
    EXPECT_EQ(launch.size, 8);
  }
}

TEST(Launch, ReplicasThatCannotBeAreRefused) {
  for (const std::string text : {"4/4", "-1/4", "1", "1/", "a/4", "1/4x", "0/0", "0/5000"}) {
    EXPECT_EQ(ErrorOf({{"BYTEPS_REPLICA", text}}),
              "BYTEPS_REPLICA='" + text +
                  "' is not NUMBER/COUNT: 0/4, 1/4, 2/4 and 3/4 are four replicas");
  }
  EXPECT_EQ(ErrorOf({{"BYTEPS_REPLICA", "0/3"}, {"WORLD_SIZE", "2"}, {"DMLC_NUM_WORKER", "4"}}),
            "DMLC_NUM_WORKER=4 is not 3 replicas (BYTEPS_REPLICA) of equal size, WORLD_SIZE=2");
}

}  // namespace
}  // namespace core
}  // namespace byteps

namespace ps {
namespace {

// ----- log lines reach a slow reader, and never wait for it

constexpr size_t kLimit = 64 << 10;
constexpr int kPatienceMs = 60'000;  // against hangs only

std::string Line(int i) { return "line " + std::to_string(i) + std::string(100, '.') + "\n"; }

std::string Notice(uint64_t dropped) { return "dropped " + std::to_string(dropped) + "\n"; }

// Reads to the end of the line with `word`.
std::string ReadUntil(int fd, const std::string& word) {
  std::string all;
  char buffer[4096];
  pollfd item{fd, POLLIN, 0};
  while (all.empty() || all.back() != '\n' || all.find(word) == std::string::npos) {
    if (poll(&item, 1, kPatienceMs) != 1) return all + "(nothing more came)";
    const ssize_t n = read(fd, buffer, sizeof(buffer));
    if (n <= 0) return all + "(closed)";
    all.append(buffer, n);
  }
  return all;
}

// The output is never destroyed, see LogOutput. This keeps it reachable for a leak checker.
LogOutput* NewOutput(int fd) {
  static auto* const all = new std::vector<LogOutput*>;
  all->push_back(new LogOutput(fd, kLimit, Notice));
  return all->back();
}

// A pipe or connection, and its writer.
struct Written {
  explicit Written(bool pipes) {
    EXPECT_EQ(pipes ? pipe(ends) : socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    output = NewOutput(ends[1]);
  }
  int ends[2];
  LogOutput* output;
};

void TryWhatIsReadComesAtOnce(bool pipes) {
  const Written written(pipes);
  written.output->Write(Line(7));
  EXPECT_EQ(ReadUntil(written.ends[0], "line"), Line(7));
  EXPECT_EQ(fcntl(written.ends[1], F_GETFL) & O_NONBLOCK, 0)
      << "others share the descriptor's file";
}

TEST(LogOutputTest, WhatIsReadComesAtOnce) {
  for (const bool pipes : {true, false}) TryWhatIsReadComesAtOnce(pipes);
}

void TryNobodyReadsForAWhile(bool pipes) {
  const Written written(pipes);
  int last = 0;
  // More lines than any pipe or socket takes, together with the lines that may wait.
  constexpr int kLines = 20'000;
  for (; last < kLines; ++last) written.output->Write(Line(last));
  written.output->Flush(0.01);
  // The first lines are there, in order. The later ones are only counted.
  std::string expected;
  int kept = 0;
  const std::string got = ReadUntil(written.ends[0], "dropped");
  const size_t notice = got.rfind("dropped");
  ASSERT_NE(notice, std::string::npos) << got.substr(got.size() - 200);
  for (; expected.size() < notice; ++kept) expected += Line(kept);
  EXPECT_EQ(got.substr(0, notice), expected);
  EXPECT_GE(expected.size(), kLimit);
  EXPECT_LT(kept, kLines);
  EXPECT_EQ(got.substr(notice), Notice(kLines - kept));
  written.output->Flush(60);
  written.output->Write(Line(last));
  EXPECT_EQ(ReadUntil(written.ends[0], "line"), Line(last));
}

TEST(LogOutputTest, NobodyReadsForAWhile) {
  for (const bool pipes : {true, false}) TryNobodyReadsForAWhile(pipes);
}

void TryAChildOwnsNothingThatWaits(bool pipes) {
  const Written written(pipes);
  for (int i = 0; i < 5000; ++i) written.output->Write(Line(i));
  int mine[2];
  ASSERT_EQ(pipe(mine), 0);
  written.output->BeforeFork();
  const pid_t child = fork();
  written.output->AfterFork(child == 0);
  if (child == 0) {
    dup2(mine[1], written.ends[1]);
    written.output->Write("from the child\n");
    written.output->Flush(60);
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  close(mine[1]);
  EXPECT_EQ(ReadUntil(mine[0], "from"), "from the child\n");
}

TEST(LogOutputTest, AChildOwnsNothingThatWaits) {
  for (const bool pipes : {true, false}) TryAChildOwnsNothingThatWaits(pipes);
}

}  // namespace
}  // namespace ps
