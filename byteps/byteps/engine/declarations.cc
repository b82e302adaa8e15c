#include "byteps/engine/declarations.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"

namespace byteps {
namespace core {
namespace {

uint32_t WholePages(uint64_t bytes) {
  const uint64_t page = sysconf(_SC_PAGESIZE);
  return static_cast<uint32_t>((bytes + page - 1) / page * page);
}

// A slot of a partition's state travels in one message.
constexpr uint64_t kMostStateBytes = 1 << 30;

void CheckRule(const Declaration& d) {
  if (!IsUpdated(d.dtype)) {
    throw UsageError(
        "servers update by gradients of float32, bfloat16, float16, int8x128 and int4x128; '" +
        d.name + "' is " + NameOf(d.dtype));
  }
  if (d.feedback) {
    throw UsageError("servers update by the sum of '" + d.name +
                     "' without rounding it: there is nothing for them to feed back");
  }
  if (ValuesIn(d.dtype, d.partition_bytes) * sizeof(float) > kMostStateBytes) {
    throw UsageError("a partition of '" + d.name +
                     "' has more than 1 GiB of fp32 parameters: " + "lower BYTEPS_PARTITION_BYTES");
  }
}

uint64_t NextJob() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

Patience PatienceOf(const Config& config, const Launch& launch) {
  Patience patience;
  const int64_t quorum = config.Int("BYTEPS_QUORUM");
  const double grace_s = config.Float("BYTEPS_GRACE_S");
  if (launch.replicas > 1) patience.replica_ranks = launch.size / launch.replicas;
  if ((quorum > 0) != (grace_s > 0)) {
    char text[96];
    snprintf(text, sizeof(text), "BYTEPS_QUORUM=%d and BYTEPS_GRACE_S=%g: set both, or neither",
             static_cast<int>(quorum), grace_s);
    throw UsageError(text);
  }
  if (quorum == 0) return patience;
  if (quorum >= launch.replicas) {
    throw UsageError("BYTEPS_QUORUM=" + std::to_string(quorum) + " must be less than the " +
                     std::to_string(launch.replicas) +
                     " replicas of the job (BYTEPS_REPLICA): there must be one to wait for");
  }
  patience.quorum = static_cast<uint32_t>(quorum);
  patience.grace_ms = static_cast<uint32_t>(std::max(grace_s * 1000, 1.0));
  return patience;
}

}  // namespace

Plan::Plan(const Config& config, const Launch& launch, int num_servers)
    : launch_(launch),
      all_(RankGroup::Below(launch.size)),
      num_servers_(num_servers),
      smallest_partition_(WholePages(config.Int("BYTEPS_MIN_PARTITION_BYTES"))),
      largest_partition_(WholePages(config.Int("BYTEPS_PARTITION_BYTES"))),
      stochastic_(config.Bool("BYTEPS_STOCHASTIC_ROUNDING")),
      patience_(PatienceOf(config, launch)),
      hash_(ParseKeyHash(config.String("BYTEPS_KEY_HASH_FN"))) {}

uint32_t Plan::PartitionBytes(DType dtype, uint64_t bytes, uint64_t piece_of, bool updated) const {
  // An answer may be longer than what was pushed.
  const uint64_t most =
      updated ? largest_partition_ * SizeOf(dtype) / SizeOf(AnswerOf(dtype)) : largest_partition_;
  return core::PartitionBytes(dtype, std::max(bytes, piece_of), num_servers_, link_bytes_per_s_,
                              smallest_partition_, static_cast<uint32_t>(most));
}

Declaration Plan::Declare(const TensorSpec& spec) const {
  Declaration d;
  d.name = spec.name;
  d.dtype = spec.dtype;
  d.average = spec.average;
  d.in_order = spec.in_order;
  d.hash = hash_;
  d.patience = patience_;
  d.bytes = spec.bytes;
  d.feedback = spec.feedback;
  d.stochastic = stochastic_ && IsBlock(spec.dtype);
  d.partition_bytes = PartitionBytes(d.dtype, d.bytes, spec.piece_of, spec.rule != nullptr);
  d.group = spec.group.empty() ? all_ : spec.group;
  d.rule = spec.rule;
  d.placement = spec.placement.value_or(d.Key() >> kPartitionBits);
  if (d.MemberIndex(launch_.rank) < 0) {
    throw UsageError("rank " + std::to_string(launch_.rank) + " is no member of the group of '" +
                     d.name + "': " + d.Describe());
  }
  if (static_cast<int>(d.group.back()) >= launch_.size) {
    throw UsageError("the group of '" + d.name + "' has rank " + std::to_string(d.group.back()) +
                     ", there are " + std::to_string(launch_.size) + " workers");
  }
  if (d.NumPartitions() > kMaxPartitions) {  // the greatest size is too small: see PartitionBytes
    throw UsageError("'" + d.name + "' of " + std::to_string(d.bytes) + " bytes has " +
                     std::to_string(d.NumPartitions()) + " partitions, at most " +
                     std::to_string(kMaxPartitions) +
                     " are possible: raise BYTEPS_PARTITION_BYTES");
  }
  if (d.rule) CheckRule(d);
  return d;
}

Plan::Layout Plan::LayOut(const Declaration& d) const {
  Layout layout;
  layout.rank = launch_.rank;
  const uint64_t key = d.Key();
  const int k = num_servers_;
  std::vector<int> distance(d.NumPartitions());  // of its server, from the one to begin with
  for (uint64_t i = 0; i < distance.size(); ++i) {
    layout.servers.push_back(ServerOf(hash_, key, d.placement, i, k));
    layout.order.push_back(static_cast<uint32_t>(i));
    distance[i] = (layout.servers.back() + k - launch_.rank % k) % k;
  }
  for (auto begin = layout.order.begin(); begin != layout.order.end();) {
    const auto end = layout.order.end() - begin > k ? begin + k : layout.order.end();
    std::stable_sort(begin, end, [&](auto a, auto b) { return distance[a] < distance[b]; });
    begin = end;
  }
  return layout;
}

std::vector<uint64_t> Plan::BytesPerServer(const TensorSpec& spec) const {
  const Declaration d = Declare(spec);
  const Layout layout = LayOut(d);
  std::vector<uint64_t> bytes(num_servers_);
  for (uint64_t i = 0; i < d.NumPartitions(); ++i) bytes[layout.servers[i]] += d.PartitionSize(i);
  return bytes;
}

Declarations::Declarations(const Plan* plan, Channel* channel, const Vacancies* vacancies,
                           double timeout_s)
    : job_(NextJob()),
      plan_(plan),
      channel_(channel),
      vacancies_(vacancies),
      timeout_s_(timeout_s) {}

std::vector<TensorPtr> Declarations::Declare(const std::vector<TensorSpec>& specs) {
  std::vector<Entry*> entries;
  for (const auto& spec : specs) entries.push_back(Find(spec));
  do {
    const std::vector<Entry*> mine = ClaimNew(entries);
    if (!mine.empty()) Tell(mine);
    // Others who tried in vain leave theirs new: the next turn tries again, and says why.
  } while (!AwaitOthers(entries));
  std::vector<TensorPtr> tensors;
  for (const Entry* entry : entries) tensors.push_back(entry->tensor);
  return tensors;
}

Declarations::Entry* Declarations::Find(const TensorSpec& spec) {
  const Declaration declaration = plan_->Declare(spec);
  const std::string id = std::to_string(declaration.group.front()) + "/" + spec.name;
  Entry* entry = nullptr;
  bool is_new = false;
  {
    ps::MutexLock lock(&mu_);
    entry = &entries_[id];
    is_new = !entry->tensor;
  }
  if (is_new) {
    auto tensor = std::make_shared<Tensor>();
    tensor->job = job_;
    tensor->declaration = declaration;
    tensor->key = declaration.Key();
    tensor->window.SetSize(declaration.MostRoundsOpen());
    tensor->layout = plan_->LayOut(declaration);
    ps::MutexLock lock(&mu_);
    if (const auto it = rounds_.find(id); it != rounds_.end()) {
      tensor->rounds = tensor->oldest = it->second;
    }
    if (!entry->tensor) entry->tensor = std::move(tensor);
  }
  const Declaration& before = entry->tensor->declaration;
  if (before == declaration) return entry;
  throw UsageError("'" + spec.name + "' was " + before.Describe() + " before and is " +
                   declaration.Describe() + " now: give different tensors different names");
}

std::vector<Declarations::Entry*> Declarations::ClaimNew(const std::vector<Entry*>& entries) {
  std::vector<Entry*> mine;
  ps::MutexLock lock(&mu_);
  if (!failure_.empty()) throw Error(failure_);
  for (Entry* entry : entries) {
    if (entry->state != State::kNew) continue;
    entry->state = State::kAsked;
    mine.push_back(entry);
  }
  return mine;
}

void Declarations::Tell(const std::vector<Entry*>& entries) {
  auto exchange = std::make_shared<Exchange>();
  exchange->first_name = entries.front()->tensor->declaration.name;
  exchange->count = entries.size();
  try {
    Send(exchange, entries);
    AwaitAnswers(exchange);
  } catch (...) {
    SetState(entries, State::kNew);
    throw;
  }
  SetState(entries, State::kDeclared);
}

void Declarations::Send(const std::shared_ptr<Exchange>& exchange,
                        const std::vector<Entry*>& entries) {
  std::vector<Declaration> declarations;
  for (const Entry* entry : entries) declarations.push_back(entry->tensor->declaration);
  exchange->body = PackDeclarations(declarations);
  exchange->key = entries.front()->tensor->key;
  uint64_t first = 0;
  const int servers = plan_->num_servers();
  {
    ps::MutexLock lock(&mu_);
    exchange->unanswered = servers;
    first = last_message_ + 1;
    last_message_ += servers;
    for (int server = 0; server < servers; ++server) messages_[first + server] = {exchange, server};
  }
  // To every server, also to those that will get none of the partitions: members
  // that disagree on the placement would otherwise wait at different servers.
  for (int server = 0; server < servers; ++server) {
    channel_->Send(MakeRequest(kDeclare, server, exchange->key, first + server, exchange->body));
  }
}

void Declarations::AwaitAnswers(const std::shared_ptr<Exchange>& exchange) {
  using Clock = Vacancies::Clock;
  const auto limit =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_));
  ps::MutexLock lock(&mu_);
  auto deadline = Clock::now() + limit;
  // Ended by all answers or a failure of the job; deadline: BYTEPS_OP_TIMEOUT_S from when the last
  // vacancy was filled.
  while (!cond_.WaitUntil(&mu_, deadline, [&]() PS_REQUIRES(mu_) {
    return !failure_.empty() || exchange->unanswered == 0;
  })) {
    // One that takes the place of a server is told again.
    const auto later = vacancies_->Last(Clock::now()) + limit;
    if (later <= deadline) break;
    deadline = later;
  }
  std::vector<int> silent;
  for (auto it = messages_.begin(); it != messages_.end();) {
    const bool ours = it->second.first == exchange;
    if (ours) silent.push_back(it->second.second);
    it = ours ? messages_.erase(it) : std::next(it);
  }
  if (!failure_.empty()) throw Error(failure_);
  if (!exchange->error.empty()) throw Error(exchange->error);
  if (silent.empty()) return;
  lock.Unlock();
  PS_PROBE(kDeclarationLate);
  std::sort(silent.begin(), silent.end());
  const std::string more =
      exchange->count > 1 ? " and " + std::to_string(exchange->count - 1) + " more" : "";
  throw Error("declaring '" + exchange->first_name + "'" + more +
              " timed out: " + channel_->NameOfServer(silent.front()) + " did not answer within " +
              Seconds(timeout_s_) + " (BYTEPS_OP_TIMEOUT_S)");
}

