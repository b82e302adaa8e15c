#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "world.h"

namespace byteps {
namespace simulation {
namespace {

// Delays of a job's threads: their number, and the usual maximum; then number and maximum of long
// delays, which together are shorter than any timeout.
constexpr int kMostDisturbances = 40;
constexpr uint64_t kShortUs = 3000;
constexpr int kMostLong = 3;
constexpr uint64_t kLongUs = 300'000;

struct Reached {
  std::array<uint64_t, kNumProbes> times{};
  int sum = 0;
  int disturbances = 0;
  int long_ones = 0;
  std::function<void(int, int)> then;
};
// State of the current job, whose threads run one at a time.
Reached* now = new Reached;

struct Row {
  const char* name;
  const char* text;
};
constexpr Row kRows[] = {
#define ROW_OF_PROBE(name, text) {#name, text},
    PS_PROBES(ROW_OF_PROBE)
#undef ROW_OF_PROBE
};
static_assert(std::size(kRows) == kNumProbes);

void OnProbe(ps::Probe probe) {
  if (!IsPlayed() || !now->then) return;
  ++now->times[static_cast<size_t>(probe)];
  now->then(static_cast<int>(probe), ++now->sum);
  if (now->disturbances == 0 || Random(4) != 0) return;
  --now->disturbances;
  if (Random(2) == 0) return std::this_thread::yield();
  uint64_t most = kShortUs;
  if (now->long_ones > 0 && Random(4) == 0) {
    --now->long_ones;
    most = kLongUs;
  }
  std::this_thread::sleep_for(std::chrono::microseconds(1 + Random(most)));
}

}  // namespace

std::string NameOfProbe(int number) { return kRows[number].name + 1; }  // without the k

void ListenToProbes() { ps::probe_listener = OnProbe; }

void BeginProbes(bool disturbed, std::function<void(int, int)> then) {
  *now = Reached();
  now->disturbances = disturbed ? kMostDisturbances : 0;
  now->long_ones = disturbed ? kMostLong : 0;
  now->then = std::move(then);
}

void EndProbes() { now->then = nullptr; }

void ProbeTable::Add() {
  for (size_t i = 0; i < kNumProbes; ++i) {
    jobs_[i] += now->times[i] > 0 ? 1 : 0;
    times_[i] += now->times[i];
  }
}

std::string ProbeTable::Print() const {
  std::string text = "| probe | what is seldom | jobs | times |\n|---|---|---|---|\n";
  std::string never;
  for (size_t i = 0; i < kNumProbes; ++i) {
    const std::string name = NameOfProbe(static_cast<int>(i));
    if (times_[i] == 0) {
      never += (never.empty() ? "" : ", ") + name;
      continue;
    }
    text += "| " + name + " | " + kRows[i].text + " | " + std::to_string(jobs_[i]) + " | " +
            std::to_string(times_[i]) + " |\n";
  }
  return text + "not reached: " + (never.empty() ? "none" : never) + "\n";
}

// ----- the network

Network::Network() {
  thread_ = std::thread([this] { Run(); });
  pthread_setname_np(thread_.native_handle(), "network");
}

Network::~Network() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
  }
  cond_.notify_all();
  thread_.join();
}

void Network::Add(SimulatedChannel* node) {
  std::lock_guard<std::mutex> lock(mu_);
  nodes_[node->number()] = node;
}

uint64_t Network::LifeOf(int node) const {
  const auto it = nodes_.find(node);
  return it == nodes_.end() ? 0 : it->second->life();
}

Network::Clock::time_point Network::ArrivalOf(int from, int to, bool in_order) {
  auto at = Clock::now() + std::chrono::microseconds(Random(2000));
  for (const int node : {from, to}) {
    const auto paused = paused_.find(node);
    if (paused != paused_.end()) at = std::max(at, paused->second);
  }
  const auto delayed = delayed_.find(PairOf(from, to));
  if (delayed != delayed_.end()) at = std::max(at, delayed->second);
  if (in_order) {
    auto& last = last_[{from, to}];
    at = last = std::max(at, last + std::chrono::nanoseconds(1));
  }
  return at;
}

