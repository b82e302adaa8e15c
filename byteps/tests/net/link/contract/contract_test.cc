// Contract of a link, tested over each transport. Contains the link pair over RDMA.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/net/rdma/connector.h"
#include "byteps/net/rdma/settings.h"
#include "byteps/net/rdma/transport.h"
#include "link_pair.h"
#ifdef BYTEPS_WITH_RDMA
#include "byteps/net/link/admission.h"
#include "byteps/net/link/counters.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/rdma/endpoint.h"
#include "byteps/net/rdma/pool.h"
#include "byteps/net/rdma/van.h"
#include "byteps/net/rdma/verbs.h"
#include "dmlc/logging.h"
#endif

namespace contract {

std::string LinkPair::Text() {
  std::string text;
  for (const Side side : {kConnects, kListens}) {
    const auto state = seen(side)->get();
    text += side == kConnects ? "who connects: " : "; who listens: ";
    text += std::to_string(state.texts.size()) + " messages, resumed " +
            std::to_string(state.resumed) + " times";
    if (state.closed > 0) text += ", closed: " + state.ending.reason;
  }
  return text;
}

std::vector<Transport> Transports() {
  std::vector<Transport> all = {
      {"Tcp", [] { return MakeTcpPair(false, 1); }},
      {"EncryptedTcp", [] { return MakeTcpPair(true, 1); }},
      {"TcpOverTwoNics", [] { return MakeTcpPair(false, 2); }},
  };
#ifdef BYTEPS_WITH_RDMA
  if (const char* address = getenv("CONTRACT_RDMA_ADDRESS")) {
    all.push_back({"Rdma", [address] { return MakeRdmaPair(address); }});
  }
#endif
  return all;
}

namespace {

// Sizes for each path: in a frame over RDMA, several per call over TCP; by rendezvous, and alone.
const std::vector<size_t> kSizes = {1, 100, 5000, 70'000, 1'000'000};

// Counts how often its bytes are still referenced.
class Memory {
 public:
  explicit Memory(const std::string& text) : bytes_(text.begin(), text.end()) {}
  ps::SArray<char> Value() {
    ++held_;
    ps::SArray<char> value;
    value.reset(bytes_.data(), bytes_.size(), [this](char*) { --held_; });
    return value;
  }
  bool held() const { return held_ != 0; }

 private:
  std::vector<char> bytes_;
  std::atomic<int> held_{0};
};

ps::SArray<char> ValueOf(const std::string& text) {
  ps::SArray<char> value(text.size());
  memcpy(value.data(), text.data(), text.size());
  return value;
}

// Returns a text of this size that differs from all others.
std::string TextOf(Side from, int n, size_t bytes) {
  std::string text = (from == kConnects ? "push " : "answer ") + std::to_string(n) + " ";
  while (text.size() < bytes) text += static_cast<char>('a' + (text.size() * 7 + n) % 26);
  return text;
}

class Contract : public testing::TestWithParam<Transport> {
 protected:
  void SetUp() override {
    broken_before_ = ps::BrokenInvariants().count;
    pair_ = GetParam().make();
  }
  void TearDown() override {
    pair_.reset();
    EXPECT_EQ(ps::BrokenInvariants().count, broken_before_) << ps::BrokenInvariants().last;
  }

  Seen* At(Side side) { return pair_->seen(side); }
  // Returns false if a link closes first.
  bool BothHave(size_t messages) {
    const auto have = [&] {
      return At(kConnects)->count() == messages && At(kListens)->count() == messages;
    };
    return WaitUntil([&] {
             return have() || At(kConnects)->get().closed > 0 || At(kListens)->get().closed > 0;
           }) &&
           have();
  }
  bool IsResumed() {
    const auto one = At(kConnects)->get(), other = At(kListens)->get();
    return one.resumed > 0 && other.resumed > 0;
  }

  uint64_t broken_before_ = 0;
  std::unique_ptr<LinkPair> pair_;
};

// Sends `count` messages from a side, cycling through kSizes.
void SendAll(LinkPair* pair, Side from, int count, std::vector<std::string>* texts) {
  for (int n = 0; n < count; ++n) {
    texts->push_back(TextOf(from, n, kSizes[n % kSizes.size()]));
    pair->Send(from, ValueOf(texts->back()));
  }
}

// Expects that messages of equal size came once, in the order in which they were sent.
void ExpectOnceAndInOrder(const std::vector<std::string>& came,
                          const std::vector<std::string>& sent) {
  const auto by_size = [](const std::vector<std::string>& texts) {
    std::map<size_t, std::vector<std::string>> sorted;
    for (const auto& text : texts) sorted[text.size()].push_back(text);
    return sorted;
  };
  EXPECT_EQ(came.size(), sent.size());
  EXPECT_TRUE(by_size(came) == by_size(sent));
}

TEST_P(Contract, EachMessageComesOnceAndWhole) {
  constexpr int kCount = 200;
  std::vector<std::string> sent[2];
  std::thread other([&] { SendAll(pair_.get(), kListens, kCount, &sent[kListens]); });
  SendAll(pair_.get(), kConnects, kCount, &sent[kConnects]);
  other.join();
  ASSERT_TRUE(BothHave(kCount)) << pair_->Text();
  ExpectOnceAndInOrder(At(kListens)->get().texts, sent[kConnects]);
  ExpectOnceAndInOrder(At(kConnects)->get().texts, sent[kListens]);
  for (const Side side : {kConnects, kListens}) {
    EXPECT_TRUE(WaitUntil([&] { return pair_->AllArrived(side); }));
    EXPECT_EQ(At(side)->get().closed, 0);
    EXPECT_TRUE(pair_->Load(side).is_open);
    EXPECT_EQ(pair_->Load(side).queued_bytes, 0u);
  }
}

TEST_P(Contract, HoweverOftenItBreaks) {
  constexpr int kCount = 300;
  std::vector<std::string> sent[2];
  std::atomic<bool> sending{true};
  std::thread breaks([&] {
    // The pauses become longer, because a slow machine must make progress between two breaks.
    for (int n = 1; sending; ++n) {
      pair_->Break();
      std::this_thread::sleep_for(std::chrono::milliseconds(10 * n));
    }
  });
  std::thread other([&] { SendAll(pair_.get(), kListens, kCount, &sent[kListens]); });
  SendAll(pair_.get(), kConnects, kCount, &sent[kConnects]);
  other.join();
  // Waits until a message was lost with a broken connection.
  EXPECT_TRUE(WaitUntil([&] { return IsResumed(); })) << pair_->Text();
  sending = false;
  breaks.join();
  ASSERT_TRUE(BothHave(kCount)) << pair_->Text();
  ExpectOnceAndInOrder(At(kListens)->get().texts, sent[kConnects]);
  ExpectOnceAndInOrder(At(kConnects)->get().texts, sent[kListens]);
}

TEST_P(Contract, WhatWasSentWhileItWasBrokenComes) {
  pair_->Send(kConnects, ValueOf("one"));
  pair_->Send(kListens, ValueOf("one"));
  ASSERT_TRUE(BothHave(1)) << pair_->Text();
  pair_->Break();
  pair_->Send(kConnects, ValueOf("two"));
  pair_->Send(kListens, ValueOf("two"));
  ASSERT_TRUE(BothHave(2)) << pair_->Text();
  EXPECT_TRUE(WaitUntil([&] { return IsResumed(); })) << pair_->Text();
  EXPECT_EQ(At(kListens)->get().texts, std::vector<std::string>({"one", "two"}));
  EXPECT_EQ(At(kConnects)->get().texts, std::vector<std::string>({"one", "two"}));
}

TEST_P(Contract, MemoryIsHeldUntilTheMessageHasArrivedAndNoLonger) {
  std::vector<std::unique_ptr<Memory>> memory;
  int n = 0;
  for (const bool breaks : {false, true}) {
    for (const size_t bytes : kSizes) {
      memory.push_back(std::make_unique<Memory>(TextOf(kConnects, ++n, bytes)));
      pair_->Send(kConnects, memory.back()->Value());
    }
    if (breaks) pair_->Break();
  }
  ASSERT_TRUE(WaitUntil([&] { return At(kListens)->count() == memory.size(); })) << pair_->Text();
  for (const auto& one : memory) EXPECT_TRUE(WaitUntil([&] { return !one->held(); }));
}

// This must hold for any number of messages, whatever messages were sent just before.
TEST_P(Contract, MemoryIsNotHeldWhenNothingFollows) {
  std::vector<std::unique_ptr<Memory>> memory;
  for (int n = 0; n < 60; ++n) {
    const size_t first = memory.size();
    for (int m = 0; m <= n % 20; ++m) {
      memory.push_back(std::make_unique<Memory>(TextOf(kConnects, n, n % 3 == 0 ? 5000 : 100)));
      pair_->Send(kConnects, memory.back()->Value());
    }
    for (size_t m = first; m < memory.size(); ++m) {
      ASSERT_TRUE(WaitUntil([&] { return !memory[m]->held(); })) << n;
    }
    EXPECT_TRUE(WaitUntil([&] { return pair_->AllArrived(kConnects); })) << n;
  }
}

TEST_P(Contract, AndNotWhenItCloses) {
  std::vector<std::unique_ptr<Memory>> memory;
  for (int n = 0; n < 20; ++n) {
    memory.push_back(std::make_unique<Memory>(TextOf(kConnects, n, 1'000'000)));
    pair_->Send(kConnects, memory.back()->Value());
  }
  pair_->Close(kConnects);
  for (const auto& one : memory) EXPECT_TRUE(WaitUntil([&] { return !one->held(); }));
}

TEST_P(Contract, AValueComesToWhereItBelongs) {
  for (const size_t bytes : kSizes) {
    std::string place(bytes, '-');
    const std::string text = std::string(bytes, 'v');
    At(kListens)->ReceiveAt(&place[0]);
    const size_t before = At(kListens)->count();
    pair_->Send(kConnects, ValueOf(text));
    ASSERT_TRUE(WaitUntil([&] { return At(kListens)->count() > before; })) << pair_->Text();
    EXPECT_EQ(place, text);
    At(kListens)->ReceiveAt(nullptr);
  }
}

TEST_P(Contract, NothingIsWrittenWhereItWasAbandoned) {
  for (int n = 0; n < 20; ++n) {
    std::string place(1'000'000, '-');
    const size_t before = At(kListens)->count();
    At(kListens)->ReceiveAt(&place[0]);
    pair_->Send(kConnects, ValueOf(std::string(place.size(), 'v')));
    if (n % 4 != 0) std::this_thread::sleep_for(std::chrono::microseconds(100 * n));
    At(kListens)->ReceiveAt(nullptr);
    pair_->Abandon(kListens, place.data(), place.size());
    const std::string left = place;
    pair_->Send(kConnects, ValueOf("end"));
    // An abandoned message does not arrive. When "end" has arrived, all earlier messages are
    // complete, also the one in `place`.
    ASSERT_TRUE(WaitUntil([&] {
      const auto texts = At(kListens)->get().texts;
      return texts.size() > before && texts.back() == "end";
    })) << pair_->Text();
    EXPECT_EQ(place, left);
  }
}

// The sender stops after it was told where to write, and before it writes.
TEST_P(Contract, NothingIsWrittenByAPeerThatStoppedOnceItsPlaceIsAbandoned) {
  At(kConnects)->Stop(true);
  pair_->Send(kListens, ValueOf("stops"));
  std::string place(16'000'000, '-');
  At(kListens)->ReceiveAt(&place[0]);
  pair_->Send(kConnects, ValueOf(std::string(place.size(), 'v')));
  const bool began = WaitUntil([&] { return At(kListens)->places_told() > 0; });
  At(kListens)->ReceiveAt(nullptr);
  pair_->Abandon(kListens, place.data(), place.size());
  place.assign(place.size(), '+');
  At(kConnects)->Stop(false);
  ASSERT_TRUE(began) << pair_->Text();
  pair_->Send(kConnects, ValueOf("end"));
  pair_->Send(kListens, ValueOf("end"));
  for (const Side side : {kConnects, kListens}) {
    ASSERT_TRUE(WaitUntil([&] {
      const auto texts = At(side)->get().texts;
      return !texts.empty() && texts.back() == "end";
    })) << pair_->Text();
  }
  EXPECT_EQ(place, std::string(place.size(), '+'));
}

TEST_P(Contract, AGoodbyeClosesBothEndsInOrder) {
  std::vector<std::string> sent;
  SendAll(pair_.get(), kConnects, 50, &sent);
  EXPECT_TRUE(WaitUntil([&] { return pair_->AllArrived(kConnects); })) << pair_->Text();
  pair_->CloseInOrder(kConnects);
  ASSERT_TRUE(WaitUntil([&] {
    return At(kConnects)->get().closed > 0 && At(kListens)->get().closed > 0;
  })) << pair_->Text();
  const auto listens = At(kListens)->get();
  ExpectOnceAndInOrder(listens.texts, sent);
  EXPECT_TRUE(listens.ending.orderly) << listens.ending.reason;
  EXPECT_EQ(listens.resumed, 0);
}

TEST_P(Contract, ItClosesOnceAndTakesNothingThen) {
  pair_->Close(kConnects);
  pair_->Close(kConnects);
  ASSERT_TRUE(WaitUntil([&] { return At(kConnects)->get().closed > 0; }));
  EXPECT_TRUE(pair_->Load(kConnects).is_closed);
  Memory memory("too late");
  pair_->Send(kConnects, memory.Value());
  EXPECT_TRUE(WaitUntil([&] { return !memory.held(); }));
  EXPECT_TRUE(pair_->AllArrived(kConnects)) << "or never will";
  EXPECT_EQ(At(kConnects)->get().closed, 1);
  EXPECT_EQ(At(kListens)->count(), 0u);
}

// Invariants hold whichever thread is at work when a link closes.
TEST_P(Contract, ClosingAmidMessagesAndAcknowledgements) {
  for (int n = 0; n < 10; ++n) {
    if (n > 0) pair_ = GetParam().make();
    std::vector<std::string> sent[2];
    std::thread other([&] { SendAll(pair_.get(), kListens, 60, &sent[kListens]); });
    std::thread closes([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(300 * n));
      pair_->Close(n % 2 == 0 ? kConnects : kListens);
    });
    SendAll(pair_.get(), kConnects, 60, &sent[kConnects]);
    other.join();
    closes.join();
  }
}

INSTANTIATE_TEST_SUITE_P(Each, Contract, testing::ValuesIn(Transports()),
                         [](const auto& test) { return test.param.name; });

}  // namespace

#ifdef BYTEPS_WITH_RDMA
// ----- the pair over RDMA: two connectors of one process, connected through a device

namespace {

using ps::rdma::Connector;
using ps::rdma::Endpoint;
using ps::rdma::Plane;
using EndpointPtr = std::shared_ptr<Endpoint>;

constexpr uint64_t kJob = 0x5678 << 16;
// Node id of the peer of each side: a server's and a worker's.
constexpr int kPeerOf[] = {8, 9};

class RdmaEnd : public ps::rdma::EndpointOwner, public ps::rdma::ConnectorOwner {
 public:
  RdmaEnd(Side side, const ps::rdma::Settings& settings, Seen* seen)
      : side_(side),
        settings_(settings),
        seen_(seen),
        connector_(std::make_unique<Connector>(this, settings, side + 1)) {}