void Declarations::SetState(const std::vector<Entry*>& entries, State state) {
  {
    ps::MutexLock lock(&mu_);
    for (Entry* entry : entries) entry->state = state;
  }
  cond_.NotifyAll();
}

bool Declarations::AwaitOthers(const std::vector<Entry*>& entries) {
  ps::MutexLock lock(&mu_);
  const auto is_asked = [](const Entry* entry) { return entry->state == State::kAsked; };
  // The caller gives up in time.
  // Ended by the caller that declares them, or a failure; deadline: that caller's.
  cond_.Wait(&mu_, [&]() PS_REQUIRES(mu_) {
    return !failure_.empty() || std::none_of(entries.begin(), entries.end(), is_asked);
  });
  if (!failure_.empty()) throw Error(failure_);
  return std::all_of(entries.begin(), entries.end(),
                     [](const Entry* entry) { return entry->state == State::kDeclared; });
}

void Declarations::OnAnswer(uint64_t number, const std::string& error) {
  std::shared_ptr<Exchange> exchange;
  {
    ps::MutexLock lock(&mu_);
    const auto it = messages_.find(number);
    if (it == messages_.end()) return PS_PROBE(kAnswerToNobody);  // given up already
    exchange = std::move(it->second.first);
    if (exchange->error.empty()) exchange->error = error;
    --exchange->unanswered;
    messages_.erase(it);
  }
  if (exchange->then) return exchange->then(error);
  cond_.NotifyAll();
}