void Network::Carry(const SimulatedChannel& from, int to, uint64_t expected, ps::Message message) {
  std::lock_guard<std::mutex> lock(mu_);
  Item item;
  item.from = from.number();
  item.to = to;
  item.from_life = from.life();
  const auto link = links_.find(PairOf(from.number(), to));
  if (link == links_.end() || link->second.lives[from.number()] != from.life()) {
    if (expected == 0 || killed_.count(from.number()) || killed_.count(to)) return;
    item.to_life = expected;
    item.message = std::move(message);
    waiting_.push_back(std::move(item));
    return;
  }
  item.to_life = link->second.lives[to];
  item.link = link->second.number;
  const auto at = ArrivalOf(from.number(), to, IsControl(message));
  item.message = std::move(message);
  under_way_.emplace(at, std::move(item));
  cond_.notify_one();
}

bool Network::IsLinked(int node, uint64_t life) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto link = links_.find(PairOf(0, node));
  return link != links_.end() && link->second.lives[node] == life;
}

void Network::Close(int node, uint64_t life) {
  const End closed{"its connection closed", true, true};
  if (IsLinked(node, life)) Unlink(node, 0, &closed, nullptr);
}

bool Network::Link(int a, int b) {
  std::lock_guard<std::mutex> lock(mu_);
  if (killed_.count(a) || killed_.count(b)) return false;
  LinkState link;
  link.number = next_link_++;
  link.lives = {{a, LifeOf(a)}, {b, LifeOf(b)}};
  links_.emplace(PairOf(a, b), link);
  SendWaiting(PairOf(a, b));
  return true;
}

void Network::SendWaiting(const Pair& pair) {
  LinkState& link = links_[pair];
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const bool goes = PairOf(it->from, it->to) == pair && link.lives[it->from] == it->from_life &&
                      link.lives[it->to] == it->to_life;
    if (!goes) {
      ++it;
      continue;
    }
    it->link = link.number;
    under_way_.emplace(ArrivalOf(it->from, it->to, false), std::move(*it));
    it = waiting_.erase(it);
  }
  cond_.notify_one();
}

void Network::ForgetWaiting(int node) {
  waiting_.remove_if([=](const Item& item) { return item.from == node || item.to == node; });
}

void Network::Unlink(int a, int b, const End* at_a, const End* at_b) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto link = links_.find(PairOf(a, b));
  if (link == links_.end()) return;
  const auto tell = [&](int node, int peer, const End* end) {
    if (end == nullptr) return;
    // Messages sent before an orderly end arrive before it; others are lost.
    Item item;
    item.from = peer;
    item.to = node;
    item.from_life = link->second.lives[peer];
    item.to_life = link->second.lives[node];
    item.is_end = true;
    item.end = *end;
    under_way_.emplace(ArrivalOf(peer, node, true), std::move(item));
  };
  const bool flushed = at_a != nullptr && at_b == nullptr && at_a->by_peer;
  for (auto it = under_way_.begin(); it != under_way_.end() && !flushed;) {
    it = it->second.link == link->second.number ? under_way_.erase(it) : std::next(it);
  }
  if (flushed) {  // b closed it: messages that it sent still arrive
    for (auto it = under_way_.begin(); it != under_way_.end();) {
      Item& item = it->second;
      const bool on_it = item.link == link->second.number;
      const bool lost = on_it && item.to == b;
      if (on_it) item.link = 0;
      // The sender may free its memory: the network keeps the values.
      for (auto& values : item.message.data) {
        if (!on_it || lost) break;
        ps::SArray<char> copy;
        copy.CopyFrom(values);
        values = copy;
      }
      it = lost ? under_way_.erase(it) : std::next(it);
    }
  }
  tell(a, b, at_a);
  tell(b, a, at_b);
  links_.erase(link);
  cond_.notify_one();
}

