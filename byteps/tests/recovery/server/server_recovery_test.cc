// Optimizer state with a copy (recovery/server/backup_link.h): two servers, and a successor of the
// first.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "byteps/base/block_codec.h"
#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "tests/server/optimizer/step_job.h"
#include "tests/support/kit.h"
#include "tests/support/recovering_server.h"

namespace byteps {
namespace core {
namespace {

constexpr size_t kCount = 256;
constexpr size_t kBytes = kCount * sizeof(float);
// Members that may miss answers; jobs with replicas have one more.
constexpr int kMembers = 2;
constexpr int kLost = 2;

class Hub;

// A server's channel.
class Wire : public ServerChannel {
 public:
  Wire(Hub* hub, int rank) : hub_(hub), rank_(rank) {}
  void Send(const Message& message) override;
  int rank() const override { return rank_; }
  std::string NameOfServer(int rank) override { return "server " + std::to_string(rank); }
  std::atomic<bool> cut{false};  // its process is gone

 private:
  Hub* const hub_;
  const int rank_;
};

// The servers, and a thread that delivers their messages to each other.
class Hub {
 public:
  Hub() : thread_([this] { Run(); }) {}
  ~Hub() {
    for (Node& node : nodes_) {
      std::unique_ptr<SumServer> server;
      ps::MutexLock lock(&mu_);
      server = std::move(node.server);
      lock.Unlock();
    }
    queue_.Close();
    thread_.join();
  }

  void Start(int rank) {
    Node& node = nodes_[rank];
    node.wire = std::make_unique<Wire>(this, rank);
    auto server =
        std::make_unique<RecoveringServer>(ConfigWith({{"BYTEPS_SERVER_ENGINE_THREAD", "2"},
                                                       {"DMLC_NUM_SERVER", "2"},
                                                       {"BYTEPS_BACKUP_STATE", "1"},
                                                       {"BYTEPS_REPLACE_SERVERS_S", "60"}}),
                                           node.wire.get());
    SumServer* const started = server.get();
    {
      ps::MutexLock lock(&mu_);
      node.server = std::move(server);
    }
    started->SetRank(rank);
  }
  // Kills a server's process. Its messages that are not sent yet are lost.
  void Kill(int rank) {
    nodes_[rank].wire->cut = true;
    std::unique_ptr<SumServer> dead;
    {
      ps::MutexLock lock(&mu_);
      dead = std::move(nodes_[rank].server);
    }
    dead.reset();
  }
  SumServer* At(int rank) { return nodes_[rank].server.get(); }

  void Carry(const Message& message, int from) {
    if (!message.between_servers) {
      const int member = static_cast<int>(message.number >> 48);
      if ((deaf >> member & 1) == 0) answers.Send(message);
      return;
    }
    if (message.is_request && message.op == kCopy && loses_copies) return;
    Item item{message.peer, message};
    item.message.peer = from;
    if (!message.values.empty()) {  // a transport does this
      const SharedBytes values = SharedBytes::New(message.values.size());
      memcpy(values.data(), message.values.data(), values.size());
      item.message.SetValues(values);
    }
    queue_.Push(std::move(item));
  }

  Answers answers;
  std::atomic<unsigned> deaf{0};  // a bit per member that gets no answers
  std::atomic<bool> loses_copies{false};

 private:
  struct Node {
    std::unique_ptr<Wire> wire;
    std::unique_ptr<SumServer> server;
  };
  struct Item {
    int to = 0;
    Message message;
  };

  void Run() {
    Item item;
    while (queue_.Pop(&item)) {
      ps::MutexLock lock(&mu_);
      if (nodes_[item.to].server) nodes_[item.to].server->OnMessage(&item.message);
    }
  }

  ps::Mutex mu_;  // held during a delivery
  std::array<Node, 2> nodes_;
  BlockingQueue<Item> queue_;
  std::thread thread_;
};

void Wire::Send(const Message& message) {
  if (!cut) hub_->Carry(message, rank_);
}

// Members that make steps, one request at a time: two members, or three replicas, the last of which
// is removed and comes back.
class Script {
 public:
  Script(DType dtype, bool replicas) : members_(replicas ? 3 : kMembers) {
    auto rule = std::make_shared<UpdateRule>();
    rule->algorithm = UpdateRule::kAdamW;
    rule->speculative = true;
    rule->groups = {{0.9, 0.99, 1e-8, false}};
    rule->segments = {{kCount, 0}};
    if (IsBlock(dtype)) rule->held = DType::kBFloat16;
    tensor_.name = "parameters";
    tensor_.dtype = dtype;
    tensor_.bytes = tensor_.partition_bytes = static_cast<uint32_t>(
        IsBlock(dtype) ? kCount / kBlockValues * SizeOf(dtype) : kCount * SizeOf(dtype));
    tensor_.group = RankGroup::Below(members_);
    if (replicas) tensor_.patience.replica_ranks = 1;
    tensor_.rule = rule;
    for (const int rank : {1, 0}) hub_.Start(rank);  // 0 connects
    for (int rank = 0; rank < members_; ++rank) Declare(rank);
    AwaitCopy();
  }

