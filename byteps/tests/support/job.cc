#include "tests/support/job.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

constexpr auto kChannelPatience = std::chrono::seconds(20);

// The range of the sum that a request asks for: its values times `ranks`.
std::vector<char> SumOf(const Message& request, float ranks) {
  PushHeader header;
  EXPECT_TRUE(PushHeader::Unpack(request.body, &header));
  std::vector<char> sum(request.values.data(), request.values.data() + request.values.size());
  auto* const values = reinterpret_cast<float*>(sum.data());
  for (size_t i = 0; i < sum.size() / sizeof(float); ++i) values[i] *= ranks;
  return {sum.begin() + header.pull_offset, sum.begin() + header.pull_offset + header.pull_bytes};
}

}  // namespace

FakeChannel::FakeChannel(Script script) : script_(std::move(script)) {}
FakeChannel::~FakeChannel() { Stop(); }

void FakeChannel::Start(ChannelUser* user) {
  user_ = user;
  for (int i = 0; i < script_.threads; ++i) threads_.emplace_back([this] { Run(); });
}

void FakeChannel::Leave(const ps::Farewell& /*farewell*/) { ++left_; }

void FakeChannel::Stop() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
  }
  cond_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  std::deque<Message> held, requests;
  std::lock_guard<std::mutex> lock(mu_);
  held.swap(held_);
  requests.swap(requests_);
}

void FakeChannel::Send(const Message& message) {
  const int server = message.peer;
  std::vector<Declaration> declared;
  std::string error;
  int linger_ms = 0;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (message.op == kDeclare) {
      if (!UnpackDeclarations(message.body, &declared, &error)) abort();
      declarations_[server].push_back(declared);
    } else if (message.op == kGiveSum) {
      PushHeader header;
      std::string lacks;
      EXPECT_TRUE(PushHeader::Unpack(message.body, &header, &lacks));
      gifts_.push_back({message.key, header.round});
    } else if (message.op == kRelease) {
      WireReader in(message.body);
      const uint32_t count = in.GetCount(sizeof(uint64_t));
      for (uint32_t i = 0; i < count; ++i) releases_.push_back({in.Get<uint64_t>(), server});
    } else if (message.op != kResume && message.op != kConfirm) {
      if (script_.on_push) script_.on_push();
      pushes_.push_back({message.key, server});
      linger_ms = script_.linger_ms;
    }
    auto it = held_servers_.find(server);
    if (it == held_servers_.end()) it = held_servers_.find(-1);
    if (message.op != kPushPull) it = held_servers_.end();
    Message copy = message;
    if (it == held_servers_.end()) {
      requests_.push_back(std::move(copy));
    } else {
      if (!it->second && !copy.values.empty()) {  // counts as sent: hold a copy
        copy.values = SharedBytes::New(message.values.size());
        memcpy(copy.values.data(), message.values.data(), message.values.size());
      }
      held_.push_back(std::move(copy));
    }
  }
  cond_.notify_all();
  if (linger_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(linger_ms));
}

void FakeChannel::Abandon(const void* begin, size_t bytes) {
  const char* const from = static_cast<const char*>(begin);
  std::lock_guard<std::mutex> lock(place_mu_);
  for (auto& placing : placing_) {
    if (placing.begin < from + bytes && from < placing.begin + placing.bytes) {
      placing.abandoned = true;
    }
  }
}

void FakeChannel::Change(const std::function<void(Script*)>& change) {
  std::lock_guard<std::mutex> lock(mu_);
  change(&script_);
}

void FakeChannel::HoldServer(int server, bool unsent) {
  std::lock_guard<std::mutex> lock(mu_);
  held_servers_[server] = unsent;
}

void FakeChannel::Release() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    held_servers_.clear();
    for (auto& message : held_) requests_.push_back(std::move(message));
    held_.clear();
  }
  cond_.notify_all();
}