  ~RdmaEnd() override {
    if (const EndpointPtr last = endpoint()) {
      last->Fail("the test is over");
      CHECK(WaitUntil([&] { return seen_->get().closed > 0 && last->finished(); }));
    }
    MakeNone();
    if (const auto transport = connector_->transport()) {
      for (auto& poller : transport->pollers) {
        poller->Wake();
        CHECK(WaitUntil([&] { return poller->size() == 0; }));
      }
    }
    connector_.reset();
  }

  Connector* connector() { return connector_.get(); }
  // Null until a peer has connected.
  EndpointPtr endpoint() {
    ps::MutexLock lock(&mu_);
    return endpoint_;
  }
  EndpointPtr Make() {
    auto made =
        std::make_shared<Endpoint>(this, Plane::kData, 0, side_ == kConnects, settings_,
                                   ps::NewEndpointCounters(ps::rdma::NameOf(Plane::kData), 0));
    made->set_peer(kPeerOf[side_]);
    ps::MutexLock lock(&mu_);
    endpoint_ = made;
    return made;
  }

  uint8_t Role() override { return side_ == kConnects ? ps::Node::WORKER : ps::Node::SERVER; }
  int32_t Rank(int /*peer*/) override { return side_ == kConnects ? 0 : -1; }
  uint64_t Job() override { return kJob; }
  uint64_t JobTold(const ps::rdma::ConnectRequest& /*request*/) override { return kJob; }
  EndpointPtr OnRequest(const ps::rdma::ConnectRequest& request, const std::string& /*address*/,
                        ps::rdma::Refusal* /*refusal*/) override {
    return request.resumes ? endpoint() : Make();
  }
  std::string OnReply(Endpoint* /*endpoint*/, const ps::rdma::ConnectReply& reply) override {
    return reply.job == kJob ? "" : "it belongs to another job";
  }

