#include "byteps/engine/declarations.h"

#include <algorithm>
#include <chrono>

#include "byteps/base/declaration_list.h"
#include "byteps/base/error.h"
#include "byteps/base/probe.h"
#include "byteps/base/text.h"
#include "byteps/cluster/message.h"

namespace byteps {
namespace core {

Declarations::Declarations(const Plan* plan, Channel* channel, double timeout_s)
    : plan_(plan), channel_(channel), timeout_s_(timeout_s) {}

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
    tensor->declaration = declaration;
    tensor->key = declaration.Key();
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
  ps::MutexLock lock(&mu_);
  cond_.WaitFor(&mu_, std::chrono::duration<double>(timeout_s_),
                [&]() PS_REQUIRES(mu_) { return !failure_.empty() || exchange->unanswered == 0; });
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