void FakeChannel::LoseServer(int server, bool drops) {
  if (drops) {
    std::lock_guard<std::mutex> lock(mu_);
    std::erase_if(held_, [=](const Message& message) { return message.peer == server; });
    held_servers_.erase(server);
  }
  ps::MembershipEvent event;
  event.kind = ps::MembershipEvent::kServerLost;
  event.rank = server;
  event.reason = "server " + std::to_string(server) + " was lost";
  user_->OnEvent(event);
}

void FakeChannel::ReplaceServer(int server) {
  ps::MembershipEvent event;
  event.kind = ps::MembershipEvent::kServerReplaced;
  event.rank = server;
  user_->OnEvent(event);
}

std::vector<std::pair<uint64_t, uint32_t>> FakeChannel::gifts() {
  std::lock_guard<std::mutex> lock(mu_);
  return gifts_;
}

void FakeChannel::FailJob(const std::string& reason) {
  ps::MembershipEvent event;
  event.kind = ps::MembershipEvent::kFailed;
  event.reason = reason;
  user_->OnEvent(event);
}

std::vector<std::vector<Declaration>> FakeChannel::declarations(int server) {
  std::lock_guard<std::mutex> lock(mu_);
  return declarations_[server];
}

std::vector<std::pair<uint64_t, int>> FakeChannel::pushes() {
  std::lock_guard<std::mutex> lock(mu_);
  return pushes_;
}

std::vector<std::pair<uint64_t, int>> FakeChannel::releases() {
  std::lock_guard<std::mutex> lock(mu_);
  return releases_;
}

bool FakeChannel::AwaitPushes(size_t count) {
  std::unique_lock<std::mutex> lock(mu_);
  return cond_.wait_for(lock, kChannelPatience, [&] { return pushes_.size() >= count; });
}

bool FakeChannel::AwaitHeld(size_t count) {
  std::unique_lock<std::mutex> lock(mu_);
  return cond_.wait_for(lock, kChannelPatience, [&] { return held_.size() >= count; });
}

bool FakeChannel::AwaitPlacing() {
  std::unique_lock<std::mutex> lock(place_mu_);
  return place_cond_.wait_for(lock, kChannelPatience, [&] { return !placing_.empty(); });
}

bool FakeChannel::TakeNext(Message* request) {
  std::unique_lock<std::mutex> lock(mu_);
  cond_.wait(lock, [this] { return stopping_ || !requests_.empty(); });
  if (stopping_) return false;
  auto it = requests_.begin();
  if (script_.shuffled) it += random_() % requests_.size();
  *request = std::move(*it);
  requests_.erase(it);
  return true;
}

void FakeChannel::Run() {
  Message request;
  while (TakeNext(&request)) {
    try {
      Answer(std::move(request));
    } catch (const std::exception& e) {  // a transport would close the connection
      FailJob(e.what());
    }
    request = Message();
  }
}

std::string FakeChannel::Fate(const Message& request) {
  std::lock_guard<std::mutex> lock(mu_);
  return request.op == kDeclare ? script_.refusal : script_.failure;
}

KeptAnswer FakeChannel::KeptAnswerTo(const PushHeader& header) {
  std::lock_guard<std::mutex> lock(mu_);
  ++serial_;
  return {header.oldest, serial_, script_.all_confirm ? serial_ : 1};
}

std::string FakeChannel::AnswerToGift(const Message& request) {
  PushHeader header;
  std::string lacks;
  EXPECT_TRUE(PushHeader::Unpack(request.body, &header, &lacks));
  WireWriter out;
  out.Put(header.round);
  std::lock_guard<std::mutex> lock(mu_);
  out.Put(++serial_);
  return out.Take();
}