void Network::Reset(int a, int b) {
  const End reset{"its connection was reset", false, false};
  Unlink(a, b, &reset, &reset);
}

void Network::Kill(int node) {
  std::vector<int> peers;
  {
    std::lock_guard<std::mutex> lock(mu_);
    killed_.insert(node);
    ForgetWaiting(node);
    for (const auto& link : links_) {
      if (link.first.first == node) peers.push_back(link.first.second);
      if (link.first.second == node) peers.push_back(link.first.first);
    }
  }
  const End closed{"its connection closed", true, false};
  // The process's own threads live on, unseen, until they notice.
  const End dead{"this process is dead", false, false};
  for (const int peer : peers) Unlink(peer, node, &closed, &dead);
}

void Network::Revive(int node) {
  std::lock_guard<std::mutex> lock(mu_);
  killed_.erase(node);
}

void Network::Pause(int node, double seconds) {
  std::lock_guard<std::mutex> lock(mu_);
  auto& until = paused_[node];
  until = std::max(until, Clock::now() + Duration(seconds));
}

void Network::Delay(int a, int b, double seconds) {
  std::lock_guard<std::mutex> lock(mu_);
  auto& until = delayed_[PairOf(a, b)];
  until = std::max(until, Clock::now() + Duration(seconds));
}

void Network::Run() {
  std::unique_lock<std::mutex> lock(mu_);
  while (!stopping_) {
    if (under_way_.empty()) {
      cond_.wait(lock);
    } else if (under_way_.begin()->first > Clock::now()) {
      const auto at = under_way_.begin()->first;
      cond_.wait_until(lock, at);
    } else {
      Item item = std::move(under_way_.begin()->second);
      under_way_.erase(under_way_.begin());
      Deliver(std::move(item));
    }
  }
}

// Called with mu_ held. Delivers nothing to nodes that are gone.
void Network::Deliver(Item item) {
  const auto node = nodes_.find(item.to);
  if (node == nodes_.end() || node->second->life() != item.to_life) return;
  Note(static_cast<uint64_t>(item.from) << 8 | item.to);
  if (item.is_end) {
    node->second->OnEnd(item.from, item.from_life, item.end);
  } else {
    node->second->Receive(item.from, item.from_life, std::move(item.message));
  }
}

void Network::Connect(const SimulatedChannel& from, int to) {
  bool there = false;
  int its = from.generation();
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto node = nodes_.find(to);
    there = node != nodes_.end() && killed_.count(to) == 0;
    if (there && to != 0) its = node->second->generation();
  }
  // Either the node will learn of the new generation, or it will be lost, as with real transports.
  if (there && its < from.generation()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Connect(from, to);
  }
  const bool ours = there && its == from.generation();
  // The node may have been killed in the meantime.
  if (ours && Link(from.number(), to)) return;
  std::lock_guard<std::mutex> lock(mu_);
  TellOfEnd(from, to,
            there && !ours
                ? "it is of generation " + std::to_string(its) + " of the job, and this node of " +
                      std::to_string(from.generation())
                : "connecting to it failed: connection refused");
}

void Network::TellOfEnd(const SimulatedChannel& node, int peer, const std::string& how) {
  Item item;
  item.from = peer;
  item.to = node.number();
  item.to_life = node.life();
  item.is_end = true;
  item.end = {how, false, false};
  under_way_.emplace(ArrivalOf(peer, node.number(), true), std::move(item));
  cond_.notify_one();
}

void Network::Leave(SimulatedChannel* channel) {
  const int node = channel->number();
  std::vector<int> peers;
  {
    std::lock_guard<std::mutex> lock(mu_);
    nodes_.erase(node);
    ForgetWaiting(node);
    for (const auto& link : links_) {
      if (link.first.first == node) peers.push_back(link.first.second);
      if (link.first.second == node) peers.push_back(link.first.first);
    }
  }
  const End closed{"its connection closed", true, true};
  for (const int peer : peers) Unlink(peer, node, &closed, nullptr);
}

}  // namespace simulation
}  // namespace byteps
