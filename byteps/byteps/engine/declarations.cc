#include "byteps/engine/declarations.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <tuple>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/protocol.h"
#include "byteps/base/wire.h"
#include "byteps/cluster/channel.h"
#include "byteps/engine/loss_policy.h"
#include "byteps/engine/tensor.h"

namespace byteps {
namespace core {
namespace {

uint64_t NextJob() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

Declarations::Declarations(const Plan* plan, Channel* channel, const Vacancies* vacancies,
                           LossPolicy* losses, double timeout_s)
    : job_(NextJob()),
      plan_(plan),
      channel_(channel),
      vacancies_(vacancies),
      losses_(losses),
      timeout_s_(timeout_s) {}

std::vector<TensorPtr> Declarations::Declare(const std::vector<TensorSpec>& specs) {
  std::vector<EntryPtr> entries;
  for (const auto& spec : specs) entries.push_back(Find(spec));
  do {
    const std::vector<EntryPtr> own_entries = ClaimNew(entries);
    if (!own_entries.empty()) Tell(own_entries);
    // If another thread's attempt has failed, these tensors are still undeclared. Then this thread
    // declares them, and throws if that fails, too.
  } while (!AwaitOthers(entries));
  std::vector<TensorPtr> tensors;
  for (const EntryPtr& entry : entries) tensors.push_back(entry->tensor);
  return tensors;
}

Declarations::EntryPtr Declarations::Find(const TensorSpec& spec) {
  Declaration declaration = plan_->Declare(spec);
  const std::string id = std::to_string(declaration.group.front()) + "/" + spec.name;
  EntryPtr entry;
  while (true) {
    {
      ps::MutexLock lock(&mu_);
      const auto releases = releases_.find(id);
      declaration.releases = releases == releases_.end() ? 0 : releases->second;
      if (const auto it = entries_.find(id); it != entries_.end()) entry = it->second;
    }
    if (entry) break;
    auto made = std::make_shared<Entry>();
    made->tensor = std::make_shared<Tensor>();
    made->tensor->job = job_;
    made->tensor->declaration = declaration;
    made->tensor->key = declaration.Key();
    made->tensor->window.SetSize(declaration.MostRoundsOpen());
    made->tensor->layout = plan_->LayOut(declaration);
    ps::MutexLock lock(&mu_);
    const auto releases = releases_.find(id);
    if (declaration.releases != (releases == releases_.end() ? 0 : releases->second)) continue;
    if (const auto it = rounds_.find(id); it != rounds_.end()) {
      made->tensor->rounds = made->tensor->oldest = it->second;
    }
    entry = entries_.emplace(id, std::move(made)).first->second;
  }
  const Declaration& before = entry->tensor->declaration;
  declaration.releases = before.releases;
  if (before == declaration) return entry;
  throw UsageError("'" + spec.name + "' was " + before.Describe() + " before and is " +
                   declaration.Describe() + " now: give different tensors different names");
}

std::vector<Declarations::EntryPtr> Declarations::ClaimNew(const std::vector<EntryPtr>& entries) {
  std::vector<EntryPtr> own_entries;
  ps::MutexLock lock(&mu_);
  if (!failure_.empty()) throw Error(failure_);
  for (const EntryPtr& entry : entries) {
    if (entry->state != State::kNew) continue;
    entry->state = State::kAsked;
    own_entries.push_back(entry);
  }
  return own_entries;
}

void Declarations::Tell(const std::vector<EntryPtr>& entries) {
  auto exchange = std::make_shared<Exchange>();
  exchange->first_name = entries.front()->tensor->declaration.name;
  exchange->count = entries.size();
  try {
    BeginUse(entries);
  } catch (...) {
    SetState(entries, State::kNew);
    throw;
  }
  try {
    Send(exchange, entries);
    AwaitAnswers(exchange);
  } catch (...) {
    {
      ps::MutexLock lock(&mu_);
      for (const EntryPtr& entry : entries) told_[entry->tensor->key].is_refused = true;
    }
    SetState(entries, State::kNew);
    EndUse(entries);
    throw;
  }
  SetState(entries, State::kDeclared);
  EndUse(entries);
}

void Declarations::BeginUse(const std::vector<EntryPtr>& entries) {
  for (auto it = entries.begin(); it != entries.end(); ++it) {
    if ((*it)->tensor->BeginUse()) continue;
    EndUse({entries.begin(), it});
    throw UsageError("'" + (*it)->tensor->declaration.name +
                     "' was released while another thread declared it");
  }
}

void Declarations::EndUse(const std::vector<EntryPtr>& entries) {
  std::vector<TensorPtr> idle;
  for (const EntryPtr& entry : entries) {
    if (entry->tensor->EndUse()) idle.push_back(entry->tensor);
  }
  GiveBack(idle);
}

void Declarations::Send(const std::shared_ptr<Exchange>& exchange,
                        const std::vector<EntryPtr>& entries) {
  std::vector<Declaration> declarations;
  for (const EntryPtr& entry : entries) declarations.push_back(entry->tensor->declaration);
  exchange->body = PackDeclarations(declarations);
  exchange->key = entries.front()->tensor->key;
  uint64_t first = 0;
  const int servers = plan_->num_servers();
  {
    ps::MutexLock lock(&mu_);
    for (const EntryPtr& entry : entries) told_[entry->tensor->key] = {entry->tensor};
    exchange->unanswered = servers;
    first = last_message_ + 1;
    last_message_ += servers;
    for (int server = 0; server < servers; ++server) messages_[first + server] = {exchange, server};
  }
  // Every server gets the declaration, even one that sums no partition of the tensor. Otherwise
  // members that disagree on the placement would wait at different servers, for ever.
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
  // The wait is ended by all answers, or a failure of the job; deadline: BYTEPS_OP_TIMEOUT_S since
  // the last lost server was replaced.
  while (!cond_.WaitUntil(&mu_, deadline, [&]() PS_REQUIRES(mu_) {
    return !failure_.empty() || exchange->unanswered == 0;
  })) {
    // The successor of a lost server must be sent the declaration again, so the deadline is
    // extended.
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

void Declarations::SetState(const std::vector<EntryPtr>& entries, State state) {
  {
    ps::MutexLock lock(&mu_);
    for (const EntryPtr& entry : entries) entry->state = state;
  }
  cond_.NotifyAll();
}

bool Declarations::AwaitOthers(const std::vector<EntryPtr>& entries) {
  ps::MutexLock lock(&mu_);
  const auto is_asked = [](const EntryPtr& entry) { return entry->state == State::kAsked; };
  // The wait is ended by the declaring thread, or a failure; deadline: the declaring thread's.
  cond_.Wait(&mu_, [&]() PS_REQUIRES(mu_) {
    return !failure_.empty() || std::none_of(entries.begin(), entries.end(), is_asked);
  });
  if (!failure_.empty()) throw Error(failure_);
  return std::all_of(entries.begin(), entries.end(),
                     [](const EntryPtr& entry) { return entry->state == State::kDeclared; });
}

void Declarations::OnAnswer(uint64_t number, const std::string& error) {
  std::shared_ptr<Exchange> exchange;
  {
    ps::MutexLock lock(&mu_);
    const auto it = messages_.find(number);
    // A request that is not found was given up already.
    if (it == messages_.end()) return PS_PROBE(kAnswerToNobody);
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
    // Callbacks for an earlier replacement of this server are dropped.
    std::erase_if(messages_, [=](const auto& entry) {
      return entry.second.second == server && entry.second.first->then != nullptr;
    });
    for (const auto& [number, asked] : messages_) {
      if (asked.second != server) continue;
      messages.push_back(
          MakeRequest(kDeclare, server, asked.first->key, number, asked.first->body));
    }
    for (const auto& [key, told] : told_) {
      if (!told.is_refused) declarations.push_back(told.tensor->declaration);
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
  for (const auto& [key, told] : told_) {
    // The released tensor's optimizer state may be gone, but no worker needs the tensor.
    const bool is_over = !told.tensor->is_used() && told.tensor->declaration.rule;
    if (told.tensor->rounds > 0 && !is_over) oldest[key] = told.tensor->oldest;
  }
  return oldest;
}

std::string Declarations::AnyUpdated() {
  ps::MutexLock lock(&mu_);
  for (const auto& [id, entry] : entries_) {
    if (entry->tensor->declaration.rule) return entry->tensor->declaration.name;
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

ProgressByTensor Declarations::Rounds() {
  ProgressByTensor progress;
  ps::MutexLock lock(&mu_);
  for (const auto& [id, releases] : releases_) progress[id].releases = releases;
  for (const auto& [id, entry] : entries_) progress[id].rounds = entry->tensor->rounds;
  return progress;
}

std::vector<std::string> Declarations::NotBegun(const std::map<std::string, uint32_t>& rounds) {
  std::vector<std::string> names;
  ps::MutexLock lock(&mu_);
  for (const auto& [id, entry] : entries_) {
    const auto it = rounds.find(entry->tensor->declaration.name);
    if (it != rounds.end() && entry->tensor->rounds <= it->second) names.push_back(it->first);
  }
  return names;
}

void Declarations::SetRounds(const ProgressByTensor& progress) {
  std::vector<TensorPtr> idle;
  {
    ps::MutexLock lock(&mu_);
    std::vector<std::string> with_other_releases;
    for (const auto& [id, entry] : entries_) {
      const auto it = progress.find(id);
      const Progress at = it == progress.end() ? Progress() : it->second;
      if (entry->tensor->declaration.releases != at.releases) with_other_releases.push_back(id);
    }
    for (const std::string& id : with_other_releases) {
      if (TensorPtr tensor = ReleaseId(id)) idle.push_back(std::move(tensor));
    }
    releases_.clear();
    rounds_.clear();
    for (const auto& [id, at] : progress) {
      if (at.releases > 0) releases_[id] = at.releases;
      rounds_[id] = at.rounds;
      const auto it = entries_.find(id);
      if (it != entries_.end()) it->second->tensor->rounds = it->second->tensor->oldest = at.rounds;
    }
  }
  GiveBack(idle);
}

// ------------------------------------------------------------------ release

TensorPtr Declarations::ReleaseId(const std::string& id) {
  ++releases_[id];
  rounds_.erase(id);
  const auto it = entries_.find(id);
  if (it == entries_.end()) return nullptr;
  const TensorPtr tensor = it->second->tensor;
  entries_.erase(it);
  tensor->is_released = true;
  if (tensor->EndUse()) return tensor;
  PS_PROBE(kReleasedInUse);
  return nullptr;
}

void Declarations::Release(const std::vector<std::string>& names, uint32_t lowest_rank) {
  std::vector<TensorPtr> idle;
  {
    ps::MutexLock lock(&mu_);
    for (const std::string& name : names) {
      TensorPtr tensor = ReleaseId(std::to_string(lowest_rank) + "/" + name);
      if (tensor) idle.push_back(std::move(tensor));
    }
  }
  GiveBack(idle);
}

void Declarations::GiveBack(const std::vector<TensorPtr>& tensors) {
  auto releasing = std::make_shared<Releasing>();
  uint64_t first = 0;
  const int servers = plan_->num_servers();
  {
    ps::MutexLock lock(&mu_);
    if (!failure_.empty()) return;
    for (const TensorPtr& tensor : tensors) {
      if (told_.count(tensor->key) > 0) releasing->tensors.push_back(tensor);
    }
    if (releasing->tensors.empty()) return;
    WireWriter out;
    out.PutSize(releasing->tensors.size());
    for (const TensorPtr& tensor : releasing->tensors) out.Put(tensor->key);
    releasing->body = out.Take();
    releasing->unanswered = servers;
    first = last_message_ + 1;
    last_message_ += servers;
    for (int server = 0; server < servers; ++server) {
      releasing_[first + server] = {releasing, server};
    }
  }
  const uint64_t key = releasing->tensors.front()->key;
  for (int server = 0; server < servers; ++server) {
    if (losses_->IsVacant(server)) continue;  // ReleaseAgain tells the server's successor
    channel_->Send(MakeRequest(kRelease, server, key, first + server, releasing->body));
  }
}

void Declarations::OnReleased(uint64_t number) {
  std::shared_ptr<Releasing> releasing;
  int server = 0;
  {
    ps::MutexLock lock(&mu_);
    const auto it = releasing_.find(number);
    // A request that is not found was sent to a server that has been replaced.
    if (it == releasing_.end()) return PS_PROBE(kAnswerToNobody);
    std::tie(releasing, server) = it->second;
    releasing_.erase(it);
    if (--releasing->unanswered == 0) {
      for (const TensorPtr& tensor : releasing->tensors) told_.erase(tensor->key);
    }
  }
  for (const TensorPtr& tensor : releasing->tensors) losses_->OnReleased(server, *tensor);
}

void Declarations::ReleaseAgain(int server) {
  std::vector<Message> messages;
  {
    ps::MutexLock lock(&mu_);
    for (const auto& [number, asked] : releasing_) {
      if (asked.second != server) continue;
      const Releasing& releasing = *asked.first;
      messages.push_back(
          MakeRequest(kRelease, server, releasing.tensors.front()->key, number, releasing.body));
    }
  }
  for (const Message& message : messages) channel_->Send(message);
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
