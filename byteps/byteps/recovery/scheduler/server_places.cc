#include "byteps/recovery/scheduler/server_places.h"

#include <algorithm>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::MemberWord;
using membership::Send;

namespace {

membership::ServerLost LostWord(int node_id, int turn, const std::string& reason) {
  return {Postoffice::IDtoRank(node_id), turn, reason};
}

}  // namespace

bool ServerPlaces::any_vacant() const {
  job_->AssertHeld();
  return !vacancies_.empty();
}

bool ServerPlaces::IsVacant(int node_id) const {
  job_->AssertHeld();
  return vacancies_.count(node_id) > 0;
}

void ServerPlaces::Choose(Node* server) const {
  job_->AssertHeld();
  const auto oldest = std::min_element(
      vacancies_.begin(), vacancies_.end(),
      [](const auto& a, const auto& b) { return a.second.since < b.second.since; });
  if (oldest != vacancies_.end()) server->id = oldest->first;
}

bool ServerPlaces::Fill(int node_id) {
  job_->AssertHeld();
  if (vacancies_.erase(node_id) == 0) return false;
  last_filled_ = Clock::now();
  ++turns_[Postoffice::IDtoRank(node_id)];
  return true;
}

ServerPlaces::Clock::time_point ServerPlaces::last_filled() const {
  job_->AssertHeld();
  return last_filled_;
}

membership::Turns ServerPlaces::TurnsToTell() const {
  job_->AssertHeld();
  membership::Turns turns = turns_;
  for (const auto& [id, vacancy] : vacancies_) --turns[Postoffice::IDtoRank(id)];
  return turns;
}

std::vector<MemberWord> ServerPlaces::LostWords() const {
  job_->AssertHeld();
  std::vector<MemberWord> words;
  for (const auto& [id, vacancy] : vacancies_) {
    words.push_back(
        LostWord(id, membership::TurnOf(turns_, Postoffice::IDtoRank(id)), vacancy.reason));
  }
  return words;
}

std::vector<ServerPlaces::Word> ServerPlaces::Words() const {
  job_->AssertHeld();
  std::vector<Word> words;
  for (const auto& [rank, turn] : turns_) {
    const int id = IdOf(Node::SERVER, rank);
    if (const auto vacancy = vacancies_.find(id); vacancy != vacancies_.end()) {
      words.push_back({id, LostWord(id, turn, vacancy->second.reason), {}});
      continue;
    }
    const Member* const member = job_->roster.Find(id);
    if (member == nullptr || member->node.port == 0) continue;  // this server has not returned yet
    const membership::ServerReplaced word{rank, turn, job_->roster.expected().servers};
    words.push_back({id, word, {member->node}});
  }
  return words;
}

void ServerPlaces::Restore(const membership::Turns& turns) {
  job_->AssertHeld();
  turns_ = turns;
  const int servers = job_->roster.expected().servers;
  std::erase_if(turns_, [&](const auto& entry) { return entry.first >= servers; });
  last_filled_ = Clock::now();  // lingering workers are needed when sums are given again
  for (int rank = 0; rank < servers; ++rank) {
    if (!membership::IsVacant(turns_, rank)) continue;
    PS_PROBE(kTakesOverVacancy);
    const int id = IdOf(Node::SERVER, rank);
    vacancies_[id] = {Clock::now(),
                      RoleAndRank(id) + " was lost before " + scheduler_->Name() + " was"};
  }
}

void ServerPlaces::Clear() {
  job_->AssertHeld();
  vacancies_.clear();
  turns_.clear();
}