  char* PlaceFor(Endpoint* /*endpoint*/, const ps::Meta& /*meta*/, size_t /*bytes*/) override {
    return seen_->place();
  }
  void OnMessage(Endpoint* /*endpoint*/, ps::rdma::Received received) override {
    std::string text;
    for (const auto& value : received.msg.data) text.append(value.data(), value.size());
    seen_->Came(std::move(text));
  }
  ps::LinkOutage::Clock::duration Patience(Endpoint* /*endpoint*/,
                                           ps::LinkFault /*fault*/) override {
    return ps::ToDuration(settings_.reconnect_s);
  }
  void OnBroken(Endpoint* endpoint, bool path_failed) override {
    connector_->Reconnect(endpoint->shared_from_this(), path_failed);
  }
  void OnResumed(Endpoint* /*endpoint*/, ps::LinkOutage::Clock::duration /*after*/,
                 size_t again) override {
    seen_->Resumed(again);
  }
  void OnClosed(Endpoint* endpoint, const ps::LinkEnding& ending) override {
    connector_->Disconnect(endpoint->shared_from_this());
    seen_->Closed(ending);
  }

 private:
  void MakeNone() {
    ps::MutexLock lock(&mu_);
    endpoint_.reset();
  }

  const Side side_;
  const ps::rdma::Settings settings_;
  Seen* const seen_;
  std::unique_ptr<Connector> connector_;
  ps::Mutex mu_;
  EndpointPtr endpoint_ PS_GUARDED_BY(mu_);
};

class RdmaPair : public LinkPair {
 public:
  RdmaPair(const std::string& address, const ps::rdma::Settings& settings)
      : settings_(settings),
        listens_(kListens, settings, seen(kListens)),
        connects_(kConnects, settings, seen(kConnects)) {
    const int port = listens_.connector()->Listen({address}, 0);
    listens_.connector()->Run();
    connects_.connector()->UseDevicesOf({address});
    connects_.connector()->Run();
    connects_.connector()->Connect(connects_.Make(), {{address, address}}, port, 0);
    CHECK(WaitUntil([&] { return Load(kConnects).is_open && listens_.endpoint() != nullptr; }));
  }