  // Number of the request before which the server dies and is replaced.
  int dies_before = -1;
  // At that time these members miss the answers to the last requests, or the backup misses its last
  // record.
  unsigned unheard = 0;  // a bit per member
  bool unsaid = false;
  std::vector<std::vector<float>> got;  // answers and state, in order

  void Run() {
    Load(0, 0, 1);
    for (round_ = 0; round_ < 12; ++round_) {
      OneRound(static_cast<int>(round_ % 6));
      if (members_ == kMembers) continue;
      // A step was speculative in this round, and in the other.
      if (round_ == 2) SetAbsent({kLost});
      if (round_ == 8) Join();
    }
    for (uint32_t slot = 0; slot < tensor_.NumSlots(); ++slot) Read(slot);
  }
  int asked() const { return asked_; }

 private:
  struct Open {
    int rank;
    Message request;
  };

  void OneRound(int kind) {
    const std::string whole = StepOf(1), small = StepOf(0.25);
    const auto both = [&](int op, const std::string& detail) {
      for (int rank = 0; rank < members_; ++rank) {
        if (absent_.count(rank) == 0) Ask(rank, op, detail);
      }
      AwaitAll();
    };
    const std::string said = std::string(1, static_cast<char>(verdict_));
    verdict_ = Verdict::kNone;
    switch (kind) {
      case 0:
        both(kPushStep, said + whole);
        ++step_;
        break;
      case 1:
        both(kPushNorm, said);
        both(kStep, small);
        ++step_;
        break;
      case 2:
        both(kPushTry, said + whole);
        verdict_ = Verdict::kKeep;
        ++step_;
        break;
      case 3:
        both(kPushTry, said + whole);
        both(kStep, small);
        ++step_;
        break;
      case 4:
        both(kPushTry, said + whole);
        verdict_ = Verdict::kDrop;
        break;
      case 5:
        both(kPushTry, said + whole);
        for (uint32_t slot = 0; slot < 3; ++slot) Load(0, slot, 2 + slot);
        step_ = 0;
        break;
      default:
        break;
    }
  }

  void SetAbsent(std::set<int> ranks) {
    absent_ = std::move(ranks);
    for (int rank = 0; rank < 2; ++rank) hub_.At(rank)->SetAbsent(absent_);
  }

  void Join() {
    SetAbsent({});
    Declare(kLost);
    ReadSome(0, 0, 0, verdict_);
    for (uint32_t slot = 0; slot < tensor_.NumSlots(); ++slot) {
      ReadSome(kLost, slot, kBytes, Verdict::kNone);
    }
  }

  std::string StepOf(double scale) const {
    UpdateStep step;
    step.number = step_ + 1;
    step.grad_scale = scale;
    step.rates = {{0.01, 0.1}};
    return step.Pack();
  }

  SharedBytes Gradients(int rank) const {
    std::vector<float> values(kCount);
    for (size_t i = 0; i < kCount; ++i) {
      values[i] = static_cast<float>((i * 7 + round_ * 13 + rank * 29) % 101) / 64 - 0.7f;
    }
    const SharedBytes bytes = SharedBytes::New(tensor_.bytes);
    if (IsBlock(tensor_.dtype)) {
      EncodeBlocks(tensor_.dtype, bytes.data(), DType::kFloat32, values.data(), kCount, nullptr,
                   nullptr);
    } else {
      memcpy(bytes.data(), values.data(), kBytes);
    }
    return bytes;
  }

  void Load(int rank, uint32_t slot, float value) {
    WireWriter out;
    out.Put(slot);
    const std::vector<float> values(kCount, value);
    const SharedBytes bytes = SharedBytes::New(kBytes);
    memcpy(bytes.data(), values.data(), kBytes);
    Ask(rank, kLoadState, out.Take(), bytes);
    AwaitAll();
  }

  void Read(uint32_t slot) { ReadSome(0, slot, kBytes, verdict_); }

  void ReadSome(int rank, uint32_t slot, uint32_t bytes, Verdict verdict) {
    WireWriter out;
    out.Put(slot);
    Ask(rank, kReadState, std::string(1, static_cast<char>(verdict)) + out.Take(), {}, bytes);
    AwaitAll();
  }

  void Ask(int rank, int op, const std::string& detail, SharedBytes values = {},
           uint32_t read_bytes = 0) {
    if (asked_++ == dies_before) Replace();
    PushHeader header;
    header.round = header.oldest = round_;
    header.timeout_ms = 600'000;
    if (op == kReadState) {
      header.pull_bytes = read_bytes;
    } else if (op != kLoadState && op != kPushNorm) {
      header.pull_bytes = static_cast<uint32_t>(AnswerBytes(tensor_.dtype, tensor_.bytes));
    }
    const uint64_t number = static_cast<uint64_t>(rank) << 48 | ++number_;
    Message message = MakeRequest(op, 0, tensor_.Key(), number, header.Pack() + detail);
    const bool pushes = op == kPushStep || op == kPushNorm || op == kPushTry;
    if (pushes) values = Gradients(rank);
    if (!values.empty()) message.SetValues(values);
    open_.push_back({rank, message});
    if (asked_ == dies_before) {
      hub_.deaf = unheard;
      hub_.loses_copies = unsaid;
    }
    Tell(rank, message);
  }