void Declarations::TellAgain(int server, std::function<void(const std::string&)> then) {
  auto exchange = std::make_shared<Exchange>();
  exchange->unanswered = 1;
  exchange->then = std::move(then);
  std::vector<Declaration> declarations;
  std::vector<Message> messages;
  {
    ps::MutexLock lock(&mu_);
    // What an older one was to be told after its answer no longer matters.
    std::erase_if(messages_, [=](const auto& entry) {
      return entry.second.second == server && entry.second.first->then != nullptr;
    });
    for (const auto& [number, asked] : messages_) {
      if (asked.second != server) continue;
      messages.push_back(
          MakeRequest(kDeclare, server, asked.first->key, number, asked.first->body));
    }
    for (const auto& [id, entry] : entries_) {
      if (!entry.tensor || entry.state == State::kNew) continue;
      declarations.push_back(entry.tensor->declaration);
    }
    if (!declarations.empty()) {
      exchange->body = PackDeclarations(declarations);
      exchange->key = declarations.front().Key();
      messages_[++last_message_] = {exchange, server};
      messages.push_back(
          MakeRequest(kDeclare, server, exchange->key, last_message_, exchange->body));
    }
  }
  for (const Message& message : messages) channel_->Send(message);
  if (declarations.empty()) exchange->then("");
}