bool ServerPlaces::Lose(int node_id, const std::string& reason) {
  std::vector<int> to_tell;
  Node lost;
  int turn = 0;
  const double limit = job_->settings.replace_servers_s;
  MutexLock telling(&job_->telling_mu);
  {
    MutexLock lock(&job_->mu);
    Member* const member = job_->roster.Find(node_id);
    if (limit <= 0 || job_->state != ScheduledJob::State::kActive || !job_->has_begun) return false;
    if (member == nullptr) return vacancies_.count(node_id) > 0;
    if (member->node.role != Node::SERVER) return false;
    if (member->removed) return true;
    PS_PROBE(kServerLost);
    lost = member->node;
    member->left = member->removed = true;  // the rank is not free yet
  }
  // If the server is alive after all, it must be told that it was declared lost, before its
  // successor gets its id.
  Send(job_->links, Control::JOB_FAILED, node_id, reason);
  job_->links->Disconnect(node_id);
  {
    MutexLock lock(&job_->mu);
    if (job_->state != ScheduledJob::State::kActive) return true;
    vacancies_[node_id] = {Clock::now(), reason};
    turn = ++turns_[Postoffice::IDtoRank(node_id)];
    job_->roster.Erase(node_id);
    replicas_->Forget(node_id);
    forget_(node_id);
    to_tell = ToTellOf(node_id);
  }
  BPS_LOG(WARNING) << reason << "; another server has " << Limit(limit, "BYTEPS_REPLACE_SERVERS_S")
                   << " to take its place";
  const std::string word = membership::Pack(MemberWord(LostWord(node_id, turn, reason)));
  for (const int id : to_tell) Send(job_->links, Control::MEMBERS, id, word);
  Emit(MembershipEvent::kServerLost, lost, reason);
  return true;
}

void ServerPlaces::OnFilled(const Node& server) {
  PS_PROBE(kServerReplaced);
  std::vector<Node> left;
  std::vector<int> to_tell;
  std::vector<MemberWord> words;
  membership::Beginning beginning;
  MemberWord word;
  MutexLock telling(&job_->telling_mu);
  {
    MutexLock lock(&job_->mu);
    if (job_->roster.Find(server.id) == nullptr) return;  // lost already
    for (const auto& [id, member] : job_->roster.members()) {
      const bool worker = member.node.role == Node::WORKER;
      if (worker && member.left && !member.removed && !member.lingers) left.push_back(member.node);
    }
    beginning.turns = TurnsToTell();
    words = LostWords();
    if (replicas_->active()) words.push_back(replicas_->View(true));
    to_tell = ToTellOf(server.id);
    const int rank = Postoffice::IDtoRank(server.id);
    word = membership::ServerReplaced{rank, membership::TurnOf(turns_, rank),
                                      job_->roster.expected().servers};
  }
  scheduler_->TellBeginning({server}, beginning);
  if (!left.empty()) Send(job_->links, Control::NODE_LEFT, server.id, "", left);
  for (const MemberWord& news : words)
    Send(job_->links, Control::MEMBERS, server.id, membership::Pack(news));
  BPS_LOG(INFO) << Describe(server) << " has taken the place of the server that was lost";
  for (const int id : to_tell)
    Send(job_->links, Control::MEMBERS, id, membership::Pack(word), {server});
  Emit(MembershipEvent::kServerReplaced, server, "");
}

void ServerPlaces::TellAll() {
  MutexLock telling(&job_->telling_mu);
  std::vector<Word> words;
  std::map<int, std::vector<int>> to_tell;  // node ids, by server
  {
    MutexLock lock(&job_->mu);
    if (job_->state != ScheduledJob::State::kActive) return;
    words = Words();
    for (const Word& word : words) to_tell[word.server] = ToTellOf(word.server);
  }
  for (const auto& [server, word, nodes] : words) {
    for (const int id : to_tell[server])
      Send(job_->links, Control::MEMBERS, id, membership::Pack(word), nodes);
  }
}

std::string ServerPlaces::ReasonToGiveUp(Clock::time_point now) {
  const double limit = job_->settings.replace_servers_s;
  MutexLock lock(&job_->mu);
  for (const auto& [id, vacancy] : vacancies_) {
    if (now - vacancy.since < ToDuration(limit)) continue;
    return vacancy.reason + "; no other server took its place within " +
           Limit(limit, "BYTEPS_REPLACE_SERVERS_S");
  }
  return "";
}

std::vector<int> ServerPlaces::ToTellOf(int server) const {
  std::vector<int> to_tell;
  for (const auto& [id, member] : job_->roster.members()) {
    const bool is_there = !member.left || (member.lingers && !member.removed);
    if (id != server && is_there) to_tell.push_back(id);
  }
  return to_tell;
}

void ServerPlaces::Emit(MembershipEvent::Kind kind, const Node& node, const std::string& reason) {
  MembershipEvent event;
  event.kind = kind;
  event.rank = Postoffice::IDtoRank(node.id);
  event.node = InfoOf(node);
  event.reason = reason;
  job_->announcer.Tell(event);
}

}  // namespace ps