void FakeChannel::Answer(Message request) {
  const int op = request.op;
  Message answer = MakeAnswer(op, request.peer, request.key, request.number, Fate(request));
  Placing* placing = nullptr;
  float ranks = 1;
  bool twice = false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (op == kDeclare && script_.drops_declarations) return;
    ranks = script_.ranks;
    twice = script_.answers_twice;
  }
  if (op == kPushPull && !answer.failed) {
    PushHeader header;
    EXPECT_TRUE(PushHeader::Unpack(request.body, &header));
    if ((header.flags & PushHeader::kKeepsSums) != 0) answer.body = KeptAnswerTo(header).Pack();
    const std::vector<char> sum = SumOf(request, ranks);
    request = Message();  // counts as sent: the sender may reuse its memory
    if (!sum.empty()) answer.SetValues(Receive(answer, sum, &placing));
  }
  if (op == kGiveSum) answer.body = AnswerToGift(request);
  request = Message();
  Message again = answer;
  user_->OnMessage(&answer);
  if (op == kPushPull && twice) user_->OnMessage(&again);
  std::lock_guard<std::mutex> lock(place_mu_);
  // Compare by object: two sums may have the same address.
  placing_.remove_if([&](const Placing& p) { return &p == placing; });
}

SharedBytes FakeChannel::Receive(const MessageHead& head, const std::vector<char>& values,
                                 Placing** placed) {
  bool in_place = false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    in_place = script_.in_place;
  }
  Placing* placing = nullptr;
  if (in_place) {
    std::lock_guard<std::mutex> lock(place_mu_);
    if (char* const place = user_->PlaceFor(head, values.size())) {
      placing_.push_back({place, values.size(), false});
      *placed = placing = &placing_.back();
    }
  }
  if (placing == nullptr) {
    SharedBytes received = SharedBytes::New(values.size());
    memcpy(received.data(), values.data(), values.size());
    return received;
  }
  place_cond_.notify_all();
  ReceiveInPieces(values, placing);
  return SharedBytes::Borrow(placing->begin, values.size(), [](char*) {});
}

void FakeChannel::ReceiveInPieces(const std::vector<char>& values, Placing* placing) {
  size_t chunk = 0;
  int wait_us = 0;
  {
    std::lock_guard<std::mutex> lock(mu_);
    chunk = script_.chunk;
    wait_us = script_.chunk_us;
  }
  for (size_t at = 0; at < values.size(); at += chunk) {
    if (wait_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(wait_us));
    std::lock_guard<std::mutex> lock(place_mu_);
    if (placing->abandoned) return;
    memcpy(placing->begin + at, values.data() + at, std::min(chunk, values.size() - at));
  }
}

namespace {

// ----- memory that cannot be allocated

std::atomic<size_t> refused_from{SIZE_MAX};
thread_local int times_left = -1;  // negative: no limit

}  // namespace

static bool Refused(size_t bytes) {
  if (bytes >= refused_from || times_left == 0) return true;
  if (times_left > 0) --times_left;
  return false;
}

NoMemoryFrom::NoMemoryFrom(size_t bytes) { refused_from = bytes; }
NoMemoryFrom::~NoMemoryFrom() { refused_from = SIZE_MAX; }

MemoryOnlyTimes::MemoryOnlyTimes(int times) { times_left = times; }
MemoryOnlyTimes::~MemoryOnlyTimes() { times_left = -1; }

}  // namespace core
}  // namespace byteps

// The linker redirects calls of operator new, and of its array forms, to here (cmake/Tests.cmake).
// Replacing the operators instead would hide allocations from sanitizers, which would then report
// frees of unknown memory. NOLINTBEGIN(bugprone-reserved-identifier): names given by the linker
extern "C" {
void* __real__Znwm(size_t bytes);
void* __real__Znam(size_t bytes);
void* __real__ZnamRKSt9nothrow_t(size_t bytes, const std::nothrow_t& nothrow);

void* __wrap__Znwm(size_t bytes) {
  if (byteps::core::Refused(bytes)) throw std::bad_alloc();
  return __real__Znwm(bytes);
}

void* __wrap__Znam(size_t bytes) {
  if (byteps::core::Refused(bytes)) throw std::bad_alloc();
  return __real__Znam(bytes);
}

void* __wrap__ZnamRKSt9nothrow_t(size_t bytes, const std::nothrow_t& nothrow) {
  return byteps::core::Refused(bytes) ? nullptr : __real__ZnamRKSt9nothrow_t(bytes, nothrow);
}
}
// NOLINTEND(bugprone-reserved-identifier)