std::map<uint64_t, uint32_t> Declarations::OldestRounds() {
  std::map<uint64_t, uint32_t> oldest;
  ps::MutexLock lock(&mu_);
  for (const auto& [id, entry] : entries_) {
    if (entry.tensor && entry.tensor->rounds > 0) oldest[entry.tensor->key] = entry.tensor->oldest;
  }
  return oldest;
}

std::string Declarations::AnyUpdated() {
  ps::MutexLock lock(&mu_);
  for (const auto& [id, entry] : entries_) {
    if (entry.tensor && entry.tensor->declaration.rule) return entry.tensor->declaration.name;
  }
  return "";
}

void Declarations::Fail(const std::string& reason) {
  {
    ps::MutexLock lock(&mu_);
    if (failure_.empty()) failure_ = reason;
  }
  cond_.NotifyAll();
}

std::map<std::string, uint32_t> Declarations::Rounds() {
  std::map<std::string, uint32_t> rounds;
  ps::MutexLock lock(&mu_);
  for (const auto& [id, entry] : entries_) {
    if (entry.tensor) rounds[id] = entry.tensor->rounds;
  }
  return rounds;
}

std::vector<std::string> Declarations::NotBegun(const std::map<std::string, uint32_t>& rounds) {
  std::vector<std::string> names;
  ps::MutexLock lock(&mu_);
  for (const auto& [id, entry] : entries_) {
    if (!entry.tensor) continue;
    const auto it = rounds.find(entry.tensor->declaration.name);
    if (it != rounds.end() && entry.tensor->rounds <= it->second) names.push_back(it->first);
  }
  return names;
}

void Declarations::SetRounds(const std::map<std::string, uint32_t>& rounds) {
  ps::MutexLock lock(&mu_);
  rounds_ = rounds;
  for (auto& [id, entry] : entries_) {
    const auto it = rounds.find(id);
    if (it != rounds.end() && entry.tensor)
      entry.tensor->rounds = entry.tensor->oldest = it->second;
  }
}

size_t Declarations::size() {
  ps::MutexLock lock(&mu_);
  return entries_.size();
}

size_t Declarations::unanswered() {
  ps::MutexLock lock(&mu_);
  return messages_.size();
}

}  // namespace core
}  // namespace byteps