  void Send(Side from, const ps::SArray<char>& value) override {
    const auto transport = EndOf(from)->connector()->transport();
    Of(from)->Send(ps::rdma::MakeOutgoing(ps::EncodeMeta(ps::Meta()), {value}, 0,
                                          settings_.inline_bytes, settings_.slot_bytes(),
                                          transport->devices, transport->pool.get()));
  }
  void Break() override {
    Of(breaks_++ % 2 == 0 ? kConnects : kListens)
        ->Break("it was broken for a test", ps::LinkFault::kBroken);
  }
  void CloseInOrder(Side side) override { Of(side)->CloseWhenFlushed(); }
  void Close(Side side) override { Of(side)->Fail("it was closed for a test"); }
  void Abandon(Side side, const void* begin, size_t bytes) override {
    Of(side)->Abandon(begin, bytes, Endpoint::Clock::now() + std::chrono::seconds(2));
  }
  bool AllArrived(Side side) override { return Of(side)->all_arrived(); }
  ps::LinkLoad Load(Side side) override { return Of(side)->load(); }

 private:
  RdmaEnd* EndOf(Side side) { return side == kConnects ? &connects_ : &listens_; }
  EndpointPtr Of(Side side) { return EndOf(side)->endpoint(); }

  const ps::rdma::Settings settings_;
  RdmaEnd listens_;
  RdmaEnd connects_;
  std::atomic<int> breaks_{0};
};

}  // namespace

std::unique_ptr<LinkPair> MakeRdmaPair(const std::string& address) {
  ps::rdma::LoadVerbsLibraries();
  auto settings = ps::rdma::Settings();
  settings.send_depth = 64;
  settings.receive_depth = 128;
  settings.inline_bytes = 4096;
  settings.pool_bytes = 64 << 20;
  settings.window_bytes = 1 << 20;
  settings.receive_window_bytes = 16 << 20;
  settings.secret = ps::auth::Secret("what both ends know");
  return std::make_unique<RdmaPair>(address, settings);
}
#endif  // BYTEPS_WITH_RDMA

}  // namespace contract