  void Tell(int rank, Message request) {
    request.peer = rank;
    if (!request.values.empty()) {  // the server adds into received memory
      const SharedBytes copy = SharedBytes::New(request.values.size());
      memcpy(copy.data(), request.values.data(), copy.size());
      request.SetValues(copy);
    }
    hub_.At(0)->OnMessage(&request);
  }

  void AwaitAll() {
    if (asked_ == dies_before) {
      for (const Open& one : open_) {
        if (!unsaid && (unheard >> one.rank & 1) == 0) hub_.answers.Await(one.request.number);
      }
      Replace();
      dies_before = -1;
    }
    for (const Open& one : open_) {
      const Answers::Answer answer = hub_.answers.Await(one.request.number);
      EXPECT_FALSE(answer.failed) << answer.body;
      std::vector<float> values = answer.values;
      for (const char c : answer.body) values.push_back(c);  // sums, and missing members
      got.push_back(std::move(values));
    }
    open_.clear();
  }

  void Declare(int rank) {
    const uint64_t number = static_cast<uint64_t>(rank) << 48 | ++number_;
    Tell(rank, MakeRequest(kDeclare, 0, tensor_.Key(), number, PackDeclarations({tensor_})));
    EXPECT_FALSE(hub_.answers.Await(number).failed);
  }

  // Waits until server 0 and its backup have met.
  void AwaitCopy() {
    const auto has_copy = [this] {
      for (const Metric& metric : hub_.At(0)->Metrics()) {
        if (metric.name == "byteps_server_has_copy") return metric.value == 1;
      }
      return false;
    };
    for (int i = 0; i < 100'000 && !has_copy(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(has_copy());
  }

  void Replace() {
    hub_.Kill(0);
    hub_.deaf = 0;
    hub_.loses_copies = false;
    hub_.At(1)->OnServerLost(0);
    hub_.Start(0);
    hub_.At(1)->OnServerReplaced(0);
    if (!absent_.empty()) hub_.At(0)->SetAbsent(absent_);
    for (int rank = 0; rank < members_; ++rank) {
      if (absent_.count(rank) > 0) continue;
      Declare(rank);
      WireWriter out;
      out.PutSize(1);
      out.Put(tensor_.Key());
      out.Put(round_);
      const uint64_t number = static_cast<uint64_t>(rank) << 48 | ++number_;
      Tell(rank, MakeRequest(kResume, 0, 0, number, out.Take()));
      const Answers::Answer answer = hub_.answers.Await(number);
      EXPECT_FALSE(answer.failed) << answer.body;
    }
    for (const Open& one : open_) {
      if (!hub_.answers.Has(one.request.number)) Tell(one.rank, one.request);
    }
  }

  const int members_;
  std::set<int> absent_;
  Hub hub_;
  Declaration tensor_;
  uint32_t round_ = 0;
  uint64_t step_ = 0;
  Verdict verdict_ = Verdict::kNone;
  uint64_t number_ = 0;
  int asked_ = 0;
  std::vector<Open> open_;
};

class BackupTest : public testing::TestWithParam<std::tuple<DType, bool>> {};

TEST_P(BackupTest, AServerThatDiesAnywhereIsReplacedToTheBit) {
  const auto [dtype, replicas] = GetParam();
  Script alone(dtype, replicas);
  alone.Run();
  ASSERT_FALSE(HasFailure());
  for (int before = 1; before < alone.asked(); ++before) {
    for (unsigned members = 0; members < 1U << kMembers; ++members) {
      for (const bool unsaid : {false, true}) {
        Script script(dtype, replicas);
        script.dies_before = before;
        script.unheard = members;
        script.unsaid = unsaid;
        script.Run();
        ASSERT_FALSE(HasFailure()) << "dies before " << before;
        ASSERT_EQ(script.got.size(), alone.got.size());
        for (size_t i = 0; i < alone.got.size(); ++i) {
          ASSERT_EQ(script.got[i].size(), alone.got[i].size());
          const size_t bytes = alone.got[i].size() * sizeof(float);
          ASSERT_EQ(memcmp(script.got[i].data(), alone.got[i].data(), bytes), 0)
              << "dies before " << before << ", answer " << i << ", unheard " << members
              << (unsaid ? ", unsaid" : "");
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, BackupTest,
                         testing::Combine(testing::Values(DType::kFloat32, DType::kInt8x128),
                                          testing::Bool()));

}  // namespace
}  // namespace core
}  // namespace byteps
