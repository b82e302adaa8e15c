#include "network.h"

#include <algorithm>
#include <cstring>

#include "byteps/base/error.h"
#include "dmlc/logging.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"
#include "virtual_threads.h"

namespace byteps {
namespace simulation {
namespace {

constexpr int kDataThreads = 2;

std::string AddressOf(int number) { return "10.0.0." + std::to_string(number); }
int NumberOf(const std::string& address) { return atoi(address.c_str() + strlen("10.0.0.")); }

std::chrono::steady_clock::duration Duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

bool IsControl(const ps::Message& message) { return !message.meta.control.empty(); }

}  // namespace

// ------------------------------------------------------------------ network

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

void Network::Remove(SimulatedChannel* node) {
  std::lock_guard<std::mutex> lock(mu_);
  nodes_.erase(node->number());
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

void Network::Carry(int from, int to, ps::Message message) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto link = links_.find(PairOf(from, to));
  if (link == links_.end()) return;
  Item item;
  item.from = from;
  item.to = to;
  item.link = link->second;
  const auto at = ArrivalOf(from, to, IsControl(message));
  item.message = std::move(message);
  under_way_.emplace(at, std::move(item));
  cond_.notify_one();
}

bool Network::IsLinked(int a, int b) {
  std::lock_guard<std::mutex> lock(mu_);
  return links_.count(PairOf(a, b)) > 0;
}

void Network::Link(int a, int b) {
  std::lock_guard<std::mutex> lock(mu_);
  if (killed_.count(a) || killed_.count(b)) return;
  links_.emplace(PairOf(a, b), next_link_++);
}

void Network::Unlink(int a, int b, const End* at_a, const End* at_b) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto link = links_.find(PairOf(a, b));
  if (link == links_.end()) return;
  const auto tell = [&](int node, int peer, const End* end) {
    if (end == nullptr) return;
    // What was sent in good order comes before the end; all else is gone.
    Item item;
    item.from = peer;
    item.to = node;
    item.is_end = true;
    item.end = *end;
    under_way_.emplace(ArrivalOf(peer, node, true), std::move(item));
  };
  const bool flushed = at_a != nullptr && at_b == nullptr && at_a->by_peer;
  for (auto it = under_way_.begin(); it != under_way_.end() && !flushed;) {
    it = it->second.link == link->second ? under_way_.erase(it) : std::next(it);
  }
  if (flushed) {  // b closed it: what it sent still comes
    for (auto it = under_way_.begin(); it != under_way_.end();) {
      Item& item = it->second;
      const bool on_it = item.link == link->second;
      const bool lost = on_it && item.to == b;
      if (on_it) item.link = 0;
      // The sender may let go of its memory: the network has the values.
      for (auto& values : item.message.data) {
        if (!on_it || lost) break;
        ps::SArray<char> copy;
        copy.CopyFrom(values);
        values = copy;
      }
      it = lost ? under_way_.erase(it) : std::next(it);
    }
  }
  links_.erase(link);
  tell(a, b, at_a);
  tell(b, a, at_b);
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
    for (const auto& link : links_) {
      if (link.first.first == node) peers.push_back(link.first.second);
      if (link.first.second == node) peers.push_back(link.first.first);
    }
  }
  const End closed{"its connection closed", true, false};
  // Its own threads live on here, unseen, until they find out.
  const End dead{"this process is dead", false, false};
  for (const int peer : peers) Unlink(peer, node, &closed, &dead);
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

// mu_ is held: a node that has gone gets nothing more.
void Network::Deliver(Item item) {
  const auto node = nodes_.find(item.to);
  if (node == nodes_.end()) return;
  Note(static_cast<uint64_t>(item.from) << 8 | item.to);
  if (item.is_end) {
    node->second->OnEnd(item.from, item.end);
  } else {
    node->second->Receive(item.from, std::move(item.message));
  }
}

// ------------------------------------------------------------------ channel

// How the membership of a node reaches others, as a van's.
class SimulatedChannel::Links : public ps::MembershipLinks {
 public:
  explicit Links(SimulatedChannel* channel) : channel_(channel) {
    const NodeSettings& settings = channel->settings_;
    scheduler_.role = ps::Node::SCHEDULER;
    scheduler_.id = ps::kScheduler;
    scheduler_.hostname = AddressOf(0);
    scheduler_.port = 9000;
    self_.role = settings.role;
    self_.hostname = AddressOf(settings.number);
    self_.port = settings.role == ps::Node::SERVER ? 9001 : 0;
    if (settings.role == ps::Node::SCHEDULER) self_ = scheduler_;
  }

  const ps::Node& self() const override { return self_; }
  const ps::Node& scheduler() const override { return scheduler_; }
  void SetSelf(const ps::Node& node) override { self_ = node; }

  void Connect(const ps::Node& node) override {
    {
      std::lock_guard<std::mutex> lock(channel_->mu_);
      channel_->number_of_[node.id] = NumberOf(node.hostname);
    }
    const int peer = NumberOf(node.hostname);
    if (self_.role == ps::Node::SCHEDULER) {
      if (channel_->network_->IsLinked(0, peer)) return;
      channel_->OnEnd(peer, {"its connection closed", true, false});  // it came, and has gone
      return;
    }
    channel_->network_->Connect(channel_->number(), peer);
  }

  void Disconnect(int node_id) override {
    int peer = -1;
    {
      std::lock_guard<std::mutex> lock(channel_->mu_);
      const auto it = channel_->number_of_.find(node_id);
      if (it == channel_->number_of_.end()) return;
      peer = it->second;
    }
    const Network::End closed{"its connection closed", true, true};
    channel_->network_->Unlink(peer, channel_->number(), &closed, nullptr);
  }

  void Send(ps::Message* message) override {
    const auto& control = message->meta.control;
    const bool worker = !control.node.empty() && control.node[0].role == ps::Node::WORKER;
    if (control.cmd == ps::Control::WELCOME && worker) ++channel_->network_->admitted_;
    channel_->Send(message);
  }

 private:
  SimulatedChannel* const channel_;
  ps::Node self_;
  ps::Node scheduler_;
};

void Network::Connect(int from, int to) {
  bool there = false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    there = nodes_.count(to) > 0 && killed_.count(to) == 0;
  }
  if (there) return Link(from, to);
  std::lock_guard<std::mutex> lock(mu_);
  Item item;
  item.from = to;
  item.to = from;
  item.is_end = true;
  item.end = {"connecting to it failed: connection refused", false, false};
  under_way_.emplace(ArrivalOf(to, from, true), std::move(item));
  cond_.notify_one();
}

SimulatedChannel::SimulatedChannel(Network* network, const NodeSettings& settings)
    : network_(network), settings_(settings) {}

SimulatedChannel::~SimulatedChannel() { Stop(); }

void SimulatedChannel::Start(core::ChannelUser* user) {
  user_ = user;
  closed_ = false;
  links_ = std::make_unique<Links>(this);
  ps::MembershipSettings membership;
  membership.is_scheduler = settings_.role == ps::Node::SCHEDULER;
  membership.peer_timeout_s = settings_.peer_timeout_s;
  membership.start_timeout_s = settings_.start_timeout_s;
  membership.workers = settings_.workers;
  membership.servers = settings_.servers;
  membership.rank = settings_.role == ps::Node::WORKER ? settings_.rank : -1;
  membership_ = std::make_unique<ps::Membership>(
      links_.get(), membership,
      [this](const ps::MembershipEvent& event) { user_->OnEvent(event); });
  network_->Add(this);
  links_->Connect(links_->scheduler());
  threads_.emplace_back([this] { ReceiveControl(); });
  pthread_setname_np(threads_.back().native_handle(), "control");
  for (int i = 0; i < kDataThreads; ++i) {
    threads_.emplace_back([this] { ReceiveData(); });
    pthread_setname_np(threads_.back().native_handle(), "data");
  }
  try {
    membership_->Join();
  } catch (const dmlc::Error& e) {
    Stop();
    throw core::Error(e.what());
  }
}

void SimulatedChannel::Stop() {
  if (threads_.empty()) return;
  membership_->Stop();
  {
    std::lock_guard<std::mutex> lock(mu_);
    closed_ = true;
  }
  control_cond_.notify_all();
  data_cond_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  network_->Leave(settings_.number);
  network_->Remove(this);
  std::lock_guard<std::mutex> lock(mu_);
  control_.clear();
  data_.clear();
}

void Network::Leave(int node) {
  std::vector<int> peers;
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (const auto& link : links_) {
      if (link.first.first == node) peers.push_back(link.first.second);
      if (link.first.second == node) peers.push_back(link.first.first);
    }
  }
  const End closed{"its connection closed", true, true};
  for (const int peer : peers) Unlink(peer, node, &closed, nullptr);
}

bool SimulatedChannel::Send(ps::Message* message) {
  int to = -1;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (closed_) return false;
    const auto it = number_of_.find(message->meta.recver);
    // What cannot be sent is dropped: who watches the peers tells of the reason.
    if (it == number_of_.end()) return true;
    to = it->second;
  }
  ps::Message sent = *message;
  sent.meta.sender = links_->self().id;
  if (to != settings_.number) network_->Carry(settings_.number, to, std::move(sent));
  return true;
}

void SimulatedChannel::Abandon(const void* begin, size_t bytes) {
  const char* const from = static_cast<const char*>(begin);
  std::lock_guard<std::mutex> lock(place_mu_);
  for (auto& placing : placing_) {
    const bool apart = placing.begin + placing.bytes <= from || from + bytes <= placing.begin;
    placing.abandoned = placing.abandoned || !apart;
  }
}

int SimulatedChannel::rank() const { return ps::Postoffice::IDtoRank(links_->self().id); }

std::string SimulatedChannel::NameOfServer(int rank) {
  return membership_->NameOf(ps::Postoffice::ServerRankToID(rank));
}

std::string SimulatedChannel::NameOfWorker(int rank) {
  return membership_->NameOf(ps::Postoffice::WorkerRankToID(rank));
}

void SimulatedChannel::Receive(int from, ps::Message message) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (closed_) return;
    Event event;
    event.from = from;
    const bool control = IsControl(message);
    event.message = std::move(message);
    (control ? control_ : data_).push_back(std::move(event));
  }
  control_cond_.notify_one();
  data_cond_.notify_one();
}

void SimulatedChannel::OnEnd(int from, const Network::End& end) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (closed_) return;
    Event event;
    event.from = from;
    event.is_end = true;
    event.end = end;
    control_.push_back(std::move(event));
  }
  control_cond_.notify_one();
}

int SimulatedChannel::IdOf(int number) const {
  std::lock_guard<std::mutex> lock(mu_);
  int id = ps::Node::kEmpty;
  for (const auto& entry : number_of_) {
    if (entry.second == number) id = entry.first;
  }
  return id;
}

void SimulatedChannel::ReceiveControl() {
  while (true) {
    Event event;
    {
      std::unique_lock<std::mutex> lock(mu_);
      control_cond_.wait(lock, [this] { return closed_ || !control_.empty(); });
      if (closed_) return;
      event = std::move(control_.front());
      control_.pop_front();
    }
    if (event.is_end) {
      HandleEnd(event.from, event.end);
      continue;
    }
    event.message.meta.sender = IdOf(event.from);
    // Who registers has no id yet, whatever it was called before.
    if (event.message.meta.control.cmd == ps::Control::ADD_NODE &&
        settings_.role == ps::Node::SCHEDULER) {
      event.message.meta.sender = ps::Node::kEmpty;
    }
    membership_->Handle(event.message);
  }
}

void SimulatedChannel::HandleEnd(int from, const Network::End& end) {
  const int id = IdOf(from);
  if (id == ps::Node::kEmpty) return;  // it never was more than a connection
  if (end.orderly) return membership_->OnDisconnect(id);
  membership_->OnLinkLost(id, end.how, end.by_peer);
}

void SimulatedChannel::ReceiveData() {
  while (true) {
    Event event;
    {
      std::unique_lock<std::mutex> lock(mu_);
      data_cond_.wait(lock, [this] { return closed_ || !data_.empty(); });
      if (closed_) return;
      // Messages from one node may overtake each other.
      const size_t pick = Random(data_.size());
      std::swap(data_[pick], data_.front());
      event = std::move(data_.front());
      data_.pop_front();
    }
    ps::Message& message = event.message;
    // A worker says to its servers who it is; its servers it knows by the scheduler's list.
    if (settings_.role == ps::Node::SERVER) {
      std::lock_guard<std::mutex> lock(mu_);
      number_of_[message.meta.sender] = event.from;
    } else {
      message.meta.sender = IdOf(event.from);
    }
    ps::SArray<char> values;
    if (!message.data.empty()) values = Place(message.meta, message.data[0]);
    if (!message.data.empty()) message.data[0] = values;
    user_->OnMessage(&message);
    std::lock_guard<std::mutex> lock(place_mu_);
    if (values.size() > 0) {
      placing_.remove_if([&](const Placing& placing) { return placing.begin == values.data(); });
    }
  }
}

ps::SArray<char> SimulatedChannel::Place(const ps::Meta& meta, const ps::SArray<char>& values) {
  Placing* placing = nullptr;
  {
    std::lock_guard<std::mutex> lock(place_mu_);
    if (char* const place = user_->PlaceFor(meta, values.size())) {
      placing_.push_back({place, values.size(), false});
      placing = &placing_.back();
    }
  }
  ps::SArray<char> received;
  if (placing == nullptr) {
    received.CopyFrom(values);
    return received;
  }
  const size_t half = values.size() / 2;
  for (const auto& [begin, end] : {std::pair<size_t, size_t>(0, half), {half, values.size()}}) {
    std::lock_guard<std::mutex> lock(place_mu_);
    if (!placing->abandoned) memcpy(placing->begin + begin, values.data() + begin, end - begin);
  }
  received.reset(placing->begin, values.size(), [](char*) {});
  return received;
}

}  // namespace simulation
}  // namespace byteps
